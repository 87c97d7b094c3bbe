"""Weights of KL and entropy that follow what was measured, from one training step to the next. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rltool.config.algorithm import AlgorithmConfig

MAX_RELATIVE_ERROR = 0.2
KL_GAIN = 0.1
ENTROPY_STEP = 0.005
"""The values of the papers named below."""


@dataclass(frozen=True)
class Coefficients:
    """What the next training step uses, and what a checkpoint keeps of the controllers.

    kl: algorithm.kl_coef as it is now; entropy: c of `adapted_entropy_coef`; entropy_bonus: algorithm.entropy_coef as
    it is now, c or 0
    """

    kl: float
    entropy: float
    entropy_bonus: float

    @classmethod
    def initial(cls, algorithm: AlgorithmConfig) -> Coefficients:
        return cls(algorithm.kl_coef, algorithm.entropy_coef, algorithm.entropy_coef)

    def applied(self, algorithm: AlgorithmConfig) -> AlgorithmConfig:
        """The algorithm with the present weights in place of those that the run began with."""
        if not algorithm.adapts_coefficients:
            return algorithm
        return algorithm.model_copy(update={"kl_coef": self.kl, "entropy_coef": self.entropy_bonus})

    def adapted(self, algorithm: AlgorithmConfig, measured: Mapping[str, float]) -> Coefficients:
        """After a training step with these metrics (train/kl, train/entropy). What was not measured changes nothing."""
        found = self
        if algorithm.kl_target is not None and "train/kl" in measured:
            kl = adapted_kl_coef(self.kl, measured["train/kl"], target=algorithm.kl_target, gain=KL_GAIN)
            found = replace(found, kl=kl)
        if algorithm.entropy_target is not None and "train/entropy" in measured:
            entropy, bonus = adapted_entropy_coef(
                self.entropy, measured["train/entropy"], target=algorithm.entropy_target, step=ENTROPY_STEP
            )
            found = replace(found, entropy=entropy, entropy_bonus=bonus)
        return found


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
