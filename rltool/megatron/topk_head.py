"""The output head where single tokens of each position are separate from the rest: a teacher's most probable ones,
and what the policy gives to these and to all others together.

As in `output_head` the logits exist for a chunk of positions at a time, on each tensor-parallel rank for its slice of
the vocabulary, and one reduction over the ranks serves all chunks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rltool.megatron.kernels import vocabulary_gradient, vocabulary_statistics
from rltool.megatron.output_head import CHUNK, capped, chunks, keeps, slope_of_cap, weight_buffer, weight_result
from rltool.megatron.products import add_product, product

TAKEN_OUT = -1e30
"""Added to a logit that the sum over all others must not see; not -inf, of which a slice with nothing else would make
NaN."""
SOME_LEFT = -1e20
"""A largest logit below it is one that was taken out: no other is there."""
SMALLEST_TAIL = 1e-30
"""A smaller probability of all others counts as this in the gradient, which stays finite."""


class TopK(NamedTuple):
    """ids: [R, K] int32, the most probable first; logprobs: [R, K] float32. -1 and -inf beyond the vocabulary."""

    ids: Tensor
    logprobs: Tensor


class HeadOutputs(NamedTuple):
    """Of R positions, float32: logprobs [R] of the targets; entropy [R]; topk [R, K] log-probabilities of given tokens;
    tail [R], the logarithm of the probability of all tokens but these, -inf where there are none."""

    logprobs: Tensor
    entropy: Tensor
    topk: Tensor
    tail: Tensor


@torch.no_grad()
def head_topk(
    hidden: Tensor, weight: Tensor, k: int, *, temperature: float, vocab_size: int,
    group: dist.ProcessGroup | None = None, softcap: float | None = None, chunk: int = CHUNK,
) -> TopK:  # fmt: skip
    """The k most probable tokens of softmax(hidden[i] @ weight.T / temperature) at each of R positions.

    Arguments as for `output_head.head_logprobs`.
    """
    offset, real = _slice(weight, vocab_size, group)
    rows_in_all, device = len(hidden), hidden.device
    stats = _no_statistics(rows_in_all, device)
    values = torch.full((rows_in_all, k), -torch.inf, device=device)
    ids = torch.full((rows_in_all, k), -1, dtype=torch.int32, device=device)
    nowhere = torch.full((rows_in_all,), -1, device=device)
    for rows in chunks(rows_in_all, chunk) if real else ():
        logits = capped(product(hidden[rows], weight[:real].t()), softcap)
        stats[:, rows] = vocabulary_statistics(logits, nowhere[rows], 1 / temperature)[0]
        best = logits.topk(min(k, real), dim=-1)
        values[rows, : min(k, real)] = best.values / temperature
        ids[rows, : min(k, real)] = (best.indices + offset).int()
    top = _largest(stats[0], group)
    (total,) = _summed(group, stats[1] * (stats[0] - top).exp())
    if group is not None and group.size() > 1:
        values, places = _gathered(values, group).topk(k, dim=-1)
        ids = _gathered(ids, group).gather(-1, places)
    return TopK(ids, values - (top + total.log())[:, None])


def head_logprobs_of(
    hidden: Tensor, weight: Tensor, targets: Tensor, ids: Tensor, *, temperature: float, vocab_size: int,
    group: dist.ProcessGroup | None = None, softcap: float | None = None, chunk: int = CHUNK, keep: bool = False,
) -> HeadOutputs:  # fmt: skip
    """As `output_head.head_logprobs`, and besides the log-probabilities of ids [R, K], distinct tokens of each
    position, and of all others together. Differentiable through all four.

    An id below 0 stands for no token: its value is 0, without a gradient. What is passed back to the logits of the
    given tokens and of the target is computed for them alone, in fp32, whatever `keep` is.
    """
    keep = keeps(keep, softcap, hidden, weight)
    given = hidden, weight, targets, ids, temperature, vocab_size, group, softcap, chunk, keep
    return HeadOutputs(*_HeadLogprobsOf.apply(*given))


def kept_distribution(found: HeadOutputs, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of the targets and entropy, [R] each, of the distribution over the tokens `kept` alone.

    found: of `head_logprobs_of` with ids = kept [R, K], distinct, the target among them, -1 beyond their number. Where
    none is named, the distribution is the whole one. Source: DeepSeek-AI 2025, "DeepSeek-V3.2", section 3.1, "Keep
    Sampling Mask".
    """
    none, beyond = (kept < 0).all(1), kept < 0
    values = torch.where(beyond, -torch.inf, found.topk)
    # Not of rows of -inf alone, whose gradient would be NaN.
    total = torch.where(none[:, None], 0.0, values).logsumexp(1)
    own = values - total[:, None]
    entropy = -(own.exp() * own.masked_fill(beyond, 0.0)).sum(1)
    return (
        torch.where(none, found.logprobs, found.logprobs - total),
        torch.where(none, found.entropy, entropy),
    )


def _slice(weight: Tensor, vocab_size: int, group: dist.ProcessGroup | None) -> tuple[int, int]:
    """(first id of this rank's slice of the vocabulary, how many of its rows are no padding)."""
    offset = group.rank() * len(weight) if group is not None else 0
    return offset, max(0, min(len(weight), vocab_size - offset))


def _no_statistics(rows: int, device: torch.device) -> Tensor:
    """[4, R], `vocabulary_statistics` of no column."""
    stats = torch.zeros(4, rows, dtype=torch.float32, device=device)
    stats[0] = torch.finfo(torch.float32).min
    return stats


def _largest(tops: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The largest over the ranks, element by element."""
    if group is None or group.size() == 1:
        return tops
    everyone = tops.clone()
    dist.all_reduce(everyone, op=dist.ReduceOp.MAX, group=group)
    return everyone


def _summed(group: dist.ProcessGroup | None, *parts: Tensor) -> tuple[Tensor, ...]:
    """Each summed over the ranks, by one reduction of all."""
    if group is None or group.size() == 1:
        return parts
    flat = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(flat, group=group)
    found = flat.split([part.numel() for part in parts])
    return tuple(values.view_as(part) for values, part in zip(found, parts, strict=True))


class _HeadLogprobsOf(torch.autograd.Function):
    """Columns of a position are its target and its K tokens, in this order; a target that is one of these counts
    there."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, ids: Tensor, temperature: float, vocab_size: int,
        group: dist.ProcessGroup | None, softcap: float | None, chunk: int, keep: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        offset, real = _slice(weight, vocab_size, group)
        scale, ids = 1 / temperature, ids.long()
        hit = ids == targets[:, None]
        columns = torch.cat([targets[:, None], ids], dim=1)
        here = (columns >= 0) & (columns >= offset) & (columns < offset + real)
        place = (columns - offset).clamp(0, max(0, real - 1))
        own = here & torch.cat([~hit.any(1, keepdim=True), torch.ones_like(hit)], dim=1)
        whole, others = (_no_statistics(len(targets), hidden.device) for _ in range(2))
        chosen = torch.zeros(columns.shape, dtype=torch.float32, device=hidden.device)
        kept: list[tuple[Tensor | None, Tensor | None]] = []
        for rows in chunks(len(targets), chunk) if real else ():
            logits = capped(product(hidden[rows], weight[:real].t()), softcap)
            whole[:, rows] = vocabulary_statistics(logits, place[rows, 0], scale)[0]
            chosen[rows] = logits.gather(-1, place[rows]) * scale
            _take_out(logits, place[rows], own[rows])
            wanted = hidden.dtype if keep else None
            others[:, rows], *held = vocabulary_statistics(logits, place[rows, 0], scale, wanted)
            if keep:
                kept.append((held[0], held[1]))
            del logits
        logprobs, log_total, entropy, tail = _joined(whole, others, chosen.masked_fill(~here, 0.0), group)
        tail = torch.where(hit.any(1), tail, torch.logaddexp(tail, logprobs[:, 0]))
        ctx.save_for_backward(hidden, place, own, hit, ids, logprobs, log_total, entropy, tail)
        ctx.kept = kept if keep else None
        # Not among the saved tensors: see output_head.
        ctx.weight, ctx.real, ctx.scale, ctx.chunk, ctx.softcap = weight, real, scale, chunk, softcap
        ctx.set_materialize_grads(False)
        return logprobs[:, 0].clone(), entropy, logprobs[:, 1:].masked_fill(ids < 0, 0.0), tail

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        by_logprob, by_entropy, by_topk, by_tail = grads
        hidden, place, own, hit, ids, logprobs, log_total, entropy, tail = ctx.saved_tensors
        weight, real, scale = ctx.weight, ctx.real, ctx.scale
        by_logprob, by_entropy, by_tail = (
            torch.zeros_like(entropy) if given is None else given.float().contiguous()
            for given in (by_logprob, by_entropy, by_tail)
        )
        by_topk = torch.zeros_like(logprobs[:, 1:]) if by_topk is None else by_topk.float().masked_fill(ids < 0, 0.0)
        # d tail / d z = scale (p / p_tail - p) of one of the others, -scale p of one of the K.
        drawn = by_topk.sum(1) + by_tail
        for_others = by_tail / tail.exp().clamp(min=SMALLEST_TAIL) - drawn
        exact = _gradient_of_columns(
            logprobs, entropy, hit, by_logprob, by_entropy, by_topk, drawn=drawn, for_others=for_others
        )
        nowhere = torch.full_like(place[:, 0], -1)
        probability = logprobs[:, 0].exp()
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        hidden_grad = torch.zeros_like(hidden) if for_hidden else None
        total, in_place = weight_buffer(weight) if for_weight else (None, False)
        for number, rows in enumerate(chunks(len(tail), ctx.chunk) if real else ()):
            states, slope = hidden[rows], None
            if ctx.kept is None:
                source, tops = capped(product(states, weight[:real].t()), ctx.softcap), None
                slope = slope_of_cap(source, ctx.softcap)
                _take_out(source, place[rows], own[rows])
            else:
                (source, tops), ctx.kept[number] = ctx.kept[number], None
            # Of the others: each column gets -(by_logprob - for_others) p, and of those taken out p is 0.
            grad = vocabulary_gradient(
                source, tops, log_total[rows], probability[rows], entropy[rows], nowhere[rows],
                (by_logprob - for_others)[rows], by_entropy[rows], scale,
                hidden.dtype if slope is None else torch.float32,
            )  # fmt: skip
            del source, tops
            grad.scatter_add_(-1, place[rows], torch.where(own[rows], exact[rows] * scale, 0.0).to(grad.dtype))
            if slope is not None:
                grad = grad.mul_(slope).to(hidden.dtype)
            if hidden_grad is not None:
                torch.mm(grad, weight[:real], out=hidden_grad[rows])
            if total is not None:
                add_product(total[:real], grad.t(), states)
        return hidden_grad, weight_result(weight, total, in_place), *[None] * 8


def _take_out(logits: Tensor, place: Tensor, own: Tensor) -> None:
    """Columns place [R, C] of logits [R, V] where own, in place. Added, for those of other ranks also have a place."""
    logits.scatter_add_(-1, place, torch.where(own, TAKEN_OUT, 0.0).to(logits.dtype))


def _joined(
    whole: Tensor, others: Tensor, chosen: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(log-probabilities of the columns [R, 1 + K], log of the normaliser, entropy, log-probability of all that was not
    taken out, -inf where nothing is left; [R] each) from `vocabulary_statistics` of this rank's slice, before and after
    columns were taken out."""
    top, rest_top = tops = _largest(torch.stack([whole[0], others[0]]), group)
    factor = (torch.stack([whole[0], others[0]]) - tops).exp()
    total, weighted = whole[1], whole[2]
    # Sums relative to the slice's own largest logit, moved to the largest of all.
    moved = torch.where(total > 0, factor[0] * (weighted + (whole[0] - top) * total), 0.0)
    total, rest, weighted, chosen = _summed(group, total * factor[0], others[1] * factor[1], moved, chosen)
    log_total = top + total.log()
    entropy = total.log() - weighted / total
    left = torch.where(rest_top > SOME_LEFT, rest_top + rest.log() - log_total, -torch.inf)
    return chosen - log_total[:, None], log_total, entropy, left


def _gradient_of_columns(
    logprobs: Tensor, entropy: Tensor, hit: Tensor, by_logprob: Tensor, by_entropy: Tensor, by_topk: Tensor,
    *, drawn: Tensor, for_others: Tensor,
) -> Tensor:  # fmt: skip
    """[R, 1 + K]: by the logits (times temperature) of the target, where it is none of the K, and of the K tokens."""
    p = logprobs.exp()
    target = torch.cat([torch.ones_like(hit[:, :1]), hit], dim=1)
    common = by_logprob[:, None] * (target.float() - p) - by_entropy[:, None] * p * (logprobs + entropy[:, None])
    own = torch.cat([for_others[:, None] * p[:, :1], by_topk - drawn[:, None] * p[:, 1:]], dim=1)
    return common + own


def _gathered(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[R, K] of each rank -> [R, ranks * K] on all."""
    everyone = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(everyone, values, group=group)
    return torch.cat(everyone, dim=-1)
