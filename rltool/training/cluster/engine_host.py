"""The Ray actor that starts a run's engines on one host, and the rollout manager's handle to all of these actors."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from rltool.config.serve import EngineLaunch
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.launch.host_engines import HostEngines
from rltool.engines.launch.plan import PortNeeds, url_of
from rltool.engines.launch.startup import Phase
from rltool.errors import PartLost
from rltool.processes.files import write_text_atomic
from rltool.processes.output import redirect_output
from rltool.processes.run_directory import open_run
from rltool.terminal import write_line
from rltool.training.cluster.ray_calls import death, unwrapped


@ray.remote(num_cpus=0)
class EngineHost:
    """Engines of the run on the host of a bundle of theirs. They end with `close`; if this actor dies without it, they
    have the driver's mark, by which `rltool stop` and the next trainer find them.

    Every method is a coroutine that leaves the waiting to threads: engines are watched while one is started.
    """

    def __init__(self, run: str, root: Path, key: str, log_file: Path | None) -> None:
        """run, root: of the run directory, which is made here where this host does not share it. key: the run's."""
        directory = open_run(run, create=True, root=root)
        if not directory.key_file.exists():
            write_text_atomic(directory.key_file, key, mode=0o600)
        redirect_output(log_file)
        with suppress(PermissionError):  # a cluster of others gives its workers a niceness, which engines would inherit
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        self._engines = HostEngines(directory)

    async def hold(self, needs: PortNeeds) -> Mapping[tuple[str, str], Sequence[int]]:
        return self._engines.hold(needs)

    async def write_fp8_copy(self, source: Path, target: Path, own: str | None) -> None:
        from rltool.checkpoints.convert import write_fp8_copy

        await asyncio.to_thread(write_fp8_copy, source, target, own=own, report=write_line)

    async def start(self, launches: Sequence[EngineLaunch]) -> None:
        await asyncio.to_thread(self._engines.start, launches)

    async def ready(self) -> list[EngineEndpoint]:
        return await self._engines.ready(write_line)

    async def starting(self) -> Mapping[str, Phase]:
        return self._engines.starting()

    async def exits(self) -> dict[int, str]:
        return await asyncio.to_thread(self._engines.exits)

    async def stop_engine(self, index: int) -> None:
        await asyncio.to_thread(self._engines.stop_engine, index)

    async def start_engine(self, index: int, boot_id: str) -> None:
        await asyncio.to_thread(self._engines.start_engine, index, boot_id)

    async def close(self) -> None:
        await asyncio.to_thread(self._engines.close)


ANSWER_SECONDS = 5.0
"""For the hosts to say which processes have ended. One that has vanished is silent for a minute, until Ray gives it
up."""


@dataclass(frozen=True)
class _Part:
    """One process of an engine. host: position in the list of hosts."""

    host: int
    index: int


class HostHandles:
    """rollout.engine_restarts.EngineProcesses over the actors. hosts: (node, actor); addresses: of the nodes; launches:
    of all of them."""

    def __init__(
        self, hosts: Sequence[tuple[str, Any]], addresses: Mapping[str, str], launches: Sequence[EngineLaunch]
    ) -> None:
        nodes = [node for node, _ in hosts]
        self._names = [addresses[node] for node in nodes]
        self._actors = [actor for _, actor in hosts]
        self._parts: dict[str, list[_Part]] = {}
        self._urls = {launch.index: url_of(launch) for launch in launches if launch.node_rank == 0}
        for launch in launches:
            part = _Part(nodes.index(launch.node), launch.index)
            self._parts.setdefault(self._urls[launch.index], []).append(part)
        self._lost: dict[int, PartLost] = {}
        self._reported: set[int] = set()
        """Lost hosts whose engines `exits` has named."""
        self._asked: dict[int, Any] = {}
        """Host -> its answer to come."""

    def urls(self) -> Iterable[str]:
        return self._parts.keys()

    def is_lost(self, url: str) -> bool:
        return any(part.host in self._lost for part in self._parts[url])

    async def exits(self) -> Mapping[str, str]:
        for number, actor in enumerate(self._actors):
            if number not in self._reported and number not in self._asked:
                self._asked[number] = actor.exits.remote()
        found = await asyncio.gather(*map(self._exits_at, list(self._asked)), return_exceptions=True)
        ended = {url: how for at in found if not isinstance(at, BaseException) for url, how in at.items()}
        failed = [at for at in found if isinstance(at, BaseException)]
        if failed and not ended:  # else the next call asks that host again, and raises
            raise failed[0]
        return ended

    async def start_again(self, url: str) -> None:
        """On every host that has a part of it, first ended everywhere. PartLost where such a host is gone."""
        boot_id = uuid.uuid4().hex
        await self.end(url)
        await self._everywhere(url, lambda part: self._actors[part.host].start_engine.remote(part.index, boot_id))

    async def end(self, url: str) -> None:
        """On every host that has a part of it. PartLost where such a host is gone."""
        await self._everywhere(url, lambda part: self._actors[part.host].stop_engine.remote(part.index))

    async def _everywhere(self, url: str, call: Callable[[_Part], Any]) -> None:
        """On the hosts that are there; then raises what failed on one, or that it is lost."""
        parts = self._parts[url]
        there = [part for part in parts if part.host not in self._lost]
        answers = await asyncio.gather(*(_answer(call(part)) for part in there), return_exceptions=True)
        failed: BaseException | None = None
        for part, error in zip(there, answers, strict=True):
            if isinstance(error, RayActorError):
                self._is_lost_with(part.host, error)
            elif isinstance(error, BaseException):
                failed = unwrapped(error)
        lost = [self._lost[part.host] for part in parts if part.host in self._lost]
        if lost:
            raise lost[0]
        if failed is not None:
            raise failed

    async def _exits_at(self, number: int) -> dict[str, str]:
        """Nothing where the host does not answer in time: the same question is asked again."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                found = await self._asked[number]
        except RayActorError as error:
            self._reported.add(number)
            lost = self._is_lost_with(number, error)
            found = {index: str(lost) for index in self._indices_at(number)}
        except RayError as error:
            del self._asked[number]
            raise PartLost(f"asking host {self._names[number]} about its engines: {error}") from error
        except TimeoutError:
            return {}
        del self._asked[number]
        return {self._urls[index]: how for index, how in found.items()}

    def _indices_at(self, number: int) -> set[int]:
        return {part.index for parts in self._parts.values() for part in parts if part.host == number}

    def _is_lost_with(self, number: int, error: RayActorError) -> PartLost:
        kind, text = death(f"what starts engines on host {self._names[number]}", error)
        return self._lost.setdefault(number, kind(text))


async def _answer(reference: Any) -> Any:
    return await reference
