"""What entropy control makes of a whole rollout: tokens without a policy loss, tokens with a penalty, weights that
change from step to step. Pure."""

from __future__ import annotations

import torch
from torch import Tensor

from rltool.algorithms import token_selection
from rltool.algorithms.batch import TrainBatch
from rltool.config.algorithm import AlgorithmConfig


def step_generator(seed: int, step: int) -> torch.Generator:
    """Random numbers of one training step: the same when a resumed run does the step again."""
    # A large odd factor, so that neighbouring seeds and steps do not share theirs.
    return torch.Generator().manual_seed((seed + 0x9E3779B97F4A7C15 * (step + 1)) % 2**63)


def with_selected_tokens(
    batch: TrainBatch, algorithm: AlgorithmConfig, generator: torch.Generator
) -> tuple[TrainBatch, dict[str, float]]:
    """is_weights without the tokens that algorithm.top_entropy_fraction and clip_cov_fraction leave out, kl_cov_coefs
    at those that kl_cov_fraction picks, and train/* metrics.

    Call it after the corrections, with advantages and, as configured, old_logprobs or old_entropies (ValueError
    without). The tokens left out keep their part in the number that the loss is divided by, as in the papers.
    """
    mask = batch.loss_mask
    metrics: dict[str, float] = {}
    if not algorithm.selects_by_entropy and not algorithm.selects_by_covariance:
        return batch, {}
    factors = mask.clone() if batch.is_weights is None else batch.is_weights
    if algorithm.selects_by_entropy:
        kept = token_selection.top_entropy(
            _present(batch.old_entropies, "old_entropies"), mask, fraction=algorithm.top_entropy_fraction
        )
        factors = factors * kept
        metrics["train/top_entropy_fraction"] = _share(kept, mask)
    if algorithm.selects_by_covariance:
        covariance = token_selection.covariances(
            _present(batch.old_logprobs, "old_logprobs"), _present(batch.advantages, "advantages"), mask
        )
        metrics["train/covariance_mean"] = float(covariance[mask > 0].mean()) if bool(mask.any()) else 0.0
        if algorithm.clip_cov_fraction > 0:
            kept = token_selection.clip_cov(
                covariance,
                mask,
                fraction=algorithm.clip_cov_fraction,
                low=algorithm.clip_cov_low,
                high=algorithm.clip_cov_high,
                generator=generator,
            )
            factors = factors * kept
            metrics["train/clip_cov_fraction"] = 1.0 - _share(kept, mask)
        if algorithm.kl_cov_fraction > 0:
            chosen = token_selection.kl_cov(covariance, mask, fraction=algorithm.kl_cov_fraction)
            batch = batch.replace(kl_cov_coefs=algorithm.kl_cov_coef * chosen)
    return (batch.replace(is_weights=factors) if algorithm.weights_policy_loss else batch), metrics


def with_coefficients(
    batch: TrainBatch, configured: AlgorithmConfig, present: AlgorithmConfig
) -> tuple[TrainBatch, dict[str, float]]:
    """kl_coefs and entropy_coefs where they are adapted, for the ranks, which know what was configured alone; and
    train/kl_coef, train/entropy_coef."""
    count, changes, metrics = batch.num_samples, {}, {}
    if configured.kl_target is not None:
        changes["kl_coefs"] = torch.full((count,), present.kl_coef)
        metrics["train/kl_coef"] = present.kl_coef
    if configured.entropy_target is not None:
        changes["entropy_coefs"] = torch.full((count,), present.entropy_coef)
        metrics["train/entropy_coef"] = present.entropy_coef
    return batch.replace(**changes), metrics


def _present(value: Tensor | None, name: str) -> Tensor:
    if value is None:
        raise ValueError(f"TrainBatch.{name} is None, but the configured choice of tokens needs it")
    return value


def _share(kept: Tensor, mask: Tensor) -> float:
    return float((kept * mask).sum() / mask.sum()) if bool(mask.any()) else 0.0
