"""The driver's handle to all trainer ranks: starts them in their bundles, shards batches, collects results in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor

from rltool.algorithms.batch import TrainBatch, Weights
from rltool.checkpoints.completion import Saved
from rltool.config.train import TrainConfig
from rltool.errors import PartLost
from rltool.megatron.export_plan import ExportPlan
from rltool.megatron.offload import PARTS
from rltool.processes.run_directory import RunDirectory
from rltool.training.cluster.devices import Device, RankDevice, check_rank_devices, check_shared_run
from rltool.training.cluster.placement import PlacementPlan
from rltool.training.cluster.ray_calls import DeadlinePassed, Waiting, get_all, rank_names
from rltool.training.ranks.rank_handles import RankHandles
from rltool.training.ranks.sharding import Sharder, Shards
from rltool.training.ranks.trainer_actor import TrainerActor

if TYPE_CHECKING:
    from rltool.megatron.runtime import Coordinates


class TrainerGroup:
    """All ranks of one trainer. Methods return when every rank has answered, each within deadlines.step."""

    def __init__(
        self, config: TrainConfig, plan: PlacementPlan, group: PlacementGroup | None, log_dir: Path | None,
        *, order: Sequence[int] | None = None, served: bool = False,
    ) -> None:  # fmt: skip
        """log_dir: of this attempt, in a run directory. order: the bundle of each rank; None: rank 0 has the first,
        and so on. served: as for TrainerActor; call `load_weights` after `start`, then training.served.RankedTrainer
        has the rest."""
        # What "auto" stands for is decided: a rank that found something else would compute in another way than the
        # others.
        trainer = config.trainer.model_copy(update={"device": plan.device})
        config = config.model_copy(update={"trainer": trainer})
        self.config = config
        run = RunDirectory(log_dir.parents[1]) if log_dir is not None else None
        self._run = run if run is not None and run.is_made else None
        self.device: Device = plan.device
        self.devices: list[RankDevice] = []
        self.ranks = []
        for rank, bundle in enumerate(plan.trainer):
            options: dict[str, Any] = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0)}
            if group is not None:
                options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=order[rank] if order is not None else rank
                )
            log_file = log_dir / f"trainer_rank{rank}.log" if log_dir else None
            actor = TrainerActor.options(**options)
            self.ranks.append(
                actor.remote(config, rank, log_file, stays=plan.ranks_stay, served=served, cwd=Path.cwd())
            )
        self.coordinates: list[Coordinates] = []
        self.export_plan: ExportPlan | None = None
        self.sharder = Sharder(config)
        self.take_gpus: Callable[[], dict[str, float]] = dict[str, float]
        """Called before what needs the ranks' memory on their devices: colocated engines leave them then. Returns the
        seconds of it, as metrics."""

    def start(self, total_optimizer_steps: int, while_waiting: Waiting | None = None) -> None:
        """Let the ranks look for their devices, find each other and build the model. Waits rendezvous_timeout at most,
        plus the time to import. UsageError naming ranks and hosts without the planned device or the run directory."""
        deadline = self.config.trainer.rendezvous_timeout + 120
        name = "trainer.rendezvous_timeout and 120 s for imports:"

        def ask(calls: Sequence[ray.ObjectRef]) -> list[Any]:
            return get_all(calls, deadline, name, who=self._names(len(calls)), while_waiting=while_waiting)

        self.devices = ask([rank.device.remote(self._run) for rank in self.ranks])
        check_rank_devices(self.device, self.devices)
        if self._run is not None:
            check_shared_run(self._run, self.devices)
        master = ask([self.ranks[0].address.remote()])[0]
        self.coordinates = ask([rank.start.remote(master, total_optimizer_steps) for rank in self.ranks])
        self.export_plan = ask([self.ranks[0].export_plan.remote()])[0]

    def load_weights(self, while_waiting: Waiting | None = None) -> None:
        self._get([rank.load_weights.remote() for rank in self.ranks], while_waiting)

    def load_checkpoint(self, directory: Path, while_waiting: Waiting | None = None) -> dict[str, Any]:
        return self._get([rank.load_checkpoint.remote(directory) for rank in self.ranks], while_waiting)[0]

    # -- training

    def logprobs(self, batch: TrainBatch, *, weights: Weights = "policy") -> Tensor:
        """Trainer's log-probability of every token of a global batch: [T] float32, aligned with batch.tokens, 0 for
        first tokens."""
        shards, results = self._on_shards(
            batch, lambda rank, part: rank.compute_logprobs.remote(part, weights), forward_only=True
        )
        return shards.in_order(self.coordinates, results)

    def logprobs_and_entropies(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """`logprobs` of the policy, and the entropy of its distribution at every token, in nats: [T] float32 each."""
        shards, results = self._on_shards(
            batch, lambda rank, part: rank.compute_logprobs_and_entropies.remote(part), forward_only=True
        )
        first, second = ([None if pairs is None else [pair[i] for pair in pairs] for pairs in results] for i in (0, 1))
        return shards.in_order(self.coordinates, first), shards.in_order(self.coordinates, second)

    def with_teacher_fields(self, batch: TrainBatch) -> TrainBatch:
        """The batch with what the loss needs of the teacher's distribution: algorithm.distill_top_k tokens and their
        log-probabilities at each token with a loss, by reference."""
        shards, results = self._on_shards(
            batch, lambda rank, part: rank.compute_teacher_fields.remote(part), forward_only=True
        )
        return batch.replace(wide=(*batch.wide, shards.wide_in_order(self.coordinates, results)))

    def train_step(self, batch: TrainBatch) -> dict[str, float]:
        """One optimizer step on a global batch; its loss_weights must be normalised over it. Metrics are the same on
        all ranks."""
        tokens = batch.num_loss_tokens
        return self._on_shards(batch, lambda rank, part: rank.train_step.remote(part, tokens))[1][0]

    def forward_backward(self, batch: TrainBatch, *, on_policy: bool = False) -> tuple[Tensor, dict[str, float]]:
        """The first half of a `train_step`: gradients, but no change of a weight. Then call `optimizer_step` or
        `discard_gradients`.

        on_policy: take the old log-probabilities from this very forward pass. Returns the log-probabilities of the loss
        tokens, [T] float32, 0 elsewhere, and metrics.
        """
        tokens = batch.num_loss_tokens
        shards, results = self._on_shards(
            batch, lambda rank, part: rank.forward_backward.remote(part, tokens, on_policy)
        )
        return shards.in_order(self.coordinates, [logprobs for logprobs, _ in results]), results[0][1]

    def call(self, method: str, *arguments: Any, **named: Any) -> list[Any]:
        """A method of ServedRank, on all ranks."""
        return self._compute(lambda rank: rank.call.remote(method, *arguments, **named))

    def call_on_shards(self, batch: TrainBatch, method: str, *arguments: Any, forward_only: bool = False) -> Tensor:
        """One that takes micro-batches, and gives tensors of each. Returns [T, ...] of the batch."""
        shards, results = self._on_shards(
            batch, lambda rank, part: rank.call.remote(method, part, *arguments), forward_only=forward_only
        )
        return shards.in_order(self.coordinates, results)

    def optimizer_step(self) -> dict[str, float]:
        return self._compute(lambda rank: rank.optimizer_step.remote())[0]

    def discard_gradients(self) -> None:
        self._compute(lambda rank: rank.discard_gradients.remote())

    def update_reference(self) -> None:
        """From now on the reference is the policy as it is."""
        self._compute(lambda rank: rank.update_reference.remote())

    def values(self, batch: TrainBatch) -> Tensor:
        """Critic's value of the state in which each loss token was chosen: [T] float32, 0 elsewhere."""
        shards, results = self._on_shards(
            batch, lambda rank, part: rank.compute_values.remote(part), forward_only=True
        )
        return shards.in_order(self.coordinates, results)

    def critic_step(self, batch: TrainBatch) -> dict[str, float]:
        """One optimizer step of the critic on a global batch with values and value_targets, cut as the policy's is."""
        tokens = batch.num_loss_tokens
        return self._on_shards(batch, lambda rank, part: rank.critic_step.remote(part, tokens))[1][0]

    def parameter_hash(self) -> str:
        return self._compute(lambda rank: rank.parameter_hash.remote())[0]

    def warm_up(self, while_waiting: Waiting | None = None) -> None:
        """Compile what a step needs. Changes no state."""
        self._get([rank.warm_up.remote() for rank in self.ranks], while_waiting)

    def offload(self, while_waiting: Waiting | None = None) -> None:
        """All of the ranks' memory off their devices, for engines that are about to be started there; where both have
        room (PlacementPlan.ranks_stay), what the ranks do not need between two steps."""
        self._get([rank.offload.remote(PARTS) for rank in self.ranks], while_waiting)

    def _shard(self, batch: TrainBatch, *, forward_only: bool) -> tuple[Shards, list[ray.ObjectRef]]:
        """The cut, and per data-parallel rank a reference to its micro-batches."""
        shards = self.sharder.shard(batch, forward_only=forward_only)
        return shards, [ray.put(shards.micro_batches(dp_rank)) for dp_rank in range(len(shards.plan))]

    def _on_shards(
        self, batch: TrainBatch, call: Callable[[Any, ray.ObjectRef], ray.ObjectRef], *, forward_only: bool = False
    ) -> tuple[Shards, list[Any]]:
        self.take_gpus()
        shards, references = self._shard(batch, forward_only=forward_only)
        pairs = zip(self.ranks, self.coordinates, strict=True)
        return shards, self._get([call(rank, references[place.dp_rank]) for rank, place in pairs])

    # -- saving

    def save_checkpoint(
        self, directory: Path, extra: dict[str, Any], metrics: dict[str, float], files: dict[str, bytes] | ray.ObjectRef
    ) -> None:
        """Returns when the state is copied (checkpoint.async_save), or when all is written; then ask `saved`. files: as
        in SourceState. SaveFailed."""
        contents = files if isinstance(files, ray.ObjectRef) else ray.put(files)
        self._compute(lambda rank: rank.save_checkpoint.remote(directory, extra, metrics, contents))

    def saved(self, *, wait: bool) -> Saved | None:
        """The checkpoint that has been completed since the last call; None while it is written. SaveFailed."""
        if not wait and not all(self._all(lambda rank: rank.save_has_ended.remote())):
            return None
        return self._all(lambda rank: rank.saved.remote())[0]

    def save_hf(self, directory: Path) -> None:
        self._compute(lambda rank: rank.save_hf.remote(directory))

    def differing_layer(self, tokens: list[int], logprob: float, directory: Path) -> str:
        """What differs from vLLM in computing the last of these tokens, in words: see weights.verify.layers. logprob:
        the trainer's in its batch. directory: for what is found. LayerUnknown, ExportFailed."""
        self.save_hf(directory / "model")
        return self._get([self.ranks[0].differing_layer.remote(tokens, logprob, directory)])[0]

    # -- looking inside (training.profiling)

    def start_profile(self) -> None:
        self._all(lambda rank: rank.start_profile.remote())

    def stop_profile(self, directory: Path, name: str) -> list[Path]:
        return self._all(lambda rank: rank.stop_profile.remote(directory, name))

    def start_memory(self) -> None:
        self._all(lambda rank: rank.start_memory.remote())

    def stop_memory(self, directory: Path, name: str) -> list[Path]:
        return self._all(lambda rank: rank.stop_memory.remote(directory, name))

    def handles(self) -> RankHandles:
        """For the rollout manager, which awaits the ranks in a weight sync."""
        assert self.export_plan is not None, "start comes first"
        hosts = [device.host for device in self.devices]
        return RankHandles(self.ranks, self.coordinates, self.sharder, self.export_plan, hosts)

    def close(self) -> None:
        """A save in flight is waited for."""
        self._all(lambda rank: rank.close.remote())

    def _compute(self, call: Callable[[Any], ray.ObjectRef]) -> list[Any]:
        """`_all`, of what needs the model where it computes."""
        self.take_gpus()
        return self._all(call)

    def _all(self, call: Callable[[Any], ray.ObjectRef]) -> list[Any]:
        return self._get([call(rank) for rank in self.ranks])

    def _names(self, count: int) -> list[str]:
        return rank_names(count, [device.host for device in self.devices])

    def _get(self, refs: Sequence[ray.ObjectRef], while_waiting: Waiting | None = None) -> list[Any]:
        deadline = self.config.deadlines.step
        try:
            return get_all(
                refs, deadline, "deadlines.step", who=self._names(len(refs)), while_waiting=while_waiting,
                lag=self.config.trainer.rendezvous_timeout,
            )  # fmt: skip
        except DeadlinePassed as error:  # a rank that hangs will not save either
            raise PartLost(str(error)) from error
