"""Methods of [algorithm] that are a table with a `kind`, each kind with the keys that it has: the estimator of
advantages, the objective, KL to the reference, entropy control, and the correction of the difference between engines
and trainer."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_serializer, model_validator

from rltool.config.base import Config, OwnFunction, is_table


def _inf_from_json(value: Any) -> Any:
    """JSON has no infinity: inf_in_json writes text."""
    return math.inf if value == str(math.inf) else value


def inf_in_json(value: float) -> float | str:
    """_inf_from_json reads the text back."""
    return value if math.isfinite(value) else str(value)


Limit = Annotated[float, BeforeValidator(_inf_from_json)]
"""A number for which inf, no limit, has a meaning."""


EXAMPLES: dict[str, str] = {
    "gpg": "advantage",
    "opo": "advantage",
    "clip_cov": "advantage",
    "gmpo": "objective",
}
"""Kinds of earlier releases that are functions of examples/algorithms.py now -> the setting that takes them."""


def in_examples(kind: str) -> str:
    """How to name the example in a configuration."""
    return (
        f'it is an example now: algorithm.{EXAMPLES[kind]} = "examples.algorithms:{kind}", from examples/algorithms.py '
        "of the repository"
    )


def _with_kind(default: str) -> BeforeValidator:
    """A name alone stands for a table with that kind, an import path for kind = "own", and a table without kind for the
    default's. ValueError for a kind that is in EXAMPLES."""

    def tabled(value: Any) -> Any:
        if isinstance(value, str):
            value = {"kind": "own", "function": value} if ":" in value else {"kind": value}
        if not is_table(value):
            return value
        table = {"kind": default, **value}
        kind = table["kind"]
        if isinstance(kind, str) and kind in EXAMPLES:
            raise ValueError(f"{kind} is no longer built in: {in_examples(kind)}")
        return table

    return BeforeValidator(tabled)


Credit = Literal["episode", "turn"]


class GRPO(Config):
    """The reward less the mean of its group, divided by a standard deviation."""

    kind: Literal["grpo"] = "grpo"
    normalize_std: bool = True
    """Divide group advantages by the group's standard deviation; False is Dr. GRPO's."""
    normalize_std_over: Literal["group", "batch"] = "group"
    """With normalize_std: whose standard deviation, the group's or that of all rewards of the rollout."""
    credit: Credit = "episode"
    """Episodes of several turns. episode: all tokens are judged by the whole reward; turn: those of each turn by what
    it and the turns behind it have earned (docs/agents.md)."""
    turn_gamma: float = Field(default=1.0, ge=0, le=1)
    """With credit = "turn": discount per turn of what later turns earn."""

    @model_validator(mode="after")
    def _counts(self) -> GRPO:
        if self.turn_gamma != 1 and self.credit != "turn":
            raise ValueError(
                f'turn_gamma = {self.turn_gamma:g} would have no effect: it needs credit = "turn"; set that, or leave '
                "turn_gamma out"
            )
        if self.normalize_std_over != "group" and not self.normalize_std:
            raise ValueError(
                f'normalize_std_over = "{self.normalize_std_over}" would have no effect: it needs normalize_std = '
                "true; set that, or leave normalize_std_over out"
            )
        return self


class _Discounted(Config):
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token."""


class ReinforcePP(_Discounted):
    """REINFORCE++: the discounted return of each token."""

    kind: Literal["reinforce_pp"] = "reinforce_pp"
    credit: Credit = "episode"
    """As for kind = "grpo"."""


class ReinforcePPBaseline(_Discounted):
    """REINFORCE++ with the mean of the group as its baseline."""

    kind: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"


class GAE(_Discounted):
    """Generalised advantage estimation with a critic ([critic])."""

    kind: Literal["gae"] = "gae"
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Decay of the sum of temporal differences; 1 is the return minus the value."""
    value_clip: float = Field(default=0.2, gt=0)
    """Values may move this far from the old ones before their loss is clipped, in units of reward."""
    credit: Credit = "episode"
    """As for kind = "grpo"."""


class PlainAdvantage(Config):
    """Estimators without keys of their own."""

    kind: Literal["gdpo", "rloo", "remax", "distill", "none"]


class OwnAdvantage(Config):
    """A function of your own; `advantage = "package.module:function"` is short for it."""

    kind: Literal["own"] = "own"
    function: OwnFunction
    """f(batch: TrainBatch, algorithm: AlgorithmConfig) -> Tensor, [N] per sample or [T] per token; see
    rltool/algorithms/contracts.py."""
    options: dict[str, Any] = Field(default_factory=dict)
    """For the function, which finds them in algorithm.advantage.options."""


Advantage = Annotated[
    Annotated[
        GRPO | ReinforcePP | ReinforcePPBaseline | GAE | PlainAdvantage | OwnAdvantage, Field(discriminator="kind")
    ],
    _with_kind("grpo"),
]


class _Clipped(Config):
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """See clip_high."""
    clip_high: Limit = Field(default=0.2, gt=0, allow_inf_nan=True)
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]; inf: no upper limit. GSPO's are near 3e-4."""

    @field_serializer("clip_high", when_used="json")
    def _clip_high(self, value: float) -> float | str:
        return inf_in_json(value)


class PPO(_Clipped):
    """The clipped surrogate of PPO; with ratio = "sequence" GSPO."""

    kind: Literal["ppo"] = "ppo"
    ratio: Literal["token", "sequence"] = "token"
    """Probability ratio new / old of each token, or the geometric mean over its sample's tokens (GSPO), whose gradient
    goes to each token by itself (GSPO-token)."""
    dual_clip: float | None = Field(default=None, gt=1)
    """For negative advantages the loss grows no further once the ratio is above this (Ye et al. 2020); None: no
    limit."""


class CISPO(_Clipped):
    """The clipped ratio as a weight, without a gradient of its own (MiniMax-M1)."""

    kind: Literal["cispo"] = "cispo"
    ratio: Literal["token", "sequence"] = "token"
    """As for kind = "ppo"."""


class SAPO(Config):
    """A soft gate in the place of the clip."""

    kind: Literal["sapo"] = "sapo"
    temperature_pos: float = Field(default=1.0, gt=0)
    """How fast the pull of a token with a positive advantage fades as its ratio leaves 1."""
    temperature_neg: float = Field(default=1.05, gt=0)
    """The same for all other tokens."""


class Reinforce(Config):
    """Log-probability times advantage, without a ratio."""

    kind: Literal["reinforce"] = "reinforce"


class OwnObjective(Config):
    """A function of your own; `objective = "package.module:function"` is short for it."""

    kind: Literal["own"] = "own"
    function: OwnFunction
    """f(logprobs: Tensor, tokens: LossTokens, algorithm: AlgorithmConfig) -> Tensor, one loss per token; see
    rltool/algorithms/contracts.py."""
    options: dict[str, Any] = Field(default_factory=dict)
    """For the function, which finds them in algorithm.objective.options."""


Objective = Annotated[
    Annotated[PPO | CISPO | SAPO | Reinforce | OwnObjective, Field(discriminator="kind")],
    _with_kind("ppo"),
]


class NoKL(Config):
    kind: Literal["none"] = "none"


class _KL(Config):
    coef: float = Field(gt=0)
    """Weight of the estimate of KL(policy || reference). With target the weight that the run begins with."""
    target: float | None = Field(default=None, gt=0)
    """Mean of the estimate per token, in nats, that the weight is steered towards after each step, by 2 % at most
    (Ziegler et al. 2019); None: coef throughout."""
    reference_update_steps: int = Field(default=0, ge=0)
    """Interval in training steps at which the reference becomes the current policy; 0: it stays the model that was
    loaded first."""


class KLInLoss(_KL):
    """A term beside the policy loss."""

    kind: Literal["loss"] = "loss"
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """With r = log p_ref - log p of the sampled token: k1 is -r, only with unbiased; k2 is r^2 / 2; k3 is
    exp(r) - 1 - r, at most 10 (rltool/algorithms/kl.py)."""
    unbiased: bool = False
    """Weight each token's estimate by its ratio new / old, which makes value and gradient those of the policy."""

    @model_validator(mode="after")
    def _sees_the_reference(self) -> KLInLoss:
        if self.estimator == "k1" and not self.unbiased:
            raise ValueError(
                'estimator = "k1" in the loss holds the policy to nothing: its gradient is that of log p, which does '
                'not depend on the reference; use "k2" or "k3", or unbiased = true, or kind = "reward"'
            )
        return self


class KLInReward(_KL):
    """Subtracted from the reward of each token."""

    kind: Literal["reward"] = "reward"
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """As for kind = "loss"."""


KL = Annotated[Annotated[NoKL | KLInLoss | KLInReward, Field(discriminator="kind")], _with_kind("none")]


class NoEntropyControl(Config):
    kind: Literal["none"] = "none"


class EntropyBonus(Config):
    """The entropy of each token's distribution, subtracted from the loss."""

    kind: Literal["bonus"] = "bonus"
    coef: float = Field(default=0.0, ge=0)
    """Weight of the bonus, in nats. With target the weight that the run begins with."""
    target: float | None = Field(default=None, gt=0)
    """Entropy in nats below which there is a bonus; its weight grows by 0.005 after each step that ends below, and
    falls by as much after one above. None: coef throughout."""

    @model_validator(mode="after")
    def _counts(self) -> EntropyBonus:
        if self.coef == 0 and self.target is None:
            raise ValueError('kind = "bonus" has no effect with coef = 0 and without target: set one of them')
        return self


class HighEntropy(Config):
    """Policy loss on the tokens alone at which the old policy has the highest entropy."""

    kind: Literal["high_entropy"] = "high_entropy"
    fraction: float = Field(default=0.2, gt=0, lt=1)
    """Their share of the rollout's tokens."""


class KLCov(Config):
    """A penalty to the old policy, |log p - log p_old|, on the tokens of the highest covariance of log-probability and
    advantage."""

    kind: Literal["kl_cov"] = "kl_cov"
    fraction: float = Field(default=2e-4, gt=0, lt=1)
    """Their share of the rollout's tokens."""
    coef: float = Field(default=1.0, gt=0)
    """Weight of the penalty."""


Entropy = Annotated[
    Annotated[NoEntropyControl | EntropyBonus | HighEntropy | KLCov, Field(discriminator="kind")], _with_kind("none")
]


class Unweighted(Config):
    kind: Literal["none"] = "none"


class ImportanceWeights(Config):
    """Truncated importance sampling: the policy loss of each token times min(trainer's old / engine's probability,
    cap). The ratio is the token's, the product over its sample's tokens, or their geometric mean."""

    kind: Literal["token", "sequence", "geometric"]
    cap: Limit = Field(default=2.0, gt=0, allow_inf_nan=True)
    """Where the importance weight is truncated; inf: nowhere."""
    floor: float = Field(default=0.0, ge=0)
    """Importance weights below this are raised to it; below cap."""
    normalize: bool = False
    """Divide the importance weights by their mean over the rollout's tokens (over its samples where a sample's tokens
    share one weight), so that they correct the direction and not the size of the gradient."""

    @model_validator(mode="after")
    def _range(self) -> ImportanceWeights:
        if self.floor >= self.cap:
            raise ValueError(f"floor {self.floor:g} is not below cap {self.cap:g}: every weight would be the same")
        return self

    @field_serializer("cap", when_used="json")
    def _cap(self, value: float) -> float | str:
        return inf_in_json(value)


class Unmasked(Config):
    kind: Literal["none"] = "none"


class ImportanceMask(Config):
    """No policy loss where that ratio lies outside [low, high]: IcePop by token, whole samples otherwise."""

    kind: Literal["token", "sequence", "geometric"]
    low: float = Field(default=0.5, ge=0)
    """See high."""
    high: float = Field(default=2.0, gt=0)
    """Above low."""

    @model_validator(mode="after")
    def _range(self) -> ImportanceMask:
        if self.low >= self.high:
            raise ValueError(f"low {self.low:g} is not below high {self.high:g}: every token would be masked")
        return self


Weights = Annotated[Annotated[Unweighted | ImportanceWeights, Field(discriminator="kind")], _with_kind("none")]
Mask = Annotated[Annotated[Unmasked | ImportanceMask, Field(discriminator="kind")], _with_kind("none")]
