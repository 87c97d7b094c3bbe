"""One model beside the policy in a run: its engines are watched, and requests go to those that serve, or to its router.

Nobody syncs or pauses these engines, so the fleet knows them as engines that take no weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rltool.config.serve import Task
from rltool.engines.client import EngineClient
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.fleet.fleet import Fleet
from rltool.engines.types import EngineInfo
from rltool.rollout.serving.data_plane import DataPlane
from rltool.rollout.serving.model_clients import ModelClient, Models
from rltool.rollout.serving.monitor import FleetMonitor
from rltool.rollout.serving.restarts import EngineRestarts
from rltool.rollout.serving.scores import Scores
from rltool.rollout.tokenizer import load_tokenizer


@dataclass(frozen=True)
class SideEngines:
    """The engines of one model as preflight found them. path: of its tokenizer, or None. router: the address that
    requests go to in place of the engines, or None; no classification does. task: what they are asked for.
    from_disk: colocated ones drop their weights while they sleep."""

    endpoints: tuple[EngineEndpoint, ...]
    infos: Mapping[str, EngineInfo]
    router: EngineEndpoint | None = None
    path: Path | None = None
    task: Task = "generate"
    from_disk: bool = False


class SideModel:
    """`start` first, `close` last. restart: see FleetMonitor. requests_per_engine, deadline: as of the policy's."""

    def __init__(
        self, name: str, engines: SideEngines, client: EngineClient, *, requests_per_engine: int, deadline: float,
        restart: Callable[[str], Awaitable[None]] | None, log: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.name, self.from_disk = name, engines.from_disk
        self._found = engines
        self.engines = EngineSet(Fleet(), client, log=lambda line: log(f"model {name}: {line}"))
        self.fleet = self.engines.fleet
        for endpoint in engines.endpoints:
            self.fleet.add_probed(endpoint, engines.infos[endpoint.url], takes_weights=False)
        self.fleet.take_transitions()
        plane = DataPlane(
            self.engines, router=engines.router, requests_per_engine=requests_per_engine, deadline=deadline
        )
        self.generate = plane.generate
        at_once = requests_per_engine * len(engines.endpoints)
        self._scores = Scores(name, self.engines, at_once=at_once, deadline=deadline)
        self.monitor = FleetMonitor(self.engines, restart=restart, on_change=plane.changed, serves=engines.task)

    async def start(self) -> ModelClient:
        """The client for functions; reads the tokenizer. UsageError where there is none at its path."""
        path = self._found.path
        tokenizer = await asyncio.to_thread(load_tokenizer, path) if path is not None else None
        self.monitor.start()
        classify = self._scores.classify if self._found.task == "classify" else None
        return ModelClient(
            self.name, self.generate, tokenizer, self._scores.score, self._scores.score_topk, classify=classify,
            serves=lambda: bool(self.fleet.serving()),
        )  # fmt: skip

    async def close(self) -> None:
        await self.monitor.close()


class SideModels:
    """All of a run. models: what functions look into; each is there once `start` has returned."""

    def __init__(self, engines: Mapping[str, SideEngines], models: Models) -> None:
        self._engines, self._models = engines, models
        self.started: list[SideModel] = []

    async def start(
        self, client: EngineClient, *, requests_per_engine: int, deadline: float, restarts: EngineRestarts | None,
        log: Callable[[str], None],
    ) -> None:  # fmt: skip
        """restarts: of engines that the run has started itself, or None."""
        for name, engines in self._engines.items():
            model = SideModel(
                name, engines, client, requests_per_engine=requests_per_engine, deadline=deadline,
                restart=restarts.restart if restarts is not None else None, log=log,
            )  # fmt: skip
            self.started.append(model)
            if restarts is not None:
                restarts.watch(model.fleet, model.monitor)
            self._models.add(await model.start())

    async def close(self) -> None:
        for model in self.started:
            await model.close()
