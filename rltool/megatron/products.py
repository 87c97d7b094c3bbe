"""Products of 16-bit matrices that are summed and kept in fp32."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] @ b [K, N] in fp32, whatever the inputs.

    bf16 logits of 20 are off by 0.06, which is a factor of 1.06 in a probability.
    """
    if a.dtype is torch.float32:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, summed in fp32. total: [M, N] fp32; a: [M, K]; b: [K, N]."""
    if a.dtype is torch.float32:
        total.addmm_(a, b)
    elif not a.is_cuda:
        total.addmm_(a.float(), b.float())
    elif _adds_in_place(a.device, a.dtype):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.add_(torch.mm(a, b, out_dtype=torch.float32))


@functools.cache
def _adds_in_place(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch adds such a product to a tensor where it lies, tried on small ones: the overload is young."""
    a, b = torch.ones(32, 16, device=device, dtype=dtype), torch.ones(16, 8, device=device, dtype=dtype)
    total = torch.ones(32, 8, device=device)
    try:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return bool((total == 17).all())
