"""What the policy and the critic share: a model in training on one rank, its gradients, optimizer and schedule.

Everything here is collective: all ranks call the same methods in the same order, from one thread each.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from rltool.algorithms.batch import TrainBatch
from rltool.config.algorithm import AlgorithmConfig
from rltool.config.sections import OptimizerConfig, TrainerConfig
from rltool.errors import UsageError
from rltool.megatron import hf_weights, loss, state
from rltool.megatron import optimizer as optim
from rltool.megatron.collectives import sum_over_context_ranks
from rltool.megatron.fp8 import round_shard
from rltool.megatron.micro_batch import MicroBatch, prepare
from rltool.megatron.model import forward, global_names
from rltool.megatron.offload import PARTS, Offloader, Part, tensors_of
from rltool.megatron.pictures import VisionTower, place_pictures
from rltool.megatron.router_bias import RouterBiases
from rltool.megatron.runtime import Coordinates, Runtime, in_megatron, to_device
from rltool.models.base import Family, Parameter

MicroBatchLoss = Callable[..., tuple[Tensor, dict[str, Any]]]
"""f(micro_batch, *outputs) -> (the loss summed over micro_batch.rows, sums for metrics by name).

outputs: of `TrainedModel.training_outputs`.
"""


@dataclass(frozen=True)
class Setup:
    """What all models in training on one rank have in common. optimizer: of the model that is built with it."""

    runtime: Runtime
    trainer: TrainerConfig
    optimizer: OptimizerConfig
    algorithm: AlgorithmConfig
    dtype: torch.dtype


class TrainedModel(ABC):
    """One model in training. `gpt` is the model, `ddp` the same with its gradients' buffers around it.

    A subclass defines how it is built and what it computes from hidden states.
    """

    own_part: str | None = None
    """Attribute of a part of the model that its family does not have: no Hugging Face directory holds its weights."""

    rounded: Sequence[tuple[Parameter, Tensor]] = ()
    """This rank's shards that are rounded to FP8 (trainer.fake_quantization); set in `build`."""

    def __init__(self, setup: Setup, family: Family, *, total_optimizer_steps: int) -> None:
        """Weights are uninitialised. UsageError for a model that cannot be cut so, or a schedule that does not fit."""
        self.setup, self.family = setup, family
        self.runtime, self.dtype = setup.runtime, setup.dtype
        self.config, self.algorithm = setup.trainer, setup.algorithm
        with self.runtime.mode():
            self.gpt = self.build()
            self._build_optimizer(total_optimizer_steps)
        self._biases = RouterBiases(self.gpt, self.config.router_bias_update_rate)
        self._offloader = Offloader(lambda: tensors_of(self.ddp, self.optimizer), self.runtime.device)

    @abstractmethod
    def build(self) -> GPTModel:
        """The model on the runtime's device; its last pipeline stage gives hidden states."""

    @abstractmethod
    def outputs(self, micro: MicroBatch, hidden: Tensor) -> tuple[Tensor, ...]:
        """What the last pipeline stage makes of its hidden states: each [R] float32, of micro.rows.

        The same on all ranks of the stage. hidden: [T, hidden], or [T / tp, hidden] under sequence parallelism.
        """

    def training_outputs(self, micro: MicroBatch, hidden: Tensor) -> tuple[Tensor, ...]:
        """What the loss is made of: `outputs` first, then what it needs besides, [R, ...] each."""
        return self.outputs(micro, hidden)

    def inputs(self) -> Collection[str]:
        """The fields of a batch that this model reads beside its tokens."""
        return ()

    @cached_property
    def tower(self) -> VisionTower | None:
        """Of pictures, made with the first one; None: this rank's layers read no features."""
        pictures, layers = self.family.pictures, [cast(Any, layer) for layer in self.gpt.decoder.layers]
        if pictures is None or not (self.gpt.pre_process or layers[0].layer_number <= pictures.deep):
            return None
        return VisionTower(self.tower_path(), self.family, self.dtype, self.runtime.device)

    def tower_path(self) -> Path:
        """The directory of the tower. UsageError for a model that takes text alone."""
        raise UsageError(f"{type(self).__name__} takes text alone, and samples have pictures")

    @property
    def coordinates(self) -> Coordinates:
        """Where this rank stands."""
        return self.runtime.coordinates

    @property
    def trained_dtype(self) -> torch.dtype:
        """Of the parameters that have gradients."""
        return self.dtype

    def _build_optimizer(self, total_optimizer_steps: int) -> None:
        runtime, trainer, optimizer = self.runtime, self.config, self.setup.optimizer
        gradients = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            # A non-finite gradient is for `_step` to see and skip, not for Megatron to stop at.
            check_for_nan_in_grad=False,
            use_distributed_optimizer=trainer.distributed_optimizer,
            overlap_grad_reduce=trainer.overlap_grad_reduce and runtime.coordinates.layout.replica_size > 1,
        )
        self.ddp = DistributedDataParallel(self.gpt.config, gradients, self.gpt)
        if gradients.overlap_grad_reduce:
            # The schedule runs all micro-batches but the last in this context. Without it Megatron counts gradients
            # over all of them, and fails in the first step with another number of micro-batches than the step before.
            self.gpt.config.no_sync_func = self.ddp.no_sync
        # The loss is already divided by the global token count: gradients are summed over ranks and not scaled again.
        self.gpt.config.finalize_model_grads_func = lambda model, _tokens=None, **kwargs: finalize_model_grads(
            model, None, **kwargs
        )
        self.optimizer = optim.build_optimizer(
            self.ddp, optimizer, self.trained_dtype, distributed=trainer.distributed_optimizer
        )
        self.schedule = optim.build_schedule(self.optimizer, optimizer, total_optimizer_steps)

    # -- weights

    @in_megatron
    def load_hf_weights(self, path: Path) -> None:
        """Weights of a Hugging Face directory, but for `own_part`.

        UsageError for unknown or missing tensors, ShapeMismatch for misshapen ones.
        """
        hf_weights.load_hf(self.gpt, self.family, path, self.runtime, without=self.own_part)
        self.weights_changed(initial=True)

    def weights_changed(self, *, initial: bool = False) -> None:
        """After the parameters were overwritten: refreshes fp32 master weights. Call it inside the runtime's mode.

        initial: the run starts from these weights.
        """
        self.optimizer.reload_model_params()
        self.round_weights()

    def round_weights(self) -> None:
        """After parameters were overwritten: those of `rounded`. The optimizer's float32 masters stay unrounded, so
        small steps add up. Gradients taken at the rounded weights are applied to the masters (straight-through
        estimator, Bengio et al. 2013, arXiv:1308.3432). In float32 there are no masters: a rule refuses that."""
        for parameter, shard in self.rounded:
            round_shard(parameter, shard.detach(), self.coordinates.layout.tp)

    # -- memory

    @property
    def away(self) -> Sequence[Part]:
        """What `offload` has put away."""
        return self._offloader.away

    def offload(self, parts: Sequence[Part] = PARTS) -> None:
        """Give these parts' memory on the device to others, until `onload`. No collective; parts that are away stay
        so. An optimizer that has made no step yet gets its moments, which are zeros, at once: the host's memory for
        them is then allocated with the rest, and not in the first step."""
        if "optimizer" in parts and "optimizer" not in self.away:
            optim.make_moments(self.optimizer)
        self._offloader.offload(parts)

    def give_back(self, parts: Sequence[Part]) -> None:
        """In place of `offload` where nothing needs to leave: the device's memory that torch has kept of a step's
        activations. Moments are made before there are any, or would lie between them."""
        if "optimizer" in parts:
            optim.make_moments(self.optimizer)
        self._offloader.give_back()

    def onload(self, parts: Sequence[Part] = PARTS) -> None:
        """Exactly as they were. Raises DeviceFull; parts that are there stay so."""
        self._offloader.onload(parts)

    # -- forward and backward

    def _run(
        self,
        micro_batches: list[TrainBatch],
        rows_of: Callable[[TrainBatch], Tensor],
        last: Callable[..., Any],
        *,
        forward_only: bool,
    ) -> list[Any]:
        """Megatron's schedule over the micro-batches; `last(micro_batch, hidden)` runs on the last pipeline stage.

        Each is prepared when its turn comes, while a GPU still computes the one before. Not in a pipeline: a batch that
        is refused would leave other stages waiting for this one.
        """
        prepared = self._prepare(micro_batches, rows_of)
        if self.coordinates.layout.pp > 1:
            prepared = iter(list(prepared))

        def forward_step(batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            micro = next(batches)
            return forward(model, micro.tokens, micro.packed), partial(last, micro)

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=prepared,
            model=self.ddp,
            num_microbatches=len(micro_batches),
            seq_length=max(len(batch.tokens) for batch in micro_batches),  # stages exchange the true lengths
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _prepare(
        self, micro_batches: list[TrainBatch], rows_of: Callable[[TrainBatch], Tensor]
    ) -> Iterator[MicroBatch]:
        at, device, inputs = self.coordinates, self.runtime.device, self.inputs()
        cut, shared = self.config.sequence_parallel, self.config.shared_prefixes
        for batch in micro_batches:
            micro = prepare(batch, rows_of(batch), at, device, sequence_parallel=cut, inputs=inputs, shared=shared)
            if batch.picture_places is not None:
                place_pictures(batch, micro.packed, self.family, at, self.tower, sequence_parallel=cut)
            yield micro

    def _states(self, micro: MicroBatch, hidden: Tensor, *, gradient_in_parts: bool) -> Tensor:
        """[H, hidden]: the states that predict those of micro.rows which fall to this rank.

        hidden: as for `outputs`. gradient_in_parts: what follows is cut over tensor-parallel ranks, so that each comes
        back with its part of the gradient, and the parts are summed; else each comes back with all of it.
        """
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=gradient_in_parts)
            return hidden[micro.sources]
        states = hidden[micro.sources]
        return copy_to_tensor_model_parallel_region(states) if gradient_in_parts else states

    def _on_all_context_ranks(self, micro: MicroBatch, *values: Tensor) -> tuple[Tensor, ...]:
        """[H, ...] of this context-parallel rank's tokens, each -> [R, ...] of all micro.rows. Of one shape and dtype.

        Every rank goes on to the whole loss, so that losses over sequences need not know how these are cut.
        """
        if micro.repeats is not None:
            return tuple(value[micro.repeats] for value in values)
        if self.coordinates.layout.cp == 1:
            return values
        spread = torch.stack(values)
        if micro.held is not None:
            whole = spread.new_zeros(len(values), len(micro.rows), *spread.shape[2:])
            spread = whole.index_copy(1, micro.held, spread)
        return sum_over_context_ranks(spread, self.runtime.cp_group).unbind()

    def _compute(
        self, micro_batches: list[TrainBatch], rows_of: Callable[[TrainBatch], Tensor], *, count: int = 1
    ) -> list[Tensor] | None:
        """Per micro-batch [count, T] float32 on the CPU: the first `count` of `outputs` in the rows of `rows_of`, 0
        elsewhere.

        micro_batches: this data-parallel rank's; their number must be the same on every rank. Returns None except on
        the rank of each replica where `coordinates.returns_logprobs`.
        """

        def result(micro: MicroBatch, hidden: Tensor, non_loss_data: bool = True) -> Tensor:
            return torch.stack([in_row(micro, values) for values in self.outputs(micro, hidden)[:count]])

        rows = self._run(micro_batches, rows_of, result, forward_only=True)
        return [values.cpu() for values in rows] if self.coordinates.returns_logprobs else None

    def _gradients(
        self, micro_batches: list[TrainBatch], loss_of: MicroBatchLoss, names: list[str], *, global_loss_tokens: int
    ) -> tuple[list[Tensor], dict[str, float]]:
        """Gradients of the sum of `loss_of` over the global batch, divided by global_loss_tokens.

        micro_batches: as for `_compute`. Returns per micro-batch [T] float32 on the device, on the last pipeline stage:
        the first of `outputs` of the loss tokens, 0 elsewhere; and the sums over the world of what `loss_of` returns
        under `names`, equal on all ranks. ValueError for a global batch without loss tokens.
        """
        if global_loss_tokens < 1:
            raise ValueError(f"global_loss_tokens is {global_loss_tokens}: without loss tokens nothing can be trained")
        rows: list[Tensor] = []

        def step_loss(micro: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            outputs = self.training_outputs(micro, hidden)
            rows.append(in_row(micro, outputs[0].detach()))
            count = torch.zeros((), dtype=torch.int)
            if len(micro.rows) == 0:
                # Still part of the graph: earlier pipeline stages wait for this micro-batch's gradient.
                return outputs[0].sum() * 0.0, count, {}
            total, sums = loss_of(micro, *outputs)
            return total / global_loss_tokens, count, sums

        self.discard_gradients()
        entries = self._run(micro_batches, loss.loss_rows, step_loss, forward_only=False)
        # Of the ranks that have the same sums one counts.
        counted = entries if self.coordinates.returns_logprobs else []
        local = [math.fsum(float(entry.get(name, 0.0)) for entry in counted) for name in names]
        return rows, dict(zip(names, self.runtime.sum_over_world(local), strict=True))

    @in_megatron
    def discard_gradients(self) -> None:
        """Forgets the gradients at hand, as if they had not been computed."""
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._biases.forget()

    def _step(self, loss: float) -> tuple[dict[str, float], bool]:
        """One optimizer step with the gradients at hand: (lr and grad_norm, whether it was made), equal on all ranks.

        A non-finite loss or gradient on any rank skips it on all: parameters, optimizer and schedule do not change.
        """
        metrics = {"lr": float(self.optimizer.param_groups[0]["lr"])}
        self.optimizer.prepare_grads()
        metrics["grad_norm"] = float(self.optimizer.get_grad_norm())
        broken = not (math.isfinite(loss) and math.isfinite(metrics["grad_norm"]))
        (skip,) = self.runtime.max_over_world([float(broken)])
        if not skip:
            self.optimizer.step()
            self.round_weights()
            self.schedule.step(1)
            self._biases.move()
        return metrics, not skip

    # -- state

    def model_state(self) -> dict[str, Any]:
        """The weights that training changes, for megatron.core.dist_checkpointing."""
        return state.model_state(self.gpt)

    def load_model_state(self, loaded: dict[str, Any]) -> None:
        """What was loaded in the places of `model_state`."""
        self.gpt.load_state_dict(loaded)
        self.round_weights()

    @in_megatron
    def sharded_state(self, *, loading: bool) -> dict[str, Any]:
        """Weights, optimizer and schedule, for megatron.core.dist_checkpointing."""
        model = self.model_state()
        sharded = {"model": model, "optimizer": state.optimizer_state(self.optimizer, model, loading=loading)}
        if not loading:
            sharded["schedule"] = self.schedule.state_dict()
        return sharded

    @in_megatron
    def restore(self, loaded: dict[str, Any]) -> None:
        """The inverse of `sharded_state`. Learning rate, betas and eps stay as configured, not as they were saved."""
        self.load_model_state(loaded["model"])
        of_optimizer = optim.chained_as(loaded["optimizer"], self.optimizer)
        optim.keep_configured_values(of_optimizer, self.optimizer)
        self.optimizer.load_state_dict(of_optimizer)
        self.schedule.load_state_dict(loaded["schedule"])
        self.schedule.step(0)

    @in_megatron
    def parameter_hash(self) -> str:
        """sha256 over all parameters of all ranks, the same on every rank. Depends on the layout of ranks."""
        digest = hashlib.sha256()
        for name, parameter in sorted(global_names(self.gpt).items()):
            digest.update(name.encode())
            copy = parameter.detach().to("cpu", copy=True)  # numpy keeps what it borrows from being offloaded
            digest.update(copy.contiguous().view(torch.uint8).numpy().tobytes())
        own = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8).to(self.runtime.device)
        everyone = [torch.empty_like(own) for _ in range(self.coordinates.layout.world_size)]
        dist.all_gather(everyone, own)
        return hashlib.sha256(torch.cat(everyone).cpu().numpy().tobytes()).hexdigest()


def in_row(micro: MicroBatch, values: Tensor) -> Tensor:
    """[R, ...] values of micro.rows -> [tokens of the batch, ...], 0 elsewhere, without waiting for the device."""
    row = values.new_zeros(len(micro.batch.tokens), *values.shape[1:])
    return row.index_copy(0, to_device(micro.rows, values.device), values)


def first_of(computed: list[Tensor] | None) -> list[Tensor] | None:
    """[count, T] per micro-batch -> the first output's [T]."""
    return None if computed is None else [values[0] for values in computed]
