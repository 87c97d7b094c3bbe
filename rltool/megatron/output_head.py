"""Log-probabilities straight from hidden states: the output layer and the softmax in one function, a chunk of tokens
at a time.

The logits of a micro-batch (16,384 tokens times 152,000 words are 10 GB in fp32) never exist whole: each chunk's are
computed, reduced to a few numbers per token and dropped; the backward pass computes them again, or takes the
probabilities that were kept in the inputs' precision. With tensor parallelism every rank does this for its slice of
the vocabulary, and one reduction over the ranks serves all chunks.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from rltool.megatron.kernels import vocabulary_gradient, vocabulary_statistics
from rltool.megatron.products import add_product, product

CHUNK = 2048
"""Tokens per chunk: large enough for full-speed matrix products, and 1.2 GB of fp32 logits at a vocabulary of
152,000."""


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    softcap: float | None = None,
    chunk: int = CHUNK,
    keep: bool = False,
) -> tuple[Tensor, Tensor]:
    """log p(targets[i]) under softmax(hidden[i] @ weight.T / temperature) and that distribution's entropy, each [R]
    float32.

    hidden: [R, H], each the state that predicts its target; weight: [V / tp, H], this rank's slice, padded vocabulary
    rows last; targets: [R] int64, global ids; group: the tensor-parallel ranks, which must all call with the same
    rows; softcap: of the logits, before the temperature, see `capped`. Differentiable in hidden and weight, through
    both results. The gradient of hidden is this rank's slice's: sum it over the group (Megatron's copy_to or
    gather_from regions do). That of the weight is summed over chunks in fp32, in place in `weight.main_grad` where
    Megatron's data-parallel wrapper has put one. keep: hold [R, V / tp] probabilities in hidden's dtype until the
    backward pass, which then needs no second product for them; not with a softcap, whose slope needs the logits.
    """
    keep = keeps(keep, softcap, hidden, weight)
    return _HeadLogprobs.apply(hidden, weight, targets, temperature, vocab_size, group, softcap, chunk, keep)


def keeps(wanted: bool, softcap: float | None, hidden: Tensor, weight: Tensor) -> bool:
    """Whether probabilities are kept for the backward pass."""
    return wanted and softcap is None and torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """softcap * tanh(logits / softcap), in place (Gemma 2, arXiv 2408.00118, section 2); None: the logits."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def slope_of_cap(capped_logits: Tensor, softcap: float | None) -> Tensor | None:
    """d capped / d logits, elementwise; None: 1 everywhere."""
    return None if softcap is None else 1 - (capped_logits / softcap).square_()


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        softcap: float | None,
        chunk: int,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        rank, size = (group.rank(), group.size()) if group is not None else (0, 1)
        local = targets - rank * len(weight)
        # Rows beyond the vocabulary are padding: left out of every product, they need no mask.
        real = max(0, min(len(weight), vocab_size - rank * len(weight)))
        # [largest, total, weighted, chosen] per token.
        stats = torch.zeros(4, len(targets), dtype=torch.float32, device=hidden.device)
        stats[0] = torch.finfo(torch.float32).min
        kept: list[tuple[Tensor | None, Tensor | None]] = []
        for rows in chunks(len(targets), chunk) if real else ():
            logits = capped(product(hidden[rows], weight[:real].t()), softcap)
            wanted = hidden.dtype if keep else None
            stats[:, rows], *held = vocabulary_statistics(logits, local[rows], 1 / temperature, wanted)
            if keep:
                kept.append((held[0], held[1]))
            del logits
        largest, total, weighted, chosen = stats
        chosen = chosen.masked_fill((local < 0) | (local >= real), 0.0)
        if size > 1:
            everyone = largest.clone()
            dist.all_reduce(everyone, op=dist.ReduceOp.MAX, group=group)
            shift = largest - everyone
            # Sums relative to the slice's own largest logit, moved to the largest of all.
            factor = shift.exp()
            sums = torch.stack(
                [total * factor, torch.where(total > 0, factor * (weighted + shift * total), 0.0), chosen]
            )
            dist.all_reduce(sums, group=group)
            largest, (total, weighted, chosen) = everyone, sums
        log_total = largest + total.log()
        entropy = total.log() - weighted / total
        ctx.save_for_backward(hidden, local, log_total, entropy, chosen)
        ctx.kept = kept if keep else None
        # Not among the saved tensors: those would come back without the attributes that Megatron put on the parameter.
        ctx.weight, ctx.real, ctx.scale, ctx.chunk, ctx.softcap = weight, real, 1 / temperature, chunk, softcap
        ctx.set_materialize_grads(False)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        by_logprob, by_entropy = grads
        hidden, local, log_total, entropy, chosen = ctx.saved_tensors
        weight, real = ctx.weight, ctx.real
        by_logprob = torch.zeros_like(entropy) if by_logprob is None else by_logprob.float().contiguous()
        by_entropy = None if by_entropy is None else by_entropy.float().contiguous()
        probability = (chosen - log_total).exp()
        # Frozen inputs (a value head on a frozen body, a probe) cost no product.
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        hidden_grad = torch.zeros_like(hidden) if for_hidden else None
        total, in_place = weight_buffer(weight) if for_weight else (None, False)
        for number, rows in enumerate(chunks(len(local), ctx.chunk) if real else ()):
            states = hidden[rows]
            if ctx.kept is None:
                source, tops = capped(product(states, weight[:real].t()), ctx.softcap), None
            else:
                (source, tops), ctx.kept[number] = ctx.kept[number], None
            slope = slope_of_cap(source, ctx.softcap)
            grad = vocabulary_gradient(
                source, tops, log_total[rows], probability[rows], entropy[rows], local[rows],
                by_logprob[rows], None if by_entropy is None else by_entropy[rows], ctx.scale,
                hidden.dtype if slope is None else torch.float32,
            )  # fmt: skip
            if slope is not None:
                grad = grad.mul_(slope).to(hidden.dtype)
            del source, tops
            if hidden_grad is not None:
                torch.mm(grad, weight[:real], out=hidden_grad[rows])
            if total is not None:
                add_product(total[:real], grad.t(), states)
        return hidden_grad, weight_result(weight, total, in_place), *[None] * 7


def chunks(length: int, chunk: int) -> list[slice]:
    """Rows [0, length), `chunk` at a time."""
    return [slice(start, min(start + chunk, length)) for start in range(0, length, chunk)]


def weight_buffer(weight: Tensor) -> tuple[Tensor, bool]:
    """Where the weight's gradient is summed, and whether that is Megatron's own buffer."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is not None and main_grad.dtype is torch.float32:
        return main_grad.view_as(weight), True
    return torch.zeros(weight.shape, dtype=torch.float32, device=weight.device), False


def weight_result(weight: Tensor, total: Tensor | None, in_place: bool) -> Tensor | None:
    """What autograd gets: the gradient, or, where it is in main_grad already, something for Megatron's hook to fire
    on.

    The hook skips what is marked `grad_added_to_main_grad`, unless the weight is also the embedding: then it adds the
    sum of both uses' gradients, of which ours must be zero.
    """
    if total is None:
        return None
    if not in_place:
        return total.to(weight.dtype)
    cast(Any, weight).grad_added_to_main_grad = True
    return torch.zeros((), dtype=weight.dtype, device=weight.device).expand(weight.shape)
