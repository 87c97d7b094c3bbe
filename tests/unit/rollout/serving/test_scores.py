"""Scoring by the engines of a teacher: which engine is asked, when it is given up, and what samples get."""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from types import SimpleNamespace

import pytest

from rltool.config.train import TrainConfig
from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.fleet.fleet import State
from rltool.engines.types import TokenScores
from rltool.errors import EngineRejected, EngineUnreachable, UsageError
from rltool.rollout.groups import Group
from rltool.rollout.sample import Sample, SampleStatus
from rltool.rollout.serving.data_plane import PoisonousRequest
from rltool.rollout.serving.model_clients import ModelClient, Models
from rltool.rollout.serving.scores import Scores, add_teacher_logprobs
from rltool.rollout.tokenizer import Tokenizer
from rltool.training.manager.work import Planes, PolicyModel, RolloutWork


class StandIn:
    """Client and fleet in one. outcomes: by URL, what each call there raises, None for the scores."""

    clock = staticmethod(time.monotonic)

    def __init__(self, **outcomes):
        self.outcomes, self.asked, self.told = outcomes, [], []

    def members(self, state):
        return tuple(SimpleNamespace(url=url, endpoint=url) for url in self.outcomes if state is State.READY)

    async def score(self, endpoint, token_ids, *, timeout, adapter=""):
        self.asked.append(endpoint)
        if self.outcomes[endpoint] is not None:
            raise self.outcomes[endpoint]
        return tuple(-float(token) for token in token_ids[1:])

    async def score_topk(self, endpoint, token_ids, topk, *, timeout, adapter=""):
        logprobs = await self.score(endpoint, token_ids, timeout=timeout)
        ids = array("i", [token + i for token in token_ids[1:] for i in range(topk)])
        return TokenScores(logprobs, ids, array("f", [-float(token) for token in ids]))

    def request_failed(self, url, reason, *, sent_at):
        self.told.append((url, "failed"))

    def request_succeeded(self, url, *, sent_at):
        self.told.append((url, "succeeded"))


def scores(stand_in, deadline=30.0):
    return Scores("teacher", EngineSet(stand_in, stand_in), at_once=4, deadline=deadline)


def test_a_failure_is_told_to_the_fleet_and_another_engine_is_asked():
    engines = StandIn(a=EngineUnreachable("gone"), b=None)
    assert asyncio.run(scores(engines).score([3, 4, 5])) == (-4.0, -5.0)
    assert engines.told == [("a", "failed"), ("b", "succeeded")]


def test_tokens_that_every_engine_fails_on_are_given_up_after_three():
    engines = StandIn(a=EngineUnreachable("gone"), b=EngineUnreachable("gone too"))
    with pytest.raises(PoisonousRequest, match="model teacher: scoring 2 tokens failed 3 times"):
        asyncio.run(scores(engines).score([3, 4]))
    assert engines.asked[:2] == ["a", "b"] and len(engines.asked) == 3


def test_a_refusal_is_raised_at_once_and_is_nobodys_fault():
    engines = StandIn(a=EngineRejected("too long"), b=None)
    with pytest.raises(EngineRejected):
        asyncio.run(scores(engines).score([3, 4]))
    assert engines.told == [] and len(engines.asked) == 1


def test_waiting_for_an_engine_has_an_end():
    with pytest.raises(EngineUnreachable, match=r"no engine of model teacher has served for deadlines\.generate = 0 s"):
        asyncio.run(scores(StandIn(), deadline=0.0).score([3, 4]))


def sample(index, response, mask):
    return Sample(
        group_id=0, index=index, prompt_index=0, prompt_ids=[7, 8], response_ids=response, response_mask=mask,
        response_logprobs=[0.0] * len(response), status=SampleStatus.COMPLETED,
    )  # fmt: skip


def teacher():
    found = scores(StandIn(a=None))
    return ModelClient("teacher", None, None, found.score, found.score_topk)


def test_a_sample_gets_the_teachers_value_where_the_policy_sampled():
    samples = [sample(0, [1, 2, 3], [1, 0, 1]), sample(1, [], [])]
    asyncio.run(add_teacher_logprobs(samples, teacher(), topk=0, vocab_size=9))
    assert samples[0].teacher_logprobs == [-1.0, 0.0, -3.0] and samples[1].teacher_logprobs == []
    assert not samples[0].teacher_topk_ids
    samples[0].clear()
    assert samples[0].teacher_logprobs == []


def test_a_sample_gets_the_teachers_most_probable_tokens_that_the_policy_has_too():
    samples = [sample(0, [1, 2, 3], [1, 0, 1]), sample(1, [], [])]
    asyncio.run(add_teacher_logprobs(samples, teacher(), topk=2, vocab_size=4))
    assert samples[0].teacher_logprobs == [-1.0, 0.0, -3.0]
    assert samples[0].teacher_topk_ids.tolist() == [1, 2, 2, 3, 3, -1]
    assert samples[0].teacher_topk_logprobs.tolist() == [-1.0, -2.0, -2.0, -3.0, -3.0, -math.inf]
    assert not samples[1].teacher_topk_ids
    samples[0].clear()
    assert not samples[0].teacher_topk_ids and not samples[0].teacher_topk_logprobs


@pytest.mark.parametrize("algorithm", [{"advantage": "distill"}, {"distill_kl_coef": 1.0, "distill_top_k": 3}])
@pytest.mark.parametrize(("reason", "scored"), [(None, [-1.0]), ("equal_rewards", [])])
def test_a_group_is_scored_by_the_teacher_unless_it_is_dropped(reason, scored, algorithm):
    async def finish(samples):
        return reason

    models = {"teacher": {"path": "t"}}
    config = TrainConfig(model={"path": "m", "teacher": "teacher"}, models=models, algorithm=algorithm)
    tokenizer, scorer = SimpleNamespace(stop_ids=()), SimpleNamespace(finish=finish)
    work = RolloutWork(
        config, Planes(None), scorer, PolicyModel(tokenizer, 9, False), None, models=Models({"teacher": teacher()})
    )
    group = Group(0, SimpleNamespace(), [sample(0, [1], [1])])
    assert asyncio.run(work.finish(group)) == reason
    assert group.samples[0].teacher_logprobs == scored
    assert len(group.samples[0].teacher_topk_ids) == len(scored) * (3 if "distill_top_k" in algorithm else 0)


def test_two_tokenizers_agree_where_every_token_of_the_one_has_its_id_in_the_other():
    def of(vocabulary):
        return Tokenizer(SimpleNamespace(eos_token_id=None, get_vocab=lambda: vocabulary), stop_ids=(), vocab_size=9)

    assert of({"a": 0, "b": 1}).differs_from(of({"a": 0, "b": 1, "c": 2})) is None
    assert of({"a": 0, "b": 1, "c": 2}).differs_from(of({"a": 0, "b": 1})) == "c"
    assert of({"a": 0, "b": 1}).differs_from(of({"a": 0, "b": 2})) == "b"


def test_a_teacher_with_other_tokens_is_refused_before_anything_starts(monkeypatch):
    from rltool.training.checks import validate

    other = SimpleNamespace()
    monkeypatch.setattr(validate, "load_tokenizer", lambda path, **_: other)
    config = TrainConfig(
        model={"path": "m", "teacher": "teacher"}, models={"teacher": {"path": "t"}}, algorithm={"distill_coef": 0.1}
    )
    with pytest.raises(UsageError, match="the tokenizer of t has another id for 'x' than the model's, or none"):
        validate.check_teachers_tokenizer(config, SimpleNamespace(differs_from=lambda found: "x"))
    validate.check_teachers_tokenizer(config, SimpleNamespace(differs_from=lambda found: None))
