"""Metrics of a batch's samples beyond their mean reward: which prompts teach, how answers are written, per category.
Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import numpy as np

from rltool.rollout.sample import Sample

REPEATED_NGRAM = 8
"""Tokens of an n-gram: long enough that prose does not repeat one by chance, short enough to see a loop of one word."""
REPETITIVE = 0.5
MOST_VALUES = 20
"""Categories, and rewards of groups without a spread, that get metrics of their own: a continuous reward, or a field
that is different in each row, must not make a thousand."""

_HASH_BASE = np.uint64(1_000_003)


def prompt_metrics(samples: Sequence[Sample], *, pass_reward: float) -> dict[str, float]:
    """Pass rates. A prompt's difficulty is the share of its own samples that passed: with none or all of them its group
    has no advantage (under a reward of 0 and 1), so the two shares between are what is learned from.

    samples: of a batch, all with a reward. Groups of any size.
    """
    groups = _groups(samples)
    rates = [_mean([float(_reward(s) >= pass_reward) for s in group]) for group in groups]
    kinds: dict[str, Callable[[float], bool]] = {
        "never_solved": lambda rate: rate == 0.0,
        "hard": lambda rate: 0.0 < rate <= 0.5,
        "easy": lambda rate: 0.5 < rate < 1.0,
        "always_solved": lambda rate: rate == 1.0,
    }
    shares = {f"rollout/prompts_{kind}_fraction": _mean([float(at(r)) for r in rates]) for kind, at in kinds.items()}
    passed = [float(_reward(sample) >= pass_reward) for sample in samples]
    return {"rollout/pass_rate": _mean(passed), **shares, **_zero_std_groups(groups)}


def _zero_std_groups(groups: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """How many groups, by the one reward that all their samples have, rounded to a tenth."""
    counts: Counter[str] = Counter()
    for group in groups:
        rewards = {_reward(sample) for sample in group}
        if len(rewards) == 1:
            counts[f"{round(rewards.pop(), 1) + 0.0:g}"] += 1
    return {f"rollout/zero_std_groups/{reward}": float(n) for reward, n in counts.most_common(MOST_VALUES)}


def length_metrics(samples: Sequence[Sample], *, pass_reward: float) -> dict[str, float]:
    """Tokens of prompts and responses; of those that passed and of those that did not, which shows whether length
    pays."""
    lengths = [float(len(sample.response_ids)) for sample in samples]
    passed = [float(len(s.response_ids)) for s in samples if _reward(s) >= pass_reward]
    failed = [float(len(s.response_ids)) for s in samples if _reward(s) < pass_reward]
    found = {
        "rollout/prompt_length_mean": _mean([float(len(sample.prompt_ids)) for sample in samples]),
        "rollout/response_length_min": min(lengths),
        "rollout/response_length_median": float(median(lengths)),
        "rollout/sampled_tokens": float(sum(sum(sample.response_mask) for sample in samples)),
        "rollout/inserted_token_fraction": 1.0
        - sum(sum(sample.response_mask) for sample in samples) / max(sum(lengths), 1.0),
    }
    for name, part in (("passed", passed), ("failed", failed)):
        if part:
            found[f"rollout/response_length_{name}_mean"] = _mean(part)
    return found


def repetition_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Loops: the mean of `repetition`, and the share of responses in which more than half is repeated."""
    found = [repetition(sample.response_ids) for sample in samples]
    return {
        "rollout/repetition_mean": _mean(found),
        "rollout/repetitive_fraction": _mean([float(value > REPETITIVE) for value in found]),
    }


def repetition(token_ids: Sequence[int], n: int = REPEATED_NGRAM) -> float:
    """Share of a response's n-grams that occur in it before; 0 for a response of fewer than n tokens.

    N-grams are compared by a polynomial hash modulo 2**64: a collision, of which there are 1e-9 among 100,000 n-grams,
    would count as one repetition.
    """
    if len(token_ids) < n:
        return 0.0
    ids = np.asarray(token_ids, dtype=np.uint64) + np.uint64(1)
    count = len(ids) - n + 1
    hashes = np.zeros(count, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for offset in range(n):
            hashes = hashes * _HASH_BASE + ids[offset : offset + count]
    return 1.0 - len(np.unique(hashes)) / count


def work_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """What samples cost beside their tokens; each over those of which it is known, and missing where it is of none."""
    seconds = [sample.tool_seconds for sample in samples if sample.tool_seconds is not None]
    cached = [float(sample.cached_tokens) for sample in samples if sample.cached_tokens is not None]
    found = {
        f"rollout/{name}_{kind}": value
        for name, values in (("tool_seconds", seconds), ("cached_prompt_tokens", cached)) if values
        for kind, value in (("mean", _mean(values)), ("max", max(values)))
    }  # fmt: skip
    passes = sum(sample.drafts.passes for sample in samples if sample.drafts)
    if passes:
        accepted = sum(sample.drafts.accepted for sample in samples if sample.drafts)
        found["rollout/accepted_length_mean"] = 1.0 + accepted / passes
    return found


def category_metrics(samples: Sequence[Sample], *, key: str | None, pass_reward: float) -> dict[str, float]:
    """Reward, pass rate and count for each value of metadata[key]; samples without it are left out. key None: nothing.

    The most frequent MOST_VALUES values. A slash in one becomes a dot, for slashes separate the parts of a name.
    """
    if key is None:
        return {}
    by_value: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        if key in sample.metadata:
            by_value[str(sample.metadata[key]).replace("/", ".")].append(sample)
    found: dict[str, float] = {}
    for value, members in sorted(by_value.items(), key=lambda item: (-len(item[1]), item[0]))[:MOST_VALUES]:
        rewards = [_reward(sample) for sample in members]
        found[f"rollout/category/{value}/reward_mean"] = _mean(rewards)
        found[f"rollout/category/{value}/pass_rate"] = _mean([float(reward >= pass_reward) for reward in rewards])
        found[f"rollout/category/{value}/samples"] = float(len(members))
    return found


def all_sample_metrics(samples: Sequence[Sample], *, pass_reward: float, category_key: str | None) -> dict[str, float]:
    """All of the above, of a batch that is not empty."""
    return {
        **prompt_metrics(samples, pass_reward=pass_reward),
        **length_metrics(samples, pass_reward=pass_reward),
        **repetition_metrics(samples),
        **work_metrics(samples),
        **category_metrics(samples, key=category_key, pass_reward=pass_reward),
    }


def speed_metrics(
    metrics: Mapping[str, float], samples: Sequence[Sample], *, seconds: float, gpus: int
) -> dict[str, float]:
    """metrics: with rollout/tokens_per_second; seconds: of the collection of this batch; gpus: of the engines that
    serve (on the CPU their workers)."""
    longest = max((sum(sample.response_mask) for sample in samples), default=0)
    found = {}
    if seconds > 0:
        found["rollout/longest_response_tokens_per_second"] = longest / seconds
    if gpus > 0 and "rollout/tokens_per_second" in metrics:
        found["rollout/tokens_per_second_per_gpu"] = metrics["rollout/tokens_per_second"] / gpus
    return found


def _groups(samples: Sequence[Sample]) -> list[list[Sample]]:
    groups: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.group_id].append(sample)
    return list(groups.values())


def _reward(sample: Sample) -> float:
    if sample.reward is None:
        raise ValueError(f"sample {sample.group_id}/{sample.index} has no reward; drop it before the metrics")
    return sample.reward


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
