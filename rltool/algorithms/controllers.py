"""Weights of KL and entropy that follow what was measured, from one training step to the next. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from rltool.algorithms.batch import TrainBatch
from rltool.config.algorithm import AlgorithmConfig

MAX_RELATIVE_ERROR = 0.2
KL_GAIN = 0.1
ENTROPY_STEP = 0.005
"""The values of the papers named below."""


@dataclass(frozen=True)
class Coefficients:
    """What the next training step uses, and what a checkpoint keeps of the controllers.

    kl: algorithm.kl.coef as it is now; entropy: c of `adapted_entropy_coef`; entropy_bonus: algorithm.entropy.coef as
    it is now, c or 0; each 0 where there is none
    """

    kl: float
    entropy: float
    entropy_bonus: float

    @classmethod
    def initial(cls, algorithm: AlgorithmConfig) -> Coefficients:
        kl = 0.0 if algorithm.kl.kind == "none" else algorithm.kl.coef
        entropy = algorithm.entropy.coef if algorithm.entropy.kind == "bonus" else 0.0
        return cls(kl, entropy, entropy)

    def applied(self, algorithm: AlgorithmConfig) -> AlgorithmConfig:
        """The algorithm with the present weights in place of those that the run began with."""
        changes: dict[str, Any] = {}
        if algorithm.adapts_kl:
            changes["kl"] = algorithm.kl.model_copy(update={"coef": self.kl})
        if algorithm.adapts_entropy:
            changes["entropy"] = algorithm.entropy.model_copy(update={"coef": self.entropy_bonus})
        return algorithm.model_copy(update=changes) if changes else algorithm

    def adapted(self, algorithm: AlgorithmConfig, measured: Mapping[str, float]) -> Coefficients:
        """After a training step with these metrics (train/kl, train/entropy). What was not measured changes nothing."""
        found = self
        kl, entropy = algorithm.kl, algorithm.entropy
        if kl.kind != "none" and kl.target is not None and "train/kl" in measured:
            found = replace(found, kl=adapted_kl_coef(self.kl, measured["train/kl"], target=kl.target, gain=KL_GAIN))
        if entropy.kind == "bonus" and entropy.target is not None and "train/entropy" in measured:
            coef, bonus = adapted_entropy_coef(
                self.entropy, measured["train/entropy"], target=entropy.target, step=ENTROPY_STEP
            )
            found = replace(found, entropy=coef, entropy_bonus=bonus)
        return found


def with_coefficients(
    batch: TrainBatch, configured: AlgorithmConfig, present: AlgorithmConfig
) -> tuple[TrainBatch, dict[str, float]]:
    """kl_coefs and entropy_coefs where they are adapted, for the ranks, which know what was configured alone; and
    train/kl_coef, train/entropy_coef."""
    count = batch.num_samples
    changes: dict[str, Any] = {}
    metrics: dict[str, float] = {}
    if configured.adapts_kl and present.kl.kind != "none":
        changes["kl_coefs"] = torch.full((count,), present.kl.coef)
        metrics["train/kl_coef"] = present.kl.coef
    if configured.adapts_entropy and present.entropy.kind == "bonus":
        changes["entropy_coefs"] = torch.full((count,), present.entropy.coef)
        metrics["train/entropy_coef"] = present.entropy.coef
    return batch.replace(**changes), metrics


def adapted_kl_coef(coef: float, kl: float, *, target: float, gain: float) -> float:
    """beta (1 + gain e) with e = clip((KL - target) / target, -0.2, 0.2) (Ziegler et al. 2019, "Fine-Tuning Language
    Models from Human Preferences", section 2.2, with gain 0.1).

    kl, target: mean of the configured estimate per token, in nats (the paper's are per sample). A NaN changes nothing.
    """
    error = (kl - target) / target
    if error != error:
        return coef
    return coef * (1 + gain * min(max(error, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR))


def adapted_entropy_coef(coef: float, entropy: float, *, target: float, step: float) -> tuple[float, float]:
    """(c, alpha): c + step where the entropy is below the target, c - step above it, never below 0; alpha = c where the
    entropy is at most the target, else 0 (He et al. 2025, "Skywork Open Reasoner 1", adaptive entropy control).

    entropy, target: mean over the loss tokens, in nats; the entropy is that of the step before, the last one known when
    the bonus is needed. Without the limit at 0 a long time above the target would take as
    long to be made up for.
    """
    if entropy < target:
        coef += step
    elif entropy > target:
        coef = max(0.0, coef - step)
    return coef, coef if entropy <= target else 0.0
