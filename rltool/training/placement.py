"""From the configuration to the bundles that Ray is asked for. Pure; `--dry-run` prints it."""

from __future__ import annotations

from dataclasses import dataclass

from rltool.config.train import TrainConfig
from rltool.training.devices import Device

Bundle = dict[str, float]


@dataclass(frozen=True)
class PlacementPlan:
    """trainer: one bundle per trainer rank; engines: bundles beyond those, one per engine GPU. Both go into one
    placement group.

    The rollout manager is an actor outside of it that reserves nothing.
    """

    trainer: tuple[Bundle, ...]
    engines: tuple[Bundle, ...]
    reason: str

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
            f"{len(self.bundles)} bundles ({len(self.trainer)} trainer, {len(self.engines)} engine){gpus}: "
            f"{self.reason}"
        )


def plan_placement(config: TrainConfig, *, gpu: bool, trains: bool = True, generates: bool = True) -> PlacementPlan:
    """The plan of `config` on GPUs or, with gpu False, on CPUs.

    external: the trainer's bundles and nothing else, whatever the engines hold. managed: those and the engines' own.
    colocate: the larger of the two, shared. trains False (debug rollout-only): no trainer bundles; generates False
    (debug train-only, supervised training without engines): no engine bundles.
    """
    trainer = config.trainer
    ours: Bundle = {"CPU": trainer.cpus_per_rank, **({"GPU": 1.0} if gpu else {})}
    theirs: Bundle = {"CPU": 1.0, **({"GPU": 1.0} if gpu else {})}
    ranks = tuple(dict(ours) for _ in range(trainer.world_size)) if trains else ()
    mode = config.engines.mode
    if not generates or mode == "external":
        reason = (
            "engines are external: the trainer's world size and nothing more" if generates else "no engines take part"
        )
        return PlacementPlan(ranks, (), reason)
    engine_gpus = sum(group.count * group.tp for group in config.engines.groups)
    beyond = engine_gpus if mode == "managed" else max(0, engine_gpus - len(ranks))
    reason = (
        "managed engines have their own bundles"
        if mode == "managed"
        else "colocated engines share the trainer's bundles"
    )
    return PlacementPlan(ranks, tuple(dict(theirs) for _ in range(beyond)), reason)
