"""What entropy control makes of a whole rollout: tokens without a policy loss, tokens with a penalty, weights that
change from step to step. Pure."""

from __future__ import annotations

import torch
from torch import Tensor

from rltool.algorithms import token_selection
from rltool.algorithms.batch import TrainBatch
from rltool.config.algorithm import AlgorithmConfig


def with_selected_tokens(batch: TrainBatch, algorithm: AlgorithmConfig) -> tuple[TrainBatch, dict[str, float]]:
    """is_weights without the tokens that algorithm.entropy = "high_entropy" leaves out, or kl_cov_coefs at those that
    "kl_cov" picks; and train/* metrics.

    Call it after the corrections, with advantages and, as configured, old_logprobs or old_entropies (ValueError
    without). The tokens left out keep their part in the number that the loss is divided by, as in the papers.
    """
    mask, chosen = batch.loss_mask, algorithm.entropy
    if chosen.kind == "high_entropy":
        kept = token_selection.top_entropy(
            _present(batch.old_entropies, "old_entropies"), mask, fraction=chosen.fraction
        )
        factors = kept * mask if batch.is_weights is None else kept * batch.is_weights
        return batch.replace(is_weights=factors), {"train/top_entropy_fraction": _share(kept, mask)}
    if chosen.kind == "kl_cov":
        covariance = token_selection.covariances(
            _present(batch.old_logprobs, "old_logprobs"), _present(batch.advantages, "advantages"), mask
        )
        picked = token_selection.kl_cov(covariance, mask, fraction=chosen.fraction)
        mean = float(covariance[mask > 0].mean()) if bool(mask.any()) else 0.0
        return batch.replace(kl_cov_coefs=chosen.coef * picked), {"train/covariance_mean": mean}
    return batch, {}


def with_coefficients(
    batch: TrainBatch, configured: AlgorithmConfig, present: AlgorithmConfig
) -> tuple[TrainBatch, dict[str, float]]:
    """kl_coefs and entropy_coefs where they are adapted, for the ranks, which know what was configured alone; and
    train/kl_coef, train/entropy_coef."""
    count, changes, metrics = batch.num_samples, {}, {}
    if configured.adapts_kl and present.kl.kind != "none":
        changes["kl_coefs"] = torch.full((count,), present.kl.coef)
        metrics["train/kl_coef"] = present.kl.coef
    if configured.adapts_entropy and present.entropy.kind == "bonus":
        changes["entropy_coefs"] = torch.full((count,), present.entropy.coef)
        metrics["train/entropy_coef"] = present.entropy.coef
    return batch.replace(**changes), metrics


def _present(value: Tensor | None, name: str) -> Tensor:
    if value is None:
        raise ValueError(f"TrainBatch.{name} is None, but the configured choice of tokens needs it")
    return value


def _share(kept: Tensor, mask: Tensor) -> float:
    return float((kept * mask).sum() / mask.sum()) if bool(mask.any()) else 0.0
