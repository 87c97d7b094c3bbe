"""One rank of the trainer: log-probabilities, one optimizer step at a time, weights out, state for checkpoints.

Plain Python around Megatron-core: whoever calls it decides about processes. Everything here is collective: all ranks call
the same methods in the same order, from one thread each. Files of checkpoints are the business of rltool.checkpoints.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rltool.algorithms.batch import TrainBatch
from rltool.config.train import AlgorithmConfig, ModelConfig, OptimizerConfig, TrainerConfig
from rltool.engines.types import TensorMeta
from rltool.megatron import hf_weights, loss, state
from rltool.megatron import optimizer as optim
from rltool.megatron.logprobs import token_logprobs
from rltool.megatron.model import build_model, forward, global_names
from rltool.megatron.packing import pack
from rltool.megatron.runtime import Coordinates, Runtime
from rltool.models.registry import family_for, read_hf_config

F = TypeVar("F", bound=Callable[..., Any])


def _in_megatron(method: F) -> F:
    """Every public method that touches Megatron runs inside the runtime's mode."""

    @functools.wraps(method)
    def wrapped(self: MegatronTrainer, *args: Any, **kwargs: Any) -> Any:
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
        if trainer.torch_threads is not None:
            torch.set_num_threads(trainer.torch_threads)
        self.model_path = model.path
        self.hf_config = read_hf_config(model.path)
        self.family = family_for(self.hf_config)
        self.algorithm, self.temperature = algorithm, temperature
        self.dtype: torch.dtype = getattr(torch, model.dtype)
        self.runtime = Runtime(
            rank=rank,
            world_size=world_size,
            master_address=master_address,
            master_port=master_port,
            tensor_parallel=trainer.tensor_parallel,
            pipeline_parallel=trainer.pipeline_parallel,
            expert_parallel=trainer.expert_parallel,
            device=trainer.device,
            timeout=trainer.rendezvous_timeout,
            seed=seed,
        )
        self._reference: dict[str, Tensor] | None = None
        try:
            with self.runtime.mode():
                self._build(optimizer, total_optimizer_steps)
        except BaseException:
            self.runtime.close()
            raise

    def _build(self, optimizer: OptimizerConfig, total_optimizer_steps: int) -> None:
        self.gpt = build_model(self.family, self.coordinates, self.dtype, self.runtime.device)
        # A non-finite gradient is for train_step to see and skip, not for Megatron to stop at.
        gradients = DistributedDataParallelConfig(grad_reduce_in_fp32=True, check_for_nan_in_grad=False)
        self.ddp = DistributedDataParallel(self.gpt.config, gradients, self.gpt)
        # The loss is already divided by the global token count: gradients are summed over ranks and not scaled again.
        self.gpt.config.finalize_model_grads_func = lambda model, _tokens=None, **kwargs: finalize_model_grads(
            model, None, **kwargs
        )
        self.optimizer = optim.build_optimizer(self.ddp, optimizer, self.dtype)
        self.schedule = optim.build_schedule(self.optimizer, optimizer, total_optimizer_steps)

    @property
    def coordinates(self) -> Coordinates:
        return self.runtime.coordinates

    @property
    def layout(self) -> dict[str, int]:
        at = self.coordinates
        return {"tensor_parallel": at.tp_size, "pipeline_parallel": at.pp_size, "data_parallel": at.dp_size}

    @_in_megatron
    def load_hf_weights(self, path: Path) -> None:
        """Weights of a Hugging Face directory. UsageError for unknown, missing or misshapen tensors."""
        hf_weights.load_hf(self.gpt, self.family, path, self.runtime)
        self.weights_changed(initial=True)

    def weights_changed(self, *, initial: bool) -> None:
        """After the parameters were overwritten: refreshes fp32 master weights; `initial` also makes them the reference."""
        self.optimizer.reload_model_params()
        if initial and self.algorithm.kl_coef > 0:
            self._reference = {
                name: parameter.detach().to("cpu", copy=True) for name, parameter in global_names(self.gpt).items()
            }

    @contextmanager
    def _reference_weights(self) -> Iterator[None]:
        """Swaps the reference weights in; the policy's wait on the CPU meanwhile."""
        if self._reference is None:
            raise RuntimeError("no reference weights: algorithm.kl_coef is 0, or no weights were loaded yet")
        parameters = global_names(self.gpt)
        policy = {name: parameter.detach().to("cpu", copy=True) for name, parameter in parameters.items()}
        try:
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(self._reference[name])
            yield
        finally:
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(policy[name])

    @_in_megatron
    @torch.no_grad()
    def compute_logprobs(self, micro_batches: list[TrainBatch], *, reference: bool = False) -> list[Tensor] | None:
        """Per micro-batch [T] float32 on the CPU: log p(tokens[t] | before) at the run's temperature, 0 for first tokens.

        micro_batches: this data-parallel rank's; their number must be the same on every rank. Returns None except on the
        rank of each replica where `coordinates.returns_logprobs`. reference: with the weights that were loaded first.
        """

        def result(batch: TrainBatch, logits: Tensor, non_loss_data: bool = True) -> Tensor:
            rows = loss.predicted_rows(batch)
            values = torch.zeros(len(batch.tokens))
            if len(rows):
                logprobs, _ = self._token_logprobs(batch, logits, rows)
                values[rows] = logprobs.cpu()
            return values

        if reference:
            with self._reference_weights():
                results = self._run(micro_batches, result, forward_only=True)
        else:
            results = self._run(micro_batches, result, forward_only=True)
        return results if self.coordinates.returns_logprobs else None

    def _token_logprobs(self, batch: TrainBatch, logits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        device = self.runtime.device
        return token_logprobs(
            logits,
            batch.tokens.to(device),
            rows.to(device),
            temperature=self.temperature,
            vocab_size=self.family.vocab_size,
            group=self.runtime.tp_group,
        )

    def _run(self, micro_batches: list[TrainBatch], last: Callable[..., Any], *, forward_only: bool) -> list[Any]:
        """Megatron's schedule over the micro-batches; `last(batch, logits)` runs on the last pipeline stage."""
        device = self.runtime.device

        def forward_step(batches: Iterator[TrainBatch], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            batch = next(batches)
            output = forward(model, batch.tokens.to(device), pack(batch.lengths, device))
            return output, partial(last, batch)

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=self.ddp,
            num_microbatches=len(micro_batches),
            seq_length=max(len(batch.tokens) for batch in micro_batches),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    @_in_megatron
    def train_step(self, micro_batches: list[TrainBatch], *, global_loss_tokens: int) -> dict[str, float]:
        """One optimizer step on sum(loss_weights * per-token loss) / global_loss_tokens over all data-parallel ranks.

        micro_batches: this data-parallel rank's, equally many on every rank; global_loss_tokens: of all ranks together.
        A non-finite loss or gradient skips the update on all ranks: parameters, optimizer and schedule stay as they were.
        Returns metrics, equal on all ranks: train/loss, grad_norm, entropy, lr, loss_tokens, skipped (0 or 1), and for
        the policy loss clip_fraction, ratio_mean, and kl with a reference. Means are over the loss tokens.
        """

        def step_loss(batch: TrainBatch, logits: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
            rows = loss.loss_rows(batch)
            if len(rows) == 0:
                # Still part of the graph: earlier pipeline stages wait for this micro-batch's gradient.
                return logits.sum() * 0.0, torch.zeros((), dtype=torch.int), {}
            logprobs, entropy = self._token_logprobs(batch, logits, rows)
            total, sums = loss.micro_batch_loss(batch, rows, logprobs, entropy, self.algorithm)
            return total / global_loss_tokens, torch.zeros((), dtype=torch.int), sums

        if global_loss_tokens < 1:
            raise ValueError(f"global_loss_tokens is {global_loss_tokens}: a global batch without loss tokens cannot train")
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        sums = self._run(micro_batches, step_loss, forward_only=False)
        metrics = self._reduce(sums, global_loss_tokens)
        metrics["train/lr"] = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.prepare_grads()
        metrics["train/grad_norm"] = float(self.optimizer.get_grad_norm())
        broken = not (math.isfinite(metrics["train/loss"]) and math.isfinite(metrics["train/grad_norm"]))
        (skip,) = self.runtime.max_over_world([float(broken)])
        metrics["train/skipped"] = skip
        if not skip:
            self.optimizer.step()
            self.schedule.step(1)
        return metrics

    def _reduce(self, sums: list[dict[str, float]], global_loss_tokens: int) -> dict[str, float]:
        names = loss.metric_names(self.algorithm)
        at = self.coordinates
        local = [math.fsum(entry.get(name, 0.0) for entry in sums) if at.returns_logprobs else 0.0 for name in names]
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

    @_in_megatron
    def sharded_state(self, *, loading: bool, with_rng: bool = True) -> dict[str, Any]:
        """What a training checkpoint holds, for megatron.core.dist_checkpointing."""
        model = state.model_state(self.gpt)
        sharded = {"model": model, "optimizer": state.optimizer_state(self.optimizer, model, loading=loading)}
        if with_rng:
            sharded["rng"] = state.rng_state(self.runtime)
        if not loading:
            sharded["schedule"] = self.schedule.state_dict()
        return sharded

    @_in_megatron
    def restore(self, loaded: dict[str, Any]) -> None:
        """The inverse of `sharded_state`. Learning rate, betas and eps stay as configured, not as they were saved."""
        self.gpt.load_state_dict(loaded["model"])
        optim.keep_configured_values(loaded["optimizer"], self.optimizer)
        self.optimizer.load_state_dict(loaded["optimizer"])
        self.schedule.load_state_dict(loaded["schedule"])
        self.schedule.step(0)
        if "rng" in loaded:
            state.restore_rng(loaded["rng"])

    def parameter_hash(self) -> str:
        """sha256 over the bytes of all parameters of all ranks, the same on every rank. Depends on the layout of ranks."""
        digest = hashlib.sha256()
        for name, parameter in sorted(global_names(self.gpt).items()):
            digest.update(name.encode())
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        own = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8).to(self.runtime.device)
        everyone = [torch.empty_like(own) for _ in range(self.coordinates.world_size)]
        dist.all_gather(everyone, own)
        return hashlib.sha256(torch.cat(everyone).cpu().numpy().tobytes()).hexdigest()

    def close(self) -> None:
        """Leaves the process groups. Idempotent."""
        self.runtime.close()
