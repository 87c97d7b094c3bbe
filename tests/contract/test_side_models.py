"""Models beside the policy: found, asked by reward functions through `context.model`, watched, never touched."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import ExitStack, asynccontextmanager

import pytest
import torch

from rltool.algorithms.kl import topk_kl
from rltool.config.train import TrainConfig
from rltool.engines.client import EngineClient
from rltool.engines.endpoints import Endpoints, EngineEndpoint, ModelEndpoints
from rltool.engines.types import VersionSpan
from rltool.errors import UsageError
from rltool.quickstart.tiny_model import make_tiny_model
from rltool.rollout.batching import samples_to_batch
from rltool.rollout.contracts import check_reward_function
from rltool.rollout.rewards.pool import RewardFailure, RewardPool, load_reward
from rltool.rollout.sample import Sample, SampleStatus
from rltool.rollout.serving import model_clients
from rltool.rollout.serving.model_clients import Models
from rltool.rollout.serving.scores import add_teacher_logprobs
from rltool.rollout.serving.side_model import SideModels
from rltool.training.checks.side_models import check_all_there, probe_models, running_models
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


def test_a_reward_waits_for_a_judge_whose_engine_is_started_again(judges, model_dir, monkeypatch):
    monkeypatch.setattr(model_clients, "LOOK_SECONDS", 0.02)
    alone = judges[:1]

    async def run():
        async with client_of(judge_config(alone, model_dir)) as models:
            pool = RewardPool(HERE + "judged", workers=1, timeout=8.0, models=models)
            try:
                assert await pool.score(samples(1), ["bird"]) == [4.0]
                await asyncio.to_thread(alone[0].die)
                with_nobody = asyncio.create_task(pool.score(samples(2), ["bird"] * 2))
                while not models.away():
                    await asyncio.sleep(0.02)
                await asyncio.sleep(8.5)  # longer than a reward may take
                assert not with_nobody.done()
                await asyncio.to_thread(alone[0].start)
                return await with_nobody
            finally:
                await pool.close()

    assert asyncio.run(run()) == [4.0] * 2


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


def test_a_teachers_most_probable_tokens_become_a_batch(judges, model_dir):
    """Also where one engine has died. Of a policy of 40 tokens, with a teacher of 64."""
    made, asked = judge_config(judges, model_dir), samples(3)
    for sample, response in zip(asked, ([5, 6, 38], [7], []), strict=True):
        sample.response_ids, sample.response_mask = response, [1] * len(response)
        sample.response_logprobs, sample.reward = [-1.0] * len(response), 0.0
        sample.versions = [VersionSpan("run:0:1", 0, len(response))] if response else []

    async def run():
        async with client_of(made) as models:
            judges[0].die()
            await add_teacher_logprobs(asked, models.model("judge"), topk=3, vocab_size=40)

    asyncio.run(run())
    batch = samples_to_batch(asked)
    assert batch.tokens.tolist() == [1, 5, 6, 38, 1, 7, 1]
    assert batch.teacher_topk_ids.shape == batch.teacher_topk_logprobs.shape == (7, 3)
    for place, (at, token) in {1: (1, 5), 2: (2, 6), 3: (3, 38), 5: (1, 7)}.items():
        entry = judges[1]._scored(at, token, 3)
        assert batch.teacher_logprobs[place].item() == pytest.approx(entry[str(token)]["logprob"])
        best = [(int(one), found["logprob"]) for one, found in entry.items() if found["rank"] <= 3]
        ids, values = zip(*(pair if pair[0] < 40 else (-1, -math.inf) for pair in best), strict=True)
        assert batch.teacher_topk_ids[place].tolist() == list(ids)
        assert batch.teacher_topk_logprobs[place].tolist() == pytest.approx(list(values))
    assert -1 in batch.teacher_topk_ids[3] and (batch.teacher_topk_ids[[0, 4, 6]] == -1).all()
    rows = batch.loss_mask > 0
    logits = torch.zeros(int(rows.sum()), 40)
    found = topk_kl(batch.teacher_topk_logprobs[rows], logits[:, :3] - math.log(40), logits[:, 0] + math.log(37 / 40))
    assert torch.isfinite(found).all() and (found > 0).all()


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
