"""The small functions of the model that are limited by memory bandwidth: plain torch, compiled into one kernel each on CUDA.

Written once, in fp32 inside; eager on the CPU, where compiling would cost more than it saves. Nothing here communicates.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])

# Widths are constants of the kernels: as variables (dynamic=True) they cost vector loads and a division for every element, and
# the kernels move half the bytes a second. The number of tokens is a variable, or every new packing would compile again.
_compiled = functools.partial(torch.compile, dynamic=False)

VARIANTS = 64
"""Of one function, before torch gives up and runs it eager: widths, layouts, with and without gradients, single tokens."""


def _allow_variants() -> None:
    """In every call: torch 2.13 keeps this setting by thread, and recomputed layers run in those of the backward pass."""
    if torch._dynamo.config.recompile_limit < VARIANTS:
        torch._dynamo.config.recompile_limit = VARIANTS


_eager = False


def compile_on_cuda(wanted: bool) -> None:
    """For this process, from the next call of each function on."""
    global _eager
    _eager = not wanted


def on_cuda_compiled(function: Function) -> Function:
    """`function` as it is for CPU tensors, compiled at its first use for CUDA tensors; the first argument decides.

    Tensors have one row a token, but for those named `weight`.
    """
    fast: list[Any] = []
    by_token = [name != "weight" for name in inspect.signature(function).parameters]

    @functools.wraps(function)
    def chosen(*arguments: Any) -> Any:
        if _eager or not arguments[0].is_cuda:
            return function(*arguments)
        _allow_variants()
        if not fast:
            fast.append(_compiled(function))
        return fast[0](*rows_vary(arguments, by_token))

    return chosen  # type: ignore[return-value]


def rows_vary(arguments: Sequence[Any], by_token: Sequence[bool]) -> Sequence[Any]:
    """The arguments, marked for the compiler: the first dimension of the tensors that have one row a token is a variable."""
    for argument, varies in zip(arguments, by_token, strict=True):
        if varies and isinstance(argument, Tensor):
            torch._dynamo.maybe_mark_dynamic(argument, 0)
    return arguments


@on_cuda_compiled
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; statistics in fp32, rounded to x's dtype before the weight."""
    return F.rms_norm(x.float(), (x.size(-1),), None, eps).to(x.dtype) * weight


@on_cuda_compiled
def rms_norm_zero_centered(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `rms_norm`, with the factor 1 + weight applied in fp32 (Gemma)."""
    return (F.rms_norm(x.float(), (x.size(-1),), None, eps) * (1.0 + weight.float())).to(x.dtype)


@on_cuda_compiled
def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021), halves paired as Hugging Face has them.

    x: [T, ..., d]; turn: fp32, broadcast to x: cosines of the d / 2 angles, then their sines.
    """
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = turn.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


@on_cuda_compiled
def swiglu(x: Tensor) -> Tensor:
    """silu(first half) * second half of the last dimension (Shazeer 2020)."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


@on_cuda_compiled
def vocabulary_statistics(logits: Tensor, local: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of one slice of the vocabulary, for z = scale * logits [R, V] (fp32): what log-probability and entropy are made of.

    local: [R] int64, column of the target, any value where the slice does not hold it.
    Returns, each [R]: the largest z; sum exp(z - largest); sum exp(z - largest) (z - largest); z of the target.
    """
    z = logits.float() * scale
    largest = z.amax(-1)
    shifted = z - largest[:, None]
    weights = shifted.exp()
    chosen = z.gather(-1, local.clamp(0, z.size(-1) - 1)[:, None]).squeeze(-1)
    return largest, weights.sum(-1), (weights * shifted).sum(-1), chosen


@on_cuda_compiled
def vocabulary_statistics_and_kept(
    logits: Tensor, local: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `vocabulary_statistics`, and exp(z - largest) [R, V] in `dtype` for `vocabulary_gradient_of_kept`."""
    z = logits.float() * scale
    largest = z.amax(-1)
    shifted = z - largest[:, None]
    weights = shifted.exp()
    chosen = z.gather(-1, local.clamp(0, z.size(-1) - 1)[:, None]).squeeze(-1)
    return largest, weights.sum(-1), (weights * shifted).sum(-1), chosen, weights.to(dtype)


@on_cuda_compiled
def vocabulary_gradient(
    logits: Tensor, log_total: Tensor, entropy: Tensor, local: Tensor, by_logprob: Tensor, by_entropy: Tensor, scale: float, dtype: torch.dtype
) -> Tensor:
    """d / d logits of sum(by_logprob * logprob + by_entropy * entropy) for one slice of the vocabulary: [R, V] in `dtype`.

    With p = exp(scale * logits - log_total): d logprob = scale (1[target] - p), d entropy = -scale p (log p + entropy).
    """
    logp = logits.float() * scale - log_total[:, None]
    p = logp.exp()
    target = torch.arange(logits.size(-1), device=logits.device)[None] == local[:, None]
    # A probability that underflows to 0 has a finite logarithm here, so that 0 * log 0 is 0 and not NaN.
    out = by_logprob[:, None] * (target.float() - p) - by_entropy[:, None] * p * (logp + entropy[:, None])
    return (out * scale).to(dtype)


@on_cuda_compiled
def vocabulary_gradient_of_kept(
    kept: Tensor, factor: Tensor, chosen: Tensor, entropy: Tensor, local: Tensor, by_logprob: Tensor, by_entropy: Tensor, scale: float
) -> Tensor:
    """As `vocabulary_gradient`, from probabilities divided by `factor` [R] that were kept in the result's dtype.

    chosen: [R] the target's own probability in fp32: of one near 1 the kept one would leave nothing of 1 - p.
    """
    target = torch.arange(kept.size(-1), device=kept.device)[None] == local[:, None]
    p = torch.where(target, chosen[:, None], kept.float() * factor[:, None])
    logp = p.clamp_min(torch.finfo(torch.float32).tiny).log()
    out = by_logprob[:, None] * (target.float() - p) - by_entropy[:, None] * p * (logp + entropy[:, None])
    return (out * scale).to(kept.dtype)
