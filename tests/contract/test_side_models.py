"""Models beside the policy: found, asked by reward functions through `context.model`, watched, never touched."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, asynccontextmanager

import pytest

from rltool.config.train import TrainConfig
from rltool.engines.client import EngineClient
from rltool.engines.endpoints import Endpoints, EngineEndpoint, ModelEndpoints
from rltool.errors import UsageError
from rltool.quickstart.tiny_model import make_tiny_model
from rltool.rollout.contracts import check_reward_function
from rltool.rollout.model_clients import Models
from rltool.rollout.reward_pool import RewardFailure, RewardPool, load_reward
from rltool.rollout.sample import Sample, SampleStatus
from rltool.rollout.side_model import SideModels
from rltool.training.side_models import check_all_there, probe_models, running_models
from tests.contract.fakes.vllm import FakeVllm

HERE = "tests.contract.rollout_functions:"
CONTROL = ("/pause", "/resume", "/init_weight_transfer_engine", "/update_weights", "/rltool/lease")


@pytest.fixture
def judges() -> Iterator[list[FakeVllm]]:
    with ExitStack() as stack:
        engines = [stack.enter_context(FakeVllm()) for _ in range(2)]
        for engine in engines:
            engine.model_id, engine.vocab_size = "judge", 64
        yield engines


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("judge"), seed=4)


def config(**more) -> TrainConfig:
    return TrainConfig(model={"path": "m"}, **more)


def judge_config(judges, model_dir, **more) -> TrainConfig:
    return config(models={"judge": {"external": [e.url for e in judges], "path": model_dir, **more}})


@asynccontextmanager
async def client_of(made: TrainConfig):
    models = Models()
    side = SideModels(await asyncio.to_thread(lambda: probe_models(made, running_models(made))), models)
    async with EngineClient() as client:
        try:
            await side.start(client, requests_per_engine=4, deadline=30.0, restarts=None, log=lambda line: None)
            yield models
        finally:
            await side.close()


def samples(count: int) -> list[Sample]:
    return [
        Sample(group_id=0, index=i, prompt_index=0, prompt_ids=[1], prompt_text="a", label="b",
               status=SampleStatus.COMPLETED)
        for i in range(count)
    ]  # fmt: skip


def test_a_reward_function_asks_the_judge_and_nobody_touches_its_weights(judges, model_dir):
    async def run():
        async with client_of(judge_config(judges, model_dir)) as models:
            pool = RewardPool(HERE + "judged", workers=1, timeout=30.0, models=models)
            try:
                return await pool.score(samples(8), ["bird"] * 8)
            finally:
                await pool.close()

    assert asyncio.run(run()) == [4.0] * 8, "four tokens each, as it asked for"
    paths = [path for engine in judges for path in engine.paths()]
    assert sum(path == "/rltool/generate" for path in paths) == 8
    assert not set(paths) & set(CONTROL)


def test_text_chat_and_token_ids_are_prompts(judges, model_dir):
    async def run():
        async with client_of(judge_config(judges, model_dir)) as models:
            judge = models.model("judge")
            [by_text] = await judge.generate("bird", max_tokens=3, temperature=0.0, seed=5)
            ids = judge._tokenizer.encode_prompt("bird")
            [by_ids] = await judge.generate(ids, max_tokens=3, temperature=0.0, seed=5)
            several = await judge.generate(ids, max_tokens=2, n=3)
            return by_text, by_ids, several, judge._tokenizer

    by_text, by_ids, several, tokenizer = asyncio.run(run())
    assert by_text == by_ids and len(by_text.token_ids) == len(by_text.logprobs) == 3
    assert by_text.text == tokenizer.decode(by_text.token_ids) and len(several) == 3


def test_a_judge_that_dies_is_replaced_by_the_other(judges, model_dir):
    async def run():
        async with client_of(judge_config(judges, model_dir)) as models:
            judges[0].die()
            return await asyncio.gather(*(models.model("judge").generate([5], max_tokens=2) for _ in range(4)))

    assert [len(replies[0].token_ids) for replies in asyncio.run(run())] == [2] * 4


def test_given_tokens_are_scored_also_when_an_engine_has_died(judges, model_dir):
    async def run():
        async with client_of(judge_config(judges, model_dir)) as models:
            judges[0].die()
            return await asyncio.gather(*(models.model("judge").score([5, 6, 7]) for _ in range(4)))

    expected = tuple(judges[1]._scored(at, token)[str(token)]["logprob"] for at, token in ((1, 6), (2, 7)))
    assert asyncio.run(run()) == [expected] * 4


def test_without_a_path_the_judge_takes_token_ids_alone(judges):
    async def run():
        made = config(models={"judge": {"external": [judges[0].url]}})
        async with client_of(made) as models:
            [reply] = await models.model("judge").generate([5, 6], max_tokens=2)
            assert len(reply.token_ids) == 2 and reply.text == ""
            with pytest.raises(UsageError, match=r"set models\.judge\.path"):
                await models.model("judge").generate("bird")
            with pytest.raises(UsageError, match="is empty"):
                await models.model("judge").generate([])
            with pytest.raises(UsageError, match=r"no such model \(it has: judge\).*\[models\.jugde\]"):
                models.model("jugde")

    asyncio.run(run())


def test_a_model_that_the_run_does_not_have_fails_the_sample_with_its_name():
    async def run():
        pool = RewardPool(HERE + "judged", workers=1, timeout=30.0)
        try:
            return await pool.score(samples(1), ["bird"])
        finally:
            await pool.close()

    [outcome] = asyncio.run(run())
    assert isinstance(outcome, RewardFailure) and "context.model('judge')" in outcome.reason


def test_a_plain_function_cannot_have_a_context():
    with pytest.raises(UsageError, match="takes a context, so it must be `async def`"):
        load_reward(HERE + "plain_with_context")


def test_such_a_function_is_checked_with_a_stand_in_for_the_model():
    class Judge:
        async def generate(self, prompt, **options):
            return [type("Reply", (), {"token_ids": (1, 2)})]

    check_reward_function(HERE + "judged", models=Models({"judge": Judge()}))


# -- which models there are


def test_models_beside_the_policy_are_found_in_its_endpoints_file(judges, tmp_path):
    file = tmp_path / "endpoints.json"
    policy, judge = (EngineEndpoint(url=url) for url in ("http://127.0.0.1:1", judges[0].url))
    Endpoints(
        models={
            "policy": ModelEndpoints(engines=(policy,)),
            "judge": ModelEndpoints(update_weights=False, engines=(judge,), data_url="http://127.0.0.1:2"),
        }
    ).save(file)
    made = config(engines={"external": [f"@{file}"]})
    found = running_models(made)
    assert list(found) == ["judge"] and found["judge"].data_url == "http://127.0.0.1:2"
    side = probe_models(made, found)["judge"]
    assert side.router is not None and side.endpoints[0].dialect == "vllm"


def test_a_model_without_engines_is_refused_by_name(model_dir):
    made = config(models={"judge": {"path": model_dir}})
    with pytest.raises(UsageError, match=r"models\.judge has no engine"):
        check_all_there(made, running_models(made))
    check_all_there(made, {"judge"})


def test_engines_that_answer_only_together_are_refused(judges):
    entry = ModelEndpoints(engines=(EngineEndpoint(url=judges[0].url, role="prefill"),))
    with pytest.raises(UsageError, match="model 'judge' has engines of role prefill"):
        probe_models(config(), {"judge": entry})


def test_a_judge_that_does_not_answer_is_named(tmp_path):
    made = config(models={"judge": {"external": ["127.0.0.1:1"]}}, deadlines={"preflight": 2.0})
    with pytest.raises(UsageError, match=r"model 'judge': http://127\.0\.0\.1:1"):
        probe_models(made, running_models(made))
