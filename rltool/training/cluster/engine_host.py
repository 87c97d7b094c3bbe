"""The Ray actor that starts a run's engines on one host, and the rollout manager's handle to all of these actors."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
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
from rltool.training.cluster.ray_calls import unwrapped


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


@dataclass(frozen=True)
class _Part:
    """One process of an engine. host: position in the list of hosts."""

    host: int
    index: int


class HostHandles:
    """rollout.engine_restarts.EngineProcesses over the actors. hosts: (node, actor); launches: of all of them."""

    def __init__(self, hosts: Sequence[tuple[str, Any]], launches: Sequence[EngineLaunch]) -> None:
        self._nodes = [node for node, _ in hosts]
        self._actors = [actor for _, actor in hosts]
        self._parts: dict[str, list[_Part]] = {}
        self._urls = {launch.index: url_of(launch) for launch in launches if launch.node_rank == 0}
        for launch in launches:
            part = _Part(self._nodes.index(launch.node), launch.index)
            self._parts.setdefault(self._urls[launch.index], []).append(part)
        self._lost: set[int] = set()

    def urls(self) -> Iterable[str]:
        return self._parts.keys()

    async def exits(self) -> Mapping[str, str]:
        hosts = [number for number in range(len(self._actors)) if number not in self._lost]
        found = await asyncio.gather(*(self._exits_at(number) for number in hosts))
        return {url: how for at in found for url, how in at.items()}

    async def start_again(self, url: str) -> None:
        """On every host that has a part of it, first ended everywhere. PartLost where such a host is gone."""
        parts = self._parts[url]
        boot_id = uuid.uuid4().hex
        await self.end(url)
        try:
            await asyncio.gather(*(self._actors[part.host].start_engine.remote(part.index, boot_id) for part in parts))
        except RayError as error:
            raise unwrapped(error) from error

    async def end(self, url: str) -> None:
        """On every host that has a part of it. PartLost where such a host is gone."""
        try:
            await asyncio.gather(
                *(self._actors[part.host].stop_engine.remote(part.index) for part in self._parts[url])
            )
        except RayError as error:
            raise unwrapped(error) from error

    async def _exits_at(self, number: int) -> dict[str, str]:
        try:
            found = await self._actors[number].exits.remote()
        except RayActorError as error:
            self._lost.add(number)
            here = {url for url, parts in self._parts.items() if any(part.host == number for part in parts)}
            return dict.fromkeys(here, f"the process that runs it on host {self._nodes[number]} was lost: {error}")
        except RayError as error:
            raise PartLost(f"asking host {self._nodes[number]} about its engines: {error}") from error
        return {self._urls[index]: how for index, how in found.items()}
