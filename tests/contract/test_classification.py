"""Reward models with a classification head, over real sockets: found, asked for scores, watched; never asked to
generate."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, asynccontextmanager

import pytest

from rltool.config.train import TrainConfig
from rltool.engines.client import EngineClient
from rltool.engines.endpoints import Endpoints, EngineEndpoint, ModelEndpoints
from rltool.errors import EngineRejected, UsageError
from rltool.rollout.rewards.pool import RewardFailure, RewardPool
from rltool.rollout.sample import Sample, SampleStatus
from rltool.rollout.serving.model_clients import Models
from rltool.rollout.serving.side_model import SideModels
from rltool.rollout.tokenizer import load_tokenizer
from rltool.training.checks.side_models import probe_models, running_models
from tests.contract.classifier_contract import CONTRACT
from tests.contract.fakes.sglang import EXPECTED_KEY, FakeSglang
from tests.contract.fakes.vllm import FakeVllm
from tests.tiny_models import write_tiny_reward_model

CHAT = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]
WRITTEN = "user: 2+2=<eos>assistant: 4<eos>"


@pytest.fixture
def engines() -> Iterator[list[FakeVllm]]:
    with ExitStack() as stack:
        found = [stack.enter_context(FakeVllm()) for _ in range(2)]
        for engine in found:
            engine.model_id, engine.task = "reward", "classify"
        yield found


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny_reward_model(tmp_path_factory.mktemp("reward"))


def config(**more) -> TrainConfig:
    return TrainConfig(model={"path": "m"}, **more)


def reward_config(engines, model_dir, task="classify", **more) -> TrainConfig:
    model = {"external": [e.url for e in engines], "path": model_dir, "task": task}
    return config(models={"reward": model}, **more)


@asynccontextmanager
async def models_of(made: TrainConfig):
    models = Models()
    side = SideModels(await asyncio.to_thread(lambda: probe_models(made, running_models(made))), models)
    async with EngineClient() as client:
        try:
            await side.start(client, requests_per_engine=4, deadline=30.0, restarts=None, log=lambda line: None)
            yield models, side
        finally:
            await side.close()


@pytest.mark.parametrize("clause", CONTRACT, ids=lambda clause: clause.__name__)
def test_the_fake_keeps_the_contract_of_a_real_classifier(fake_vllm, key_file, clause):
    fake_vllm.task = "classify"

    async def run():
        engine = EngineEndpoint(
            url=fake_vllm.url, dialect="vllm", plugin=True, key_file=key_file, boot_id=fake_vllm.boot_id
        )
        async with EngineClient() as client:
            await clause(client, engine)

    asyncio.run(run())


def test_sglang_gives_the_scores_of_the_head_and_no_activation(tmp_path):
    (tmp_path / "key").write_text(EXPECTED_KEY)

    async def run(server):
        engine = EngineEndpoint(url=server.url, dialect="sglang", key_file=tmp_path / "key")
        async with EngineClient() as client:
            assert (await client.probe(engine)).task == "classify"
            scores = await client.classify(engine, [5, 6], use_activation=False, timeout=30.0)
            with pytest.raises(UsageError, match="applies no activation"):
                await client.classify(engine, [5, 6], use_activation=True, timeout=30.0)
            server.logits = None
            assert (await client.probe(engine)).task == "generate"
            with pytest.raises(EngineRejected, match="--is-embedding"):
                await client.classify(engine, [5, 6], use_activation=False, timeout=30.0)
            return scores

    with FakeSglang(logits=[1.5, -2.0]) as server:
        assert asyncio.run(run(server)) == (1.5, -2.0)
        assert server.bodies["/classify"] == {"input_ids": [5, 6]} and server.seen["/classify"] == 2


def test_text_chat_and_token_ids_are_scored_and_a_chat_is_a_whole_conversation(engines, model_dir):
    ids = load_tokenizer(model_dir).encode_rendered(WRITTEN)

    async def run():
        async with models_of(reward_config(engines, model_dir)) as (models, _):
            reward = models.model("reward")
            return [await reward.classify(prompt) for prompt in (ids, CHAT, WRITTEN)]

    assert asyncio.run(run()) == [engines[0].logits(ids)] * 3


def test_an_engine_that_dies_is_replaced_by_the_other(engines, model_dir):
    async def run():
        async with models_of(reward_config(engines, model_dir)) as (models, _):
            engines[0].die()
            return await asyncio.gather(*(models.model("reward").classify([5, 6]) for _ in range(4)))

    assert asyncio.run(run()) == [engines[1].logits([5, 6])] * 4


def test_a_router_in_front_is_left_out(engines, model_dir, tmp_path):
    file, engine = tmp_path / "endpoints.json", EngineEndpoint(url=engines[0].url)
    entry = ModelEndpoints(update_weights=False, engines=(engine,), data_url="http://127.0.0.1:2")
    Endpoints(models={"reward": entry}).save(file)
    made = config(models={"reward": {"external": [f"@{file}"], "path": model_dir, "task": "classify"}})

    async def run():
        async with models_of(made) as (models, _):
            return await models.model("reward").classify([5, 6])

    assert asyncio.run(run()) == engines[0].logits([5, 6])


def test_a_canary_request_asks_a_classifier_for_scores(engines, model_dir):
    async def run():
        async with models_of(reward_config(engines, model_dir)) as (_, side):
            await side.started[0].monitor._canary(engines[0].url)

    asyncio.run(run())
    assert engines[0].paths().count("/classify") == 1
    assert not any("generate" in path for engine in engines for path in engine.paths())


def test_a_classifier_is_not_asked_to_generate_nor_a_judge_for_scores(engines, model_dir):
    engines[1].task = "generate"
    made = config(
        models={
            "reward": {"external": [engines[0].url], "task": "classify"},
            "judge": {"external": [engines[1].url]},
        }
    )

    async def run():
        async with models_of(made) as (models, _):
            for ask in (models.model("reward").generate, models.model("reward").score):
                with pytest.raises(UsageError, match="'reward' is a classifier, which generates nothing"):
                    await ask([5])
            with pytest.raises(UsageError, match=r'''models\.judge\.task = "classify"'''):
                await models.model("judge").classify([5])
            with pytest.raises(UsageError, match="is empty"):
                await models.model("reward").classify([])

    asyncio.run(run())


# -- as a reward


def sample(**changes) -> Sample:
    fields = {"prompt_text": "2+2=", "label": "4", "status": SampleStatus.COMPLETED} | changes
    return Sample(group_id=0, index=0, prompt_index=0, prompt_ids=[1], **fields)


def rewarded(made, one: Sample, **options) -> float | RewardFailure:
    async def run():
        async with models_of(made) as (models, _):
            pool = RewardPool("reward-model", options=options, workers=1, timeout=30.0, models=models)
            try:
                return (await pool.score([one], ["4"]))[0]
            finally:
                await pool.close()

    return asyncio.run(run())


def test_the_reward_is_the_score_of_the_conversation_in_the_reward_models_own_template(engines, model_dir):
    tokenizer, made = load_tokenizer(model_dir), reward_config(engines, model_dir)
    [expected] = engines[0].logits(tokenizer.encode_rendered(WRITTEN))
    assert rewarded(made, sample()) == expected
    as_rows = sample(prompt_text="<the policy's template>", metadata={"messages": CHAT[:1]})
    assert rewarded(made, as_rows, prompt_key="messages") == expected
    assert 0 < rewarded(made, sample(), use_activation=True) < 1
    failed = rewarded(made, sample(), prompt_key="messages")
    assert isinstance(failed, RewardFailure) and "metadata['messages'] holds no prompt" in failed.reason


def test_of_a_model_with_several_labels_one_is_the_reward(engines, model_dir):
    for engine in engines:
        engine.num_labels = 3
    made = reward_config(engines, model_dir)
    ids = load_tokenizer(model_dir).encode_rendered(WRITTEN)
    assert rewarded(made, sample(), label=2) == engines[0].logits(ids)[2]
    for options, reason in (({}, "gave 3 scores: set `label`"), ({"label": 3}, "there is no label 3")):
        failed = rewarded(made, sample(), **options)
        assert isinstance(failed, RewardFailure) and reason in failed.reason


# -- before a run starts


def probed(made: TrainConfig):
    return probe_models(made, running_models(made))


def test_an_engine_that_is_served_for_something_else_is_refused(engines, model_dir):
    assert probed(reward_config(engines, model_dir))["reward"].task == "classify"
    with pytest.raises(UsageError, match="http://.* is served for 'classify', expected 'generate'"):
        probed(reward_config(engines, model_dir, task="generate"))
    engines[1].task = "generate"
    with pytest.raises(UsageError, match=f"{engines[1].url} is served for 'generate', expected 'classify'"):
        probed(reward_config(engines, model_dir))


@pytest.mark.parametrize(("function", "task"), [("judge", "classify"), ("reward-model", "generate")])
def test_a_reward_that_asks_a_model_for_what_it_is_not_is_refused(engines, tmp_path, function, task):
    """Also where the engines alone tell what the model is, for no [models.NAME] does."""
    for engine in engines:
        engine.task = task
    file, policy = tmp_path / "endpoints.json", ModelEndpoints(engines=(EngineEndpoint(url="http://127.0.0.1:1"),))
    reward = ModelEndpoints(update_weights=False, engines=(EngineEndpoint(url=engines[0].url),))
    Endpoints(models={"policy": policy, "reward": reward}).save(file)
    made = config(
        engines={"external": [f"@{file}"]}, reward={"function": function, "options": {"model": "reward"}}
    )
    with pytest.raises(UsageError, match=f"reward.function = '{function}'.*'reward' is served for '{task}'"):
        probed(made)
