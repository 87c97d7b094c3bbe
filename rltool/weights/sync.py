"""One weight sync, whole: a coroutine that drives the engines over HTTP and awaits the trainer's ranks.

connect (engines that are new or whose connection failed) -> pause, begin -> send beside receive -> finish -> resume, in
`finally` -> value check of new connections. It runs where the fleet and the HTTP client live, the one owner of the
control plane.

- A version is given to an engine only after all of its bytes are there, and its prefix cache is dropped.
- Each engine's failure is its own: it is a line of `SyncReport.failed`, the fleet has the engine STALE, the others go
  on. Only a sync that reaches nobody raises.
- An engine whose connection is new serves only after its values were compared: it is resumed, but PAUSED in the fleet,
  is sampled directly, and the ranks score its tokens.
- The coroutine ends only when every rank's `send` has ended: Ray runs a rank's methods one after another, so an
  abandoned send would hold up the next training step. It is not to be cancelled; its deadlines end it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor

from rltool.algorithms.batch import TrainBatch
from rltool.config.rollout import WeightsConfig
from rltool.engines.client import EngineClient
from rltool.engines.dialect import Dialect, Transport
from rltool.engines.dialects import dialect
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet import Fleet, Member, State
from rltool.engines.resume import TRANSFER_GROUP as GROUP
from rltool.engines.types import Bucket, Completion, EngineInfo, TensorMeta
from rltool.engines.weight_version import WeightVersion
from rltool.engines.wire import bucket_bytes, plan_buckets
from rltool.errors import EngineError, EngineUnreachable
from rltool.weights.disk import bucket_file, version_directory
from rltool.weights.liveness import CHECKS_MISSED, EngineSilent, while_alive
from rltool.weights.sender import Connection, SendReport, Target
from rltool.weights.verify import ValueCheck

Failures = dict[str, str]
"""engine URL -> what went wrong there; empty: all is well"""

LEAVE_SECONDS = 5.0
"""For telling an engine whose update failed to leave its group, or one that has fallen silent to resume;
if it does not answer that either, its deadline will do."""


class WeightSyncFailed(EngineError):
    """No engine holds the new weights. Names each engine and its reason.

    values_differ: every engine took them and samples something else; trying again does not help.
    """

    def __init__(self, message: str, *, values_differ: bool = False) -> None:
        super().__init__(message)
        self.values_differ = values_differ


class Ranks(Protocol):
    """The trainer's ranks, awaited: host and join concern rank 0 alone, the others are collectives of all ranks."""

    async def weight_metadata(self) -> list[TensorMeta]: ...
    async def host(self, targets: Sequence[Target], group: str) -> list[Connection]: ...
    async def join(self) -> Failures: ...
    async def send(self, buckets: Sequence[Bucket], urls: Collection[str]) -> SendReport: ...
    async def write(self, buckets: Sequence[Bucket], directory: Path) -> SendReport: ...
    async def leave_transfer(self, urls: Sequence[str] | None = None) -> None: ...
    async def logprobs(self, batch: TrainBatch) -> Tensor: ...


@dataclass(frozen=True)
class SyncReport:
    """bytes: of one copy of the weights; seconds by phase: connect, pause, transfer, finish, resume, verify.

    updated: engines that hold the version now; failed: engine -> reason; difference: mean |log-probability difference|
    of the value check over the engines that were checked, None where none was.
    """

    version: str
    bytes: int
    seconds: float
    phases: dict[str, float] = field(default_factory=dict)
    updated: tuple[str, ...] = ()
    failed: Failures = field(default_factory=dict)
    difference: float | None = None

    def line(self) -> str:
        """One line for the log."""
        phases = " ".join(f"{name} {seconds:.3f}" for name, seconds in self.phases.items())
        total = len(self.updated) + len(self.failed)
        text = (
            f"weights {self.version}: {self.bytes / 1e6:.1f} MB to {len(self.updated)}/{total} engines "
            f"in {self.seconds:.3f} s ({self.bytes / 1e9 / max(self.seconds, 1e-9):.2f} GB/s; {phases})"
        )
        if self.difference is not None:
            text += f"; engines agree with the trainer within {self.difference:.1e}"
        return text + "".join(f"\n  {url}: {reason}" for url, reason in self.failed.items())

    def metrics(self) -> dict[str, float]:
        """weights/* and time/sync_seconds."""
        values = {
            "weights/sync_seconds": self.seconds,
            "weights/sync_bytes": float(self.bytes),
            "time/sync_seconds": self.seconds,
        }
        values["weights/failed_engines"] = float(len(self.failed))
        if self.difference is not None:
            values["weights/logprob_abs_diff_mean"] = self.difference
        return values | {f"weights/{phase}_seconds": seconds for phase, seconds in self.phases.items()}


class WeightSync:
    """endpoints, infos: of the fleet's members by URL, dialects known; live views, for engines come and go.

    transport: gloo or disk; step_deadline: seconds for each step (deadlines.sync_step); disk_root: of this run alone.
    """

    def __init__(
        self,
        client: EngineClient,
        fleet: Fleet,
        endpoints: dict[str, EngineEndpoint],
        infos: dict[str, EngineInfo],
        ranks: Ranks,
        config: WeightsConfig,
        check: ValueCheck,
        *,
        transport: Transport,
        step_deadline: float,
        disk_root: Path,
    ) -> None:
        self.client, self.fleet, self.endpoints, self.infos, self.ranks = client, fleet, endpoints, infos, ranks
        self.config, self.check = config, check
        self.transport: Transport = transport
        self.deadline, self.disk_root = step_deadline, disk_root
        self._buckets: list[Bucket] = []
        self._connected: dict[str, str | None] = {}  # URL -> boot id of the process that joined
        self._silent: set[str] = set()  # engines that answered nothing any more, in this sync
        self._differing: set[str] = set()  # engines whose values differed, in this sync
        self._left: set[str] = set()  # engines whose groups the ranks have not left yet

    async def sync(
        self, version: WeightVersion, *, check_all: bool = False, only: Collection[str] | None = None
    ) -> SyncReport:
        """Bring every engine that takes weights, and can be paused now, to `version`.

        only: these engines, which missed the version; the others go on serving. check_all: compare values of every
        engine, not of new connections alone. Raises WeightSyncFailed when no engine took the weights, and whatever a
        rank raises; every engine that was paused has been told to resume all the same, and none is PAUSED in the fleet.
        """
        started = time.perf_counter()
        phases: dict[str, float] = {}
        self._silent, self._differing = set(), set()
        urls = [url for url in self.fleet.syncable() if only is None or url in only]
        if not urls:
            raise WeightSyncFailed(self._explain(str(version), {}))
        if not self._buckets:
            self._buckets = plan_buckets(await self.ranks.weight_metadata(), self.config.bucket_bytes)
        with _timed(phases, "connect"):
            new, failures = await self._connect(urls)
        # Requests and probes go on until the pause: an engine may have failed them while others were connected.
        there = self.fleet.syncable()
        failures |= {url: self.fleet.member(url).reason for url in urls if url not in there and url not in failures}
        paused = [url for url in urls if url not in failures]
        for url in failures:
            self._lost(url, failures[url])
        try:
            try:
                for url in paused:
                    self.fleet.pause(url)
                with _timed(phases, "pause"):
                    failures |= await self._each(self._paused(paused), self._pause_and_begin)
                with _timed(phases, "transfer"):
                    failures |= await self._transfer(str(version), self._paused(paused))
                with _timed(phases, "finish"):
                    failures |= await self._each(self._paused(paused), lambda endpoint: self._finish(endpoint, version))
                if self._paused(paused):
                    self.fleet.advance(version)
            finally:
                with _timed(phases, "resume"):
                    # The first failure of an engine is the one to report.
                    failures = await self._resume(paused) | failures
            to_check = [url for url in self._paused(paused) if check_all or url in new]
            with _timed(phases, "verify"):
                checked, difference = await self._verify(to_check)
        except BaseException as error:  # of a rank, or a bug: these engines serve on nobody's word
            for url in self._paused(paused):
                self._lost(url, f"the sync ended with {type(error).__name__}: {error}")
            raise
        failures |= checked
        updated = tuple(self._paused(paused))
        for url in updated:
            self.fleet.resume(url)
        if not updated:
            raise WeightSyncFailed(
                self._explain(str(version), failures), values_differ=failures.keys() == self._differing
            )
        size = sum(map(bucket_bytes, self._buckets))
        return SyncReport(str(version), size, time.perf_counter() - started, phases, updated, failures, difference)

    async def leave_engine(self, url: str) -> None:
        """One engine leaves the run: out of its transfer group. Not in the middle of a sync that it takes part in.

        The ranks, which may be in a training step now, leave theirs at the next sync. Raises EngineError.
        """
        self._left.add(url)
        if url in self._connected:
            del self._connected[url]
            shut_down = self._dialect(self.endpoints[url]).shutdown_transfer(GROUP)
            await self.client.run(self.endpoints[url], shut_down, timeout=LEAVE_SECONDS)

    async def leave(self, *, ceded: Collection[str] = ()) -> Failures:
        """At the end of the run: engines resumed and out of their transfer groups. Failures are returned.

        ceded: engines that another run controls by now, whose group would be the one shut down.
        """
        urls = [url for url in self._connected if url in self.endpoints and url not in ceded]
        failures = await self._gather(urls, self._shut_down)
        gone = (State.DEAD, State.STARTING)
        alive = [m.url for m in self.fleet.members() if m.takes_weights and m.state not in gone and m.url not in ceded]
        failures = (
            await self._gather(alive, lambda endpoint: self._run(endpoint, self._dialect(endpoint).resume())) | failures
        )
        self._connected = {}
        await self.ranks.leave_transfer()
        return failures

    # -- steps

    async def _connect(self, urls: Sequence[str]) -> tuple[set[str], Failures]:
        """Engines without a connection to this process of theirs join one each. Returns those, and the failures."""
        if self._left:
            left, self._left = sorted(self._left), set()
            await self.ranks.leave_transfer(left)
        new = [url for url in urls if not self._is_connected(self.fleet.member(url))]
        # The ranks wait for whoever they host, as long as joining may take: none that is known to be away is hosted.
        away = await self._gather(new, self._answers)
        new = [url for url in new if url not in away]
        if not new:
            return set(), away
        targets = [Target(url, self.endpoints[url].dialect or "", self.infos[url].world_size) for url in new]
        if self.transport == "disk":
            connections = [Connection(target, "", 0, GROUP) for target in targets]
            failures = await self._gather(new, self._init_transfer(connections))
        else:
            connections = await self.ranks.host(targets, GROUP)
            joining = asyncio.ensure_future(self.ranks.join())
            answered = await self._gather(new, self._init_transfer(connections))
            # What the engine says of its failure is nearer to the cause than our waiting for it in vain.
            failures = {**await joining, **answered}
        self._connected |= {url: self.fleet.member(url).boot_id for url in new if url not in failures}
        return set(new), away | failures

    def _is_connected(self, member: Member) -> bool:
        """Whether its transfer group is with this process of it. One whose weights are not known to be ours may be
        another process: its owner may have started it again with the same boot id, or it tells none."""
        is_known = member.url in self._connected and self._connected[member.url] == member.boot_id
        return is_known and member.version is not None

    async def _answers(self, endpoint: EngineEndpoint) -> None:
        """EngineUnreachable if it does not. What it says is no matter: a paused SGLang calls itself not ready."""
        try:
            await self.client.health(endpoint)
        except EngineUnreachable:
            raise
        except EngineError:
            pass

    def _init_transfer(self, connections: Sequence[Connection]) -> Callable[[EngineEndpoint], Awaitable[None]]:
        by_url = {connection.target.url: connection for connection in connections}

        async def init(endpoint: EngineEndpoint) -> None:
            connection = by_url[endpoint.url]
            # A trainer that died may have left a group behind; one that cannot be left fails now.
            with suppress(EngineError):
                await self._run(endpoint, self._dialect(endpoint).shutdown_transfer(GROUP))
            await self._run(
                endpoint,
                self._dialect(endpoint).init_transfer(
                    self.transport,
                    address=connection.address,
                    port=connection.port,
                    rank_offset=1,
                    world_size=connection.world_size,
                    group=connection.group,
                    timeout_seconds=2 * self.deadline,  # see _announce
                ),
            )

        return init

    async def _pause_and_begin(self, endpoint: EngineEndpoint) -> None:
        speaks = self._dialect(endpoint)
        await self._run(endpoint, speaks.pause(self.config.pause_mode))
        self.fleet.update_began(endpoint.url)
        await self._run(endpoint, speaks.begin_update())

    async def _transfer(self, version: str, urls: Sequence[str]) -> Failures:
        """Send every bucket while each engine receives at its own pace;
        the disk transport writes first and announces paths."""
        if self.transport == "disk":
            directory = version_directory(self.disk_root, version)
            await self.ranks.write(self._buckets, directory)
            paths = [bucket_file(directory, i, len(self._buckets)) for i in range(len(self._buckets))]
            return await self._each(urls, lambda endpoint: self._announce(endpoint, version, paths))
        receiving = asyncio.ensure_future(self._each(urls, lambda endpoint: self._announce(endpoint, version, ())))
        try:
            sent = await self.ranks.send(self._buckets, urls)
        finally:
            received = await receiving
        for url, reason in sent.failures.items():
            if url not in received:
                self._lost(url, reason)
        return {**sent.failures, **received}

    async def _announce(self, endpoint: EngineEndpoint, version: str, paths: Sequence[Path]) -> None:
        """Every bucket, in order; gloo engines take the bytes while the request is open.

        An engine that fails is told to leave its group at once: the trainer's broadcast into it then ends with an error
        instead of waiting for its deadline, with the other engines behind it. One that hangs cannot be told, and costs
        the others up to one step deadline; hence their two, here and in their groups.
        """
        speaks = self._dialect(endpoint)
        try:
            for index, bucket in enumerate(self._buckets):
                path = str(paths[index]) if paths else None
                requests = speaks.update_bucket(self.transport, bucket, group=GROUP, version=version, path=path)
                await self.client.run(endpoint, requests, timeout=2 * self.deadline)
        except EngineError:
            with suppress(EngineError):  # the first failure is the one to report
                await self.client.run(endpoint, speaks.shutdown_transfer(GROUP), timeout=LEAVE_SECONDS)
            raise

    async def _finish(self, endpoint: EngineEndpoint, version: WeightVersion) -> None:
        await self._run(endpoint, self._dialect(endpoint).finish_update(str(version)))
        self.fleet.update_finished(endpoint.url, version)

    async def _resume(self, urls: Sequence[str]) -> Failures:
        """Every engine that was paused, whatever became of its update:
        a frozen one serves nobody, not even somebody else."""

        async def resume(endpoint: EngineEndpoint) -> None:
            seconds = LEAVE_SECONDS if endpoint.url in self._silent else self.deadline
            await self.client.run(endpoint, self._dialect(endpoint).resume(), timeout=seconds)

        failures = await self._gather(urls, resume)
        for url in set(failures) & set(self._paused(urls)):
            self._lost(url, failures[url])
        return failures

    async def _verify(self, urls: Sequence[str]) -> tuple[Failures, float | None]:
        """The value check: engines sample, the ranks score. An engine that differs is that engine's failure."""
        if not urls:
            return {}, None
        request = self.check.request()
        completions: dict[str, Completion] = {}

        async def sample(endpoint: EngineEndpoint) -> None:
            [completions[endpoint.url]] = await self.client.generate(endpoint, request, timeout=self.deadline)

        failures = await self._each(urls, sample)
        if not completions:
            return failures, None
        batch = self.check.batch(request, list(completions.values()))
        result = self.check.compare(list(completions), batch, await self.ranks.logprobs(batch))
        self._differing = set(result.failed)
        for url, reason in result.failed.items():
            self._lost(url, reason)
        return failures | result.failed, result.mean

    # -- the rest

    async def _shut_down(self, endpoint: EngineEndpoint) -> None:
        await self._run(endpoint, self._dialect(endpoint).shutdown_transfer(GROUP))

    async def _run(self, endpoint: EngineEndpoint, requests: Sequence) -> None:
        await self.client.run(endpoint, requests, timeout=self.deadline)

    def _dialect(self, endpoint: EngineEndpoint) -> Dialect:
        return dialect(endpoint.dialect or "")

    def _paused(self, urls: Sequence[str]) -> list[str]:
        """Those of `urls` that this sync still has in its hands."""
        return [member.url for member in self.fleet.members() if member.url in urls and member.state is State.PAUSED]

    def _lost(self, url: str, reason: str) -> None:
        """An engine that failed in this sync: STALE, and to be connected anew.

        One that fell silent is SUSPECT at once: left STALE it would be tried again, and waited for, by every sync.
        """
        self._connected.pop(url, None)
        if self.fleet.member(url).state is State.PAUSED:
            self.fleet.update_failed(url, reason)
        if url in self._silent:
            self.fleet.fell_silent(url, reason, checks=CHECKS_MISSED)

    async def _each(self, urls: Sequence[str], act: Callable[[EngineEndpoint], Awaitable[None]]) -> Failures:
        """`act` on all of them side by side; those that fail are out of this sync."""
        failures = await self._gather(urls, act)
        for url, reason in failures.items():
            self._lost(url, reason)
        return failures

    async def _gather(self, urls: Sequence[str], act: Callable[[EngineEndpoint], Awaitable[None]]) -> Failures:
        steps = (while_alive(self.client, self.endpoints[url], act(self.endpoints[url])) for url in urls)
        results = await asyncio.gather(*steps, return_exceptions=True)
        failures = {}
        for url, result in zip(urls, results, strict=True):
            if isinstance(result, EngineSilent):
                self._silent.add(url)
            if isinstance(result, EngineError):
                failures[url] = str(result)
            elif isinstance(result, BaseException):
                raise result  # a bug of ours, not a failure of the engine
        return failures

    def _explain(self, version: str, failures: Failures) -> str:
        if not failures:
            states = "".join(f"\n  {m.url}: {m.state.value} ({m.reason})" for m in self.fleet.members())
            return f"weights {version}: no engine is there to receive them{states}"
        lines = "\n".join(f"  {url}: {reason}" for url, reason in failures.items())
        return (
            f"weights {version} reached none of {len(failures)} engines:\n{lines}\n"
            "If an engine has died, its log tells why (`rltool logs`); "
            "`rltool engines resume` frees engines that stayed paused."
        )


@contextmanager
def _timed(phases: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        phases[name] = time.perf_counter() - started
