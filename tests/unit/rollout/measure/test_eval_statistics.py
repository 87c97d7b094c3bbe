"""Estimates of an evaluation: pass@k, intervals, and the table."""

from __future__ import annotations

import itertools
import math

import pytest
from pydantic import ValidationError

from rltool.config.rollout import EvalConfig, SamplingConfig
from rltool.engines.types import SamplingParams, VersionSpan
from rltool.report.eval_table import by_set, result, result_table
from rltool.rollout.measure.eval_set import eval_settings
from rltool.rollout.measure.evaluation import version_metrics
from rltool.rollout.measure.metrics import estimate, eval_metrics, pass_at_k, wilson
from rltool.rollout.sample import Sample
from rltool.terminal import Console


@pytest.mark.parametrize(("n", "c"), [(1, 0), (1, 1), (4, 0), (4, 1), (5, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_all_choices_that_have_a_sample_that_passed(n, c):
    for k in range(1, n + 1):
        choices = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, 1, 5), (4, 1, 0), (4, -1, 1)])
def test_pass_at_k_of_what_is_not_there_is_refused(n, c, k):
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k(n, c, k)


def test_a_bootstrap_interval_is_that_of_the_normal_approximation_for_many_prompts():
    values = [0.0, 0.25, 0.5, 1.0] * 100
    found = estimate(values)
    mean = sum(values) / len(values)
    half = 1.96 * math.sqrt(sum((v - mean) ** 2 for v in values) / len(values) / len(values))
    assert found.mean == mean
    assert found.low == pytest.approx(mean - half, abs=0.005) and found.high == pytest.approx(mean + half, abs=0.005)
    assert estimate(values) == found, "the same numbers are drawn each time"


def test_where_all_passed_the_interval_is_wilsons_and_not_a_point():
    assert estimate([1.0] * 10) == (1.0, *wilson(1.0, 10))
    assert estimate([0.0] * 10)[2] == pytest.approx(0.2775, abs=1e-4)
    assert estimate([0.5] * 10) == (0.5, 0.5, 0.5)
    assert all(map(math.isnan, estimate([])))


def test_wilsons_interval():
    # R: prop.test(15, 50, correct = FALSE)
    assert wilson(0.3, 50) == (pytest.approx(0.1910, abs=1e-4), pytest.approx(0.4375, abs=1e-4))


def sample(group, reward):
    return Sample(group, 0, 0, [1], response_ids=[2], response_mask=[1], response_logprobs=[0.0], reward=reward)


def test_metrics_of_a_set_have_intervals_and_pass_at_k():
    samples = [sample(g, r) for g, rewards in enumerate(([1, 0, 0, 0], [0, 0, 0, None], [1, 1, 0, 1])) for r in rewards]
    found = eval_metrics("a", samples, pass_at=(1, 4), pass_reward=1.0)
    assert found["eval/a/accuracy"] == found["eval/a/pass_at_1"] == pytest.approx(1 / 3)
    assert found["eval/a/pass_at_4"] == pytest.approx(2 / 3)
    assert found["eval/a/accuracy_low"] < 1 / 3 < found["eval/a/accuracy_high"]
    assert (found["eval/a/prompts"], found["eval/a/samples"], found["eval/a/failed"]) == (3, 12, 1)
    assert eval_metrics("a", samples, pass_at=(1,), pass_reward=0.0)["eval/a/pass_at_1"] == pytest.approx(1.0)


def test_a_set_takes_what_it_does_not_set_from_the_sections_around_it():
    config = EvalConfig.model_validate(
        {"sets": {"a": "a.jsonl", "b": "b.jsonl"}, "samples_per_prompt": 4, "sampling": {"top_p": 0.5}, "pass_at": [2],
         "overrides": {"b": {"temperature": 0.0, "samples_per_prompt": 2, "max_response_tokens": 9}}}
    )  # fmt: skip
    sampling = SamplingConfig(max_response_tokens=77)
    a, b = (eval_settings(config, sampling, name, pass_reward=0.5) for name in "ab")
    assert (a.samples_per_prompt, a.temperature, a.top_p, a.top_k, a.max_response_tokens) == (4, 1.0, 0.5, -1, 77)
    assert (b.samples_per_prompt, b.temperature, b.top_p, b.top_k, b.max_response_tokens) == (2, 0.0, 0.5, -1, 9)
    assert a.pass_at == (2,) and b.pass_reward == 0.5
    asked = SamplingParams(max_tokens=5, temperature=1.0, stop=("trained",))
    ends = EvalConfig.model_validate({"sets": {"a": "a.jsonl"}, "sampling": {"stop": ["evaluated"]}})
    for settings, stop in ((a, ()), (eval_settings(ends, sampling, "a", pass_reward=1.0), ("evaluated",))):
        assert settings.applied(asked).stop == stop


def test_an_own_reward_of_a_set_has_options_and_options_need_one():
    own = EvalConfig.model_validate(
        {"sets": {"a": "a.jsonl"}, "overrides": {"a": {"reward": "regex", "reward_options": {"pattern": "x"}}}}
    ).overrides["a"]
    assert own.rewards().function == "regex" and own.rewards().options == {"pattern": "x"}
    with pytest.raises(ValidationError, match="reward_options has no effect without reward"):
        EvalConfig.model_validate({"sets": {"a": "a.jsonl"}, "overrides": {"a": {"reward_options": {"pattern": "x"}}}})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"overrides": {"c": {}}}, "overrides for c, which eval.sets does not have"),
        ({"pass_at": [3]}, "set 'a' has 2 samples of each prompt"),
        ({"pass_at": [0]}, "1 <= k"),
        ({"pass_at": [2], "overrides": {"a": {"samples_per_prompt": 1}}}, "set 'a' has 1 samples"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes, said):
    with pytest.raises(ValidationError, match=said):
        EvalConfig.model_validate({"sets": {"a": "a.jsonl"}, "samples_per_prompt": 2, **changes})


METRICS = eval_metrics("gsm", [sample(0, 1.0), sample(1, 0.0)], pass_at=(1,)) | {"eval/gsm/seconds": 1.5}


def test_results_are_a_table_and_json():
    assert by_set(METRICS)["gsm"]["accuracy"] == 0.5
    assert result(METRICS, {"model": "m"}) == {"model": "m", "sets": by_set(METRICS)}
    console = Console(width=80)
    with console.capture() as capture:
        console.print(result_table(METRICS))
    text = capture.get()
    [accuracy] = [line.split() for line in text.splitlines() if "accuracy" in line]
    assert accuracy == ["│", "gsm", "│", "accuracy", "│", "0.500", "│", "0.000", "to", "1.000", "│"]
    assert "pass@1" in text and "2, 2" in text


def test_what_an_own_evaluation_found_is_in_the_table_and_versions_are_of_no_set():
    own = {"eval/gsm/majority": 0.75, "eval/gsm/majority_low": 0.5, "eval/gsm/majority_high": 1.0}
    console = Console(width=80)
    with console.capture() as capture:
        console.print(result_table(METRICS | own | {"eval/version_min": 3.0, "eval/version_max": 4.0}))
        console.print(result_table({"eval/a/accuracy": 0.25, "eval/a/votes": 3.0, "eval/a/seconds": 1.0}))
    lines = [[cell.strip() for cell in line.split("│")] for line in capture.get().splitlines()]
    found = {line[2]: line[3:5] for line in lines if len(line) == 6}
    assert found["majority"] == ["0.750", "0.500 to 1.000"] and found["votes"] == ["3.000", ""]
    assert "majority_low" not in found and "samples" not in found
    assert by_set({"eval/version_min": 3.0, "eval/skipped": 1.0}) == {}


def test_the_versions_of_an_evaluation_are_those_of_its_tokens():
    def of(*versions):
        one = sample(0, 1.0)
        one.versions = [VersionSpan(version, 0, 1) for version in versions]
        return one

    run = "a" * 32
    found = version_metrics([of(f"{run}:0:9", f"{run}:0:10"), of(f"{run}:1:11")])
    assert found == {"eval/version_min": 9.0, "eval/version_max": 11.0}
    assert version_metrics([of("default")]) == {} == version_metrics([])
