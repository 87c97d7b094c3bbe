"""What a run's rollouts begin with: engines, and what sending them weights needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.types import EngineInfo
from rltool.engines.weight_version import Lineage
from rltool.rollout.serving.lease import LeaseTerms
from rltool.rollout.serving.restarts import EngineProcesses
from rltool.rollout.serving.side_model import SideEngines
from rltool.weights.connections import Ranks


@dataclass(frozen=True)
class Engines:
    """The fleet that a run begins with. router: the address that generation goes through, or None; the list of its
    workers follows the fleet. models: beside the policy, by name. processes: of engines that the run has started
    itself, to be started again when they die; None: there are none. absent: engines that join when they answer, and
    why they do not. evaluation: engines for evaluation alone, None: these here."""

    endpoints: tuple[EngineEndpoint, ...]
    infos: Mapping[str, EngineInfo]
    router: EngineEndpoint | None = None
    models: Mapping[str, SideEngines] = field(default_factory=dict)
    processes: EngineProcesses | None = None
    absent: Mapping[EngineEndpoint, str] = field(default_factory=dict)
    evaluation: Engines | None = None


@dataclass(frozen=True)
class Syncing:
    """What a run needs to send weights: lineage names them; trainer_device: cpu or cuda; directory: of this run alone.
    lease: how it takes the engines; None: without a lease. vocab_size: of the model; None: its tokenizer's."""

    ranks: Ranks
    lineage: Lineage
    trainer_device: str
    directory: Path
    lease: LeaseTerms | None = None
    vocab_size: int | None = None
