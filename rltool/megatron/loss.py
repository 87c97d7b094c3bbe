"""The loss of one micro-batch, from the log-probabilities of its loss tokens, and the sums that metrics are made of."""

from __future__ import annotations

import torch
from torch import Tensor

from rltool.algorithms.batch import TrainBatch
from rltool.algorithms.kl import k3
from rltool.algorithms.losses import policy_loss, sft_loss
from rltool.config.train import AlgorithmConfig


def predicted_rows(batch: TrainBatch) -> Tensor:
    """Indices [R] of all tokens that something came before: everything but the first token of each sample."""
    first = torch.zeros(len(batch.tokens), dtype=torch.bool)
    first[batch.lengths.cumsum(0) - batch.lengths] = True
    return (~first).nonzero().squeeze(-1)


def loss_rows(batch: TrainBatch) -> Tensor:
    """Indices [R] of the tokens that have a loss. ValueError if one is the first of its sample: nothing predicts it."""
    starts = batch.lengths.cumsum(0) - batch.lengths
    if batch.loss_mask[starts].any():
        raise ValueError("loss_mask is 1 on the first token of a sample, which no token precedes")
    return batch.loss_mask.nonzero().squeeze(-1)


def metric_names(algorithm: AlgorithmConfig) -> list[str]:
    """The sums of `micro_batch_loss`, in one order on all ranks."""
    names = ["loss", "loss_tokens", "entropy"]
    if algorithm.loss == "policy":
        names += ["clip_fraction", "ratio_mean"]
        if algorithm.kl_coef > 0:
            names.append("kl")
    return names


def micro_batch_loss(
    batch: TrainBatch, rows: Tensor, logprobs: Tensor, entropy: Tensor, algorithm: AlgorithmConfig
) -> tuple[Tensor, dict[str, float]]:
    """The weighted sum of the token losses (a scalar in the graph), and sums over the loss tokens by metric name.

    rows: [R] from `loss_rows`; logprobs, entropy: [R]. Only these rows are ever touched, so that what stands in a field
    where there is no loss cannot reach the gradient. ValueError when a field that the configured loss needs is None.
    """

    def field(name: str) -> Tensor:
        value = getattr(batch, name)
        if value is None:
            raise ValueError(f"TrainBatch.{name} is None, but algorithm.loss = {algorithm.loss} needs it")
        return value[rows].to(logprobs.device)

    sums = {"loss_tokens": float(len(rows)), "entropy": float(entropy.detach().sum())}
    if algorithm.loss == "sft":
        token_loss = sft_loss(logprobs)
    else:
        clipped = policy_loss(
            logprobs,
            field("old_logprobs"),
            field("advantages"),
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
        )
        token_loss = clipped.loss
        sums |= {"clip_fraction": float(clipped.clipped.sum()), "ratio_mean": float(clipped.ratio.sum())}
        if algorithm.kl_coef > 0:
            kl = k3(logprobs, field("ref_logprobs"))
            token_loss = token_loss + algorithm.kl_coef * kl
            sums["kl"] = float(kl.detach().sum())
    total = (field("loss_weights") * token_loss).sum()
    return total, sums | {"loss": float(total.detach())}
