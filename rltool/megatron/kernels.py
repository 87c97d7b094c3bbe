"""The small functions of the model that are limited by memory bandwidth: here in plain torch, on a GPU as one kernel
each (`fused`).

Written once, in fp32 inside. Nothing here communicates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_eager = False


def compile_on_cuda(wanted: bool) -> None:
    """Whether tensors on a GPU go to `fused`; for this process, from the next call of each function on."""
    global _eager
    _eager = not wanted


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda and not _eager and x.numel() > 0


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; statistics in fp32, rounded before the weight: to x's
    dtype, or the weight's where x is fp32. So is the result."""
    if _on_gpu(x):
        from rltool.megatron import fused

        return fused.rms_norm(x, weight, eps, centered=False)
    return F.rms_norm(x.float(), (x.size(-1),), None, eps).to(normed_dtype(x, weight)) * weight


def rms_norm_zero_centered(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `rms_norm`, with the factor 1 + weight applied in fp32 (Gemma)."""
    if _on_gpu(x):
        from rltool.megatron import fused

        return fused.rms_norm(x, weight, eps, centered=True)
    return (F.rms_norm(x.float(), (x.size(-1),), None, eps) * (1.0 + weight.float())).to(normed_dtype(x, weight))


def normed_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """Of a norm's result: a residual stream in fp32 goes into layers in the weights' dtype."""
    return weight.dtype if x.dtype is torch.float32 else x.dtype


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021), halves paired as Hugging Face has them.

    x: [T, 1, heads, D]; turn: fp32 [T, 1, 1, d]: cosines of the d / 2 angles, then their sines; the first d numbers of
    a head are turned. Without a GPU any turn that is broadcast to x will do.
    """
    if (size := turn.size(-1)) < x.size(-1):
        return torch.cat((rotate(x[..., :size], turn), x[..., size:]), dim=-1)
    if _on_gpu(x):
        from rltool.megatron import fused

        return fused.rotate(x, turn)
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = turn.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def split_and_rotate(
    mixed: Tensor, bias: Tensor | None, turn: Tensor, groups: int, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, 1, heads, size], keys and values [T, 1, groups, size], each contiguous, of one product of them all:
    its bias added, queries and keys turned (`rotate`).

    mixed: [T, 1, groups * (heads / groups + 2) * size], of each group its queries, its key, its value; bias: [last
    dimension of mixed]; turn: as for `rotate`.
    """
    if _on_gpu(mixed) and turn.size(-1) == size:
        from rltool.megatron import fused

        return fused.split_and_rotate(mixed, bias, turn, groups, size)
    whole = (mixed if bias is None else mixed + bias).unflatten(-1, (groups, -1))
    query, key, value = whole.split([whole.size(-1) - 2 * size, size, size], dim=-1)
    return rotate(query.unflatten(-1, (-1, size)).flatten(2, 3), turn), rotate(key, turn), value.contiguous()


class Gate(NamedTuple):
    """gate * sigmoid(alpha * gate) * (up + offset), the gate at most `limit` and up between -limit and limit."""

    alpha: float = 1.0
    offset: float = 0.0
    limit: float = math.inf


SILU = Gate()


def swiglu(x: Tensor, scale: Tensor | None = None, kind: Gate = SILU) -> Tensor:
    """silu(first half) * second half of the last dimension (Shazeer 2020), or another `kind` of it; each row times its
    `scale`.

    x: [..., 2 * f]; scale: [...], fp32. Returns [..., f] in x's dtype.
    """
    if _on_gpu(x):
        from rltool.megatron import fused

        return fused.swiglu(x, scale, *kind)
    gate, up = x.chunk(2, dim=-1)
    if kind == SILU:
        gated = F.silu(gate) * up
    else:
        gate, up = gate.clamp(max=kind.limit), up.clamp(-kind.limit, kind.limit)
        gated = gate * torch.sigmoid(kind.alpha * gate) * (up + kind.offset)
    return gated if scale is None else (gated * scale.unsqueeze(-1)).to(x.dtype)


def short_convolution(x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    """SiLU of a causal convolution of each channel over the last tokens of its sequence.

    x: [T, C]; weight: [C, K], the last for the token itself; positions: [T] int, of each token in its sequence.
    Returns [T, C] in x's dtype.
    """
    if _on_gpu(x):
        from rltool.megatron import fused

        return fused.short_convolution(x, weight, positions)
    # Else the backward pass keeps a copy of x for each token that is seen; x itself is there.
    return checkpoint(_convolved, x, weight, positions, use_reentrant=False, preserve_rng_state=False)


def _convolved(x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    weight, rows = weight.float(), len(x)
    out = x * weight[:, -1]
    for back in range(1, min(weight.size(1), rows)):
        same = (positions[back:] >= back).unsqueeze(-1)
        earlier = torch.where(same, x[: rows - back], 0) * weight[:, -1 - back]
        out = out + F.pad(earlier, (0, 0, back, 0))
    return F.silu(out).to(x.dtype)


def sum_rows(rows: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    """Sums of groups of rows, in fp32 and in the order given: the same bits each time, unlike atomic additions.

    rows: [R, H]; order: [R] int64, row numbers sorted by group; ends: [N] int64, where in `order` each group ends.
    Returns [N, H] in rows' dtype; zeros for an empty group. It has no gradient of its own.
    """
    if _on_gpu(rows):
        from rltool.megatron import fused

        return fused.sum_rows(rows, order, ends)
    group = torch.arange(len(ends), device=ends.device).repeat_interleave(ends.diff(prepend=ends.new_zeros(1)))
    sums = torch.zeros(len(ends), rows.size(1), dtype=torch.promote_types(rows.dtype, torch.float32))
    return sums.to(rows.device).index_add_(0, group, rows[order].to(sums.dtype)).to(rows.dtype)


def add_to_each(totals: Sequence[Tensor], parts: Tensor) -> None:
    """totals[i] += parts[i], in one kernel where the totals lie at equal distances in memory (a gradient buffer).

    totals: contiguous, fp32; parts: [len(totals), *shape of each].
    """
    if _on_gpu(parts) and parts.is_contiguous():
        places = [total.data_ptr() for total in totals]
        step = places[1] - places[0] if len(places) > 1 else 0
        if all(place == places[0] + i * step for i, place in enumerate(places)):
            from rltool.megatron import fused

            fused.add_to_each(totals[0], step // totals[0].element_size(), parts)
            return
    for total, part in zip(totals, parts.unbind(), strict=True):
        total.add_(part)


def vocabulary_statistics(
    logits: Tensor, local: Tensor, scale: float, keep: torch.dtype | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Of one slice of the vocabulary, for z = scale * logits [R, V] (fp32): what log-probability and entropy are made
    of.

    local: [R] int64, column of the target, any value where the slice does not hold it. Returns [4, R]: the largest z;
    sum exp(z - largest); sum exp(z - largest) (z - largest); z of the target. With `keep` also, for
    `vocabulary_gradient`: exp(z - top) [R, V] in that dtype, and top [R, blocks], the largest z of each block of
    columns.
    """
    if _on_gpu(logits):
        from rltool.megatron import fused

        return fused.vocabulary_statistics(logits, local, scale, keep)
    z = logits.float() * scale
    largest = z.amax(-1)
    shifted = z - largest[:, None]
    weights = shifted.exp()
    chosen = z.gather(-1, local.clamp(0, z.size(-1) - 1)[:, None]).squeeze(-1)
    stats = torch.stack([largest, weights.sum(-1), (weights * shifted).sum(-1), chosen])
    return (stats, None, None) if keep is None else (stats, weights.to(keep), largest[:, None])


def vocabulary_gradient(
    source: Tensor,
    tops: Tensor | None,
    log_total: Tensor,
    chosen: Tensor,
    entropy: Tensor,
    local: Tensor,
    by_logprob: Tensor,
    by_entropy: Tensor | None,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    """d / d logits of sum(by_logprob * logprob + by_entropy * entropy) for one slice of the vocabulary: [R, V] in
    `dtype`.

    With p = exp(scale * logits - log_total): d logprob = scale (1[target] - p), d entropy = -scale p (log p +
    entropy). source: the logits, with tops None; or what `vocabulary_statistics` kept, with its tops; it may be
    overwritten. chosen: [R] the target's probability in fp32: of one near 1 a kept one would leave nothing of 1 - p.
    """
    if _on_gpu(source):
        from rltool.megatron import fused

        return fused.vocabulary_gradient(
            source, tops, log_total, chosen, entropy, local, by_logprob, by_entropy, scale, dtype
        )
    target = torch.arange(source.size(-1), device=source.device)[None] == local[:, None]
    if tops is None:
        logp = source.float() * scale - log_total[:, None]
        p = logp.exp()
    else:
        p = torch.where(target, chosen[:, None], source.float() * (tops - log_total[:, None]).exp())
        # A probability that underflows to 0 has a finite logarithm here, so that 0 * log 0 is 0 and not NaN.
        logp = p.clamp_min(1e-37).log()
    out = by_logprob[:, None] * (target.float() - p)
    if by_entropy is not None:
        out = out - by_entropy[:, None] * p * (logp + entropy[:, None])
    return (out * scale).to(dtype)
