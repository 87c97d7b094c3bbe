"""Engines for evaluation alone (eval.engines): they get the weights of an evaluation when it begins, and hold these
until the next one begins. Rollouts are never sampled from them, and syncs of the policy's engines pass them by."""

from __future__ import annotations

from rltool.config.train import TrainConfig
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.run_client import EngineStatus
from rltool.errors import EngineError
from rltool.rollout.serving.lease import LeaseTerms
from rltool.rollout.serving.versions import VersionBook
from rltool.training.manager.policy_engines import EngineHooks, PolicyEngines
from rltool.training.manager.rollout_engines import Engines
from rltool.weights.connections import Trainer
from rltool.weights.sync_report import SyncReport


class EvaluationEngines:
    """`start` first, `close` last. The arguments are those of PolicyEngines, of a fleet and a book of their own."""

    def __init__(
        self, config: TrainConfig, found: Engines, engines: EngineSet, book: VersionBook, *, trainer: Trainer,
        lease: LeaseTerms | None, hooks: EngineHooks,
    ) -> None:  # fmt: skip
        alone = config.engines.model_copy(update={"min_serving": 1})
        self._members = PolicyEngines(
            config.model_copy(update={"engines": alone}), found, engines, book, trainer=trainer, lease=lease,
            hooks=hooks,
        )  # fmt: skip
        self.plane, self.leases = self._members.plane, self._members.leases
        self.check = self._members.guard.check

    async def start(self) -> None:
        """EngineTaken: another run has one of them."""
        await self._members.start()

    async def hold(self, step: int) -> SyncReport:
        """Bring them to the weights after `step` training steps; the ranks are idle meanwhile. GenerationLost where
        none takes them within deadlines.engines."""
        assert self._members.weights is not None
        return await self._members.weights.update(step)

    def rows(self) -> list[EngineStatus]:
        """Each as users see it."""
        return self._members.membership.rows()

    def present(self) -> tuple[EngineEndpoint, ...]:
        return self._members.membership.present()

    async def leave(self) -> dict[str, str]:
        """At the end of the run: out of their transfer groups, before the ranks leave all of theirs. Returns URL ->
        reason for failures."""
        await self._members.membership.close()
        failures = {}
        urls = [member.url for member in self._members.fleet.members()]
        for url in [url for url in urls if url not in self.leases.lost]:
            try:
                assert self._members.weights is not None
                await self._members.weights.leave_engine(url)
            except EngineError as error:
                failures[url] = str(error)
        return failures

    async def close(self) -> None:
        await self._members.close()
