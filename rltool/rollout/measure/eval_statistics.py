"""Numbers of an evaluation with what they may be off by. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

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
