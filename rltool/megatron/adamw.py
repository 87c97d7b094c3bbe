"""AdamW in the form that Megatron's optimizers expect of Transformer Engine's and Apex's: the step is in the group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw


class GroupStepAdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019). torch's arithmetic; one kernel per group on CUDA.

    torch's own class keeps a step per parameter. Megatron's distributed optimizer then cannot be restored: it asserts,
    misses a key or restarts the step count, by version. With the step in the group and exactly exp_avg and exp_avg_sq
    as state it takes the path that it takes with Transformer Engine.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        """adam_w_mode must be True and capturable (for CUDA graphs) False; Megatron passes both, by version."""
        if not adam_w_mode or capturable:
            raise ValueError("only decoupled weight decay outside of CUDA graphs is implemented")
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})

    @torch.no_grad()
    def make_moments(self) -> None:
        """Zeros, of every parameter that has none yet."""
        for group in self.param_groups:
            self._make_moments(group["params"])

    def _make_moments(self, params: Iterable[Tensor]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # Megatron has none
        for group in self.param_groups:
            done = int(group.get("step", 0))
            group["step"] = done + 1
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            self._make_moments(params)
            self._update(group, params, done)

    def _update(self, group: dict[str, Any], params: list[Tensor], done: int) -> None:
        fused = params[0].is_cuda
        # The kernel advances each of these: they may not be one tensor.
        steps = torch.full((len(params),), float(done), device=params[0].device if fused else "cpu").unbind()
        adamw(
            params,
            [cast(Tensor, p.grad) for p in params],
            [self.state[p]["exp_avg"] for p in params],
            [self.state[p]["exp_avg_sq"] for p in params],
            [],
            list(steps),
            # Not foreach on CUDA: it would hold several copies of all parameters.
            foreach=False,
            fused=fused,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
