"""Kernels for causal attention over packed sequences on a GPU, and which of them to trust.

Torch's own, FlashAttention 2, is always there. FlashAttention 4 (package flash-attn-4, compiled at its first use)
and, through Transformer Engine, cuDNN's and FlashAttention 3's use Hopper's own instructions and are faster on long
sequences. Much can go wrong between two packages and a driver without an error, so another kernel than torch's is
used only after it gave torch's results, gradients included, on a small batch of the shape at hand. Transformer Engine
chooses among its own again when lengths change, so this finds what is wrong in general, not what is wrong at one
length.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, cast

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rltool.errors import RltoolError, UsageError
from rltool.terminal import write_line

logger = logging.getLogger(__name__)

Backend = Literal["auto", "torch", "flash_attention_4", "transformer_engine"]

Kernel = Callable[[Tensor, Tensor, Tensor, PackedSeqParams, float | None, int | None], Tensor]
"""f(query [T, heads, d], key and value [K, groups, d], packed, scale, window) -> [T, heads, d].

`packed` has the boundaries of the blocks of queries and of the keys that each block sees; the last query of a block
belongs to its last key. window: how many keys a query sees, its own included; None: all before it.
"""

TORCH_LABEL = "torch's FlashAttention 2"

TOLERANCE = 0.02
"""Largest relative difference (2-norm) of results and gradients in 16 bit: two right kernels differ by a few
thousandths."""

UNFUSED_VARIABLE = "NVTE_UNFUSED_ATTN"

PROBE_LENGTHS = ((33, 33), (1, 1), (300, 300))
PROBE_BLOCKS = ((16, 48), (5, 5), (120, 360))
"""(queries, keys) of each block of the batch that kernels are compared on; blocks see more keys under context
parallelism."""


class Shape(NamedTuple):
    """What a kernel is chosen for. blocks: whether blocks of queries may see more keys than they have queries."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    groups: int
    dim: int
    scale: float | None
    window: int | None
    blocks: bool


def check_backend(backend: Backend, device: torch.device, dtype: torch.dtype) -> None:
    """UsageError when another package's kernel is demanded where it cannot serve or be imported."""
    if backend in ("auto", "torch"):
        return
    if device.type != "cuda" or dtype is torch.float32:
        name = str(dtype).removeprefix("torch.")
        raise UsageError(
            f'trainer.attention = "{backend}" needs a GPU and model.dtype = "bfloat16"; this is {name} on {device.type}'
        )
    try:
        importlib.import_module(OTHERS[backend].module)
    except Exception as error:  # an installation that does not fit this torch or driver fails with anything
        raise UsageError(
            f'trainer.attention = "{backend}", but that package cannot be imported here '
            f'({type(error).__name__}: {error}); install one that fits this torch, or leave trainer.attention at "auto"'
        ) from error


def has_kernels(query: Tensor) -> bool:
    """Whether a GPU kernel serves tensors like this one: not on the CPU, and not in fp32."""
    return query.device.type == "cuda" and query.dtype in (torch.bfloat16, torch.float16)


def kernel_for(
    query: Tensor, key: Tensor, packed: PackedSeqParams, *, scale: float | None, window: int | None, backend: Backend
) -> Kernel:
    """The kernel for tensors like these (see `has_kernels`).

    backend "auto": the first of `OTHERS` that can be imported and agrees with torch's. RltoolError when one is
    demanded and disagrees.
    """
    if backend == "torch":
        _say_once(f"attention: {TORCH_LABEL}")
        return torch_attention
    blocks = packed.cu_seqlens_kv is not packed.cu_seqlens_q
    heads, groups, dim = query.size(1), key.size(1), query.size(2)
    return judged(Shape(query.device, query.dtype, heads, groups, dim, scale, window, blocks), backend)


@functools.cache
def judged(shape: Shape, backend: Backend = "auto") -> Kernel:
    """The first of `OTHERS` (or of them the demanded one) that agrees with torch's kernel, else torch's; RltoolError
    if one is demanded and does not."""
    name, kernel = _chosen(shape, backend)
    _say_once(f"attention: {name}")
    return kernel


@functools.cache
def _say_once(line: str) -> None:
    """Of a few shapes with the same answer one."""
    write_line(line)


def _chosen(shape: Shape, backend: Backend) -> tuple[str, Kernel]:
    for name, other in OTHERS.items():
        if backend not in ("auto", name):
            continue
        try:
            importlib.import_module(other.module)
        except Exception:
            continue
        problem = _problem(other.kernel, shape)
        if problem is None:
            return other.label, other.kernel
        message = f"{other.label}'s attention for {shape.heads} heads in {shape.groups} groups of {shape.dim} {problem}"
        if backend == name:
            raise RltoolError(f'{message}; set trainer.attention = "torch"')
        logger.warning("%s; it is not used", message)
    return TORCH_LABEL, torch_attention


def _problem(kernel: Kernel, shape: Shape) -> str | None:
    try:
        error = disagreement(kernel, torch_attention, shape)
    except Exception as failure:
        return f"fails: {type(failure).__name__}: {failure}"
    return None if error <= TOLERANCE else f"differs from torch's by a relative {error:.2g} (allowed: {TOLERANCE:g})"


def disagreement(kernel: Kernel, reference: Kernel, shape: Shape) -> float:
    """Largest relative difference of output and gradients on a small batch; inf where something is not finite."""
    sizes = PROBE_BLOCKS if shape.blocks else PROBE_LENGTHS
    if shape.window is not None:
        sizes = (*sizes, (40, shape.window + 50) if shape.blocks else (shape.window + 50,) * 2)
    queries, keys = (torch.tensor([size[i] for size in sizes]) for i in (0, 1))
    boundaries = [torch.cat([n.new_zeros(1), n.cumsum(0)]).to(shape.device, torch.int32) for n in (queries, keys)]
    packed = PackedSeqParams(
        cu_seqlens_q=boundaries[0],
        cu_seqlens_kv=boundaries[1] if shape.blocks else boundaries[0],
        max_seqlen_q=int(queries.max()),
        max_seqlen_kv=int(keys.max()),
    )
    # Its own generator: training's random numbers are not to depend on which kernels were tried.
    generator = torch.Generator().manual_seed(0)

    def draw(count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, shape.dim, generator=generator).to(shape.device, shape.dtype)

    inputs = (
        draw(int(queries.sum()), shape.heads),
        draw(int(keys.sum()), shape.groups),
        draw(int(keys.sum()), shape.groups),
    )
    by_output = draw(int(queries.sum()), shape.heads)

    def run(attend: Kernel) -> list[Tensor]:
        query, key, value = leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        with torch.enable_grad():
            output = attend(query, key, value, packed, shape.scale, shape.window)
            return [output.detach(), *torch.autograd.grad(output, leaves, by_output)]

    errors = [
        float((a.float() - b.float()).norm() / b.float().norm())
        for a, b in zip(run(kernel), run(reference), strict=True)
    ]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


@functools.cache
def _varlen_parameters() -> frozenset[str]:
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


def _causal() -> dict[str, Any]:
    return {"window_size": (-1, 0)} if "window_size" in _varlen_parameters() else {"is_causal": True}


def torch_attention(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams, scale: float | None, window: int | None
) -> Tensor:
    """By torch's variable-length kernel. A `Kernel`.

    Torch spells "causal" `is_causal` or `window_size=(-1, 0)`, by version; NotImplementedError where it lacks what is
    asked for.
    """
    known = _varlen_parameters()
    options: dict[str, Any] = _causal()
    if window is not None:
        if "window_size" not in known:
            raise NotImplementedError("this torch's varlen_attn has no sliding window: update torch")
        options = {"window_size": (window - 1, 0)}
    if "scale" in known:
        options["scale"] = scale
    elif scale is not None and not math.isclose(scale, query.size(-1) ** -0.5):
        raise NotImplementedError("this torch's varlen_attn has no scale argument: update torch")
    if query.size(1) != key.size(1):
        if "enable_gqa" in known:
            options["enable_gqa"] = True
        elif not _takes_grouped_queries(query.device, query.dtype):
            key, value = _repeated(key, query), _repeated(value, query)
    return _varlen(query, key, value, packed, **options)


def _varlen(query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams, **options: Any) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(
        query,
        key,
        value,
        packed.cu_seqlens_q,
        packed.cu_seqlens_kv,
        packed.max_seqlen_q,
        packed.max_seqlen_kv,
        **options,
    )
    return cast(Tensor, out)  # a pair only where the log-sum-exp is asked for


def attention_with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    packed: PackedSeqParams,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """A `Kernel` with a learned score of each head beside those of the keys (`models.base.Attention.sinks`), sinks:
    [heads]. By torch's kernel alone: the others have no gradient of sinks."""
    return cast(Tensor, _WithSinks.apply(query, key, value, sinks, packed, scale, window))


class _WithSinks(torch.autograd.Function):
    """torch's FlashAttention 2 knows no sinks. With log-sum-exp l and output o of a head without its sink s, the output
    with it is o sigmoid(l - s), and its log-sum-exp log(exp(l) + exp(s)). FlashAttention's backward pass (Dao 2023,
    arXiv 2307.08691, algorithm 2) makes the weights again from the log-sum-exp, and takes of the output only its
    product with the gradient: given those with the sink, its gradients are those with the sink."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        packed: PackedSeqParams,
        scale: float | None,
        window: int | None,
    ) -> Tensor:
        out, total, *random = _flash_forward(query, key, value, packed, scale, window)
        sink = sinks.float()[:, None]
        out = (out.float() * torch.sigmoid(total - sink).t().unsqueeze(-1)).to(out.dtype)
        total = torch.logaddexp(total, sink)
        ctx.save_for_backward(query, key, value, sinks, out, total, *random)
        ctx.options = packed, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        by_out = grads[0].contiguous()
        query, key, value, sinks, out, total, *random = ctx.saved_tensors
        by_inputs = flash_backward(by_out, query, key, value, out, total, *random, *ctx.options)
        share = torch.exp(sinks.float()[:, None] - total)
        by_sinks = -(share * (by_out.float() * out.float()).sum(-1).t()).sum(-1)
        return *by_inputs, by_sinks.to(sinks.dtype), None, None, None


def _flash_forward(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams, scale: float | None, window: int | None
) -> tuple[Tensor, ...]:
    """(output, log-sum-exp [heads, T], two tensors for the backward pass), as torch's varlen_attn calls it."""
    left = -1 if window is None else window - 1
    return torch.ops.aten._flash_attention_forward(
        query, key, value, packed.cu_seqlens_q, packed.cu_seqlens_kv, packed.max_seqlen_q, packed.max_seqlen_kv,
        0.0, left == -1, False, scale=scale, window_size_left=left, window_size_right=0,
    )[:4]  # fmt: skip


def flash_backward(
    by_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    total: Tensor,
    state: Tensor,
    unused: Tensor,
    packed: PackedSeqParams,
    scale: float | None,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    left = -1 if window is None else window - 1
    return torch.ops.aten._flash_attention_backward(
        by_out, query, key, value, out, total, packed.cu_seqlens_q, packed.cu_seqlens_kv, packed.max_seqlen_q,
        packed.max_seqlen_kv, 0.0, left == -1, state, unused, scale=scale, window_size_left=left, window_size_right=0,
    )  # fmt: skip


def _repeated(grouped: Tensor, query: Tensor) -> Tensor:
    return grouped.repeat_interleave(query.size(1) // grouped.size(1), 1)


@functools.cache
def _takes_grouped_queries(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a varlen_attn without `enable_gqa` takes grouped queries all the same: torch 2.11 checks nothing, and
    the kernel below may. Repeating the keys instead costs memory for each layer."""

    def repeating(query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams, *_: Any) -> Tensor:
        return _varlen(query, _repeated(key, query), _repeated(value, query), packed, **_causal())

    def grouped(query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams, *_: Any) -> Tensor:
        return _varlen(query, key, value, packed, **_causal())

    try:
        return disagreement(grouped, repeating, Shape(device, dtype, 4, 2, 64, None, None, False)) <= TOLERANCE
    except RuntimeError:
        return False


def flash_attention_4(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams, scale: float | None, window: int | None
) -> Tensor:
    """By FlashAttention 4's kernels in the CuTe language (flash_attn.cute.flash_attn_varlen_func). A `Kernel`."""
    from flash_attn.cute import flash_attn_varlen_func

    output, _ = flash_attn_varlen_func(
        query,
        key,
        value,
        cu_seqlens_q=packed.cu_seqlens_q,
        cu_seqlens_k=packed.cu_seqlens_kv,
        max_seqlen_q=packed.max_seqlen_q,
        max_seqlen_k=packed.max_seqlen_kv,
        softmax_scale=scale,
        causal=True,
        window_size=(None, None) if window is None else (window - 1, 0),
    )
    return output


def transformer_engine_attention(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams, scale: float | None, window: int | None
) -> Tensor:
    """By Transformer Engine's DotProductAttention in its "thd" layout (transformer_engine.pytorch). A `Kernel`."""
    module = _dot_product_attention(query.size(1), key.size(1), query.size(2), scale, window)
    same = packed.cu_seqlens_kv is packed.cu_seqlens_q
    with _without_score_matrices():
        output = module(
            query,
            key,
            value,
            cu_seqlens_q=packed.cu_seqlens_q,
            cu_seqlens_kv=packed.cu_seqlens_kv,
            max_seqlen_q=packed.max_seqlen_q,
            max_seqlen_kv=packed.max_seqlen_kv,
            attn_mask_type="padding_causal" if same else "padding_causal_bottom_right",
        )
    return output.view_as(query)


@contextmanager
def _without_score_matrices() -> Iterator[None]:
    """Transformer Engine's last resort, plain products, would be right and take memory by the square of the length.

    It asks the environment whenever it chooses. Megatron sets this variable to 1 when it builds a model, and refuses
    to build one where it is 0: so only for the time of a call.
    """
    before = os.environ.get(UNFUSED_VARIABLE)
    os.environ[UNFUSED_VARIABLE] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[UNFUSED_VARIABLE]
        else:
            os.environ[UNFUSED_VARIABLE] = before


@functools.cache
def _dot_product_attention(
    heads: int, groups: int, dim: int, scale: float | None, window: int | None
) -> torch.nn.Module:
    """One for all layers, outside of the model: it has no parameters, but would add entries of its own to checkpoints.

    It gets this rank's heads and knows nothing of tensor or context parallelism, which are handled around it.
    """
    from transformer_engine.pytorch import DotProductAttention

    return DotProductAttention(
        heads,
        dim,
        num_gqa_groups=groups,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        window_size=None if window is None else (window - 1, 0),
        softmax_scale=scale,
    )


class Other(NamedTuple):
    """A kernel of another package than torch."""

    label: str
    module: str
    kernel: Kernel


OTHERS: dict[str, Other] = {
    "flash_attention_4": Other("FlashAttention 4", "flash_attn.cute", flash_attention_4),
    "transformer_engine": Other("Transformer Engine", "transformer_engine.pytorch", transformer_engine_attention),
}
"""In the order in which they are tried."""
