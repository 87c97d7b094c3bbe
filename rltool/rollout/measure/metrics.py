"""Numbers of a rollout under their stable names. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rltool.rollout.sample import Sample, SampleStatus


def rollout_metrics(
    samples: Sequence[Sample], *, seconds: float | None, dropped: Mapping[str, int]
) -> dict[str, float]:
    """Metrics of the samples that training will see.

    seconds: wall-clock time of generation, None for recorded samples; dropped: reason -> number of samples that were
    taken out, each reported as rollout/dropped_<reason> beside their sum rollout/dropped. Tokens are those that the
    policy sampled.
    """
    rewards = _rewards(samples)
    metrics = {
        "rollout/samples": float(len(samples)),
        "rollout/reward_mean": _mean(rewards),
        "rollout/reward_std": _std(rewards),
        "rollout/zero_std_group_fraction": zero_std_group_fraction(samples),
        **_lengths("rollout", samples),
        **_turns(samples),
        "rollout/dropped": float(sum(dropped.values())),
        **_reward_parts(samples),
        "rollout/weight_versions": float(len({span.version for sample in samples for span in sample.versions})),
    }
    if seconds is not None:
        metrics["rollout/tokens_per_second"] = sum(sum(sample.response_mask) for sample in samples) / seconds
    metrics.update({f"rollout/dropped_{reason}": float(count) for reason, count in dropped.items()})
    return metrics


def eval_metrics(
    name: str, samples: Sequence[Sample], *, pass_at: Sequence[int] = (), pass_reward: float = 1.0
) -> dict[str, float]:
    """eval/<name>/accuracy is the mean reward over all samples, each episode of an agent once;
    eval/<name>/pass_at_<k> is pass@k with what reaches pass_reward. Both with <...>_low and <...>_high, the ends of
    their 95 % interval (`estimate`).

    A sample whose reward failed counts 0, has not passed, and is reported as well. All prompts have the same number of
    samples. Lengths are of all trajectories, as those of a batch.
    """
    episodes = [sample for sample in samples if sample.trajectory == 0]
    groups: dict[int, list[Sample]] = defaultdict(list)
    for sample in episodes:
        groups[sample.group_id].append(sample)
    estimates = {"accuracy": estimate([_mean([s.reward or 0.0 for s in group]) for group in groups.values()])}
    for k in pass_at:
        passed = [(len(group), sum((s.reward or 0.0) >= pass_reward for s in group)) for group in groups.values()]
        estimates[f"pass_at_{k}"] = estimate([pass_at_k(n, c, k) for n, c in passed])
    failed = sum(sample.reward is None for sample in episodes)
    return {
        **{f"eval/{name}/{metric}": found.mean for metric, found in estimates.items()},
        **{f"eval/{name}/{metric}_low": found.low for metric, found in estimates.items()},
        **{f"eval/{name}/{metric}_high": found.high for metric, found in estimates.items()},
        f"eval/{name}/prompts": float(len(groups)),
        f"eval/{name}/samples": float(len(episodes)),
        f"eval/{name}/failed": float(failed),
        **_lengths(f"eval/{name}", samples),
    }


def zero_std_group_fraction(samples: Sequence[Sample]) -> float:
    """Share of prompt groups whose rewards are all equal: they have no advantage and teach nothing."""
    groups: dict[int, set[float | None]] = defaultdict(set)
    for sample in samples:
        groups[sample.group_id].add(sample.reward)
    return _mean([float(len(values) == 1) for values in groups.values()])


def _reward_parts(samples: Sequence[Sample]) -> dict[str, float]:
    """Means over the samples that have them: of each part of the reward, and of what reward.group replaced."""
    parts: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for name, value in sample.reward_parts.items():
            parts[f"rollout/reward_part_{name}"].append(value)
        if sample.raw_reward is not None:
            parts["rollout/raw_reward_mean"].append(sample.raw_reward)
    return {name: _mean(values) for name, values in sorted(parts.items())}


def _lengths(prefix: str, samples: Sequence[Sample]) -> dict[str, float]:
    lengths = [float(len(sample.response_ids)) for sample in samples]
    return {
        f"{prefix}/response_length_mean": _mean(lengths),
        f"{prefix}/response_length_max": max(lengths, default=math.nan),
        f"{prefix}/truncated_fraction": _mean([float(s.status is SampleStatus.TRUNCATED) for s in samples]),
    }


def _turns(samples: Sequence[Sample]) -> dict[str, float]:
    """rollout/turns_mean, of those that have a response; nothing where every sample is one turn."""
    turns = [sample.turns for sample in samples if sample.response_ids]
    return {"rollout/turns_mean": _mean([float(count) for count in turns])} if max(turns, default=0) > 1 else {}


def _rewards(samples: Sequence[Sample]) -> list[float]:
    lacking = next((sample for sample in samples if sample.reward is None), None)
    if lacking is not None:
        raise ValueError(f"sample {lacking.group_id}/{lacking.index} has no reward; drop it before the metrics")
    return [sample.reward for sample in samples if sample.reward is not None]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _std(values: Sequence[float]) -> float:
    """Population standard deviation; 0 for a single value."""
    mean = _mean(values)
    return math.sqrt(_mean([(value - mean) ** 2 for value in values])) if values else math.nan


RESAMPLES = 1000
CONFIDENCE = 0.95
Z = 1.959964
"""The 97.5 % quantile of the normal distribution."""


class Estimate(NamedTuple):
    """A mean over prompts and its 95 % interval; NaN for no prompt."""

    mean: float
    low: float
    high: float


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that of k samples drawn without replacement from n, of which c passed, at least one passed:
    1 - C(n - c, k) / C(n, k), the unbiased estimator of pass@k (Chen et al. 2021, "Evaluating Large Language Models
    Trained on Code", eq. 1). ValueError unless 0 <= c <= n and 1 <= k <= n."""
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {n} samples, {c} of which passed, is not defined")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def estimate(values: Sequence[float]) -> Estimate:
    """values: one per prompt, the mean over its samples or its pass@k.

    The interval is a bootstrap over prompts (percentiles of RESAMPLES means; Efron 1979), because the samples of one
    prompt are not independent. It always draws the same numbers. Where all values are 0, or all are 1, every resample
    is the same and useless: then it is Wilson's interval (1927) of the prompts.
    """
    count = len(values)
    if count == 0:
        return Estimate(math.nan, math.nan, math.nan)
    found = np.asarray(values, dtype=np.float64)
    mean = float(found.mean())
    if bool((found == 0.0).all()) or bool((found == 1.0).all()):
        return Estimate(mean, *wilson(mean, count))
    draws = np.random.default_rng(0)
    means = np.array([found[draws.integers(count, size=count)].mean() for _ in range(RESAMPLES)])
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(mean, float(low), float(high))


def wilson(share: float, count: int) -> tuple[float, float]:
    """The score interval of a share of `count` independent trials (Wilson 1927)."""
    squared = Z * Z / count
    middle = (share + squared / 2) / (1 + squared)
    half = Z / (1 + squared) * math.sqrt(share * (1 - share) / count + squared / (4 * count))
    return max(middle - half, 0.0), min(middle + half, 1.0)
