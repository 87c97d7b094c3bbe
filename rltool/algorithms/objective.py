"""The policy loss of loss tokens as AlgorithmConfig composes it: ratio, objective, mismatch weights, KL, entropy
bonus."""

from __future__ import annotations

from torch import Tensor

from rltool.algorithms.kl import kl_loss, topk_kl
from rltool.algorithms.losses import (
    LossTokens,
    PolicyLoss,
    bounded_ratio,
    cispo_loss,
    off_policy_sequence_mask,
    ppo_loss,
    reinforce_loss,
    sapo_loss,
    sequence_log_ratio,
)
from rltool.config.algorithm import AlgorithmConfig
from rltool.config.import_path import load_callable
from rltool.errors import ContractViolation


def policy_objective(logprobs: Tensor, tokens: LossTokens, algorithm: AlgorithmConfig) -> PolicyLoss:
    """The configured surrogate of each loss token, before weights, KL and bonus. logprobs: [R], in the graph.

    ContractViolation when a function of the user's returns something other than one loss per token.
    """
    log_ratio = logprobs - tokens.old_logprobs
    chosen = algorithm.objective
    if chosen.kind == "own":
        loss = load_callable(chosen.function, setting="algorithm.objective")(logprobs, tokens, algorithm)
        if not isinstance(loss, Tensor) or loss.shape != logprobs.shape:
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ContractViolation(
                f"algorithm.objective = {chosen.function!r} returned {found}, expected one loss per token, a "
                f"tensor of shape {tuple(logprobs.shape)}; weights and reduction are applied by the trainer"
            )
        return PolicyLoss(loss, bounded_ratio(log_ratio).detach())
    if chosen.kind == "reinforce":
        return reinforce_loss(logprobs, log_ratio, tokens.advantages)
    if chosen.kind == "sapo":
        temperatures = {"temperature_pos": chosen.temperature_pos, "temperature_neg": chosen.temperature_neg}
        return sapo_loss(log_ratio, tokens.advantages, **temperatures)
    clip = {"clip_low": chosen.clip_low, "clip_high": chosen.clip_high}
    if chosen.ratio == "sequence":
        log_ratio = sequence_log_ratio(log_ratio, tokens.sample, tokens.num_samples)
    if chosen.kind == "cispo":
        return cispo_loss(logprobs, log_ratio, tokens.advantages, **clip)
    return ppo_loss(log_ratio, tokens.advantages, **clip, dual_clip=chosen.dual_clip)


def policy_token_losses(
    logprobs: Tensor, tokens: LossTokens, is_weights: Tensor | None, algorithm: AlgorithmConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss of each token [R], detached per-token values [R] by metric name: see `metric_names`).

    w * surrogate + kl.coef * KL + distill_kl_coef * KL(teacher || policy) - entropy.coef * entropy, with w = is_weights
    and, where configured, the mask of off-policy samples: the correction is of the advantage's expectation; KLs and
    entropy pull on every token, masked or not.
    """
    surrogate = policy_objective(logprobs, tokens, algorithm)
    loss = surrogate.loss if is_weights is None else surrogate.loss * is_weights
    values = {"ratio_mean": surrogate.ratio}
    if surrogate.clipped is not None:
        values["clip_fraction"] = surrogate.clipped
    if surrogate.dual_clipped is not None:
        values["dual_clip_fraction"] = surrogate.dual_clipped
    if algorithm.off_policy_mask_threshold is not None:
        kept = _off_policy_mask(logprobs, tokens, algorithm.off_policy_mask_threshold)
        loss = loss * kept
        values["off_policy_masked_fraction"] = 1 - kept
    if tokens.kl_cov_coefs is not None:
        loss = loss + tokens.kl_cov_coefs * (logprobs - tokens.old_logprobs).abs()
    if algorithm.kl.kind == "loss":
        assert tokens.ref_logprobs is not None
        kl = kl_loss(
            logprobs,
            tokens.ref_logprobs,
            tokens.old_logprobs,
            estimator=algorithm.kl.estimator,
            unbiased=algorithm.kl.unbiased,
        )
        loss = loss + (algorithm.kl.coef if tokens.kl_coefs is None else tokens.kl_coefs) * kl
        values["kl"] = kl.detach()
    if algorithm.distill_kl_coef > 0:
        kl = _distillation_kl(tokens)
        loss = loss + algorithm.distill_kl_coef * kl
        values["distill_kl"] = kl.detach()
    if tokens.entropy_coefs is not None:
        loss = loss - tokens.entropy_coefs * tokens.entropy
    elif algorithm.entropy.kind == "bonus":
        loss = loss - algorithm.entropy.coef * tokens.entropy
    return loss, values


def metric_names(algorithm: AlgorithmConfig) -> list[str]:
    """The per-token values of `policy_token_losses`, in one order on all ranks."""
    names = ["ratio_mean"]
    if algorithm.clips_ratio:
        names.append("clip_fraction")
    if algorithm.objective.kind == "ppo" and algorithm.objective.dual_clip is not None:
        names.append("dual_clip_fraction")
    if algorithm.off_policy_mask_threshold is not None:
        names.append("off_policy_masked_fraction")
    if algorithm.kl.kind == "loss":
        names.append("kl")
    return [*names, "distill_kl"] if algorithm.distill_kl_coef > 0 else names


def needed_fields(algorithm: AlgorithmConfig) -> set[str]:
    """Of LossFields, what `policy_token_losses` cannot do without; old log-probabilities may be those of the loss."""
    needs = {
        "advantages": True,
        "rollout_logprobs": algorithm.off_policy_mask_threshold is not None,
        "ref_logprobs": algorithm.kl.kind == "loss",
        "teacher_topk_logprobs": algorithm.uses_teacher_topk,
        "kl_cov_coefs": algorithm.entropy.kind == "kl_cov",
    }
    return {name for name, needed in needs.items() if needed}


def _distillation_kl(tokens: LossTokens) -> Tensor:
    teacher, topk, tail = tokens.teacher_topk_logprobs, tokens.topk_logprobs, tokens.tail_logprobs
    assert teacher is not None and topk is not None and tail is not None
    return topk_kl(teacher, topk, tail)


def _off_policy_mask(logprobs: Tensor, tokens: LossTokens, threshold: float) -> Tensor:
    assert tokens.rollout_logprobs is not None
    return off_policy_sequence_mask(
        logprobs,
        tokens.rollout_logprobs,
        tokens.advantages,
        tokens.sample,
        tokens.num_samples,
        threshold=threshold,
    )
