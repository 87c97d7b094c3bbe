"""The functions of `kernels` for a GPU, written in Triton: one launch each, forward and backward, and each number is
read once.

Not left to torch.compile: its call costs the host 100 to 200 microseconds before a kernel is launched (guards,
wrappers of autograd), five times a layer, and small models then wait for the host. Its code also read every input of
SwiGLU's backward twice, and the logits twice. The arithmetic is that of `kernels`, in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from rltool.megatron.kernels import normed_dtype

TILE = 4096
"""Numbers that one program of the row-wise kernels holds."""
PROGRAMS = 528
"""Of the norm's backward kernel, each with its own sum for the weight: four a multiprocessor of an H200."""
VOCABULARY_BLOCK = 4096
"""Columns of the vocabulary that one program takes."""

# Triton's types give a launch the kernel's own parameters: they want a constexpr for a number, and know no num_warps.
jit = cast(Callable[[Callable[..., Any]], Any], triton.jit)


@jit
def _norm_forward(
    x, weight, out, scale, rows, eps, H: tl.constexpr, CENTERED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row[:, None] < rows) & (column[None, :] < H)
    at = row[:, None].to(tl.int64) * H + column[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, 1) / H + eps)
    tl.store(scale + row, inverse, mask=row < rows)
    factor = tl.load(weight + column, mask=column < H, other=0.0).to(tl.float32)
    result = value * inverse[:, None]
    if CENTERED:
        result = result * (1.0 + factor)[None, :]
    else:
        result = result.to(out.dtype.element_ty).to(tl.float32) * factor[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


@jit
def _norm_backward(
    grad,
    x,
    weight,
    scale,
    grad_x,
    grad_weight,
    rows,
    H: tl.constexpr,
    CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    column = tl.arange(0, WIDTH)
    factor = tl.load(weight + column, mask=column < H, other=0.0).to(tl.float32)
    if CENTERED:
        factor += 1.0
    total = tl.zeros([WIDTH], dtype=tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = block * ROWS + tl.arange(0, ROWS)
        inside = (row[:, None] < rows) & (column[None, :] < H)
        at = row[:, None].to(tl.int64) * H + column[None, :]
        inverse = tl.load(scale + row, mask=row < rows, other=0.0)[:, None]
        normed = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * inverse
        given = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(given * normed, 0)
        given = given * factor[None, :]
        along = tl.sum(given * normed, 1) / H
        tl.store(grad_x + at, ((given - normed * along[:, None]) * inverse).to(grad_x.dtype.element_ty), mask=inside)
    tl.store(grad_weight + tl.program_id(0) * H + column, total, mask=column < H)


@jit
def _rotate(
    x,
    turn,
    out,
    by_token,
    by_head,
    heads,
    HALF: tl.constexpr,
    BACK: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column, head = tl.arange(0, WIDTH), tl.arange(0, HEADS)
    cos = tl.load(turn + token * 2 * HALF + column, mask=column < HALF, other=0.0)[None, :]
    sin = tl.load(turn + token * 2 * HALF + HALF + column, mask=column < HALF, other=0.0)[None, :]
    if BACK:
        sin = -sin
    inside = (head[:, None] < heads) & (column[None, :] < HALF)
    source = x + token * by_token + head[:, None] * by_head + column[None, :]
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    place = out + token * heads * 2 * HALF + head[:, None] * 2 * HALF + column[None, :]
    tl.store(place, (first * cos - second * sin).to(out.dtype.element_ty), mask=inside)
    tl.store(place + HALF, (second * cos + first * sin).to(out.dtype.element_ty), mask=inside)


@jit
def _split_and_rotate(
    mixed, bias, turn, query, key, value, groups,
    SHARE: tl.constexpr, HALF: tl.constexpr, BACK: tl.constexpr, BIAS: tl.constexpr, HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column, head = tl.arange(0, WIDTH), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    cos = tl.load(turn + token * 2 * HALF + column, mask=column < HALF, other=0.0)[None, :]
    sin = tl.load(turn + token * 2 * HALF + HALF + column, mask=column < HALF, other=0.0)[None, :]
    # In the product each group has SHARE heads of queries, then one of keys and one of values.
    group, kind = head // (SHARE + 2), head % (SHARE + 2)
    real = (head < groups * (SHARE + 2))[:, None] & (column < HALF)[None, :]
    of_query, of_key = real & (kind < SHARE)[:, None], real & (kind == SHARE)[:, None]
    of_value = real & (kind == SHARE + 1)[:, None]
    whole = head[:, None] * 2 * HALF + column[None, :]
    at = mixed + token * groups * (SHARE + 2) * 2 * HALF + whole
    at_query = query + ((token * groups + group) * SHARE + kind)[:, None] * 2 * HALF + column[None, :]
    at_key = key + (token * groups + group)[:, None] * 2 * HALF + column[None, :]
    at_value = value + (token * groups + group)[:, None] * 2 * HALF + column[None, :]
    turned = (kind <= SHARE)[:, None]
    if BACK:
        first = tl.load(at_query, mask=of_query, other=0.0).to(tl.float32)
        first += tl.load(at_key, mask=of_key, other=0.0).to(tl.float32)
        first += tl.load(at_value, mask=of_value, other=0.0).to(tl.float32)
        second = tl.load(at_query + HALF, mask=of_query, other=0.0).to(tl.float32)
        second += tl.load(at_key + HALF, mask=of_key, other=0.0).to(tl.float32)
        second += tl.load(at_value + HALF, mask=of_value, other=0.0).to(tl.float32)
        tl.store(at, tl.where(turned, first * cos + second * sin, first).to(mixed.dtype.element_ty), mask=real)
        tl.store(at + HALF, tl.where(turned, second * cos - first * sin, second).to(mixed.dtype.element_ty), mask=real)
    else:
        first = tl.load(at, mask=real, other=0.0).to(tl.float32)
        second = tl.load(at + HALF, mask=real, other=0.0).to(tl.float32)
        if BIAS:
            # Rounded before it is turned, as without a kernel of its own.
            first += tl.load(bias + whole, mask=real, other=0.0).to(tl.float32)
            second += tl.load(bias + whole + HALF, mask=real, other=0.0).to(tl.float32)
            first = first.to(mixed.dtype.element_ty).to(tl.float32)
            second = second.to(mixed.dtype.element_ty).to(tl.float32)
        one = tl.where(turned, first * cos - second * sin, first).to(mixed.dtype.element_ty)
        other = tl.where(turned, second * cos + first * sin, second).to(mixed.dtype.element_ty)
        tl.store(at_query, one, mask=of_query)
        tl.store(at_query + HALF, other, mask=of_query)
        tl.store(at_key, one, mask=of_key)
        tl.store(at_key + HALF, other, mask=of_key)
        tl.store(at_value, one, mask=of_value)
        tl.store(at_value + HALF, other, mask=of_value)


@jit
def _swiglu_forward(
    x, scale, out, alpha, offset, limit, F: tl.constexpr, SCALED: tl.constexpr, PLAIN: tl.constexpr, WIDTH: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    gate = tl.load(x + row * 2 * F + column, mask=column < F, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * F + F + column, mask=column < F, other=0.0).to(tl.float32)
    if PLAIN:
        result = gate / (1.0 + tl.exp(-gate)) * up
    else:
        gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
        result = gate / (1.0 + tl.exp(-alpha * gate)) * (up + offset)
    if SCALED:
        # Rounded before the scale, as without a kernel of its own.
        result = result.to(out.dtype.element_ty).to(tl.float32) * tl.load(scale + row)
    tl.store(out + row * F + column, result.to(out.dtype.element_ty), mask=column < F)


@jit
def _swiglu_backward(
    grad, x, scale, grad_x, grad_scale, blocks, alpha, offset, limit,
    F: tl.constexpr, SCALED: tl.constexpr, PLAIN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    place = row * 2 * F + column
    gate = tl.load(x + place, mask=column < F, other=0.0).to(tl.float32)
    up = tl.load(x + place + F, mask=column < F, other=0.0).to(tl.float32)
    given = tl.load(grad + row * F + column, mask=column < F, other=0.0).to(tl.float32)
    up_moves = column < F  # a clamped number has no gradient
    if PLAIN:
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        slope = 1.0 + gate * (1.0 - sigmoid)
    else:
        gate_moves, up_moves = gate <= limit, (up >= -limit) & (up <= limit)
        gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit) + offset
        sigmoid = 1.0 / (1.0 + tl.exp(-alpha * gate))
        slope = tl.where(gate_moves, 1.0 + alpha * gate * (1.0 - sigmoid), 0.0)
    if SCALED:
        product = (gate * sigmoid * up).to(x.dtype.element_ty).to(tl.float32)
        tl.store(grad_scale + row * blocks + tl.program_id(1), tl.sum(given * product, 0))
        given = given * tl.load(scale + row)
    by_gate = given * up * sigmoid * slope
    by_up = tl.where(up_moves, given * gate * sigmoid, 0.0)
    tl.store(grad_x + place, by_gate.to(grad_x.dtype.element_ty), mask=column < F)
    tl.store(grad_x + place + F, by_up.to(grad_x.dtype.element_ty), mask=column < F)


@jit
def _convolution_forward(
    x, weight, positions, out, T, C: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = (row[:, None] < T) & (column[None, :] < C)
    position = tl.load(positions + row, mask=row < T, other=-1)
    at = row[:, None] * C + column[None, :]
    total = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    for back in tl.static_range(K):  # pyright: ignore[reportGeneralTypeIssues]
        factor = tl.load(weight + column * K + (K - 1 - back), mask=column < C, other=0.0).to(tl.float32)
        seen = inside & (position[:, None] >= back) & (row[:, None] >= back)
        total += tl.load(x + at - back * C, mask=seen, other=0.0).to(tl.float32) * factor[None, :]
    tl.store(out + at, (total / (1.0 + tl.exp(-total))).to(out.dtype.element_ty), mask=inside)


@jit
def _convolution_slopes(
    grad, x, weight, positions, slopes, parts, T,
    C: tl.constexpr, K: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    column, tap = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH), tl.arange(0, TAPS)
    sums = tl.zeros([TAPS, WIDTH], dtype=tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(T, ROWS), tl.num_programs(0)):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row[:, None] < T) & (column[None, :] < C)
        position = tl.load(positions + row, mask=row < T, other=-1)
        at = row[:, None] * C + column[None, :]
        total = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
        for back in tl.static_range(K):  # pyright: ignore[reportGeneralTypeIssues]
            factor = tl.load(weight + column * K + (K - 1 - back), mask=column < C, other=0.0).to(tl.float32)
            seen = inside & (position[:, None] >= back) & (row[:, None] >= back)
            total += tl.load(x + at - back * C, mask=seen, other=0.0).to(tl.float32) * factor[None, :]
        sigmoid = 1.0 / (1.0 + tl.exp(-total))
        slope = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * sigmoid * (1.0 + total * (1.0 - sigmoid))
        tl.store(slopes + at, slope, mask=inside)
        for back in tl.static_range(K):  # pyright: ignore[reportGeneralTypeIssues]
            seen = inside & (position[:, None] >= back) & (row[:, None] >= back)
            earlier = tl.load(x + at - back * C, mask=seen, other=0.0).to(tl.float32)
            by_column = tl.sum(slope * earlier, 0)
            sums += tl.where(tap[:, None] == K - 1 - back, by_column[None, :], 0.0)  # pyright: ignore[reportArgumentType]
    place = parts + tl.program_id(0) * C * K + column[None, :] * K + tap[:, None]
    tl.store(place, sums, mask=(tap[:, None] < K) & (column[None, :] < C))


@jit
def _convolution_backward(
    slopes, weight, positions, grad_x, T, C: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    at = row[:, None] * C + column[None, :]
    total = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    for back in tl.static_range(K):  # pyright: ignore[reportGeneralTypeIssues]
        # The token that is `back` later saw this one, if it is of the same sequence.
        position = tl.load(positions + row + back, mask=row + back < T, other=-1)
        factor = tl.load(weight + column * K + (K - 1 - back), mask=column < C, other=0.0).to(tl.float32)
        saw = (position[:, None] >= back) & (column[None, :] < C)
        total += tl.load(slopes + at + back * C, mask=saw, other=0.0) * factor[None, :]
    tl.store(grad_x + at, total.to(grad_x.dtype.element_ty), mask=(row[:, None] < T) & (column[None, :] < C))


@jit
def _sum_rows(rows, order, ends, out, H: tl.constexpr, WIDTH: tl.constexpr):
    group = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    total = tl.zeros([WIDTH], dtype=tl.float32)
    for i in range(start, tl.load(ends + group)):
        row = tl.load(order + i)
        total += tl.load(rows + row * H + column, mask=column < H, other=0.0).to(tl.float32)
    tl.store(out + group * H + column, total.to(out.dtype.element_ty), mask=column < H)


@jit
def _add_to_each(total, parts, step, size, WIDTH: tl.constexpr):
    which = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    part = tl.load(parts + which * size + place, mask=place < size, other=0.0).to(tl.float32)
    held = tl.load(total + which * step + place, mask=place < size, other=0.0)
    tl.store(total + which * step + place, held + part, mask=place < size)


@jit
def _vocabulary_blocks(
    logits, local, largest, total, weighted, chosen, kept, V, blocks, scale, KEEP: tl.constexpr, WIDTH: tl.constexpr
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * WIDTH + tl.arange(0, WIDTH)
    z = tl.load(logits + row * V + column, mask=column < V, other=float("-inf")).to(tl.float32) * scale
    top = tl.max(z, 0)
    shifted = z - top
    weight = tl.exp(shifted)
    tl.store(largest + row * blocks + block, top)
    tl.store(total + row * blocks + block, tl.sum(weight, 0))
    tl.store(weighted + row * blocks + block, tl.sum(tl.where(column < V, weight * shifted, 0.0), 0))
    target = tl.load(local + row)
    here = (target >= block * WIDTH) & (target < (block + 1) * WIDTH) & (target < V)
    tl.store(chosen + row, tl.load(logits + row * V + target, mask=here, other=0.0).to(tl.float32) * scale, mask=here)
    if KEEP:
        tl.store(kept + row * V + column, weight.to(kept.dtype.element_ty), mask=column < V)


@jit
def _join_blocks(largest, total, weighted, tops, totals, sums, blocks, WIDTH: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside = column < blocks
    top = tl.load(largest + row * blocks + column, mask=inside, other=float("-inf"))
    most = tl.max(top, 0)
    shift = tl.where(inside, top - most, 0.0)
    factor = tl.where(inside, tl.exp(shift), 0.0)
    part = tl.load(total + row * blocks + column, mask=inside, other=0.0)
    moved = tl.load(weighted + row * blocks + column, mask=inside, other=0.0) + shift * part
    tl.store(tops + row, most)
    tl.store(totals + row, tl.sum(factor * part, 0))
    tl.store(sums + row, tl.sum(factor * moved, 0))


@jit
def _vocabulary_gradient(
    source, tops, log_total, chosen, entropy, local, by_logprob, by_entropy, out, V, blocks, scale,
    KEPT: tl.constexpr, ENTROPY: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * WIDTH + tl.arange(0, WIDTH)
    hit = column == tl.load(local + row)
    value = tl.load(source + row * V + column, mask=column < V, other=0.0).to(tl.float32)
    normalizer = tl.load(log_total + row)
    if KEPT:
        p = tl.where(hit, tl.load(chosen + row), value * tl.exp(tl.load(tops + row * blocks + block) - normalizer))
    else:
        p = tl.exp(value * scale - normalizer)
    result = tl.load(by_logprob + row) * (tl.where(hit, 1.0, 0.0) - p)
    if ENTROPY:
        if KEPT:
            log_p = tl.log(tl.maximum(p, 1e-37))
        else:
            log_p = value * scale - normalizer
        result -= tl.load(by_entropy + row) * p * (log_p + tl.load(entropy + row))
    tl.store(out + row * V + column, (result * scale).to(out.dtype.element_ty), mask=column < V)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, centered: bool) -> Tensor:
        x = x.contiguous()
        width, rows = x.size(-1), x.numel() // x.size(-1)
        out = torch.empty_like(x, dtype=normed_dtype(x, weight))
        scale = torch.empty(rows, dtype=torch.float32, device=x.device)
        padded = triton.next_power_of_2(width)
        together = max(1, TILE // padded)
        _norm_forward[(triton.cdiv(rows, together),)](
            x, weight, out, scale, rows, eps, H=width, CENTERED=centered, ROWS=together, WIDTH=padded
        )
        ctx.save_for_backward(x, weight, scale)
        ctx.centered = centered
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight, scale = ctx.saved_tensors
        width, rows = x.size(-1), x.numel() // x.size(-1)
        padded = triton.next_power_of_2(width)
        together = max(1, TILE // padded)
        programs = min(PROGRAMS, triton.cdiv(rows, together))
        grad_x, parts = torch.empty_like(x), torch.empty(programs, width, dtype=torch.float32, device=x.device)
        _norm_backward[(programs,)](
            grad.contiguous(),
            x,
            weight,
            scale,
            grad_x,
            parts,
            rows,
            H=width,
            CENTERED=ctx.centered,
            ROWS=together,
            WIDTH=padded,
        )
        return grad_x, parts.sum(0).to(weight.dtype), None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, centered: bool) -> Tensor:
    return _Norm.apply(x, weight, eps, centered)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, turn: Tensor) -> Tensor:
        ctx.save_for_backward(turn)
        return _turned(x, turn, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return _turned(grad, *ctx.saved_tensors, back=True), None


def _turned(x: Tensor, turn: Tensor, *, back: bool) -> Tensor:
    if x.stride(-1) != 1:
        x = x.contiguous()
    tokens, heads, half = x.size(0), x.size(-2), x.size(-1) // 2
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rotate[(tokens,)](
        x, turn, out, x.stride(0), x.stride(-2), heads,
        HALF=half, BACK=back, HEADS=triton.next_power_of_2(heads), WIDTH=triton.next_power_of_2(half),
    )  # fmt: skip
    return out


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """x: [T, 1, heads, d]; turn: [T, 1, 1, d]."""
    return _Rotation.apply(x, turn.contiguous())


class _SplitAndRotation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, bias: Tensor | None, turn: Tensor, groups: int, size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        mixed, share = mixed.contiguous(), mixed.size(-1) // size // groups - 2
        parts = [
            torch.empty(len(mixed), 1, heads, size, dtype=mixed.dtype, device=mixed.device)
            for heads in (groups * share, groups, groups)
        ]
        _launch_split(mixed, bias, turn, parts, back=False)
        ctx.save_for_backward(turn)
        return parts[0], parts[1], parts[2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (turn,), parts = ctx.saved_tensors, [grad.contiguous() for grad in grads]
        width = sum(part.size(-2) for part in parts) * parts[0].size(-1)
        mixed = torch.empty(len(parts[0]), 1, width, dtype=parts[0].dtype, device=parts[0].device)
        _launch_split(mixed, None, turn, parts, back=True)
        return mixed, mixed.sum((0, 1)) if ctx.needs_input_grad[1] else None, None, None, None


def _launch_split(mixed: Tensor, bias: Tensor | None, turn: Tensor, parts: list[Tensor], *, back: bool) -> None:
    (heads, size), groups = parts[0].shape[-2:], parts[1].size(-2)
    rows, width = heads + 2 * groups, triton.next_power_of_2(size // 2)
    at_once = min(triton.next_power_of_2(rows), max(1, 1024 // width))  # of one program: more would not fit registers
    _split_and_rotate[(len(mixed), triton.cdiv(rows, at_once))](
        mixed, mixed if bias is None else bias, turn, *parts, groups,
        SHARE=heads // groups, HALF=size // 2, BACK=back, BIAS=bias is not None,
        HEADS=at_once, WIDTH=width,
    )  # fmt: skip


def split_and_rotate(
    mixed: Tensor, bias: Tensor | None, turn: Tensor, groups: int, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _SplitAndRotation.apply(mixed, bias, turn.contiguous(), groups, size)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor | None, kind: tuple[float, float, float]) -> Tensor:
        x = x.contiguous()
        half, rows = x.size(-1) // 2, x.numel() // x.size(-1)
        out = torch.empty(*x.shape[:-1], half, dtype=x.dtype, device=x.device)
        width = min(2048, triton.next_power_of_2(half))
        ctx.scaled, ctx.kind = scale is not None, kind
        scale = scale.contiguous() if scale is not None else x
        _swiglu_forward[(rows, triton.cdiv(half, width))](
            x, scale, out, *kind, F=half, SCALED=ctx.scaled, PLAIN=kind == PLAIN, WIDTH=width
        )
        ctx.save_for_backward(x, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, scale = ctx.saved_tensors
        half, rows = x.size(-1) // 2, x.numel() // x.size(-1)
        grad_x, width = torch.empty_like(x), min(2048, triton.next_power_of_2(half))
        blocks = triton.cdiv(half, width)
        parts = torch.empty(rows, blocks, dtype=torch.float32, device=x.device) if ctx.scaled else grad_x
        _swiglu_backward[(rows, blocks)](
            grad.contiguous(), x, scale, grad_x, parts, blocks, *ctx.kind,
            F=half, SCALED=ctx.scaled, PLAIN=ctx.kind == PLAIN, WIDTH=width,
        )  # fmt: skip
        return grad_x, parts.sum(-1).view(scale.shape).to(scale.dtype) if ctx.scaled else None, None


PLAIN = (1.0, 0.0, math.inf)
"""`kernels.SILU`."""


def swiglu(
    x: Tensor, scale: Tensor | None = None, alpha: float = 1.0, offset: float = 0.0, limit: float = math.inf
) -> Tensor:
    return _SwiGLU.apply(x, scale, (alpha, offset, limit))


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
        x, weight, positions = x.contiguous(), weight.contiguous(), positions.contiguous()
        out, (grid, sizes) = torch.empty_like(x), _tiles(x, weight)
        _convolution_forward[grid](x, weight, positions, out, len(x), **sizes)
        ctx.save_for_backward(x, weight, positions)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight, positions = ctx.saved_tensors
        grad_x, slopes = torch.empty_like(x), torch.empty(x.shape, dtype=torch.float32, device=x.device)
        (rows, columns), sizes = _tiles(x, weight)
        programs = min(rows, triton.cdiv(PROGRAMS, columns))
        parts = torch.empty(programs, *weight.shape, dtype=torch.float32, device=x.device)
        _convolution_slopes[(programs, columns)](
            grad.contiguous(), x, weight, positions, slopes, parts, len(x),
            TAPS=triton.next_power_of_2(weight.size(1)), **sizes,
        )  # fmt: skip
        _convolution_backward[(rows, columns)](slopes, weight, positions, grad_x, len(x), **sizes)
        return grad_x, parts.sum(0).to(weight.dtype), None


def _tiles(x: Tensor, weight: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Programs by rows and columns, and the sizes that the kernels are compiled for."""
    channels, taps = weight.shape
    width = min(128, triton.next_power_of_2(channels))
    rows = TILE // 2 // width
    return (triton.cdiv(len(x), rows), triton.cdiv(channels, width)), dict(C=channels, K=taps, ROWS=rows, WIDTH=width)


def short_convolution(x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    return _Convolution.apply(x, weight, positions)


def sum_rows(rows: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    rows, width = rows.contiguous(), rows.size(1)
    out = torch.empty(len(ends), width, dtype=rows.dtype, device=rows.device)
    block = min(2048, triton.next_power_of_2(width))
    _sum_rows[(len(ends), triton.cdiv(width, block))](rows, order, ends, out, H=width, WIDTH=block)
    return out


def add_to_each(first: Tensor, step: int, parts: Tensor) -> None:
    """step: numbers from one total to the next, negative where they lie in reverse."""
    size = first.numel()
    _add_to_each[(triton.cdiv(size, 2048), len(parts))](first, parts, step, size, WIDTH=2048)


def vocabulary_statistics(
    logits: Tensor, local: Tensor, scale: float, keep: torch.dtype | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    logits = logits.contiguous()
    rows, width = logits.shape
    blocks = triton.cdiv(width, VOCABULARY_BLOCK)
    parts = torch.empty(3, rows, blocks, dtype=torch.float32, device=logits.device)
    stats = torch.zeros(4, rows, dtype=torch.float32, device=logits.device)
    kept = torch.empty(rows, width, dtype=keep, device=logits.device) if keep is not None else None
    _vocabulary_blocks[(rows, blocks)](
        logits, local, parts[0], parts[1], parts[2], stats[3], logits if kept is None else kept, width, blocks, scale,
        KEEP=keep is not None, WIDTH=VOCABULARY_BLOCK, num_warps=8,
    )  # fmt: skip
    _join_blocks[(rows,)](
        parts[0], parts[1], parts[2], stats[0], stats[1], stats[2], blocks, WIDTH=triton.next_power_of_2(blocks)
    )
    return stats, kept, parts[0] if keep is not None else None


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
    """Kept probabilities are overwritten by the result."""
    rows, width = source.shape
    out = source if tops is not None else torch.empty(rows, width, dtype=dtype, device=source.device)
    blocks = triton.cdiv(width, VOCABULARY_BLOCK)
    _vocabulary_gradient[(rows, blocks)](
        source, tops if tops is not None else log_total, log_total, chosen, entropy, local,
        by_logprob, by_entropy if by_entropy is not None else by_logprob, out, width, blocks, scale,
        KEPT=tops is not None, ENTROPY=by_entropy is not None, WIDTH=VOCABULARY_BLOCK, num_warps=8,
    )  # fmt: skip
    return out
