"""Engines that hold the policy's weights, as one: who they are and how they are, whose they are, where requests go, how
weights reach them, and who joins and leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rltool.config.train import TrainConfig
from rltool.engines.client import EngineClient
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet import Fleet
from rltool.errors import RltoolError
from rltool.rollout.data_plane import DataPlane
from rltool.rollout.engine_guard import EngineGuard
from rltool.rollout.fleet_monitor import FleetMonitor
from rltool.rollout.lease import Ownership
from rltool.rollout.router_members import RouterMembers
from rltool.rollout.versions import VersionBook
from rltool.router.workers import RouterWorkers
from rltool.training.fleet_membership import FleetMembership
from rltool.training.preflight import with_model_config
from rltool.training.rollout_engines import Engines, Syncing
from rltool.training.weight_updates import WeightUpdates
from rltool.weights.comparison import Comparison
from rltool.weights.residency import SharedGpus
from rltool.weights.sync import WeightSync
from rltool.weights.verify import ValueCheck


@dataclass(frozen=True)
class EngineHooks:
    """What the engines ask of their owner. restart: starts an engine again, None where the run has started none; end:
    ends one, and why; router_refused: workers of others are in the router, and that was forbidden; is_stopping: asked
    while no engine is there to sync."""

    restart: Callable[[str], Awaitable[None]] | None
    end: Callable[[str, str], Awaitable[None]]
    router_refused: Callable[[RltoolError], None]
    is_stopping: Callable[[], bool]


class PolicyEngines:
    """`start` first, `close` last. fleet, book: new ones. syncing None: nobody sends these engines weights. vocab_size:
    of the model. lock: held while a weight sync runs. say: one line for the user."""

    def __init__(
        self, config: TrainConfig, engines: Engines, client: EngineClient, fleet: Fleet, book: VersionBook, *,
        syncing: Syncing | None, vocab_size: int, lock: asyncio.Lock, hooks: EngineHooks, say: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._config, self._engines, self._client, self._hooks = config, engines, client, hooks
        self._lock, self._say, self._clock = lock, say, clock
        self.fleet, self.book = fleet, book
        self.endpoints = {endpoint.url: endpoint for endpoint in engines.endpoints}
        self.infos = dict(engines.infos)
        for url, endpoint in self.endpoints.items():
            info = self.infos[url]
            fleet.add(url, takes_weights=syncing is not None and endpoint.takes_weights)
            fleet.probe_succeeded(
                url, sent_at=fleet.member(url).since, boot_id=info.boot_id, version=info.weight_version
            )
        fleet.take_transitions()  # nobody has to hear that the engines of the beginning are there
        self.ownership = Ownership(
            client, fleet, self.endpoints, self.infos, syncing.lease if syncing else None, run=book.lineage.run,
            say=say, clock=clock,
        )  # fmt: skip
        self.plane = DataPlane(
            client, fleet, self.endpoints, router=engines.router,
            requests_per_engine=config.rollout.requests_per_engine, deadline=config.deadlines.generate,
            min_serving=config.engines.min_serving, judge=book if syncing else None,
            saw_version=self.ownership.saw, clock=clock,
        )  # fmt: skip
        router = self._router_members(engines.router) if engines.router else None
        self.guard = EngineGuard(
            fleet, self.endpoints, min_serving=config.engines.min_serving, deadline=config.deadlines.engines,
            router=router, clock=clock,
        )  # fmt: skip
        self.monitor = FleetMonitor(
            client, fleet, self.endpoints, self.infos,
            router=router, restart=hooks.restart,
            on_change=self.plane.changed, saw_version=self.ownership.saw, log=say, clock=clock,
        )  # fmt: skip
        self.weights = self._weight_updates(syncing, vocab_size) if syncing else None
        self.membership = FleetMembership(
            config, client, fleet, self.endpoints, self.infos, self.monitor, self.plane,
            router=engines.router, trainer_device=syncing.trainer_device if syncing else None,
            lock=lock, admit=self.ownership.admit,
            leave_group=self.weights.leave_engine if self.weights else self.ownership.release, log=say, clock=clock,
        )  # fmt: skip

    async def start(self) -> None:
        """Take the engines' leases, watch them, and wait for those that are absent. EngineTaken: another run has
        them."""
        await self.ownership.start()
        await self.monitor.carry_out()  # what else the router has goes before the first request
        self.monitor.start()
        for endpoint, why in self._engines.absent.items():
            self.membership.expect(endpoint, why)

    async def close(self) -> None:
        await self.ownership.close()
        await self.monitor.close()

    # -- the rest is private

    def _router_members(self, router: EngineEndpoint) -> RouterMembers:
        return RouterMembers(
            RouterWorkers(self._client, router), self.fleet, self.endpoints,
            foreign=self._config.engines.foreign_workers, away=[engine.url for engine in self._engines.absent],
            on_refused=self._hooks.router_refused, log=self._say, clock=self._clock,
        )  # fmt: skip

    def _weight_updates(self, syncing: Syncing, vocab_size: int) -> WeightUpdates:
        config = self._config
        lengths = [info.max_model_len for info in self.infos.values() if info.max_model_len]
        check = ValueCheck(
            vocab_size, config.algorithm.logits_temperature(config.sampling.temperature),
            config.weights.verify_tolerance, min(lengths, default=None), config.model.dtype, self.infos,
        )  # fmt: skip
        gpus = None
        if config.engines.shares_gpus:
            gpus = SharedGpus(syncing.ranks, self.infos, syncing.trainer_device, self._hooks.end)
        sync = WeightSync(
            self._client, self.fleet, self.endpoints, self.infos, syncing.ranks, config.weights, check,
            trainer_device=syncing.trainer_device, step_deadline=config.deadlines.sync_step,
            bucket_deadline=config.deadlines.bucket, directory=syncing.directory, gpus=gpus,
            withdraw=self.plane.changed,
        )  # fmt: skip
        comparison = Comparison(
            self._client, self.fleet, self.endpoints, self.infos, syncing.ranks, check,
            deadline=config.deadlines.sync_step, gpus=gpus, described=with_model_config,
        )  # fmt: skip
        return WeightUpdates(
            sync, comparison, self.fleet, self.book, self.monitor, self.ownership, self.guard, lock=self._lock,
            # In asynchronous modes a batch may hold no token of the current policy: then this comparison is the only
            # one.
            check_all=config.rollout.max_staleness > 0, is_stopping=self._hooks.is_stopping, say=self._say,
        )  # fmt: skip
