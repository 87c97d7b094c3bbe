"""Metrics of a batch's samples beyond the mean reward, and what engines tell of themselves."""

from __future__ import annotations

import asyncio

import pytest
import torch

from rltool.algorithms.mismatch import off_policy_metrics
from rltool.engines.dialects.table import dialect
from rltool.engines.fleet.fleet import Fleet
from rltool.engines.types import Completion, Drafts, EngineCounters, Tally, VersionSpan
from rltool.errors import EngineError
from rltool.rollout.measure.sample_metrics import (
    MOST_VALUES,
    all_sample_metrics,
    category_metrics,
    length_metrics,
    prompt_metrics,
    repetition,
    repetition_metrics,
    speed_metrics,
    work_metrics,
)
from rltool.rollout.sample import Sample
from rltool.rollout.serving.rates import EngineRates, rates
from rltool.training.observe.metrics import step_speed
from tests import fleets


def sample(group, reward, length=2, mask=None, **metadata):
    mask = mask or [1] * length
    return Sample(
        group, 0, 0, [1, 2, 3], response_ids=list(range(length)), response_mask=mask, response_logprobs=[0.0] * length,
        reward=reward, metadata=metadata,
    )  # fmt: skip


def batch(*rewards_of_groups):
    return [sample(group, reward) for group, rewards in enumerate(rewards_of_groups) for reward in rewards]


def test_prompts_are_told_apart_by_how_many_of_their_samples_passed():
    found = prompt_metrics(batch([0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]), pass_reward=1.0)
    kinds = ("never_solved", "hard", "easy", "always_solved")
    assert [found[f"rollout/prompts_{kind}_fraction"] for kind in kinds] == [0.2, 0.4, 0.2, 0.2]
    assert found["rollout/pass_rate"] == 0.5
    assert prompt_metrics(batch([0.6, 0.4]), pass_reward=0.5)["rollout/pass_rate"] == 0.5


def test_groups_without_a_spread_are_counted_by_their_reward():
    found = prompt_metrics(batch([0, 0], [0.0, 0.0], [1, 1], [0, 1], [-0.01, -0.01], [0.26, 0.26]), pass_reward=1.0)
    zero_std = {name: value for name, value in found.items() if "zero_std" in name}
    assert zero_std == {
        "rollout/zero_std_groups/0": 3.0, "rollout/zero_std_groups/1": 1.0, "rollout/zero_std_groups/0.3": 1.0,
    }  # fmt: skip
    many = prompt_metrics([s for i in range(99) for s in batch([float(i)] * 2)[:1] * 1], pass_reward=1.0)
    assert sum("zero_std" in name for name in many) <= MOST_VALUES


def test_what_engines_and_tools_report_is_averaged_over_the_samples_that_have_it():
    assert work_metrics(batch([1.0, 0.0])) == {}
    one, two, three = samples = batch([1.0, 0.0, 0.0])
    one.tool_seconds, two.tool_seconds = 1.0, 4.0
    one.cached_tokens, three.cached_tokens = 0, 12
    one.drafts, two.drafts = Drafts(passes=2, accepted=1), Drafts(passes=6, accepted=5)
    assert work_metrics(samples) == {
        "rollout/tool_seconds_mean": 2.5, "rollout/tool_seconds_max": 4.0, "rollout/cached_prompt_tokens_mean": 6.0,
        "rollout/cached_prompt_tokens_max": 12.0, "rollout/accepted_length_mean": 1.75,
    }  # fmt: skip
    assert work_metrics(samples).items() <= all_sample_metrics(samples, pass_reward=1.0, category_key=None).items()
    one.drafts, two.drafts = Drafts(passes=0, accepted=0), None
    assert "rollout/accepted_length_mean" not in work_metrics(samples), "no pass has verified anything"


def test_a_samples_counts_are_those_of_all_its_requests_or_unknown():
    def completion(**found):
        return Completion((5,), (-0.5,), "stop", (VersionSpan("run:0:1", 0, 1),), **found)

    made = Sample(0, 0, 0, [1, 2])
    made.append_response_tokens(completion(cached_tokens=4, drafts=Drafts(2, 3)))
    made.append_environment_tokens([7, 8])
    made.append_response_tokens(completion(cached_tokens=0, drafts=Drafts(1, 0)))
    assert (made.cached_tokens, made.drafts) == (4, Drafts(3, 3))
    made.append_response_tokens(completion())
    made.append_response_tokens(completion(cached_tokens=5, drafts=Drafts(1, 1)))
    assert (made.cached_tokens, made.drafts) == (None, None), "a sum without one of its parts"
    made.clear()
    made.append_response_tokens(completion(cached_tokens=5))
    assert (made.cached_tokens, made.drafts) == (5, None)


def test_lengths_of_what_passed_and_of_what_did_not():
    samples = [sample(0, 1.0, 2), sample(0, 0.0, 8, mask=[1, 1, 0, 0, 0, 0, 1, 1]), sample(1, 0.0, 4)]
    found = length_metrics(samples, pass_reward=1.0)
    assert found["rollout/response_length_passed_mean"] == 2 and found["rollout/response_length_failed_mean"] == 6
    assert found["rollout/response_length_min"] == 2 and found["rollout/response_length_median"] == 4
    assert found["rollout/sampled_tokens"] == 10 and found["rollout/prompt_length_mean"] == 3
    assert found["rollout/inserted_token_fraction"] == pytest.approx(4 / 14)
    assert "rollout/response_length_passed_mean" not in length_metrics(samples[1:], pass_reward=1.0)


def plain_repetition(ids, n=8):
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


@pytest.mark.parametrize(
    "ids", [[], [5] * 7, [5] * 8, [5] * 100, list(range(100)), [*range(20), *range(20)], [0, 1] * 30, [2**40, 7] * 9]
)
def test_repetition_is_the_share_of_repeated_ngrams(ids):
    assert repetition(ids) == pytest.approx(plain_repetition(ids))


def test_a_response_that_is_mostly_a_loop_is_counted():
    loop, prose = sample(0, 0.0, 40), sample(0, 0.0, 40)
    loop.response_ids = [1, 2] * 20
    found = repetition_metrics([loop, prose])
    assert found["rollout/repetitive_fraction"] == 0.5
    assert found["rollout/repetition_mean"] == pytest.approx(plain_repetition([1, 2] * 20) / 2)


def test_categories_are_values_of_one_field_of_the_metadata():
    samples = [sample(0, 1.0, task="add"), sample(0, 0.5, task="add"), sample(1, 0.0, task="a/b"), sample(2, 0.0)]
    assert category_metrics(samples, key="task", pass_reward=1.0) == {
        "rollout/category/add/reward_mean": 0.75, "rollout/category/add/pass_rate": 0.5,
        "rollout/category/add/samples": 2.0, "rollout/category/a.b/reward_mean": 0.0,
        "rollout/category/a.b/pass_rate": 0.0, "rollout/category/a.b/samples": 1.0,
    }  # fmt: skip
    assert category_metrics(samples, key=None, pass_reward=1.0) == {}
    rows = [sample(0, 1.0, row=i) for i in range(50)]
    assert len(category_metrics(rows, key="row", pass_reward=1.0)) == 3 * MOST_VALUES


def test_all_of_them_refuse_a_sample_without_reward():
    with pytest.raises(ValueError, match="0/0 has no reward"):
        all_sample_metrics([sample(0, None)], pass_reward=1.0, category_key=None)


def test_speed_is_per_gpu_of_the_engines_and_of_the_longest_response():
    samples = [sample(0, 1.0, 8), sample(0, 1.0, 4, mask=[1, 0, 0, 0])]
    found = speed_metrics({"rollout/tokens_per_second": 90.0}, samples, seconds=2.0, gpus=3)
    assert found == {"rollout/longest_response_tokens_per_second": 4.0, "rollout/tokens_per_second_per_gpu": 30.0}
    assert speed_metrics({}, samples, seconds=0.0, gpus=0) == {}


def test_speed_of_a_step():
    measured = {"time/train_seconds": 4.0, "time/step_seconds": 10.0, "time/wait_seconds": 3.0}
    assert step_speed(measured, tokens=800, ranks=2) == {
        "train/tokens_per_second": 200.0, "train/tokens_per_second_per_gpu": 100.0, "time/non_generation_seconds": 7.0,
    }  # fmt: skip


def test_effective_samples_on_policy_and_where_one_token_has_all_the_weight():
    mask = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0])
    same = torch.full((5,), -2.0)
    assert off_policy_metrics(same, same, mask)["train/effective_sample_fraction"] == pytest.approx(1.0)
    far = off_policy_metrics(same + torch.tensor([9.0, 0.0, 0.0, 0.0, 15.0]), same, mask)
    assert far["train/effective_sample_fraction"] == pytest.approx(0.25, abs=1e-4)
    assert far["train/rollout_ratio_max"] == pytest.approx(3269017.25, rel=1e-5) and far["train/rollout_ratio_min"] == 1
    assert off_policy_metrics(same, same, mask * 0) == {}


# -- what engines tell


METRICS = """# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0"} 100.0
vllm:prefix_cache_queries_total{engine="1"} 60.0
vllm:prefix_cache_queries_created{engine="0"} 1.7e9
vllm:prefix_cache_hits_total{engine="0"} 30.0
vllm:prefix_cache_hits_total{engine="1"} 10.0
"""


def test_vllm_counts_prefix_hits_and_drafts_since_its_start():
    vllm = dialect("vllm", plugin=False)
    assert vllm.counters().path == "/metrics"
    assert vllm.parse_counters(METRICS) == EngineCounters(Tally(40.0, 160.0), None)
    drafts = METRICS + "vllm:spec_decode_num_draft_tokens_total 8.0\nvllm:spec_decode_num_accepted_tokens_total 6.0\n"
    assert vllm.parse_counters(drafts).speculation == Tally(6.0, 8.0)
    assert vllm.parse_counters("") == EngineCounters(None, None)


def test_sglang_tells_of_its_last_batches():
    sglang = dialect("sglang", plugin=False)
    ranks = [{"cache_hit_rate": 0.5, "speculative": {"accept_rate": 0.75, "accept_length": 3}}, {"cache_hit_rate": 1.0}]
    assert sglang.parse_counters({"loads": ranks}) == EngineCounters(0.75, 0.75)
    with pytest.raises(EngineError, match="no data-parallel rank"):
        sglang.parse_counters({"loads": []})


def test_rates_are_of_what_was_counted_since_the_last_question():
    before = {"a": EngineCounters(Tally(40.0, 100.0))}
    now = {"a": EngineCounters(Tally(100.0, 200.0)), "b": EngineCounters(0.2, 0.5)}
    found = rates(before, now)
    assert found == {
        "rollout/prefix_cache_hit_rate": pytest.approx((0.6 + 0.2) / 2), "rollout/speculative_acceptance_rate": 0.5,
    }  # fmt: skip
    assert rates(now, {"a": now["a"]}) == {}, "nothing was counted in between"
    restarted = {"a": EngineCounters(Tally(5.0, 50.0))}
    assert rates(now, restarted)["rollout/prefix_cache_hit_rate"] == pytest.approx(0.1)


def test_an_engine_that_does_not_answer_is_left_out():
    class Client:
        async def counters(self, endpoint, *, timeout):
            if endpoint.url == "silent":
                raise EngineError("no")
            return EngineCounters(Tally(1.0, 4.0))

    async def ask():
        rates, fleet = EngineRates(Client()), Fleet()
        for url in ("loud", "silent"):
            fleets.add(fleet, url)
        return [await rates.since_last(fleet.members()) for _ in range(2)]

    assert asyncio.run(ask()) == [{"rollout/prefix_cache_hit_rate": 0.25}, {}]
