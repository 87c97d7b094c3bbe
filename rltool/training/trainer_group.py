"""The driver's handle to all trainer ranks: starts them in their bundles, deals batches out, collects results in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor

from rltool.algorithms.batch import TrainBatch, Weights
from rltool.algorithms.schedule import plan_micro_batches
from rltool.checkpoints.completion import Saved
from rltool.config.train import TrainConfig
from rltool.engines.types import Bucket, TensorMeta
from rltool.errors import RltoolError
from rltool.models.cost import ModelCost
from rltool.models.registry import family_for, read_hf_config
from rltool.training.actors import TrainerActor
from rltool.training.devices import RankDevice, check_rank_devices
from rltool.training.placement import PlacementPlan
from rltool.weights.sender import Connection, Target


class RayFuture:
    """An ObjectRef (or several; the first's value counts) with the interface of concurrent.futures.Future."""

    def __init__(self, refs: Sequence[ray.ObjectRef]) -> None:
        self._refs = list(refs)

    def result(self, timeout: float | None = None) -> Any:
        return get_all(self._refs, timeout)[0]


def get_all(refs: Sequence[ray.ObjectRef], timeout: float | None = None) -> list[Any]:
    """ray.get, with our own errors as they were raised and not inside Ray's wrapper, and the deadline named."""
    try:
        return ray.get(list(refs), timeout=timeout)
    except ray.exceptions.GetTimeoutError as error:
        raise RltoolError(f"no answer from the trainer or the rollout manager within {timeout:g} s; their logs tell why (`rltool logs`)") from error
    except ray.exceptions.RayActorError as error:
        raise RltoolError(f"a process of the run died: {error}\nIts log tells why (`rltool logs`); go on with `rltool train --resume`") from error
    except ray.exceptions.RayTaskError as error:
        cause = error.cause if isinstance(error.cause, RltoolError) else None
        if cause is None:
            raise
        raise cause from error


class TrainerGroup:
    """All ranks of one trainer. Methods return when every rank has answered, except send, write and join, which return futures."""

    def __init__(self, config: TrainConfig, plan: PlacementPlan, group: PlacementGroup | None, log_dir: Path | None) -> None:
        # What "auto" stands for is decided: a rank that found something else would compute in another way than the others.
        trainer = config.trainer.model_copy(update={"device": plan.device})
        config = config.model_copy(update={"trainer": trainer})
        self.config = config
        self.device = plan.device
        self.devices: list[RankDevice] = []
        self.ranks = []
        for rank, bundle in enumerate(plan.trainer):
            options: dict[str, Any] = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0)}
            if group is not None:
                options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
            log_file = log_dir / f"trainer_rank{rank}.log" if log_dir else None
            self.ranks.append(TrainerActor.options(**options).remote(config, rank, log_file))
        self.coordinates: list[Any] = []
        self._cost: ModelCost | None = None

    def start(self, total_optimizer_steps: int) -> None:
        """Let the ranks look for their devices, find each other and build the model. Waits rendezvous_timeout at most, plus the
        time to import. UsageError naming ranks and hosts without the planned device."""
        deadline = self.config.trainer.rendezvous_timeout + 120
        self.devices = get_all([rank.device.remote() for rank in self.ranks], deadline)
        check_rank_devices(self.device, self.devices)
        master = get_all([self.ranks[0].address.remote()], deadline)[0]
        self.coordinates = get_all([rank.start.remote(master, total_optimizer_steps) for rank in self.ranks], deadline)

    def load_weights(self) -> None:
        self._all(lambda rank: rank.load_weights.remote())

    def load_checkpoint(self, directory: Path) -> dict[str, Any]:
        return self._all(lambda rank: rank.load_checkpoint.remote(directory))[0]

    # -- training

    def logprobs(self, batch: TrainBatch, *, weights: Weights = "policy") -> Tensor:
        """Trainer's log-probability of every token of a global batch: [T] float32, aligned with batch.tokens, 0 for first tokens."""
        plan, dealt = self._deal(batch)
        results = get_all([rank.compute_logprobs.remote(dealt[place.dp_rank], weights) for rank, place in zip(self.ranks, self.coordinates, strict=True)])
        return self._in_order(batch, plan, results)

    def _in_order(self, batch: TrainBatch, plan: list[list[list[int]]], results: Sequence[list[Tensor] | None]) -> Tensor:
        """[T] of the global batch from the ranks' values per micro-batch."""
        out = torch.zeros(len(batch.tokens))
        ends = batch.lengths.cumsum(0)
        starts = ends - batch.lengths
        for place, result in zip(self.coordinates, results, strict=True):
            if result is None:
                continue
            for samples, values in zip(plan[place.dp_rank], result, strict=True):
                at = 0
                for i in samples:  # a filler micro-batch has no samples: its values are dropped
                    size = int(batch.lengths[i])
                    out[starts[i] : starts[i] + size] = values[at : at + size]
                    at += size
        return out

    def train_step(self, batch: TrainBatch) -> dict[str, float]:
        """One optimizer step on a global batch; its loss_weights must be normalised over it. Metrics are the same on all ranks."""
        _, dealt = self._deal(batch)
        tokens = batch.num_loss_tokens
        return get_all([rank.train_step.remote(dealt[place.dp_rank], tokens) for rank, place in zip(self.ranks, self.coordinates, strict=True)])[0]

    def forward_backward(self, batch: TrainBatch, *, fresh: bool = False) -> tuple[Tensor, dict[str, float]]:
        """The first half of a `train_step`: gradients, but no change of a weight. Then call `optimizer_step` or `discard_gradients`.

        fresh: take the old log-probabilities from this very forward pass. Returns the log-probabilities of the loss tokens, [T]
        float32, 0 elsewhere, and metrics.
        """
        plan, dealt = self._deal(batch)
        tokens = batch.num_loss_tokens
        results = get_all([rank.forward_backward.remote(dealt[place.dp_rank], tokens, fresh) for rank, place in zip(self.ranks, self.coordinates, strict=True)])
        return self._in_order(batch, plan, [logprobs for logprobs, _ in results]), results[0][1]

    def optimizer_step(self) -> dict[str, float]:
        return self._all(lambda rank: rank.optimizer_step.remote())[0]

    def discard_gradients(self) -> None:
        self._all(lambda rank: rank.discard_gradients.remote())

    def values(self, batch: TrainBatch) -> Tensor:
        """Critic's value of the state in which each loss token was chosen: [T] float32, 0 elsewhere."""
        plan, dealt = self._deal(batch)
        results = get_all([rank.compute_values.remote(dealt[place.dp_rank]) for rank, place in zip(self.ranks, self.coordinates, strict=True)])
        return self._in_order(batch, plan, results)

    def critic_step(self, batch: TrainBatch) -> dict[str, float]:
        """One optimizer step of the critic on a global batch with values and value_targets, cut as the policy's is."""
        _, dealt = self._deal(batch)
        tokens = batch.num_loss_tokens
        return get_all([rank.critic_step.remote(dealt[place.dp_rank], tokens) for rank, place in zip(self.ranks, self.coordinates, strict=True)])[0]

    def parameter_hash(self) -> str:
        return self._all(lambda rank: rank.parameter_hash.remote())[0]

    def _deal(self, batch: TrainBatch) -> tuple[list[list[list[int]]], list[Any]]:
        """Micro-batches per data-parallel rank: as sample indices, and as references to the batches themselves."""
        trainer = self.config.trainer
        plan = plan_micro_batches(
            batch.lengths.tolist(), max_tokens=trainer.micro_batch_tokens, data_parallel=trainer.layout.dp, costs=self._costs(batch)
        )
        return plan, [ray.put([batch.micro_batch(samples) for samples in rank]) for rank in plan]

    def _costs(self, batch: TrainBatch) -> list[int] | None:
        if self.config.trainer.balance == "tokens":
            return None
        if self._cost is None:
            self._cost = family_for(read_hf_config(self.config.model.path)).cost()
        return [self._cost.training_flops(length) for length in batch.lengths.tolist()]

    # -- weights (weights.sync.SenderHandle)

    def weight_metadata(self) -> list[TensorMeta]:
        return self._all(lambda rank: rank.weight_metadata.remote())[0]

    def host(self, targets: Sequence[Target], group: str) -> list[Connection]:
        return get_all([self.ranks[0].host.remote(targets, group)])[0]

    def join(self) -> RayFuture:
        return RayFuture([self.ranks[0].join.remote()])

    def send(self, buckets: Sequence[Bucket], skip: Sequence[str]) -> RayFuture:
        return RayFuture([rank.send.remote(buckets, skip) for rank in self.ranks])

    def write(self, buckets: Sequence[Bucket], directory: Path) -> RayFuture:
        return RayFuture([rank.write.remote(buckets, directory) for rank in self.ranks])

    def leave_transfer(self) -> None:
        get_all([self.ranks[0].leave_transfer.remote()])

    # -- saving

    def save_checkpoint(self, directory: Path, extra: dict[str, Any], metrics: dict[str, float]) -> None:
        """Returns when the state is copied (checkpoint.async_save), or when all is written; then ask `saved`. SaveFailed."""
        self._all(lambda rank: rank.save_checkpoint.remote(directory, extra, metrics))

    def saved(self, *, wait: bool) -> Saved | None:
        """The checkpoint that has been completed since the last call; None while it is written. SaveFailed."""
        if not wait and not all(self._all(lambda rank: rank.save_has_ended.remote())):
            return None
        return self._all(lambda rank: rank.saved.remote())[0]

    def save_hf(self, directory: Path) -> None:
        self._all(lambda rank: rank.save_hf.remote(directory))

    # -- looking inside (training.profiling)

    def start_profile(self) -> None:
        self._all(lambda rank: rank.start_profile.remote())

    def stop_profile(self, directory: Path, name: str) -> list[Path]:
        return self._all(lambda rank: rank.stop_profile.remote(directory, name))

    def start_memory(self) -> None:
        self._all(lambda rank: rank.start_memory.remote())

    def stop_memory(self, directory: Path, name: str) -> list[Path]:
        return self._all(lambda rank: rank.stop_memory.remote(directory, name))

    def close(self) -> None:
        self._all(lambda rank: rank.close.remote())

    def _all(self, call: Callable[[Any], ray.ObjectRef]) -> list[Any]:
        return get_all([call(rank) for rank in self.ranks])


