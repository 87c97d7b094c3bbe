"""One rank of the trainer: log-probabilities, one optimizer step at a time, weights out, state for checkpoints.

Plain Python around Megatron-core: whoever calls it decides about processes. Everything here is collective: all ranks call
the same methods in the same order, from one thread each. Files of checkpoints are the business of rltool.checkpoints.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from rltool.algorithms.batch import TrainBatch, Weights
from rltool.config.train import AlgorithmConfig, ModelConfig, OptimizerConfig, TrainerConfig
from rltool.engines.types import TensorMeta
from rltool.megatron import hf_weights, loss, state
from rltool.megatron.collectives import sum_over_context_ranks
from rltool.megatron.host_memory import room_for
from rltool.megatron.kernels import compile_on_cuda
from rltool.megatron.micro_batch import MicroBatch, prepare
from rltool.megatron.model import build_model, global_names, output_hidden_states, output_weight
from rltool.megatron.output_head import head_logprobs
from rltool.megatron.runtime import Coordinates, Runtime
from rltool.megatron.threads import limit_threads, wanted_threads
from rltool.megatron.trained import TrainedModel, in_row
from rltool.models.registry import family_for, read_hf_config

F = TypeVar("F", bound=Callable[..., Any])


def in_megatron(method: F) -> F:
    """A method of something with a `runtime` that touches Megatron: it runs inside the runtime's mode."""

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.runtime.mode():
            return method(self, *args, **kwargs)

    return wrapped  # type: ignore[return-value]


class MegatronTrainer:
    """Model, optimizer and schedule of one rank. After construction: `load_weights`, then anything else."""

    def __init__(
        self,
        model: ModelConfig,
        trainer: TrainerConfig,
        optimizer: OptimizerConfig,
        algorithm: AlgorithmConfig,
        *,
        rank: int,
        world_size: int,
        master_address: str,
        master_port: int,
        total_optimizer_steps: int,
        seed: int,
        temperature: float,
    ) -> None:
        """Joins the other ranks at master_address:master_port and builds the model with uninitialised weights.

        temperature: that of the rollouts; logits are divided by it everywhere (1.0 for supervised training).
        Raises UsageError (model or layout that cannot be built) and RendezvousFailed.
        """
        on_gpu = trainer.device != "cpu" and torch.cuda.is_available()
        ranks_here = min(world_size, torch.cuda.device_count()) if on_gpu else world_size
        limit_threads(wanted_threads(trainer.torch_threads, on_gpu=on_gpu, ranks_on_host=ranks_here))
        self.model_path = model.path
        self.hf_config = read_hf_config(model.path)
        self.family = family_for(self.hf_config)
        self.config, self.algorithm, self.temperature = trainer, algorithm, temperature
        self.dtype: torch.dtype = getattr(torch, model.dtype)
        self.runtime = Runtime(
            rank=rank,
            world_size=world_size,
            master_address=master_address,
            master_port=master_port,
            tensor_parallel=trainer.tensor_parallel,
            pipeline_parallel=trainer.pipeline_parallel,
            context_parallel=trainer.context_parallel,
            expert_parallel=trainer.expert_parallel,
            device=trainer.device,
            timeout=trainer.rendezvous_timeout,
            seed=seed,
        )
        self._frozen: dict[str, dict[str, Tensor]] = {}
        self._waiting: dict[str, Tensor] | None = None
        try:
            with self.runtime.mode():
                self._build(optimizer, total_optimizer_steps)
        except BaseException:
            self.runtime.close()
            raise

    def _build(self, optimizer: OptimizerConfig, total_optimizer_steps: int) -> None:
        compile_on_cuda(self.config.compile)
        self.gpt = build_model(self.family, self.coordinates, self.dtype, self.runtime.device, self.config)
        output_hidden_states(self.gpt)
        self.trained = TrainedModel(self.gpt, optimizer, self.runtime, self.dtype, self.config, total_optimizer_steps=total_optimizer_steps)

    @property
    def coordinates(self) -> Coordinates:
        return self.runtime.coordinates

    @property
    def layout(self) -> dict[str, int]:
        """How ranks share the work; stands in the manifest of a checkpoint."""
        at = self.coordinates
        return {
            "tensor_parallel": at.tp_size,
            "pipeline_parallel": at.pp_size,
            "context_parallel": at.cp_size,
            "expert_parallel": at.ep_size,
            "data_parallel": at.dp_size,
            "distributed_optimizer": int(self.config.distributed_optimizer),
        }

    @in_megatron
    def load_hf_weights(self, path: Path) -> None:
        """Weights of a Hugging Face directory. UsageError for unknown, missing or misshapen tensors."""
        hf_weights.load_hf(self.gpt, self.family, path, self.runtime)
        self.weights_changed(initial=True)

    def weights_changed(self, *, initial: bool) -> None:
        """After the parameters were overwritten: refreshes fp32 master weights; `initial` also makes them the reference."""
        self.trained.optimizer.reload_model_params()
        if initial and self.algorithm.uses_reference:
            self._frozen["reference"] = self._copy_of_weights()

    @in_megatron
    def load_teacher(self, load: Callable[[], None]) -> None:
        """Keeps on the CPU, as the teacher, what `load` writes into the model; the policy's weights are put back after it."""
        with self._policy_put_back():
            load()
            self._frozen["teacher"] = self._copy_of_weights()

    def _copy_of_weights(self, into: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """On the CPU, from a GPU in memory that it copies to and from at full speed. into: an earlier copy, which is overwritten."""
        pinned = self.runtime.device.type == "cuda"
        parameters = global_names(self.gpt)
        copies = into or room_for(parameters, pinned=pinned)
        with torch.no_grad():
            for name, parameter in parameters.items():
                copies[name].copy_(parameter, non_blocking=pinned)
        if pinned:
            torch.cuda.current_stream().synchronize()
        return copies

    def _put_weights(self, weights: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in global_names(self.gpt).items():
                parameter.copy_(weights[name], non_blocking=True)

    @contextmanager
    def _policy_put_back(self) -> Iterator[None]:
        """The policy's weights wait on the CPU, whatever is done to the model's meanwhile; the optimizer's copies stay."""
        # Kept for the next time: pinning memory takes longer than the copies.
        self._waiting = self._copy_of_weights(self._waiting)
        try:
            yield
        finally:
            self._put_weights(self._waiting)

    @contextmanager
    def _with_weights(self, weights: Weights) -> Iterator[None]:
        """Swaps frozen weights in, and the policy's back."""
        if weights == "policy":
            yield
            return
        if weights not in self._frozen:
            raise RuntimeError(f"no {weights} weights: the configuration uses none, or they were not loaded yet")
        with self._policy_put_back():
            self._put_weights(self._frozen[weights])
            yield

    @in_megatron
    @torch.no_grad()
    def compute_logprobs(self, micro_batches: list[TrainBatch], *, weights: Weights = "policy") -> list[Tensor] | None:
        """Per micro-batch [T] float32 on the CPU: log p(tokens[t] | before) at the run's temperature, 0 for first tokens.

        micro_batches: this data-parallel rank's; their number must be the same on every rank. Returns None except on the
        rank of each replica where `coordinates.returns_logprobs`. weights: the policy's; the reference's, which are those that
        were loaded first; or the teacher's. RuntimeError for frozen weights that were not loaded.
        """

        def result(micro: MicroBatch, hidden: Tensor, non_loss_data: bool = True) -> Tensor:
            logprobs, _ = self._token_logprobs(micro, hidden)
            return in_row(micro, logprobs)

        prepared = self._prepare(micro_batches, loss.predicted_rows)
        with self._with_weights(weights):
            results = self.trained.run(prepared, result, forward_only=True)
        return [values.cpu() for values in results] if self.coordinates.returns_logprobs else None

    def _prepare(self, micro_batches: list[TrainBatch], rows_of: Callable[[TrainBatch], Tensor]) -> list[MicroBatch]:
        at, device, cut = self.coordinates, self.runtime.device, self.config.sequence_parallel
        return [prepare(batch, rows_of(batch), at, device, sequence_parallel=cut) for batch in micro_batches]

    def _token_logprobs(self, micro: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of micro.rows, [R] float32 each, the same on all ranks of a replica's last stage.

        hidden: [T, hidden], or [T / tp, hidden] under sequence parallelism.
        """
        if self.config.sequence_parallel:
            states = gather_from_sequence_parallel_region(hidden)[micro.sources]
        else:
            states = copy_to_tensor_model_parallel_region(hidden[micro.sources])
        both = head_logprobs(
            states,
            output_weight(self.gpt),
            micro.targets,
            temperature=self.temperature,
            vocab_size=self.family.vocab_size,
            group=self.runtime.tp_group,
            chunk=self.config.head_chunk_tokens,
            keep=not self.config.recompute_head,
        )
        if self.coordinates.cp_size == 1:
            return both
        # Every rank goes on to the whole loss, so that losses over sequences need not know how these are cut.
        spread = states.new_zeros(2, len(micro.rows), dtype=torch.float32)
        spread = spread.index_copy(1, micro.held, torch.stack(both)) if micro.held is not None else torch.stack(both)
        logprobs, entropy = sum_over_context_ranks(spread, self.runtime.cp_group)
        return logprobs, entropy

    def train_step(self, micro_batches: list[TrainBatch], *, global_loss_tokens: int) -> dict[str, float]:
        """`forward_backward` and `optimizer_step` in one: metrics of both."""
        _, metrics = self.forward_backward(micro_batches, global_loss_tokens=global_loss_tokens)
        return metrics | self.optimizer_step()

    @in_megatron
    def forward_backward(
        self, micro_batches: list[TrainBatch], *, global_loss_tokens: int, fresh: bool = False
    ) -> tuple[list[Tensor] | None, dict[str, float]]:
        """Gradients of sum(loss_weights * per-token loss) / global_loss_tokens over all data-parallel ranks. No weight changes.

        micro_batches: this data-parallel rank's, equally many on every rank; global_loss_tokens: of all ranks together;
        fresh: the policy that sampled is the one that is trained now, so its log-probabilities are the old ones.
        Returns the log-probabilities of the loss tokens as `compute_logprobs` does, 0 elsewhere, and metrics, equal on all
        ranks: train/loss, entropy, loss_tokens, and for the policy loss those of algorithms/objective.py. Means are over the
        loss tokens. Then comes `optimizer_step` or `discard_gradients`.
        """
        logprobs_of: list[Tensor] = []

        def step_loss(micro: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            logprobs, entropy = self._token_logprobs(micro, hidden)
            logprobs_of.append(in_row(micro, logprobs.detach()))
            count = torch.zeros((), dtype=torch.int)
            if len(micro.rows) == 0:
                # Still part of the graph: earlier pipeline stages wait for this micro-batch's gradient.
                return logprobs.sum() * 0.0, count, {}
            total, sums = loss.micro_batch_loss(micro.batch, micro.rows, logprobs, entropy, self.algorithm, fresh=fresh)
            return total / global_loss_tokens, count, sums

        if global_loss_tokens < 1:
            raise ValueError(f"global_loss_tokens is {global_loss_tokens}: a global batch without loss tokens cannot train")
        self.discard_gradients()
        sums = self.trained.run(self._prepare(micro_batches, loss.loss_rows), step_loss, forward_only=False)
        metrics = self._reduce(sums, global_loss_tokens)
        self._loss = metrics["train/loss"]
        return [values.cpu() for values in logprobs_of] if self.coordinates.returns_logprobs else None, metrics

    @in_megatron
    def optimizer_step(self) -> dict[str, float]:
        """One step with the gradients of the last `forward_backward`.

        A non-finite loss or gradient skips the update on all ranks: parameters, optimizer and schedule stay as they were.
        Returns train/lr, train/grad_norm, train/skipped (0 or 1), equal on all ranks.
        """
        metrics, made = self.trained.step(self._loss)
        return {f"train/{name}": value for name, value in metrics.items()} | {"train/skipped": float(not made)}

    @in_megatron
    def discard_gradients(self) -> None:
        """Forgets what `forward_backward` left, as if it had not been."""
        self.trained.discard_gradients()

    def _reduce(self, sums: list[dict[str, Any]], global_loss_tokens: int) -> dict[str, float]:
        names = loss.metric_names(self.algorithm)
        at = self.coordinates
        local = [math.fsum(float(entry.get(name, 0.0)) for entry in sums) if at.returns_logprobs else 0.0 for name in names]
        total = dict(zip(names, self.runtime.sum_over_world(local), strict=True))
        tokens = total.pop("loss_tokens")
        metrics = {"train/loss": total.pop("loss") / global_loss_tokens, "train/loss_tokens": tokens}
        return metrics | {f"train/{name}": value / max(tokens, 1) for name, value in total.items()}

    def weight_metadata(self) -> list[TensorMeta]:
        """HF names, dtypes and shapes, in the order of `export_weights`."""
        return hf_weights.weight_metadata(self.family, self.dtype)

    def export_weights(self) -> Iterator[tuple[TensorMeta, Tensor | None]]:
        """HF tensors one by one: on global rank 0 the tensor, None elsewhere. Every rank of data-parallel rank 0 must run the
        iterator to its end (others may). Tensors may alias parameters: use them before the next step."""
        return hf_weights.export_weights(self.gpt, self.family, self.dtype, self.runtime)

    @in_megatron
    def sharded_state(self, *, loading: bool, with_rng: bool = True) -> dict[str, Any]:
        """What a training checkpoint holds, for megatron.core.dist_checkpointing."""
        sharded = self.trained.sharded_state(loading=loading)
        if with_rng:
            sharded["rng"] = state.rng_state(self.runtime)
        return sharded

    @in_megatron
    def restore(self, loaded: dict[str, Any]) -> None:
        """The inverse of `sharded_state`. Learning rate, betas and eps stay as configured, not as they were saved."""
        self.trained.restore(loaded)
        if "rng" in loaded:
            state.restore_rng(loaded["rng"])

    def parameter_hash(self) -> str:
        """sha256 over the bytes of all parameters of all ranks, the same on every rank. Depends on the layout of ranks."""
        return self.trained.parameter_hash()

    def close(self) -> None:
        """Leaves the process groups. Idempotent."""
        self.runtime.close()
