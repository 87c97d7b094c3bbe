"""One rank of the trainer: log-probabilities, one optimizer step at a time, weights out, state for checkpoints.

Plain Python around Megatron-core: its caller decides about processes. Everything here is collective: all ranks
call the same methods in the same order, from one thread each. Files of checkpoints are the business of
rltool.checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from rltool.algorithms.batch import TrainBatch, Weights
from rltool.config.algorithm import AlgorithmConfig
from rltool.config.sections import LoraConfig, ModelConfig, OptimizerConfig, TrainerConfig
from rltool.engines.types import TensorMeta
from rltool.megatron import hf_weights, loss, state
from rltool.megatron.exact import exact_head_logprobs, use_engine_kernels
from rltool.megatron.export_plan import ExportPlan, Stream, adapter_plan, full_plan
from rltool.megatron.fp8 import rounded_parameters
from rltool.megatron.gathering import gather_bytes
from rltool.megatron.host_memory import room_for
from rltool.megatron.kernels import compile_on_cuda
from rltool.megatron.lora import Adapters, MergedWeights, attach
from rltool.megatron.micro_batch import MicroBatch
from rltool.megatron.model import build_model, global_names, output_hidden_states, output_weight
from rltool.megatron.output_head import head_logprobs
from rltool.megatron.routing_replay import REPLAYED, RoutingReplay
from rltool.megatron.runtime import Rendezvous, Runtime, in_megatron
from rltool.megatron.shards import OwnPart
from rltool.megatron.threads import limit_threads, wanted_threads
from rltool.megatron.topk_head import TopK, head_logprobs_of, head_topk, kept_distribution
from rltool.megatron.trained import Setup, TrainedModel, first_of, in_row
from rltool.models.adapters import PART
from rltool.models.base import Parameter
from rltool.models.registry import family_for, read_hf_config


@dataclass(frozen=True)
class TrainingRun:
    """Facts of the run that a rank needs and that are no setting of the trainer's.

    total_optimizer_steps: of the policy in the whole run, for the learning-rate schedule
    seed: of everything random in the trainer
    temperature: at which the rollouts are sampled
    """

    total_optimizer_steps: int
    seed: int = 0
    temperature: float = 1.0


class MegatronTrainer(TrainedModel):
    """The policy of one rank, and the runtime that every model of this rank shares.

    After construction: `load_hf_weights` or `rltool.checkpoints.torch_dist.load_weights`, then anything else.
    export_plan: what is sent to engines and saved for Hugging Face.
    """

    def __init__(
        self,
        model: ModelConfig,
        trainer: TrainerConfig,
        optimizer: OptimizerConfig,
        algorithm: AlgorithmConfig,
        rendezvous: Rendezvous,
        run: TrainingRun,
        lora: LoraConfig = LoraConfig(),
    ) -> None:
        """Joins the other ranks of trainer.layout and builds the model with uninitialised weights; with `lora` these
        are frozen, and adapters beside them are trained.

        Logits are divided by `algorithm.logits_temperature` everywhere.
        Raises UsageError (model or layout that cannot be built) and RendezvousFailed.
        """
        on_gpu = trainer.device != "cpu" and torch.cuda.is_available()
        world_size = trainer.world_size
        ranks_here = min(world_size, torch.cuda.device_count()) if on_gpu else world_size
        limit_threads(wanted_threads(trainer.torch_threads, on_gpu=on_gpu, ranks_on_host=ranks_here))
        self.model_path = model.path
        self.hf_config = read_hf_config(model.path)
        self.temperature = algorithm.logits_temperature(run.temperature)
        family, dtype = family_for(self.hf_config, model.family), getattr(torch, model.dtype)
        self.export_plan = full_plan(family, dtype)
        self.lora = lora
        self.adapters: Adapters | None = None
        self.adapter_plan = adapter_plan(family, lora, str(model.path)) if lora.rank else None
        self._seed = run.seed
        runtime = Runtime(trainer.layout, rendezvous, device=trainer.device, seed=run.seed)
        self._frozen: dict[str, dict[str, Tensor]] = {}
        self._replay: RoutingReplay | None = None
        self._replays = algorithm.routing_replay
        self._waiting: dict[Weights, dict[str, Tensor]] = {}
        try:
            super().__init__(
                Setup(runtime, trainer, optimizer, algorithm, dtype),
                family,
                total_optimizer_steps=run.total_optimizer_steps,
            )
        except BaseException:
            runtime.close()
            raise

    def build(self) -> GPTModel:
        """The family's model; from `output_weight` on `outputs` computes."""
        compile_on_cuda(self.config.compile)
        model = build_model(self.family, self.coordinates, self.dtype, self.runtime.device, self.config)
        output_hidden_states(model)
        if self.algorithm.exact:
            use_engine_kernels(model, self.model_path, self.family.architecture)
        if self.config.fake_quantization:
            found = rounded_parameters(self.family, self.coordinates.layout.tp)
            self.rounded = [(found[name], shard) for name, shard in global_names(model).items() if name in found]
        if self.lora.rank:
            self.adapters = attach(model, self.family, self.lora, self.coordinates, seed=self._seed)
            self.own_part = PART
        if self.algorithm.routing_replay:
            cut, at = self.config.sequence_parallel, self.coordinates
            self._replay = RoutingReplay(
                model, layers=self.family.num_layers, tp_rank=at.tp_rank if cut else 0,
                tp_size=at.layout.tp if cut else 1,
            )  # fmt: skip
        return model

    def inputs(self) -> Collection[str]:
        """The experts that the engines chose, where the policy is to replay them."""
        return (REPLAYED,) if self._replays else ()

    def tower_path(self) -> Path:
        """Frozen: that of the model which the run began with."""
        return self.model_path

    def weights_changed(self, *, initial: bool = False) -> None:
        """As for every model; initial weights also become the reference, where the loss has one."""
        super().weights_changed(initial=initial)
        if initial and self.algorithm.uses_reference:
            self._frozen["reference"] = self._copy_of_weights("reference")

    @property
    def trained_dtype(self) -> torch.dtype:
        """Of adapters float32; they need no master copies."""
        return self.dtype if self.adapters is None else torch.float32

    @in_megatron
    def load_adapters(self, read: Callable[[Parameter], Tensor]) -> None:
        """Adapters to begin with: `read` gives the merged tensor of each of their parameters. With them the model
        becomes the reference, where the loss has one."""
        assert self.adapters is not None
        self.adapters.load(read)
        self.weights_changed(initial=True)

    @in_megatron
    def update_reference(self) -> None:
        """The policy's present weights become the reference."""
        self._frozen["reference"] = self._copy_of_weights("reference", self._frozen["reference"])

    @in_megatron
    def load_teacher(self, load: Callable[[], None]) -> None:
        """Keeps on the CPU, as the teacher, what `load` writes into the model; then puts the policy's weights back."""
        with self._policy_put_back("teacher"):
            load()
            self._frozen["teacher"] = self._copy_of_weights("teacher")

    def _replaced_by(self, weights: Weights) -> dict[str, torch.nn.Parameter]:
        """The parameters, by global name, in whose place frozen weights are put. Beside adapters a teacher replaces the
        model, and the reference the adapters; or nothing, where it is the model without them."""
        parameters = global_names(self.gpt)
        if self.adapters is None:
            return parameters
        if weights == "reference" and self._model_is_reference:
            return {}
        return {name: p for name, p in parameters.items() if p.requires_grad == (weights == "reference")}

    @property
    def _model_is_reference(self) -> bool:
        return bool(self.lora.rank) and self.lora.init is None and not self.algorithm.reference_update_steps

    def _copy_of_weights(self, weights: Weights, into: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """What is in the model in the place of these weights: on the CPU, from a GPU in memory that it copies to and
        from at full speed.

        into: an earlier copy, which is overwritten.
        """
        pinned = self.runtime.device.type == "cuda"
        parameters = self._replaced_by(weights)
        copies = into or room_for(parameters, pinned=pinned)
        with torch.no_grad():
            for name, parameter in parameters.items():
                copies[name].copy_(parameter, non_blocking=pinned)
        if pinned:
            torch.cuda.current_stream().synchronize()
        return copies

    def _put_weights(self, weights: dict[str, Tensor]) -> None:
        parameters = global_names(self.gpt)
        with torch.no_grad():
            for name, copy in weights.items():
                parameters[name].copy_(copy, non_blocking=True)

    @contextmanager
    def _policy_put_back(self, weights: Weights) -> Iterator[None]:
        """The policy's weights wait on the CPU while these are in the model; the optimizer's copies stay."""
        # Kept for the next time: pinning memory takes longer than the copies.
        place = "policy" if self.adapters is None else weights
        self._waiting[place] = self._copy_of_weights(weights, self._waiting.get(place))
        try:
            yield
        finally:
            self._put_weights(self._waiting[place])

    @contextmanager
    def _with_weights(self, weights: Weights) -> Iterator[None]:
        """Swaps frozen weights in, and the policy's back."""
        if weights == "policy":
            yield
            return
        if weights not in self._frozen:
            raise RuntimeError(f"no {weights} weights: the configuration uses none, or they were not loaded yet")
        off = self.adapters is not None and (weights == "teacher" or self._model_is_reference)
        with self._policy_put_back(weights), self.adapters.off() if off and self.adapters else nullcontext():
            self._put_weights(self._frozen[weights])
            self._replays = False  # these would choose other experts than the policy that sampled
            try:
                yield
            finally:
                self._replays = self.algorithm.routing_replay

    @in_megatron
    @torch.no_grad()
    def compute_logprobs(self, micro_batches: list[TrainBatch], *, weights: Weights = "policy") -> list[Tensor] | None:
        """Per micro-batch [T] float32 on the CPU: log p(tokens[t] | before) at `temperature`, 0 for first tokens.

        micro_batches: this data-parallel rank's; their number must be the same on every rank. Returns None except on
        the rank of each replica where `coordinates.returns_logprobs`. weights: the policy's; the reference's, which are
        those that were loaded first; or the teacher's. RuntimeError for frozen weights that were not loaded. With
        algorithm.routing_replay the policy takes the experts that the micro-batches name, frozen weights their own.
        """
        with self._with_weights(weights):
            return first_of(self._compute(micro_batches, loss.predicted_rows))

    @in_megatron
    def warm_up(self) -> None:
        """Compute on a few tokens what every step computes: attention's and other kernels are compiled then, which on a
        GPU takes 10 to 30 s the first time. No state changes: no optimizer step is made, and the gradients are
        discarded."""
        batch = probe_batch(self.family.vocab_size)
        self.compute_logprobs([batch])
        if self.inputs() or self.algorithm.uses_teacher_topk:  # the loss would need fields that this batch lacks
            return
        self._gradients(
            [batch], lambda micro, *outputs: (outputs[0].sum(), {}), [], global_loss_tokens=batch.num_loss_tokens
        )
        self.discard_gradients()

    @in_megatron
    @torch.no_grad()
    def compute_logprobs_and_entropies(self, micro_batches: list[TrainBatch]) -> list[Tensor] | None:
        """As `compute_logprobs` of the policy, but [2, T]: below the log-probabilities the entropy of the distribution
        that each token was drawn from, in nats."""
        return self._compute(micro_batches, loss.predicted_rows, count=2)

    @in_megatron
    @torch.no_grad()
    def compute_teacher_topk(self, micro_batches: list[TrainBatch]) -> list[dict[str, Tensor]] | None:
        """Per micro-batch, as fields of it, the teacher's algorithm.distill_top_k most probable tokens at each token
        with a loss, at `temperature`, [T, K] on the CPU; 0 elsewhere. Ranks and errors as for `compute_logprobs`."""

        def result(micro: MicroBatch, hidden: Tensor, non_loss_data: bool = True) -> TopK:
            states = self._states(micro, hidden, gradient_in_parts=True)
            found = head_topk(states, output_weight(self.gpt), self.algorithm.distill_top_k, **self._head())
            return TopK(*(in_row(micro, *self._on_all_context_ranks(micro, values)) for values in found))

        with self._with_weights("teacher"):
            rows = self._run(micro_batches, loss.loss_rows, result, forward_only=True)
        if not self.coordinates.returns_logprobs:
            return None
        return [{"teacher_topk_ids": ids.cpu(), "teacher_topk_logprobs": values.cpu()} for ids, values in rows]

    def outputs(self, micro: MicroBatch, hidden: Tensor) -> tuple[Tensor, ...]:
        """Log-probability and entropy of micro.rows, over the tokens that were left to choose from."""
        states, weight = self._states(micro, hidden, gradient_in_parts=True), output_weight(self.gpt)
        options = {"keep": not self.config.recompute_head, **self._head()}
        kept = micro.at_targets.get("sampling_mask")
        if kept is None:
            head = exact_head_logprobs if self.algorithm.exact else head_logprobs
            found = head(states, weight, micro.targets, **options)
        else:
            found = kept_distribution(head_logprobs_of(states, weight, micro.targets, kept, **options), kept)
        return self._on_all_context_ranks(micro, *found)

    def training_outputs(self, micro: MicroBatch, hidden: Tensor) -> tuple[Tensor, ...]:
        """`outputs`; with algorithm.distill_kl_coef all of topk_head.HeadOutputs, of the teacher's tokens."""
        if not self.algorithm.uses_teacher_topk:
            return self.outputs(micro, hidden)
        ids = micro.at_targets.get("teacher_topk_ids")
        if ids is None:
            raise ValueError("TrainBatch.teacher_topk_ids is None, but algorithm.distill_kl_coef needs it")
        found = head_logprobs_of(
            self._states(micro, hidden, gradient_in_parts=True),
            output_weight(self.gpt),
            micro.targets,
            ids,
            keep=not self.config.recompute_head,
            **self._head(),
        )
        logprobs, entropy, tail = self._on_all_context_ranks(micro, found.logprobs, found.entropy, found.tail)
        return logprobs, entropy, *self._on_all_context_ranks(micro, found.topk), tail

    def _head(self) -> dict[str, Any]:
        """The arguments of all functions of the output head."""
        return {
            "temperature": self.temperature,
            "vocab_size": self.family.vocab_size,
            "group": self.runtime.tp_group,
            "softcap": self.family.logit_softcap,
            "chunk": self.config.head_chunk_tokens,
        }

    def train_step(self, micro_batches: list[TrainBatch], *, global_loss_tokens: int) -> dict[str, float]:
        """`forward_backward` and `optimizer_step` in one: metrics of both."""
        _, metrics = self.forward_backward(micro_batches, global_loss_tokens=global_loss_tokens)
        return metrics | self.optimizer_step()

    @in_megatron
    def forward_backward(
        self, micro_batches: list[TrainBatch], *, global_loss_tokens: int, on_policy: bool = False
    ) -> tuple[list[Tensor] | None, dict[str, float]]:
        """Gradients of sum(loss_weights * per-token loss) / global_loss_tokens over all data-parallel ranks.

        micro_batches: this data-parallel rank's, equally many on every rank; global_loss_tokens: of all ranks together;
        on_policy: the old policy is the one that is trained now, so these log-probabilities are the old ones.
        Returns the log-probabilities of the loss tokens as `compute_logprobs` does, 0 elsewhere, and metrics, equal on
        all ranks: train/loss, entropy, loss_tokens, and for the policy loss those of algorithms/objective.py; with
        algorithm.routing_replay train/routing_agreement, the share of the replayed choices that the routers would have
        made themselves. Means are over the loss tokens. No weight changes: then comes `optimizer_step` or
        `discard_gradients`.
        """

        def loss_of(micro: MicroBatch, logprobs: Tensor, entropy: Tensor, *of_topk: Tensor) -> tuple[Tensor, Any]:
            return loss.micro_batch_loss(
                micro.batch, micro.rows, logprobs, entropy, self.algorithm, *of_topk, on_policy=on_policy
            )

        if self._replay is not None:
            if any(getattr(batch, REPLAYED) is None for batch in micro_batches):
                raise ValueError(f"TrainBatch.{REPLAYED} is None, but algorithm.routing_replay needs it")
            self._replay.start_counting()
        names = loss.metric_names(self.algorithm, on_policy=on_policy)
        rows, sums = self._gradients(micro_batches, loss_of, names, global_loss_tokens=global_loss_tokens)
        tokens = sums.pop("loss_tokens")
        metrics = {"train/loss": sums.pop("loss") / global_loss_tokens, "train/loss_tokens": tokens}
        self._loss = metrics["train/loss"]
        metrics |= {f"train/{name}": value / max(tokens, 1) for name, value in sums.items()}
        if self._replay is not None:
            own, choices = self.runtime.sum_over_world(self._replay.agreement())
            metrics["train/routing_agreement"] = own / max(choices, 1)
        return [values.cpu() for values in rows] if self.coordinates.returns_logprobs else None, metrics

    @in_megatron
    def optimizer_step(self) -> dict[str, float]:
        """One step with the gradients of the last `forward_backward`.

        A non-finite loss or gradient skips it on all ranks: parameters, optimizer and schedule do not change.
        Returns train/lr, train/grad_norm, train/skipped (0 or 1), equal on all ranks.
        """
        metrics, made = self._step(self._loss)
        return {f"train/{name}": value for name, value in metrics.items()} | {"train/skipped": float(not made)}

    def export_weights(
        self, *, everywhere: bool = False, plan: ExportPlan | None = None
    ) -> Iterator[tuple[TensorMeta, Tensor | None]]:
        """What `export_plan` names, or another plan of the whole model, adapters merged in, one by one: on global rank
        0 the tensor, None elsewhere; everywhere: on every rank.

        Every rank of data-parallel rank 0 must run the iterator to its end (others may; everywhere: must). Tensors may
        alias parameters: use them before the next step.
        """
        merged = None if self.adapters is None else MergedWeights(self.gpt, self.adapters)
        return hf_weights.export_weights(
            self.gpt, plan or self.export_plan, self.runtime, weights=merged, everywhere=everywhere
        )

    def export_adapters(self, *, everywhere: bool = False) -> Iterator[tuple[TensorMeta, Tensor | None]]:
        """What `adapter_plan` names; otherwise as `export_weights`."""
        assert self.adapters is not None and self.adapter_plan is not None
        held = {parameter.name: tensor for parameter, tensor in self.adapters.held()}
        return hf_weights.export_weights(self.gpt, self.adapter_plan, self.runtime, weights=held, everywhere=everywhere)

    def export_own(self, part: OwnPart) -> Stream:
        """What lies on this rank of what `export_weights` would gather: no collective."""
        local = global_names(self.gpt) if self.adapters is None else MergedWeights(self.gpt, self.adapters)
        return part.tensors(local)

    def own_bytes(self, part: OwnPart) -> int:
        """What `export_own` holds at most beside the model."""
        return part.copy_bytes + (0 if self.adapters is None else self.adapters.merging_bytes(self.dtype))

    def export_bytes(self, *, everywhere: bool = False, plan: ExportPlan | None = None) -> int:
        """What `export_weights` holds at most beside the model, on a rank that gets the tensors."""
        held = gather_bytes(plan or self.export_plan, self.coordinates.layout, everywhere=everywhere)
        return held + (0 if self.adapters is None else self.adapters.merging_bytes(self.dtype))

    def model_state(self) -> dict[str, Any]:
        """Of a frozen model its adapters alone."""
        whole = super().model_state()
        if self.adapters is None:
            return whole
        return {name: value for name, value in whole.items() if name.split(".")[0] == PART}

    def load_model_state(self, loaded: dict[str, Any]) -> None:
        """The frozen model keeps its weights."""
        if self.adapters is None:
            super().load_model_state(loaded)
        else:
            self.adapters.load_state_dict({name.removeprefix(f"{PART}."): value for name, value in loaded.items()})

    @in_megatron
    def sharded_state(self, *, loading: bool, with_rng: bool = True, with_reference: bool = True) -> dict[str, Any]:
        """What a training checkpoint holds, for megatron.core.dist_checkpointing.

        with_rng: the random generators too, which load under the same layout of ranks only. with_reference: the
        reference too where it changes in the run; an earlier checkpoint may have none.
        """
        sharded = super().sharded_state(loading=loading)
        if with_reference and self.algorithm.uses_reference and self.algorithm.reference_update_steps:
            with self._with_weights("reference"):
                sharded["reference"] = state.copied(self.model_state(), prefix=state.REFERENCE_PREFIX)
        if with_rng:
            sharded["rng"] = state.rng_state(self.runtime)
        return sharded

    @in_megatron
    def restore(self, loaded: dict[str, Any]) -> None:
        """The inverse of `sharded_state`. Learning rate, betas and eps stay as configured, not as they were saved."""
        super().restore(loaded)
        if "reference" in loaded:
            with self._policy_put_back("reference"):
                self.load_model_state(loaded["reference"])
                self.update_reference()
        if "rng" in loaded:
            state.restore_rng(loaded["rng"])

    def close(self) -> None:
        """Leaves the process groups. Idempotent."""
        self.runtime.close()


def probe_batch(vocab_size: int) -> TrainBatch:
    """Two sequences of 64 tokens, all of which but the first have a loss."""
    lengths = torch.tensor([64, 64])
    mask = torch.ones(128).index_fill(0, torch.tensor([0, 64]), 0.0)
    return TrainBatch(
        tokens=torch.arange(128) % vocab_size, lengths=lengths, loss_mask=mask, rewards=torch.zeros(2),
        group_ids=torch.zeros(2, dtype=torch.int64), loss_weights=mask,
    )  # fmt: skip
