"""How far the trainer's log-probabilities are from those that the engine sampled with."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from rltool.algorithms.kl import k3


class LogprobGap(NamedTuple):
    """Over loss tokens: mean and maximum of |trainer - engine|, and the k3 estimate of KL(engine || trainer), in nats."""

    abs_mean: float
    abs_max: float
    kl: float


def logprob_gap(trainer: Tensor, engine: Tensor, loss_mask: Tensor) -> LogprobGap:
    """trainer, engine, loss_mask: [T] each. The gate that no weight sync can fool: it compares values, not version numbers."""
    chosen = loss_mask > 0
    if not bool(chosen.any()):
        return LogprobGap(0.0, 0.0, 0.0)
    ours, theirs = trainer[chosen].double(), engine[chosen].double()
    difference = (ours - theirs).abs()
    return LogprobGap(float(difference.mean()), float(difference.max()), float(k3(theirs, ours).mean()))
