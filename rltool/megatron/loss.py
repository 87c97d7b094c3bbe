"""The loss of one micro-batch, from the log-probabilities of its loss tokens, and the sums that metrics are made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rltool.algorithms import corrections, objective
from rltool.algorithms.batch import TrainBatch
from rltool.algorithms.fields import LossFields, fields_of
from rltool.algorithms.losses import LossTokens, sft_loss
from rltool.algorithms.ragged import sample_of_token
from rltool.config.algorithm import AlgorithmConfig
from rltool.megatron.runtime import to_device


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


def metric_names(algorithm: AlgorithmConfig, *, on_policy: bool = False) -> list[str]:
    """The sums of `micro_batch_loss`, in one order on all ranks."""
    names = ["loss", "loss_tokens", "entropy"]
    if algorithm.loss != "policy":
        return names
    corrected = corrections.metric_names(algorithm) if on_policy else []
    return names + objective.metric_names(algorithm) + corrected


def micro_batch_loss(
    batch: TrainBatch,
    rows: Tensor,
    logprobs: Tensor,
    entropy: Tensor,
    algorithm: AlgorithmConfig,
    topk_logprobs: Tensor | None = None,
    tail_logprobs: Tensor | None = None,
    *,
    on_policy: bool = False,
) -> tuple[Tensor, dict[str, Any]]:
    """The weighted sum of the token losses (a scalar in the graph), and sums over the loss tokens by metric name.

    rows: [R] from `loss_rows`; logprobs, entropy: [R]; topk_logprobs [R, K], tail_logprobs [R]: the policy's of the
    teacher's tokens and of all others, where algorithm.distill_kl_coef needs them. Only these rows are ever touched, so
    that what stands in a field where there is no loss cannot reach the gradient. Sums stay on the device: reading one
    here would hold up the schedule. on_policy: the old log-probabilities are these, detached, and corrections are made
    of them. ValueError when a field that the configured loss needs is None.
    """

    def optional(name: str) -> Tensor | None:
        value = getattr(batch, name)
        at = sample if fields_of(batch)[name].of == "sample" else rows
        return None if value is None else to_device(value[at], logprobs.device)

    def field(name: str) -> Tensor:
        value = optional(name)
        if value is None:
            raise ValueError(f"TrainBatch.{name} is None, but algorithm.loss = {algorithm.loss} needs it")
        return value

    sample = sample_of_token(batch.lengths)[rows]
    sums = {"loss_tokens": float(len(rows)), "entropy": entropy.detach().sum()}
    if algorithm.loss == "sft":
        token_loss = sft_loss(logprobs)
    else:
        needed = objective.needed_fields(algorithm)
        given: dict[str, Any] = {
            name: field(name) if name in needed else optional(name) for name in fields_of(LossFields)
        }
        tokens = LossTokens(
            **given | {"old_logprobs": logprobs.detach() if on_policy else field("old_logprobs")},
            sample=to_device(sample, logprobs.device),
            num_samples=batch.num_samples,
            entropy=entropy,
            topk_logprobs=topk_logprobs,
            tail_logprobs=tail_logprobs,
            metadata={name: to_device(value[sample], logprobs.device) for name, value in batch.metadata.items()},
        )
        if on_policy and algorithm.corrects_mismatch:
            every = torch.ones_like(tokens.old_logprobs)
            weights, corrected = corrections.mismatch_factors(
                tokens.old_logprobs, field("rollout_logprobs"), batch.lengths, every, algorithm
            )
            sums |= {name: value.sum() for name, value in corrected.items()}
        else:
            weights = field("is_weights") if algorithm.weights_policy_loss else None
        token_loss, values = objective.policy_token_losses(logprobs, tokens, weights, algorithm)
        sums |= {name: value.sum() for name, value in values.items()}
    total = (field("loss_weights") * token_loss).sum()
    return total, sums | {"loss": total.detach()}
