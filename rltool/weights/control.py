"""The engines' end of a weight transfer, seen from outside: every control call of a sync, to all engines side by side.

Lives in the rollout manager, the one owner of the control plane. Each step reports failures per engine instead of raising, so
that one engine's failure is that engine's alone; sync.py decides what becomes of the whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

from rltool.config.train import WeightsConfig
from rltool.engines.client import EngineClient
from rltool.engines.dialect import Medium
from rltool.engines.dialects import dialect
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet import Fleet, State
from rltool.engines.resume import TRANSFER_GROUP as GROUP
from rltool.engines.types import Bucket, Completion, EngineInfo, GenerateRequest
from rltool.engines.weight_version import WeightVersion
from rltool.errors import EngineError
from rltool.weights.sender import Connection, Target

Failures = dict[str, str]
"""engine URL -> what went wrong there; empty: all is well"""


LEAVE_SECONDS = 5.0
"""For telling an engine whose update failed to leave its group; if it does not answer that either, its deadline will do."""


class WeightControl:
    """endpoints: engines that take weights, dialects known. All methods run on the client's event loop."""

    def __init__(self, endpoints: Sequence[EngineEndpoint], infos: dict[str, EngineInfo], client: EngineClient, fleet: Fleet, config: WeightsConfig, *, timeout: float) -> None:
        self.endpoints = {endpoint.url: endpoint for endpoint in endpoints}
        self.client = client
        self.fleet = fleet
        self.config = config
        self.timeout = timeout
        self._infos = dict(infos)
        self._connected: set[str] = set()
        for endpoint in endpoints:
            info = infos[endpoint.url]
            fleet.add(endpoint.url)
            fleet.probe_succeeded(endpoint.url, sent_at=fleet.member(endpoint.url).since, boot_id=info.boot_id, version=info.weight_version)

    # -- what the trainer needs to know

    def targets(self) -> list[Target]:
        """Engines that can be synced now."""
        return [Target(url, self.endpoints[url].dialect or "", self._infos[url].world_size) for url in self.fleet.syncable()]

    def epoch(self) -> int:
        """Changes whenever transfer groups built before are no longer the right ones."""
        return self.fleet.membership_epoch

    # -- the steps of a sync, in their order

    async def clear_leftovers(self) -> Failures:
        """What a trainer that died may have left: a pause, and a transfer group that nobody will ever send into again."""

        async def clear(endpoint: EngineEndpoint) -> None:
            speaks = dialect(endpoint.dialect)
            with suppress(EngineError):  # there was none; one that cannot be left will say so when the new group is joined
                await self.client.run(endpoint, speaks.shutdown_transfer(GROUP), timeout=self.timeout)
            await self.client.run(endpoint, speaks.resume(), timeout=self.timeout)

        return await self._each(self.endpoints, clear)

    async def connect(self, connections: Sequence[Connection], medium: Medium) -> Failures:
        """Tell each engine to join its transfer group; the trainer joins meanwhile. Disk needs the call as well, not the group."""
        by_url = {connection.target.url: connection for connection in connections}
        await self.disconnect()

        async def init(endpoint: EngineEndpoint) -> None:
            connection = by_url[endpoint.url]
            requests = dialect(endpoint.dialect).init_transfer(
                medium, address=connection.address, port=connection.port, rank_offset=1, world_size=connection.world_size,
                group=connection.group, timeout_seconds=2 * self.timeout,  # see receive
            )  # fmt: skip
            await self.client.run(endpoint, requests, timeout=self.timeout)

        failures = await self._each(by_url, init)
        self._connected = set(by_url) - set(failures)
        return failures

    async def prepare(self) -> Failures:
        """Pause, and open the update."""
        urls = [url for url in self.fleet.syncable() if url in self._connected]
        for url in urls:
            self.fleet.pause(url)

        async def pause_and_begin(endpoint: EngineEndpoint) -> None:
            speaks = dialect(endpoint.dialect)
            await self.client.run(endpoint, speaks.pause(self.config.pause_mode), timeout=self.timeout)
            self.fleet.update_began(endpoint.url)
            await self.client.run(endpoint, speaks.begin_update(), timeout=self.timeout)

        return await self._update_step(urls, pause_and_begin)

    async def receive(self, version: str, buckets: Sequence[Bucket], medium: Medium, paths: Sequence[Path] = ()) -> Failures:
        """Announce every bucket, in order, to each engine at its own pace; gloo engines take the bytes while this runs.

        An engine that fails is told to leave its group at once: the trainer's broadcast into it then ends with an error
        instead of waiting for its deadline, with the other engines behind it. One that hangs cannot be told, and costs the
        others up to one timeout; hence their two, here and in their groups.
        """

        async def announce(endpoint: EngineEndpoint) -> None:
            speaks = dialect(endpoint.dialect)
            try:
                for index, bucket in enumerate(buckets):
                    path = str(paths[index]) if paths else None
                    requests = speaks.update_bucket(medium, bucket, group=GROUP, version=version, path=path)
                    await self.client.run(endpoint, requests, timeout=2 * self.timeout)
            except EngineError:
                with suppress(EngineError):  # the first failure is the one to report
                    await self.client.run(endpoint, speaks.shutdown_transfer(GROUP), timeout=LEAVE_SECONDS)
                self._connected.discard(endpoint.url)
                raise

        return await self._update_step(self._paused(), announce)

    async def finish(self, version: str, failed: Failures) -> Failures:
        """Close the update and give the new weights their name; engines in `failed` are given up to STALE instead."""
        for url in set(self._paused()) & set(failed):
            self.fleet.update_failed(url, failed[url])

        async def close(endpoint: EngineEndpoint) -> None:
            await self.client.run(endpoint, dialect(endpoint.dialect).finish_update(version), timeout=self.timeout)
            self.fleet.update_finished(endpoint.url, WeightVersion.parse(version))

        failures = await self._update_step(self._paused(), close)
        if self._paused():
            self.fleet.advance(WeightVersion.parse(version))
        return failures

    async def release(self) -> Failures:
        """Resume every engine that takes weights, whatever happened before. An engine that was not paused does not mind."""

        async def resume(endpoint: EngineEndpoint) -> None:
            await self.client.run(endpoint, dialect(endpoint.dialect).resume(), timeout=self.timeout)

        paused = self._paused()
        failures = await self._each(self.endpoints, resume)
        for url in paused:
            if url in failures:
                self.fleet.update_failed(url, failures[url])
            else:
                self.fleet.resume(url)
        return failures

    async def disconnect(self) -> Failures:
        """Have the engines leave their transfer groups."""

        async def shutdown(endpoint: EngineEndpoint) -> None:
            await self.client.run(endpoint, dialect(endpoint.dialect).shutdown_transfer(GROUP), timeout=self.timeout)

        connected, self._connected = self._connected, set()
        return await self._each(connected, shutdown)

    async def sample_each(self, request: GenerateRequest) -> dict[str, Completion]:
        """One completion by every serving engine itself (not through the router): what the value check compares."""
        urls = self.fleet.serving()
        replies = await asyncio.gather(*(self.client.generate(self.endpoints[url], request, timeout=self.timeout) for url in urls))
        return {url: completions[0] for url, completions in zip(urls, replies, strict=True)}

    # -- the rest is private

    def _paused(self) -> list[str]:
        return [member.url for member in self.fleet.members() if member.state is State.PAUSED]

    async def _each(self, urls: Sequence[str] | set[str] | dict, act: Callable[[EngineEndpoint], Awaitable[None]]) -> Failures:
        order = list(urls)
        results = await asyncio.gather(*(act(self.endpoints[url]) for url in order), return_exceptions=True)
        failures = {}
        for url, result in zip(order, results, strict=True):
            if isinstance(result, EngineError):
                failures[url] = str(result)
            elif isinstance(result, BaseException):
                raise result  # a bug of ours, not a failure of the engine
        return failures

    async def _update_step(self, urls: Sequence[str], act: Callable[[EngineEndpoint], Awaitable[None]]) -> Failures:
        failures = await self._each(urls, act)
        for url, reason in failures.items():
            self.fleet.update_failed(url, reason)
        return failures
