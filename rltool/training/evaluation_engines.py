"""Engines for evaluation alone (eval.engines): they get the weights of an evaluation when it begins, and hold these
until the next one begins. Rollouts are never sampled from them, and syncs of the policy's engines pass them by."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rltool.config.train import TrainConfig
from rltool.engines.client import EngineClient
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet import Fleet, FleetPolicy
from rltool.engines.run_client import EngineStatus
from rltool.errors import EngineError
from rltool.rollout.versions import VersionBook
from rltool.training.policy_engines import EngineHooks, PolicyEngines
from rltool.training.rollout_engines import Engines, Syncing
from rltool.weights.sync_report import SyncReport


class EvaluationEngines:
    """`start` first, `close` last. policy: thresholds of the fleet, None for its own. lock: held while any weight sync
    of the run goes on."""

    def __init__(
        self, config: TrainConfig, engines: Engines, client: EngineClient, *, syncing: Syncing, vocab_size: int,
        policy: FleetPolicy | None, lock: asyncio.Lock, hooks: EngineHooks, say: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        def say_whose(line: str) -> None:
            say(f"evaluation: {line}")

        alone = config.engines.model_copy(update={"min_serving": 1})
        self._members = PolicyEngines(
            config.model_copy(update={"engines": alone}), engines, client,
            Fleet(policy, clock=clock), VersionBook(syncing.lineage), syncing=syncing, vocab_size=vocab_size, lock=lock,
            hooks=hooks, say=say_whose, clock=clock,
        )  # fmt: skip
        self.plane, self.ownership = self._members.plane, self._members.ownership
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
        for url in [url for url in self._members.endpoints if url not in self.ownership.ceded]:
            try:
                assert self._members.weights is not None
                await self._members.weights.leave_engine(url)
            except EngineError as error:
                failures[url] = str(error)
        return failures

    async def close(self) -> None:
        await self._members.close()
