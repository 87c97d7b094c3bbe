"""Engines that join and leave a living run.

An engine joins once it has answered and passed the checks of the run's first engines (training/checks/preflight.py);
until then it is asked again and again, and is no member of the fleet: it is not synced or sampled. It serves after its
first weight sync.

An engine leaves in order: no new request (DRAINING, out of the router); what it has is finished, or after
deadlines.close aborted, and goes on elsewhere from where it was; out of its transfer group; out of the fleet. Where a
weight sync is in progress it leaves after that. `remove` is answered at once; repeat it to see the progress.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

from rltool.config.train import TrainConfig
from rltool.engines.endpoints import EngineEndpoint, ModelEndpoints
from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.fleet.fleet import Member, State
from rltool.engines.run_client import EngineStatus
from rltool.engines.types import EngineInfo
from rltool.errors import EngineConflict, EngineError, EngineRejected, EngineUnreachable, UnknownEngine, UsageError
from rltool.processes.tasks import Background
from rltool.rollout.serving.data_plane import DataPlane
from rltool.training.checks.disaggregated import check_role
from rltool.training.checks.preflight import ProbedFleet, check_engines
from rltool.training.checks.routing_replay import check_rollout_engines
from rltool.training.manager.weight_updates import Oversight, WeightUpdates

DRAIN_POLL_SECONDS = 0.2
"""How often an engine that leaves is looked at: a look is a number in memory, behind a router one small request."""
ABORTED_SECONDS = 10.0
"""For aborted requests to come back with what they have."""
REPLY_SECONDS = 1.0
"""How long the reply to `remove` waits for the engine to get nothing new; it reports where a sync takes longer."""
REMOVED = "removed by its owner"


@dataclass
class _Joining:
    """An engine that has not answered yet."""

    endpoint: EngineEndpoint
    since: float
    reason: str
    task: asyncio.Task[None] | None = None


@dataclass
class _Draining:
    """began: it gets no new request any more. ends_at: when what is left is aborted; None: a sync has to end first."""

    task: asyncio.Task[None] | None = None
    began: asyncio.Event = field(default_factory=asyncio.Event)
    ends_at: float | None = None


class FleetMembership:
    """weights None: none are sent."""

    def __init__(
        self, config: TrainConfig, engines: EngineSet, oversight: Oversight, plane: DataPlane,
        weights: WeightUpdates | None,
    ) -> None:  # fmt: skip
        self._config, self._client, self._fleet = config, engines.client, engines.fleet
        self._clock, self._log = engines.clock, engines.log
        self._monitor, self._leases = oversight.monitor, oversight.leases
        self._plane, self._router, self._weights = plane, plane.router, weights
        self._lock = weights.trainer.lock if weights is not None else asyncio.Lock()
        self._trainer_device = weights.trainer.device if weights is not None else None
        self._background = Background(lambda failure: engines.log(str(failure)))
        self._joining: dict[str, _Joining] = {}
        self._draining: dict[str, _Draining] = {}

    # -- what the owner calls

    async def add(self, endpoint: EngineEndpoint) -> EngineStatus:
        """Have an engine join. Raises UsageError for one that cannot serve this run, EngineConflict for one that is
        there; one that does not answer (yet) joins when it does, within the fleet's start_seconds."""
        url = endpoint.url
        if url not in self._draining:
            self._refuse_twice(url)
        self._check_key(endpoint)
        self._check_role(endpoint)
        await self._cancel_removal(url)
        if self._is_member(url):  # its removal was cancelled before it began
            return self.row(url)
        try:
            info = await self._ask(endpoint)
        except EngineError as error:
            self._refuse_twice(url)
            self.expect(endpoint, str(error))
            return self.row(url)
        await self._join(endpoint, info)
        return self.row(url)

    def expect(self, endpoint: EngineEndpoint, why: str) -> None:
        """An engine that has not answered, for this reason, joins when it does."""
        joining = self._joining[endpoint.url] = _Joining(endpoint, self._clock(), _not_yet(why))
        joining.task = self._background.start(self._wait_for(joining), f"waiting for {endpoint.url}")

    async def remove(self, url: str) -> EngineStatus:
        """Have an engine leave; asking again shows the progress. Raises UnknownEngine."""
        joining = self._joining.pop(url, None)
        if joining is not None:
            await _end(joining.task)
            if not self._is_member(url):
                return {"url": url, "state": "removed", "reason": "it had not answered yet"}
        if not self._is_member(url):
            raise UnknownEngine(f"{url} is no engine of this run")
        draining = self._draining.get(url)
        if draining is None or (draining.task is not None and draining.task.done()):  # done, and still a member?
            draining = self._draining[url] = _Draining()
            draining.task = self._background.start(self._leave(url, draining), f"{url} leaves")
        with suppress(TimeoutError):
            await asyncio.wait_for(draining.began.wait(), REPLY_SECONDS)
        return self.row(url)

    def rows(self) -> list[EngineStatus]:
        """Every engine, those that have not answered yet included."""
        return [self.row(url) for url in dict.fromkeys([*(m.url for m in self._fleet.members()), *self._joining])]

    def row(self, url: str) -> EngineStatus:
        """One engine as users see it; state "removed": it has left."""
        now = self._clock()
        joining = self._joining.get(url)
        if joining is not None:
            return {
                "url": url, "state": State.STARTING.value, "reason": joining.reason,
                "since_seconds": round(now - joining.since, 1), "weight_version": None,
                "takes_weights": joining.endpoint.takes_weights,
            }  # fmt: skip
        if not self._is_member(url):
            return {"url": url, "state": "removed", "reason": REMOVED}
        return self._member_row(self._fleet.member(url), self._draining.get(url), now)

    def present(self) -> tuple[EngineEndpoint, ...]:
        """The engines that a run which resumes would begin with: members that are not leaving."""
        return tuple(m.endpoint for m in self._fleet.members() if m.url not in self._draining)

    async def close(self) -> None:
        """No engine joins or leaves any more."""
        await self._background.close()

    # -- joining

    def _check_key(self, endpoint: EngineEndpoint) -> None:
        key = endpoint.read_key()
        if self._router is not None and key != self._router.read_key():
            raise UsageError(
                f"{endpoint.url} has another key than the router {self._router.url}, which passes its clients' key on "
                "to all engines: start the engine with the router's key, and name it with --key-file"
            )

    def _check_role(self, endpoint: EngineEndpoint) -> None:
        check_role(endpoint, [m.endpoint for m in self._fleet.members() if m.url != endpoint.url])

    async def _ask(self, endpoint: EngineEndpoint) -> EngineInfo:
        """Raises UsageError for what will not change by waiting (a wrong key, no engine), EngineError for the rest."""
        seconds = 0.6 * self._config.deadlines.preflight  # the caller waits for deadlines.preflight in all
        try:
            async with asyncio.timeout(seconds):
                return await self._client.probe(endpoint, timeout=seconds)
        except EngineRejected as error:
            raise UsageError(f"{error}; a key is named with --key-file") from error
        except TimeoutError as error:
            raise EngineUnreachable(f"{endpoint.url}: no answer within {seconds:g} s") from error

    async def _wait_for(self, joining: _Joining) -> None:
        url, policy = joining.endpoint.url, self._fleet.policy
        try:
            while self._clock() - joining.since < policy.start_seconds:
                await asyncio.sleep(policy.probe_seconds)
                try:
                    await self._join(joining.endpoint, await self._ask(joining.endpoint))
                    return
                except EngineError as error:
                    joining.reason = _not_yet(str(error))
            self._log(f"engine {url} does not join: no answer in {policy.start_seconds:g} s; {joining.reason}")
        except (UsageError, EngineConflict) as error:
            self._log(f"engine {url} does not join: {error}")
        finally:
            if self._joining.get(url) is joining:
                del self._joining[url]

    async def _join(self, endpoint: EngineEndpoint, info: EngineInfo) -> None:
        url = endpoint.url
        endpoint = endpoint.probed(info)
        self._check_role(endpoint)
        alone = ModelEndpoints(engines=(endpoint,), data_url=self._router.url if self._router else None)
        await asyncio.to_thread(check_engines, ProbedFleet(alone, {url: info}), self._config, self._trainer_device)
        check_rollout_engines(self._config, {url: info}, router=alone.data_url)
        self._refuse_member(url)  # meanwhile
        # First: a member is brought to the run's weights by the next sync.
        await self._leases.admit(endpoint, info)
        self._refuse_member(url)
        takes_weights = self._weights is not None and endpoint.takes_weights
        self._fleet.add_probed(endpoint, info, takes_weights=takes_weights)
        await self._monitor.carry_out()

    # -- leaving

    async def _leave(self, url: str, draining: _Draining) -> None:
        async with self._lock:
            draining.ends_at = self._clock() + self._config.deadlines.close
            if self._fleet.member(url).state not in (State.READY, State.STALE, State.SUSPECT):
                await self._forget(url, REMOVED)  # it has nothing to finish
                draining.began.set()
                return
            self._fleet.drain(url, REMOVED)
            await self._monitor.carry_out()
            draining.began.set()
        await self._drain(url, draining.ends_at)
        try:
            await (self._leases.release(url) if self._weights is None else self._weights.leave_engine(url))
        except EngineError as error:
            self._log(f"leaving {url}: {error}")
        await self._forget(url, REMOVED)

    async def _drain(self, url: str, ends_at: float) -> None:
        """Until the engine has none of our requests any more."""
        while (left := await self._requests_at(url)) and self._clock() < ends_at:  # noqa: ASYNC110  # the engine is asked
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        if not left:
            return
        deadline = self._config.deadlines.close
        self._log(f"{url} has not finished its requests within deadlines.close = {deadline:g} s: they are aborted")
        for reason in (await self._plane.abort(at=url)).values():
            self._log(f"aborting requests at {url}: {reason}")
        aborted_at = self._clock()
        while await self._requests_at(url) and self._clock() < aborted_at + ABORTED_SECONDS:  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_POLL_SECONDS)

    async def _requests_at(self, url: str) -> int:
        """Behind a router the engine itself is asked: only it knows its requests."""
        if self._router is None:
            return self._plane.in_flight_at(url)
        engine = self._fleet.find(url)
        if engine is None:
            return 0
        try:
            load = await self._client.load(engine.endpoint)
        except EngineUnreachable:  # it is gone, and with it its requests
            return 0
        except EngineError:  # not reported: until the deadline it may have some
            return 1
        return load.running + load.waiting

    async def _cancel_removal(self, url: str) -> None:
        """An engine that is leaving is added again: it stays if its drain has not begun."""
        draining = self._draining.pop(url, None)
        if draining is None:
            return
        await _end(draining.task)
        if draining.ends_at is not None and self._is_member(url):
            await self._forget(url, "added again")

    async def _forget(self, url: str, reason: str) -> None:
        self._draining.pop(url, None)
        self._fleet.remove(url, reason)
        await self._monitor.carry_out()

    # -- the rest is private

    def _refuse_twice(self, url: str) -> None:
        if url in self._joining:
            raise EngineConflict(f"{url} is an engine of this run already")
        self._refuse_member(url)

    def _refuse_member(self, url: str) -> None:
        if self._is_member(url):
            raise EngineConflict(f"{url} is an engine of this run already")

    def _is_member(self, url: str) -> bool:
        return self._fleet.find(url) is not None

    def _member_row(self, member: Member, draining: _Draining | None, now: float) -> EngineStatus:
        row: EngineStatus = {
            "url": member.url, "state": member.state.value, "reason": member.reason,
            "since_seconds": round(now - member.since, 1), "takes_weights": member.takes_weights,
            "weight_version": str(member.version) if member.version else None,
        }  # fmt: skip
        if draining is None:
            return row
        if draining.ends_at is None:
            row["reason"] = "leaves when the weight sync in progress has ended"
            row["leaves_within_seconds"] = self._config.deadlines.sync + self._config.deadlines.close
            return row
        left = max(draining.ends_at - now, 0.0)
        doing = f"{self._plane.in_flight_at(member.url)} requests in flight" if self._router is None else "finishing"
        row["reason"] = f"{REMOVED}; {doing}, at most {left:.0f} s more"
        row["leaves_within_seconds"] = round(left + ABORTED_SECONDS, 1)
        return row


def _not_yet(why: str) -> str:
    return f"has not answered yet, and is asked again: {why}"


async def _end(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
