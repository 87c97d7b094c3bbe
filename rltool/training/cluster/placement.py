"""From the configuration to the bundles that Ray is asked for. Pure; `--dry-run` prints it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from rltool.config.parallel import ParallelLayout
from rltool.config.rollout import WeightsConfig
from rltool.config.train import TrainConfig
from rltool.engines.dialects.memory_flags import with_sleep_flags
from rltool.engines.launch.plan import Slot, device_of, engine_slots, shares_seat
from rltool.errors import UsageError
from rltool.megatron.shards import held_elsewhere
from rltool.training.cluster.devices import Device
from rltool.training.cluster.engine_memory import NOT_SET, EngineMemory

Bundle = dict[str, float]


@dataclass(frozen=True)
class PlacementPlan:
    """trainer: one bundle per trainer rank; engines: bundles beyond those, one per process of each slot, in order. All
    go into one placement group.

    The rollout manager is an actor outside of it that reserves nothing. slots: the engines that the run starts.
    shares_gpus: these have no bundles, they are in the trainer's. memory: log lines about theirs. starts_beside:
    they load while the trainer does, and not after it has left the GPUs. ranks_stay: it never leaves them.
    """

    trainer: tuple[Bundle, ...]
    engines: tuple[Bundle, ...]
    reason: str
    slots: tuple[Slot, ...] = ()
    shares_gpus: bool = False
    memory: tuple[str, ...] = ()
    starts_beside: bool = True
    ranks_stay: bool = False

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        return self.trainer + self.engines

    @property
    def device(self) -> Device:
        """What the trainer's ranks run on."""
        return "cuda" if any(bundle.get("GPU") for bundle in self.trainer) else "cpu"

    def total(self, resource: str) -> float:
        return sum(bundle.get(resource, 0.0) for bundle in self.bundles)

    def describe(self) -> str:
        gpus = f", {self.total('GPU'):g} GPUs" if self.total("GPU") else ""
        return (
            f"{len(self.bundles)} Ray bundle{'s' * (len(self.bundles) != 1)} "
            f"({len(self.trainer)} trainer, {len(self.engines)} engine){gpus}: "
            f"{self.reason}"
        )


def plan_placement(
    config: TrainConfig, *, gpu: bool, trains: bool = True, generates: bool = True, gpus_per_host: int | None = None,
    memory: EngineMemory = NOT_SET,
) -> PlacementPlan:  # fmt: skip
    """The plan of `config` on GPUs or, with gpu False, on CPUs.

    external: the trainer's bundles and nothing else. managed: those and one for each process
    of the engines (and for each placeholder), so that an engine never straddles two hosts by accident; one that no
    host has room for (gpus_per_host: of the largest) is cut over several. colocate: the trainer's bundles, which the
    engines share; UsageError where they want more GPUs. trains False (debug rollout-only): no trainer bundles;
    generates False (debug train-only, supervised training without engines): no engine bundles. memory: of colocated
    engines.
    """
    trainer = config.trainer
    ours: Bundle = {"CPU": trainer.cpus_per_rank, **({"GPU": 1.0} if gpu else {})}
    ranks = tuple(dict(ours) for _ in range(trainer.world_size)) if trains else ()
    if not generates or config.engines.mode == "external":
        reason = (
            "engines are external: the trainer's world size and nothing more" if generates else "no engines take part"
        )
        return PlacementPlan(ranks, (), reason)
    device: Device = "cuda" if gpu else "cpu"
    if config.engines.shares_gpus:
        from_disk = {name for name, model in config.models.items() if model.sleep == "disk"}
        groups = [
            with_sleep_flags(group, device, from_disk=group.model in from_disk, cache=memory.caches.get(group.name))
            for group in config.engines.groups
        ]
        slots = engine_slots(groups, device=device, gpus_per_host=gpus_per_host)
        _check_room(slots, len(ranks))
        reason = "colocated engines share the trainer's bundles, in turns"
        beside = memory.beside or all(device_of(group, device) == "cpu" for group in groups)
        return PlacementPlan(
            ranks, (), reason, tuple(slots), shares_gpus=True, memory=memory.lines, starts_beside=beside,
            ranks_stay=memory.beside,
        )  # fmt: skip
    slots = engine_slots(config.engines.groups, device=device, gpus_per_host=gpus_per_host)
    engines = tuple(_bundle(share) for slot in slots if not shares_seat(slot) for share in slot.shares)
    return PlacementPlan(ranks, engines, "managed engines have their own bundles", tuple(slots))


def check_reach(
    weights: WeightsConfig, layout: ParallelLayout, nodes: Sequence[str], engines: Iterable[Collection[str]]
) -> None:
    """UsageError where sharded weights would have to come out of memory of another host. nodes: of the ranks, in order;
    engines: the nodes of each; of one that has several, workers say at the join what they miss."""
    if not weights.sharded or weights.transport not in ("auto", "ipc"):
        return
    for node in dict.fromkeys(node for taken in engines if len(set(taken)) == 1 for node in taken):
        missing = held_elsewhere(layout, {rank for rank, at in enumerate(nodes) if at == node})
        if missing:
            raise UsageError(
                f"weights.sharded: the engines on host {node} need what rank {', '.join(map(str, missing))} holds, on "
                'another host, whose memory CUDA IPC does not reach: set weights.transport = "gloo", or lay out the '
                "ranks so that each host holds the whole model"
            )


def _check_room(slots: Sequence[Slot], ranks: int) -> None:
    wanted = sum(share for slot in slots if not shares_seat(slot) for share in slot.shares)
    if wanted > ranks:
        raise UsageError(
            f'engines.mode = "colocate": engines.groups takes {wanted} GPUs, and the trainer has {ranks} '
            "(trainer.world_size): lower the groups' count or tp, set engines_per_gpu, or raise trainer.world_size"
        )


def _bundle(share: int) -> Bundle:
    return {"CPU": float(share), "GPU": float(share)} if share else {"CPU": 1.0}
