"""Losses by the names of tinker's client, as sums over given weights: what `serve-trainer` computes.

Inputs are those of the client's Datum.loss_fn_inputs beside the targets, settings those of its loss_fn_config. Formulas
and defaults are those of the Tinker documentation (tinker-docs.thinkingmachines.ai, "Loss Functions"), with p the model
in training, q the sampling policy and r = p / q. Of gspo no defaults are known.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from rltool.algorithms.losses import bounded_ratio, cispo_loss, ppo_loss, sequence_log_ratio, sft_loss
from rltool.errors import UsageError


@dataclass(frozen=True)
class NamedLoss:
    """inputs: names of its inputs beside `weights`, which every loss may have, 1 where it is not given. settings: with
    their defaults, None: there is none, and it must be given."""

    inputs: tuple[str, ...] = ()
    settings: Mapping[str, float | None] | None = None

    @property
    def known_inputs(self) -> tuple[str, ...]:
        return ("weights", *self.inputs)


_POLICY = ("logprobs", "advantages")

LOSSES: dict[str, NamedLoss] = {
    "cross_entropy": NamedLoss(),
    "importance_sampling": NamedLoss(_POLICY),
    "ppo": NamedLoss(_POLICY, settings={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "cispo": NamedLoss(_POLICY, settings={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": NamedLoss(_POLICY, settings={"beta": 0.05}),
    "gspo": NamedLoss(
        (*_POLICY, "sequence_ratio_mask"), settings={"clip_low_threshold": None, "clip_high_threshold": None}
    ),
}  # fmt: skip

STABLE_REINFORCE = "is in alpha, and its formula is in neither client nor cookbook"
NOT_HERE = {"stable_reinforce": STABLE_REINFORCE, "custom": "would be a client's code, which its client runs itself"}
"""Of the client's list, and why."""

FIELDS = {
    "weights": "loss_weights", "logprobs": "old_logprobs", "advantages": "advantages",
    "sequence_ratio_mask": "is_weights",
}  # fmt: skip
"""Input -> the field of a TrainBatch that has it on the ranks."""


def check_loss(loss: str, given: Collection[str], settings: Mapping[str, object]) -> dict[str, float]:
    """The settings, with defaults. given: names of the inputs that a datum has. UsageError by name for what is unknown,
    missing or no number."""
    if loss not in LOSSES:
        why = f": it {NOT_HERE[loss]}" if loss in NOT_HERE else ""
        raise UsageError(f"loss {loss!r} is not supported{why}; choose {', '.join(LOSSES)}, or compute your own loss "
                         "in the client from the log-probabilities (forward_backward_custom)")  # fmt: skip
    named = LOSSES[loss]
    for name in named.inputs:
        if name not in given:
            raise UsageError(f"loss {loss}: loss_fn_inputs lacks {name}; it needs {', '.join(named.inputs)}")
    for name in given:
        if name not in named.known_inputs:
            raise UsageError(f"loss {loss}: loss_fn_inputs has {name}, which it does not read; it reads "
                             f"{', '.join(named.known_inputs)}")  # fmt: skip
    defaults = named.settings or {}
    for name, value in settings.items():
        if name not in defaults:
            known = ", ".join(defaults) or "none"
            raise UsageError(f"loss {loss}: loss_fn_config has {name}, which it does not read; it reads {known}")
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise UsageError(f"loss {loss}: loss_fn_config has {name} = {value!r}, expected a number")
    found: dict[str, float] = {}
    for name, value in (dict(defaults) | dict(settings)).items():
        if value is None:
            raise UsageError(f"loss {loss}: loss_fn_config lacks {name}, which has no default")
        found[name] = float(value)  # type: ignore[arg-type]
    low, high = found.get("clip_low_threshold", 0.0), found.get("clip_high_threshold", 2.0)
    if not 0 <= low <= 1 <= high:
        raise UsageError(f"loss {loss}: clip_low_threshold = {low:g} and clip_high_threshold = {high:g}, expected "
                         "0 <= low <= 1 <= high: they are limits of the ratio, such as 0.8 and 1.2")  # fmt: skip
    return found


def named_token_losses(
    loss: str,
    logprobs: Tensor,
    inputs: Mapping[str, Tensor],
    sample: Tensor,
    num_samples: int,
    settings: Mapping[str, float],
) -> Tensor:
    """The loss of each target, [R], whose sum is the loss. All inputs: [R], `weights` among them.

    sample: [R] int64, the datum of each target, ascending; settings: of `check_loss`.

    cross_entropy: -w log p. importance_sampling: -w r A. ppo: -w min(r A, clip(r) A). cispo: -w sg(clip(r)) A log p.
    dro: -w (A log p - beta / 2 (log p - log q)^2). gspo: -w min(s A, clip(s) A) with log s the mean of log r over the
    datum's tokens that sequence_ratio_mask marks (is not 0 at); every token carries s, with its own gradient, as in
    GSPO-token (Zheng et al. 2025, eq. 14).
    """
    weights = inputs["weights"]
    if loss == "cross_entropy":
        return weights * sft_loss(logprobs)
    advantages, log_ratio = inputs["advantages"], logprobs - inputs["logprobs"]
    clip = {"clip_low": 1 - settings.get("clip_low_threshold", 0.0),
            "clip_high": settings.get("clip_high_threshold", 2.0) - 1}  # fmt: skip
    if loss == "importance_sampling":
        return -weights * bounded_ratio(log_ratio) * advantages
    if loss == "ppo":
        return weights * ppo_loss(log_ratio, advantages, **clip).loss
    if loss == "cispo":
        return weights * cispo_loss(logprobs, log_ratio, advantages, **clip).loss
    if loss == "dro":
        return -weights * (logprobs * advantages - 0.5 * settings["beta"] * log_ratio**2)
    assert loss == "gspo", "check_loss comes first"
    marked = (inputs["sequence_ratio_mask"] != 0).to(log_ratio.dtype)
    return weights * ppo_loss(sequence_log_ratio(log_ratio, sample, num_samples, marked), advantages, **clip).loss
