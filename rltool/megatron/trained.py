"""A model in training on one rank: its gradients, optimizer and schedule. The policy is one, the critic another.

Collective throughout, and to be called inside the runtime's mode.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rltool.config.train import OptimizerConfig, TrainerConfig
from rltool.megatron import optimizer as optim
from rltool.megatron import state
from rltool.megatron.micro_batch import MicroBatch
from rltool.megatron.model import forward, global_names
from rltool.megatron.runtime import Runtime, to_device


class TrainedModel:
    """The parts that belong to one set of weights. `gpt` is the model, `ddp` the same with its gradients' buffers around it."""

    def __init__(
        self, gpt: GPTModel, optimizer: OptimizerConfig, runtime: Runtime, dtype: torch.dtype, trainer: TrainerConfig, *, total_optimizer_steps: int
    ) -> None:
        """Raises UsageError for a schedule that does not fit the number of steps."""
        self.gpt, self.runtime = gpt, runtime
        gradients = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            # A non-finite gradient is for `step` to see and skip, not for Megatron to stop at.
            check_for_nan_in_grad=False,
            use_distributed_optimizer=trainer.distributed_optimizer,
            overlap_grad_reduce=trainer.overlap_grad_reduce and runtime.coordinates.replica_size > 1,
        )
        self.ddp = DistributedDataParallel(gpt.config, gradients, gpt)
        if gradients.overlap_grad_reduce:
            # The schedule runs all micro-batches but the last in this context. Without it Megatron counts gradients over all of
            # them, and fails in the first step with another number of micro-batches than the step before.
            gpt.config.no_sync_func = self.ddp.no_sync
        # The loss is already divided by the global token count: gradients are summed over ranks and not scaled again.
        gpt.config.finalize_model_grads_func = lambda model, _tokens=None, **kwargs: finalize_model_grads(model, None, **kwargs)
        self.optimizer = optim.build_optimizer(self.ddp, optimizer, dtype, distributed=trainer.distributed_optimizer)
        self.schedule = optim.build_schedule(self.optimizer, optimizer, total_optimizer_steps)

    def run(self, micro_batches: list[MicroBatch], last: Callable[..., Any], *, forward_only: bool) -> list[Any]:
        """Megatron's schedule over the micro-batches; `last(micro_batch, hidden)` runs on the last pipeline stage."""

        def forward_step(batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            micro = next(batches)
            return forward(model, micro.tokens, micro.packed), partial(last, micro)

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=self.ddp,
            num_microbatches=len(micro_batches),
            seq_length=max(len(micro.tokens) for micro in micro_batches),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def discard_gradients(self) -> None:
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self, loss: float) -> tuple[dict[str, float], bool]:
        """One optimizer step with the gradients at hand: (lr and grad_norm, whether it was made), equal on all ranks.

        A non-finite loss or gradient on any rank skips the update on all: parameters, optimizer and schedule stay as they were.
        """
        metrics = {"lr": float(self.optimizer.param_groups[0]["lr"])}
        self.optimizer.prepare_grads()
        metrics["grad_norm"] = float(self.optimizer.get_grad_norm())
        broken = not (math.isfinite(loss) and math.isfinite(metrics["grad_norm"]))
        (skip,) = self.runtime.max_over_world([float(broken)])
        if not skip:
            self.optimizer.step()
            self.schedule.step(1)
        return metrics, not skip

    def sharded_state(self, *, loading: bool) -> dict[str, Any]:
        """Weights, optimizer and schedule, for megatron.core.dist_checkpointing."""
        model = state.model_state(self.gpt)
        sharded = {"model": model, "optimizer": state.optimizer_state(self.optimizer, model, loading=loading)}
        if not loading:
            sharded["schedule"] = self.schedule.state_dict()
        return sharded

    def restore(self, loaded: dict[str, Any]) -> None:
        """The inverse of `sharded_state`. Learning rate, betas and eps stay as configured, not as they were saved."""
        self.gpt.load_state_dict(loaded["model"])
        optim.keep_configured_values(loaded["optimizer"], self.optimizer)
        self.optimizer.load_state_dict(loaded["optimizer"])
        self.schedule.load_state_dict(loaded["schedule"])
        self.schedule.step(0)

    def parameter_hash(self) -> str:
        """sha256 over the bytes of all parameters of all ranks, the same on every rank. Depends on the layout of ranks."""
        digest = hashlib.sha256()
        for name, parameter in sorted(global_names(self.gpt).items()):
            digest.update(name.encode())
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        own = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8).to(self.runtime.device)
        everyone = [torch.empty_like(own) for _ in range(self.runtime.coordinates.world_size)]
        dist.all_gather(everyone, own)
        return hashlib.sha256(torch.cat(everyone).cpu().numpy().tobytes()).hexdigest()


def in_row(micro: MicroBatch, values: Tensor) -> Tensor:
    """[R] values of micro.rows -> [tokens of the batch], 0 elsewhere, without waiting for the device."""
    row = torch.zeros(len(micro.batch.tokens), device=values.device)
    return row.index_copy(0, to_device(micro.rows, values.device), values)
