"""Collectives that autograd goes through, for context parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = x.new_empty(group.size() * x.size(0), *x.shape[1:])
        dist.all_gather(list(out.chunk(group.size())), x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        group = ctx.group
        grad = grad.contiguous()
        if grad.is_cuda:
            own = grad.new_empty(grad.size(0) // group.size(), *grad.shape[1:])
            dist.reduce_scatter_tensor(own, grad, group=group)
            return own, None
        # Gloo has no reduce-scatter.
        dist.all_reduce(grad, group=group)
        return grad.chunk(group.size())[group.rank()], None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return grad, None


def gather_from_context_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[T, ...] of each rank -> [ranks * T, ...] on all, in rank order.

    Backward: each rank gets the sum of its part's gradients.
    """
    return _Gather.apply(x, group)


def sum_over_context_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks, on all. Backward: the gradient as it is.

    Right where every rank goes on to compute the same loss from the sum: each then has the whole gradient of its own
    summand.
    """
    return _Sum.apply(x, group)
