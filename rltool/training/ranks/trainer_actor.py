"""The Ray actor of one trainer rank, one per bundle. It is thin: what it wraps is plain Python, MegatronTrainer with
WeightSender."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import ray

from rltool.algorithms.batch import TrainBatch, Weights
from rltool.config.train import TrainConfig
from rltool.engines.dialects.checksums import ParameterLayout
from rltool.engines.transfer.ipc import gpu_uuid
from rltool.megatron.export_plan import ExportPlan, drain
from rltool.megatron.offload import Part
from rltool.processes import garbage
from rltool.processes.output import redirect_output
from rltool.processes.ports import reserve_ports
from rltool.training.cluster.devices import RankDevice, device_of_rank
from rltool.weights.send.sender import SendReport, WeightSender
from rltool.weights.send.stream import named_tensors
from rltool.weights.transport import Receiver, Rendezvous
from rltool.weights.verify.implied_checksums import implied_checksums


@cast(Any, ray.remote)(concurrency_groups={"abort": 1, "ready": 2})  # which its overloads do not have
class TrainerActor:
    """One Megatron rank. Ray runs its methods one at a time on one thread, which Megatron's CPU mode needs; those of
    the concurrency groups "abort" and "ready" run beside them, on others."""

    def __init__(self, config: TrainConfig, rank: int, log_file: Path | None, *, stays: bool = False) -> None:
        """stays: its memory is on its GPU also while colocated engines are awake."""
        redirect_output(log_file)
        self.config, self.rank, self.stays = config, rank, stays
        self.sender: WeightSender | None = None
        self.trainer: Any = None
        self.critic: Any = None
        self.saver: Any = None
        self.recorder: Any = None

    def device(self) -> RankDevice:
        """What this rank finds where it runs: the driver compares it with the plan before the ranks wait for each
        other."""
        return device_of_rank(self.rank)

    def address(self) -> tuple[str, int]:
        """Where rank 0 shall host the rendezvous of the ranks: (address of this node, a port that was free just
        now)."""
        # In a local cluster Ray still names the host's outer address, whatever it was given; the ranks have no business
        # there.
        node = "127.0.0.1" if self.config.ray.address is None else ray.util.get_node_ip_address()
        held = reserve_ports(1, host=node)
        held.release()
        return node, held.ports[0]

    def start(self, master: tuple[str, int], total_optimizer_steps: int) -> Any:
        """Join the ranks' process group and build the model. Returns this rank's megatron.runtime.Coordinates."""
        from rltool.checkpoints.saving import CheckpointSaver
        from rltool.megatron.profiling import Recorder
        from rltool.megatron.runtime import Rendezvous
        from rltool.megatron.trainer import MegatronTrainer, TrainingRun

        config = self.config
        rendezvous = Rendezvous(self.rank, *master, timeout=config.trainer.rendezvous_timeout)
        run = TrainingRun(total_optimizer_steps, seed=config.seed, temperature=config.sampling.temperature)
        self.trainer = MegatronTrainer(
            config.model, config.trainer, config.optimizer, config.algorithm, rendezvous, run
        )
        if config.algorithm.uses_critic:
            from rltool.megatron.critic import Critic

            updates = config.steps * config.updates_per_rollout * config.critic.updates_per_optimizer_step
            self.critic = Critic(self.trainer, config.critic, total_optimizer_steps=updates)
        self.saver = CheckpointSaver(self.trainer, asynchronous=config.checkpoint.async_save, critic=self.critic)
        self.recorder = Recorder(self.rank)
        device = self.trainer.runtime.device
        self.sender = WeightSender(
            config.weights, self.trainer.export_plan, device=device, deadline=config.deadlines.bucket,
            model_files=config.model.path, rank=self.rank, gpu=gpu_uuid(device) if device.type == "cuda" else "",
        )  # fmt: skip
        garbage.settle()
        return self.trainer.coordinates

    def load_weights(self) -> None:
        from rltool.checkpoints.torch_dist import load_weights

        self._load_policy()
        if self.critic is not None:
            load_weights(self.critic, self.critic.path)

    def _load_policy(self) -> None:
        from rltool.checkpoints.torch_dist import load_weights

        self._load_teacher()
        load_weights(self.trainer, self.config.model.path)

    def _load_teacher(self) -> None:
        from rltool.checkpoints.torch_dist import load_teacher

        if self.config.model.teacher_path is not None:
            load_teacher(self.trainer, self.config.model.teacher_path)

    def load_checkpoint(self, directory: Path) -> dict[str, Any]:
        """The teacher's weights come from model.teacher_path, the reference's from model.path unless the checkpoint has
        later ones, everything else from the checkpoint. Returns what `save_checkpoint` was given."""
        from rltool.checkpoints.torch_dist import load_checkpoint

        if self.config.algorithm.uses_reference:
            self._load_policy()
        else:
            self._load_teacher()
        return load_checkpoint(self.trainer, directory, critic=self.critic)

    # -- training

    def warm_up(self) -> None:
        self.trainer.warm_up()

    def compute_logprobs(self, micro_batches: list[TrainBatch], weights: Weights = "policy") -> Any:
        return self.trainer.compute_logprobs(micro_batches, weights=weights)

    def compute_logprobs_and_entropies(self, micro_batches: list[TrainBatch]) -> Any:
        return self.trainer.compute_logprobs_and_entropies(micro_batches)

    def compute_teacher_topk(self, micro_batches: list[TrainBatch]) -> Any:
        return self.trainer.compute_teacher_topk(micro_batches)

    def train_step(self, micro_batches: list[TrainBatch], global_loss_tokens: int) -> dict[str, float]:
        return self.trainer.train_step(micro_batches, global_loss_tokens=global_loss_tokens)

    def forward_backward(self, micro_batches: list[TrainBatch], global_loss_tokens: int, on_policy: bool) -> Any:
        return self.trainer.forward_backward(micro_batches, global_loss_tokens=global_loss_tokens, on_policy=on_policy)

    def optimizer_step(self) -> dict[str, float]:
        return self.trainer.optimizer_step()

    def discard_gradients(self) -> None:
        self.trainer.discard_gradients()

    def update_reference(self) -> None:
        self.trainer.update_reference()

    def compute_values(self, micro_batches: list[TrainBatch]) -> Any:
        return self.critic.compute_values(micro_batches)

    def critic_step(self, micro_batches: list[TrainBatch], global_loss_tokens: int) -> dict[str, float]:
        return self.critic.train_step(micro_batches, global_loss_tokens=global_loss_tokens)

    def parameter_hash(self) -> str:
        """Of the policy; with a critic, of both."""
        policy = self.trainer.parameter_hash()
        if self.critic is None:
            return policy
        return hashlib.sha256(f"{policy} {self.critic.parameter_hash()}".encode()).hexdigest()

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

    def _models(self) -> list[Any]:
        return [model for model in (self.trainer, self.critic) if model is not None]

    # -- weights

    def export_plan(self) -> ExportPlan:
        return self.trainer.export_plan

    def host(self, receivers: Sequence[Receiver], group: str, directory: Path) -> dict[str, Rendezvous]:
        return self._sender.host(receivers, group, directory)

    def join(self) -> dict[str, str]:
        return self._sender.join()

    def send(self, version: str, urls: Sequence[str]) -> SendReport:
        """A collective of all ranks; each reports of the engines that it sends to."""
        everywhere = self._sender.gathers_everywhere(urls)
        stream = self.trainer.export_weights(everywhere=everywhere)
        held = self.trainer.export_bytes(everywhere=everywhere)
        return self._sender.send(stream, version, urls, stream_bytes=held)

    @ray.method(concurrency_group="ready")
    def ready(self, url: str, version: str, number: int, seconds: float) -> str | None:
        """Beside `send`: see WeightSender."""
        return self._sender.ready(url, version, number, seconds)

    def weight_checksums(self, layout: ParameterLayout) -> dict[str, tuple[str, ...]]:
        """A collective of all ranks; those of an engine that holds the present weights in this layout come from rank
        0."""
        stream = self.trainer.export_weights()
        try:
            if self.rank != 0:
                return {}
            return implied_checksums(self.trainer.export_plan, named_tensors(stream), layout)
        finally:
            drain(stream)  # also where a digest failed: the other ranks are inside the same gather

    @ray.method(concurrency_group="abort")
    def abort_transfer(self, urls: Sequence[str], reason: str) -> None:
        """Beside `join` or `send`, which waits no longer for these engines."""
        self._sender.abort(urls, reason)

    def leave_transfer(self, urls: Sequence[str] | None = None) -> None:
        """The groups with these engines; None: all."""
        if urls is None:
            self._sender.close()
        else:
            self._sender.leave(urls)

    # -- saving

    def save_checkpoint(
        self, directory: Path, extra: dict[str, Any], metrics: dict[str, float], files: dict[str, bytes]
    ) -> None:
        """Returns when the state is copied (checkpoint.async_save) or written. A collective. files: name -> content,
        written beside it."""
        self.saver.save(directory, extra, metrics, files)

    def save_has_ended(self) -> bool:
        return self.saver.has_ended

    def saved(self) -> Any:
        """The checkpoint that was started last, once it has been completed; None when it was asked for already."""
        return self.saver.wait()

    def save_hf(self, directory: Path) -> None:
        """Write the weights as a Hugging Face directory. A collective."""
        from rltool.checkpoints.hf_export import export_hf

        export_hf(self.trainer, directory)

    # -- looking inside

    def start_profile(self) -> None:
        self.recorder.start_profile()

    def stop_profile(self, directory: Path, name: str) -> Path:
        return self.recorder.stop_profile(directory, name)

    def start_memory(self) -> None:
        self.recorder.start_memory()

    def stop_memory(self, directory: Path, name: str) -> Path:
        return self.recorder.stop_memory(directory, name)

    def close(self) -> None:
        """A save in flight is waited for."""
        if self.saver is not None:
            self.saver.close()
        if self.sender is not None:
            self.sender.close()
        if self.trainer is not None:
            self.trainer.close()

    @property
    def _sender(self) -> WeightSender:
        assert self.sender is not None, "start comes first"
        return self.sender
