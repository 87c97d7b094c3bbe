"""How far the trainer's log-probabilities are from those that the engine sampled with."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rltool.algorithms.kl import k3
from rltool.algorithms.losses import bounded_ratio


class LogprobDifference(NamedTuple):
    """Mean and maximum of |trainer - engine|, and the k3 estimate of KL(engine || trainer), in nats, over `tokens`
    tokens.

    With tokens = 0 nothing was compared, and the numbers are NaN: they pass no limit, and are never taken for
    agreement.
    """

    abs_mean: float
    abs_max: float
    kl: float
    tokens: int

    @property
    def metrics(self) -> dict[str, float]:
        """Under their stable names; where nothing was compared the count alone."""
        counted = {"train/logprob_compared_tokens": float(self.tokens)}
        if self.tokens == 0:
            return counted
        return counted | {
            "train/logprob_abs_diff_mean": self.abs_mean,
            "train/logprob_abs_diff_max": self.abs_max,
            "train/mismatch_kl": self.kl,
        }


def logprob_difference(trainer: Tensor, engine: Tensor, selection: Tensor) -> LogprobDifference:
    """trainer, engine: [T] float; selection: [T] bool or 0 and 1, the tokens to compare. It compares values and not
    version numbers, so that no weight sync can fool it.

    Select loss tokens of the weights that the trainer has now (staleness.current_tokens): older weights differ for a
    good reason, and a training forward computes loss tokens alone.
    """
    chosen = selection > 0
    if not bool(chosen.any()):
        return LogprobDifference(math.nan, math.nan, math.nan, 0)
    ours, theirs = trainer[chosen].double(), engine[chosen].double()
    difference = (ours - theirs).abs()
    return LogprobDifference(
        float(difference.mean()), float(difference.max()), float(k3(theirs, ours).mean()), len(ours)
    )


def most_different_sample(
    trainer: Tensor, engine: Tensor, selection: Tensor, lengths: Tensor
) -> tuple[int, float]:
    """(number, mean |trainer - engine| over its selected tokens) of the sample where that is the largest; NaN is larger
    than any. trainer, engine, selection: [T] as for `logprob_difference`; lengths: [N]."""
    chosen = (selection > 0).double()
    difference = torch.where(chosen > 0, (trainer - engine).abs().double(), 0.0)
    sample = torch.arange(len(lengths)).repeat_interleave(lengths)
    total, count = (x.new_zeros(len(lengths)).index_add(0, sample, x) for x in (difference, chosen))
    means = (total / count.clamp(min=1)).nan_to_num(nan=math.inf)
    return int(means.argmax()), float(means.max())


def first_different_token(trainer: Tensor, engine: Tensor, selection: Tensor, lengths: Tensor) -> tuple[int, int]:
    """(sample, place in it) of the selected token with the fewest before it of those whose log-probabilities differ in
    any bit; of several the first sample's. One does. trainer, engine, selection: [T] as for `logprob_difference`;
    lengths: [N]."""
    chosen = (trainer != engine) & (selection > 0)  # NaN differs
    place = torch.cat([torch.arange(int(n)) for n in lengths])
    sample = torch.arange(len(lengths)).repeat_interleave(lengths)
    at = int(torch.where(chosen, place, len(place)).argmin())
    return int(sample[at]), int(place[at])


def off_policy_metrics(trainer: Tensor, engine: Tensor, loss_mask: Tensor) -> dict[str, float]:
    """How far the tokens with a loss are from the policy that is trained on them. trainer, engine, loss_mask: [T].

    With rho = p_trainer / p_engine of each token: train/rollout_ratio_min, train/rollout_ratio_max and
    train/effective_sample_fraction, (sum rho)^2 / (n sum rho^2) (Kish 1965, "Survey Sampling", section 11.7): 1
    on-policy, 1/n where one token has all the weight. Nothing where no token has a loss.
    """
    chosen = loss_mask > 0
    if not bool(chosen.any()):
        return {}
    ratio = bounded_ratio((trainer - engine)[chosen]).double()
    return {
        "train/rollout_ratio_min": float(ratio.min()),
        "train/rollout_ratio_max": float(ratio.max()),
        "train/effective_sample_fraction": float(ratio.sum().square() / (len(ratio) * ratio.square().sum())),
    }
