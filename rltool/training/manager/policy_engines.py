"""Engines that hold the policy's weights, as one: who they are and how they are, whose they are, where requests go, how
weights reach them, and who joins and leaves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rltool.config.train import TrainConfig
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.engine_set import EngineSet
from rltool.errors import RltoolError
from rltool.rollout.serving.data_plane import DataPlane
from rltool.rollout.serving.guard import EngineGuard
from rltool.rollout.serving.lease import EngineLeases, LeaseTerms
from rltool.rollout.serving.monitor import FleetMonitor
from rltool.rollout.serving.router_members import RouterMembers
from rltool.rollout.serving.versions import VersionBook
from rltool.router.workers import RouterWorkers
from rltool.training.checks.preflight import with_model_config
from rltool.training.manager.membership import FleetMembership
from rltool.training.manager.rollout_engines import Engines
from rltool.training.manager.weight_updates import Oversight, WeightUpdates
from rltool.weights.adapter_sync import AdapterSync
from rltool.weights.connections import Trainer
from rltool.weights.sleep import SharedGpus
from rltool.weights.sync import SyncDeadlines, WeightSync
from rltool.weights.verify.comparison import Comparison
from rltool.weights.verify.values import ValueCheck


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
    """`start` first, `close` last. found: the engines that the run begins with; engines, book: new ones, without a
    member. trainer None: these engines are sent no weights. lease: how they are taken; None: without a lease."""

    def __init__(
        self, config: TrainConfig, found: Engines, engines: EngineSet, book: VersionBook, *, trainer: Trainer | None,
        lease: LeaseTerms | None, hooks: EngineHooks,
    ) -> None:  # fmt: skip
        self._config, self._found, self._hooks = config, found, hooks
        self.engines, self.fleet, self.book = engines, engines.fleet, book
        for endpoint in found.endpoints:
            takes_weights = trainer is not None and endpoint.takes_weights
            self.fleet.add_probed(endpoint, found.infos[endpoint.url], takes_weights=takes_weights)
        self.fleet.take_transitions()  # the first engines' joining is no event
        self.leases = EngineLeases(engines, lease, run=book.lineage.run)
        self.plane = DataPlane(
            engines, router=found.router, requests_per_engine=config.rollout.requests_per_engine,
            deadline=config.deadlines.generate, min_serving=config.engines.min_serving,
            judge=book if trainer is not None else None, observed_version=self.leases.observed_version,
        )  # fmt: skip
        router = self._router_members(found.router) if found.router else None
        self.guard = EngineGuard(
            engines, min_serving=config.engines.min_serving, deadline=config.deadlines.engines, router=router
        )
        self.monitor = FleetMonitor(
            engines, router=router, restart=hooks.restart, on_change=self.plane.changed,
            observed_version=self.leases.observed_version,
        )  # fmt: skip
        oversight = Oversight(self.monitor, self.leases, self.guard)
        self.weights = self._weight_updates(trainer, oversight) if trainer is not None else None
        self.membership = FleetMembership(config, engines, oversight, self.plane, self.weights)

    async def start(self) -> None:
        """Take the engines' leases, watch them, and wait for those that are absent. EngineTaken: another run has
        them."""
        await self.leases.start()
        await self.monitor.carry_out()  # what else the router has goes before the first request
        self.monitor.start()
        for endpoint, why in self._found.absent.items():
            self.membership.expect(endpoint, why)

    async def close(self) -> None:
        await self.leases.close()
        await self.monitor.close()

    # -- the rest is private

    def _router_members(self, router: EngineEndpoint) -> RouterMembers:
        return RouterMembers(
            RouterWorkers(self.engines.client, router), self.engines, foreign=self._config.engines.foreign_workers,
            away=[engine.url for engine in self._found.absent], on_refused=self._hooks.router_refused,
        )  # fmt: skip

    def _weight_updates(self, trainer: Trainer, oversight: Oversight) -> WeightUpdates:
        config, members = self._config, self.fleet.members()
        lengths = [member.info.max_model_len for member in members if member.info.max_model_len]
        check = ValueCheck(
            trainer.vocab_size, config.algorithm.logits_temperature(config.sampling.temperature),
            config.weights.verify_tolerance, min(lengths, default=None), config.model.dtype,
        )  # fmt: skip
        adapters = self.book.lineage.adapters
        gpus = SharedGpus(trainer, self._hooks.end, updated=not adapters) if config.engines.shares_gpus else None
        deadlines = SyncDeadlines(config.deadlines.sync, config.deadlines.bucket)
        if adapters:
            sync = AdapterSync(
                self.engines, trainer, config.weights, check, deadlines, in_use=self.plane.samples_with, gpus=gpus
            )  # fmt: skip
        else:
            sync = WeightSync(
                self.engines, trainer, config.weights, check, deadlines, gpus=gpus, withdraw=self.plane.changed
            )
        comparison = Comparison(
            self.engines, trainer.ranks, check, deadline=config.deadlines.sync, gpus=gpus,
            described=with_model_config, adapter=self.book.adapter,
        )  # fmt: skip
        return WeightUpdates(
            self.engines, oversight, sync, comparison, self.book, is_stopping=self._hooks.is_stopping,
            # In asynchronous modes a batch may hold no token of the current policy: then this comparison is the only
            # one.
            check_all=config.rollout.max_staleness > 0,
        )  # fmt: skip
