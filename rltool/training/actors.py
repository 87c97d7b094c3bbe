"""The Ray actors: one trainer rank per bundle, and the rollout manager, which reserves nothing.

They are thin. What they wrap is plain Python that knows nothing of Ray: MegatronTrainer with WeightSender, and RolloutManager
with WeightControl.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from rltool.algorithms.batch import TrainBatch, Weights
from rltool.config.train import TrainConfig
from rltool.engines.dialect import Medium
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet import Fleet
from rltool.engines.types import Bucket, Completion, EngineInfo, GenerateRequest
from rltool.processes.ports import reserve_ports
from rltool.rollout.manager import RolloutManager, RolloutResult
from rltool.training.devices import RankDevice, device_of_rank
from rltool.weights.control import Failures, WeightControl
from rltool.weights.sender import (
    Connection,
    SendReport,
    Target,
    WeightSender,
    drain,
    remove_old_versions,
    write_to_disk,
)


def redirect_output(log_file: Path | None) -> None:
    """Send this process's stdout and stderr, and those of its libraries, to the run's log where the run directory is reachable."""
    if log_file is None or not log_file.parent.is_dir():
        return
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


@ray.remote
class TrainerActor:
    """One Megatron rank. Ray runs its methods one at a time on one thread, which Megatron's CPU mode needs."""

    def __init__(self, config: TrainConfig, rank: int, log_file: Path | None) -> None:
        redirect_output(log_file)
        self.config = config
        self.rank = rank
        self.sender = WeightSender(config.weights, timeout=config.deadlines.sync_step)
        self.trainer: Any = None
        self.critic: Any = None
        self.saver: Any = None
        self.recorder: Any = None

    def device(self) -> RankDevice:
        """What this rank finds where it runs: the driver compares it with the plan before the ranks wait for each other."""
        return device_of_rank(self.rank)

    def address(self) -> tuple[str, int]:
        """Where rank 0 shall host the rendezvous of the ranks: (address of this node, a port that was free just now)."""
        # In a local cluster Ray still names the host's outer address, whatever it was told; the ranks have no business there.
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
        self.trainer = MegatronTrainer(config.model, config.trainer, config.optimizer, config.algorithm, rendezvous, run)
        if config.algorithm.uses_critic:
            from rltool.megatron.critic import Critic

            updates = config.steps * config.optimizer_steps_per_rollout * config.critic.updates_per_optimizer_step
            self.critic = Critic(self.trainer, config.critic, total_optimizer_steps=updates)
        self.saver = CheckpointSaver(self.trainer, asynchronous=config.checkpoint.async_save, critic=self.critic)
        self.recorder = Recorder(self.rank)
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
        """Reference and teacher weights come from model.path and model.teacher_path, everything else from the checkpoint. Returns what `save_checkpoint` was given."""
        from rltool.checkpoints.torch_dist import load_checkpoint

        if self.config.algorithm.uses_reference:
            self._load_policy()
        else:
            self._load_teacher()
        return load_checkpoint(self.trainer, directory, critic=self.critic)

    # -- training

    def compute_logprobs(self, micro_batches: list[TrainBatch], weights: Weights = "policy") -> Any:
        return self.trainer.compute_logprobs(micro_batches, weights=weights)

    def train_step(self, micro_batches: list[TrainBatch], global_loss_tokens: int) -> dict[str, float]:
        return self.trainer.train_step(micro_batches, global_loss_tokens=global_loss_tokens)

    def forward_backward(self, micro_batches: list[TrainBatch], global_loss_tokens: int, fresh: bool) -> Any:
        return self.trainer.forward_backward(micro_batches, global_loss_tokens=global_loss_tokens, fresh=fresh)

    def optimizer_step(self) -> dict[str, float]:
        return self.trainer.optimizer_step()

    def discard_gradients(self) -> None:
        self.trainer.discard_gradients()

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

    # -- weights

    def weight_metadata(self) -> Any:
        return self.trainer.weight_metadata()

    def host(self, targets: Sequence[Target], group: str) -> list[Connection]:
        return self.sender.host(targets, group)

    def join(self) -> Failures:
        return self.sender.join()

    def send(self, buckets: Sequence[Bucket], skip: Sequence[str]) -> SendReport | None:
        """A collective of all ranks; the report comes from rank 0."""
        if self.rank == 0:
            return self.sender.send(self.trainer.export_weights(), buckets, skip)
        return drain(self.trainer.export_weights())

    def write(self, buckets: Sequence[Bucket], directory: Path) -> SendReport | None:
        """The disk transport's send. A collective as well."""
        if self.rank != 0:
            return drain(self.trainer.export_weights())
        report = write_to_disk(self.trainer.export_weights(), buckets, directory, self.config.model.path)
        remove_old_versions(directory.parent)
        return report

    def leave_transfer(self) -> None:
        self.sender.close()

    # -- saving

    def save_checkpoint(self, directory: Path, extra: dict[str, Any], metrics: dict[str, float]) -> None:
        """Returns when the state is copied (checkpoint.async_save) or written. A collective."""
        self.saver.save(directory, extra, metrics)

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
        self.sender.close()
        if self.trainer is not None:
            self.trainer.close()


@ray.remote
class RolloutActor:
    """The one owner of the fleet, the HTTP client and every control call."""

    def __init__(
        self, config: TrainConfig, targets: tuple[EngineEndpoint, ...], engines: tuple[EngineEndpoint, ...], infos: dict[str, EngineInfo], vocab_size: int, log_file: Path | None
    ) -> None:
        redirect_output(log_file)
        self.manager = RolloutManager(config, targets, num_engines=len(engines), vocab_size=vocab_size)
        self.control = WeightControl(engines, infos, self.manager.client, Fleet(clock=time.monotonic), config.weights, timeout=config.deadlines.sync_step)

    # -- rollouts

    def generate(self, step: int) -> RolloutResult:
        return self.manager.generate(step)

    def evaluate(self) -> dict[str, float]:
        return self.manager.evaluate()

    def data_facts(self) -> dict[str, int]:
        return {"prompts": self.manager.num_prompts, "prompts_too_long": self.manager.num_prompts_too_long}

    def state_dict(self) -> dict[str, Any]:
        return self.manager.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.manager.load_state_dict(state)

    # -- weights: WeightControl's methods by name

    def epoch(self) -> int:
        return self.control.epoch()

    def targets(self) -> list[Target]:
        return self.control.targets()

    def clear_leftovers(self) -> Failures:
        return self.manager.run(self.control.clear_leftovers())

    def connect(self, connections: Sequence[Connection], medium: Medium) -> Failures:
        return self.manager.run(self.control.connect(connections, medium))

    def prepare(self) -> Failures:
        return self.manager.run(self.control.prepare())

    def receive(self, version: str, buckets: Sequence[Bucket], medium: Medium, paths: Sequence[Path]) -> Failures:
        return self.manager.run(self.control.receive(version, buckets, medium, paths))

    def finish(self, version: str, failed: Failures) -> Failures:
        return self.manager.run(self.control.finish(version, failed))

    def release(self) -> Failures:
        return self.manager.run(self.control.release())

    def disconnect(self) -> Failures:
        return self.manager.run(self.control.disconnect())

    def sample_each(self, request: GenerateRequest) -> dict[str, Completion]:
        return self.manager.run(self.control.sample_each(request))

    def close(self) -> None:
        self.manager.close()
