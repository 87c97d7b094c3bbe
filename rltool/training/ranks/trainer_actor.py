"""The Ray actor of one trainer rank, one per bundle. It is thin: what it wraps is plain Python, MegatronTrainer with
WeightSender."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ray
from torch import Tensor

from rltool.algorithms.batch import TrainBatch, Weights, Wide, fetched
from rltool.config.train import TrainConfig
from rltool.engines.dialects.checksums import ParameterLayout
from rltool.engines.transfer.ipc import gpu_uuid
from rltool.errors import RltoolError
from rltool.megatron.export_plan import ExportPlan, drain
from rltool.megatron.fp8 import fp8_plan
from rltool.megatron.offload import PARTS, Part
from rltool.processes import garbage
from rltool.processes.output import redirect_output
from rltool.processes.ports import reserve_ports
from rltool.processes.run_directory import RunDirectory
from rltool.training.cluster.devices import RankDevice, device_of_rank
from rltool.weights.send.sender import Rank, SendReport, WeightSender
from rltool.weights.send.stream import named_tensors
from rltool.weights.transport import Receiver, Rendezvous
from rltool.weights.verify.implied_checksums import adapter_checksums, implied_checksums

if TYPE_CHECKING:
    from rltool.checkpoints.completion import Saved
    from rltool.checkpoints.saving import CheckpointSaver
    from rltool.megatron.critic import Critic
    from rltool.megatron.profiling import Recorder
    from rltool.megatron.runtime import Coordinates
    from rltool.megatron.trained import TrainedModel
    from rltool.megatron.trainer import MegatronTrainer
    from rltool.training.ranks.served_rank import ServedRank


@dataclass
class _Parts:
    """What a rank has made once it has started."""

    trainer: MegatronTrainer
    critic: Critic | None
    saver: CheckpointSaver
    recorder: Recorder
    sender: WeightSender


READY = 32
"""Calls of `ready` at a time. It waits: were there fewer threads than engines that a rank sends to, those that wait for
the next bucket could keep out the one whose call the rank waits for, and the sync of that engine would fail."""


@cast(Any, ray.remote)(concurrency_groups={"abort": 1, "ready": READY})  # which its overloads do not have
class TrainerActor:
    """One Megatron rank. Ray runs its methods one at a time on one thread, which Megatron's CPU mode needs; those of
    the concurrency groups "abort" and "ready" run beside them, on others."""

    def __init__(
        self, config: TrainConfig, rank: int, log_file: Path | None, *, stays: bool = False, served: bool = False,
        cwd: Path | None = None,
    ) -> None:  # fmt: skip
        """stays: its memory is on its GPU also while colocated engines are awake. served: it has named models (`call`)
        in the place of the configured one. cwd: the driver's, by which relative paths are meant, also on hosts that
        have it."""
        redirect_output(log_file)
        if cwd is not None:
            with contextlib.suppress(OSError):
                os.chdir(cwd)
        self.config, self.rank, self.stays, self._is_served = config, rank, stays, served
        self._served: ServedRank | None = None
        self._started: _Parts | None = None
        self._closing = contextlib.ExitStack()

    def device(self, run: RunDirectory | None) -> RankDevice:
        """What this rank finds where it runs: the driver compares it with the plan before the ranks wait for each
        other."""
        return device_of_rank(self.rank, run)

    def address(self) -> tuple[str, int]:
        """Where rank 0 shall host the rendezvous of the ranks: (address of this node, a port that was free just
        now)."""
        # In a local cluster Ray still names the host's outer address, regardless of options; the ranks have no business
        # there.
        node = "127.0.0.1" if self.config.ray.address is None else ray.util.get_node_ip_address()
        held = reserve_ports(1, host=node)
        held.release()
        return node, held.ports[0]

    def start(self, master: tuple[str, int], total_optimizer_steps: int) -> Coordinates:
        """Join the ranks' process group and build the model."""
        from rltool.checkpoints.saving import CheckpointSaver
        from rltool.megatron.profiling import Recorder
        from rltool.megatron.runtime import Rendezvous
        from rltool.megatron.trainer import MegatronTrainer, TrainingRun

        config = self.config
        rendezvous = Rendezvous(self.rank, *master, timeout=config.trainer.rendezvous_timeout)
        run = TrainingRun(total_optimizer_steps, seed=config.seed, temperature=config.sampling.temperature)
        if self._is_served:
            from rltool.megatron.served import ServedModel

            trainer = ServedModel(config.model, config.trainer, rendezvous)
        else:
            trainer = MegatronTrainer(
                config.model, config.trainer, config.optimizer, config.algorithm, rendezvous, run, config.lora
            )
        self._closing.callback(trainer.close)
        critic = None
        if config.algorithm.uses_critic:
            from rltool.megatron.critic import Critic

            updates = config.steps * config.updates_per_rollout * config.critic.updates_per_optimizer_step
            critic = Critic(trainer, config.critic, total_optimizer_steps=updates)
        device = trainer.runtime.device
        gpu = gpu_uuid(device) if device.type == "cuda" else ""
        sender = WeightSender(
            config.weights, self._plan_of(trainer), device=device, deadline=config.deadlines.bucket,
            model_files=config.model.path, rank=Rank(self.rank, gpu, config.trainer.layout),
        )  # fmt: skip
        self._closing.callback(sender.close)
        saver = CheckpointSaver(trainer, asynchronous=config.checkpoint.async_save, critic=critic)
        self._closing.callback(saver.close)
        self._started = _Parts(trainer, critic, saver, Recorder(self.rank), sender)
        if self._is_served:
            from rltool.megatron.served import ServedModel
            from rltool.training.ranks.served_rank import ServedRank

            assert isinstance(trainer, ServedModel)
            self._served = ServedRank(trainer, saver, config.model.path)
        garbage.settle()
        return trainer.coordinates

    def load_weights(self) -> None:
        from rltool.checkpoints.torch_dist import load_weights

        self._load_policy()
        if (critic := self._here.critic) is not None:
            load_weights(critic, critic.path)

    def _load_policy(self) -> None:
        from rltool.checkpoints.torch_dist import load_adapters, load_weights

        self._load_teacher()
        load_weights(self._here.trainer, self.config.model.path)
        if self.config.lora.init is not None:
            load_adapters(self._here.trainer, self.config.lora.init)

    def _load_teacher(self) -> None:
        from rltool.checkpoints.torch_dist import load_teacher

        if self.config.model.teacher_path is not None:
            load_teacher(self._here.trainer, self.config.model.teacher_path)

    def load_checkpoint(self, directory: Path) -> dict[str, Any]:
        """The teacher's weights come from model.teacher_path, the reference's from model.path unless the checkpoint has
        later ones, the model beside adapters from model.path, everything else from the checkpoint. Returns what
        `save_checkpoint` was given."""
        from rltool.checkpoints.torch_dist import load_checkpoint

        if self.config.algorithm.uses_reference or self.config.lora.rank:
            self._load_policy()
        else:
            self._load_teacher()
        return load_checkpoint(self._here.trainer, directory, critic=self._here.critic)

    # -- training: micro-batches come with references to their wide fields, which are read here

    def warm_up(self) -> None:
        self._here.trainer.warm_up()

    def compute_logprobs(self, micro_batches: list[TrainBatch], weights: Weights = "policy") -> list[Tensor] | None:
        return self._here.trainer.compute_logprobs(fetched(micro_batches, ray.get), weights=weights)

    def compute_logprobs_and_entropies(self, micro_batches: list[TrainBatch]) -> list[Tensor] | None:
        return self._here.trainer.compute_logprobs_and_entropies(fetched(micro_batches, ray.get))

    def compute_teacher_fields(self, micro_batches: list[TrainBatch]) -> list[Wide] | None:
        """Of each micro-batch; the values stay in the object store, for the ranks."""
        found = self._here.trainer.compute_teacher_topk(fetched(micro_batches, ray.get))
        if found is None:
            return None
        return [Wide.cut(values, batch.lengths, ray.put) for values, batch in zip(found, micro_batches, strict=True)]

    def train_step(self, micro_batches: list[TrainBatch], global_loss_tokens: int) -> dict[str, float]:
        batches = fetched(micro_batches, ray.get)
        return self._here.trainer.train_step(batches, global_loss_tokens=global_loss_tokens)

    def forward_backward(
        self, micro_batches: list[TrainBatch], global_loss_tokens: int, on_policy: bool
    ) -> tuple[list[Tensor] | None, dict[str, float]]:
        trainer, batches = self._here.trainer, fetched(micro_batches, ray.get)
        return trainer.forward_backward(batches, global_loss_tokens=global_loss_tokens, on_policy=on_policy)

    def optimizer_step(self) -> dict[str, float]:
        return self._here.trainer.optimizer_step()

    def discard_gradients(self) -> None:
        self._here.trainer.discard_gradients()

    def update_reference(self) -> None:
        self._here.trainer.update_reference()

    def compute_values(self, micro_batches: list[TrainBatch]) -> list[Tensor] | None:
        return self._critic.compute_values(fetched(micro_batches, ray.get))

    def critic_step(self, micro_batches: list[TrainBatch], global_loss_tokens: int) -> dict[str, float]:
        return self._critic.train_step(fetched(micro_batches, ray.get), global_loss_tokens=global_loss_tokens)

    def parameter_hash(self) -> str:
        """Of the policy; with a critic, of both."""
        policy = self._here.trainer.parameter_hash()
        if (critic := self._here.critic) is None:
            return policy
        return hashlib.sha256(f"{policy} {critic.parameter_hash()}".encode()).hexdigest()

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """A method of ServedRank."""
        return getattr(self._served, method)(*arguments, **named)

    # -- memory that engines on the same GPUs take in turns

    def offload(self, parts: Sequence[Part]) -> None:
        """Between two steps: gradients are of no use then, and zeros need no room on the host. Of ranks that stay only
        what torch has cached."""
        for model in self._models():
            if self.stays:
                model.give_back(parts)
                continue
            if "gradients" in parts and "gradients" not in model.away:
                model.discard_gradients()
            model.offload(parts)

    def onload(self, parts: Sequence[Part]) -> None:
        for model in self._models():
            model.onload(parts)

    def _models(self) -> list[TrainedModel]:
        here = self._here
        return [here.trainer] if here.critic is None else [here.trainer, here.critic]

    # -- weights

    def export_plan(self) -> ExportPlan:
        """Of what engines are sent."""
        return self._here.sender.plan

    def _plan_of(self, trainer: MegatronTrainer) -> ExportPlan:
        if self.config.engines.quantization == "fp8":
            return fp8_plan(trainer.family)
        if self.config.weights.lora_sync == "merged":
            return trainer.export_plan
        assert trainer.adapter_plan is not None, "a rule of the configuration"
        return trainer.adapter_plan

    def host(self, receivers: Sequence[Receiver], group: str, directory: Path) -> dict[str, Rendezvous]:
        return self._here.sender.host(receivers, group, directory)

    def join(self) -> dict[str, str]:
        return self._here.sender.join()

    def send(self, version: str, urls: Sequence[str]) -> SendReport:
        """A collective of all ranks; each reports of the engines that it sends to."""
        everywhere = self._here.sender.needs_all_ranks(urls)
        trainer, plan = self._here.trainer, self._here.sender.plan
        if (part := self._here.sender.part) is not None:
            stream, held = trainer.export_own(part), trainer.own_bytes(part)
        elif plan.peft is not None:
            stream, held = trainer.export_adapters(everywhere=everywhere), 0
        else:
            stream = trainer.export_weights(everywhere=everywhere, plan=plan)
            held = trainer.export_bytes(everywhere=everywhere, plan=plan)
        return self._here.sender.send(stream, version, urls, stream_bytes=held)

    @ray.method(concurrency_group="ready")
    def ready(self, url: str, version: str, number: int, seconds: float) -> str | None:
        """Beside `send`: see WeightSender."""
        return self._here.sender.ready(url, version, number, seconds)

    def weight_checksums(self, layout: ParameterLayout) -> dict[str, tuple[str, ...]]:
        """A collective of all ranks; those of an engine that holds the present weights in this layout come from rank
        0. With weights.lora_sync = "adapter" those of the adapter."""
        trainer, plan = self._here.trainer, self._here.sender.plan
        stream = trainer.export_weights(plan=plan) if plan.peft is None else trainer.export_adapters()
        try:
            if self.rank != 0:
                return {}
            checksums = implied_checksums if plan.peft is None else adapter_checksums
            return checksums(plan, named_tensors(stream), layout)
        finally:
            drain(stream)  # also where a digest failed: the other ranks are inside the same gather

    @ray.method(concurrency_group="abort")
    def abort_transfer(self, urls: Sequence[str], reason: str) -> None:
        """Beside `join` or `send`, which waits no longer for these engines."""
        self._here.sender.abort(urls, reason)

    def leave_transfer(self, urls: Sequence[str] | None = None) -> None:
        """The groups with these engines; None: all."""
        if urls is None:
            self._here.sender.close()
        else:
            self._here.sender.leave(urls)

    # -- saving

    def save_checkpoint(
        self, directory: Path, extra: dict[str, Any], metrics: dict[str, float], files: dict[str, bytes]
    ) -> None:
        """Returns when the state is copied (checkpoint.async_save) or written. A collective. files: name -> content,
        written beside it."""
        self._here.saver.save(directory, extra, metrics, files)

    def save_has_ended(self) -> bool:
        return self._here.saver.has_ended

    def saved(self) -> Saved | None:
        """The checkpoint that was started last, once it has been completed; None when it was asked for already."""
        return self._here.saver.wait()

    def save_hf(self, directory: Path) -> None:
        """Write the weights as a Hugging Face directory. A collective."""
        from rltool.checkpoints.hf_export import export_hf

        export_hf(self._here.trainer, directory)

    # -- looking inside

    def differing_layer(self, tokens: list[int], logprob: float, directory: Path) -> str:
        """See TrainerGroup. Not a collective. Any failure is LayerUnknown: the state is whole."""
        from rltool.weights.verify.layers import LayerUnknown, find, verdict

        @contextlib.contextmanager
        def offloaded() -> Iterator[None]:
            self.offload(PARTS)
            try:
                yield
            finally:
                self.onload(PARTS)

        try:
            return verdict(find(self._here.trainer, tokens, directory, offloaded=offloaded), logprob)
        except RltoolError:
            raise
        except Exception as error:
            raise LayerUnknown(f"{type(error).__name__}: {error}") from error

    def start_profile(self) -> None:
        self._here.recorder.start_profile()

    def stop_profile(self, directory: Path, name: str) -> Path:
        return self._here.recorder.stop_profile(directory, name)

    def start_memory(self) -> None:
        self._here.recorder.start_memory()

    def stop_memory(self, directory: Path, name: str) -> Path:
        return self._here.recorder.stop_memory(directory, name)

    def close(self) -> None:
        """A save in flight is waited for. Of a start that failed, what it had made."""
        self._closing.close()

    @property
    def _here(self) -> _Parts:
        assert self._started is not None, "start comes first"
        return self._started

    @property
    def _critic(self) -> Critic:
        assert self._here.critic is not None, "asked for with algorithm.uses_critic alone"
        return self._here.critic
