"""The gateway of a run that was given none: started, watched, and started again under its port when it dies.

Its sessions lie on disk, turn by turn, so one that is started again takes them up; agents whose clients try again never
hear of it. Which engines it may use is written to its standard input (gateway/fleet.py): a pipe needs no route, key or
file, keeps the order, and ends with the manager.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rltool.config.gateway import GatewayConfig
from rltool.engines.client import EngineClient
from rltool.engines.types import HttpRequest
from rltool.errors import EngineError, RltoolError
from rltool.gateway.fleet import REPEAT_SECONDS, VIEW_SECONDS, FleetView
from rltool.gateway.parts import Parts
from rltool.processes.hosts import http_url
from rltool.processes.ports import reserved_ports
from rltool.processes.tasks import Background

POLL_SECONDS = 0.1
RESTART_SECONDS = 1.0
"""Before it is started again, doubled with each start up to sixteen times, while none of them has served."""
STOP_SECONDS = 10.0
"""For it to record the turns in progress."""


@dataclass(frozen=True)
class GatewayPlace:
    """sessions: directory of their files; key_file: of the key that opens sessions; log: its output is appended."""

    sessions: Path
    key_file: Path
    log: Path


class GatewayProcess:
    """config.port 0: a free one, kept over restarts. view: the run's fleet now, which a gateway with parts.follows
    follows; else None. Owned by one event loop."""

    def __init__(
        self, config: GatewayConfig, parts: Parts, log_file: Path, client: EngineClient, *, log: Callable[[str], None],
        view: Callable[[], FleetView] | None = None,
    ) -> None:  # fmt: skip
        with reserved_ports(1, host=config.host, first=config.port) as reserved:
            self._config = config.model_copy(update={"port": reserved.ports[0]})
        self._parts, self._log_file, self._client, self._log, self._view = parts, log_file, client, log, view
        self._process: asyncio.subprocess.Process | None = None
        self._background = Background(lambda failure: log(str(failure)))
        self.counts: Counter[str] = Counter()
        """Events since the start: gateway_restarts."""

    @property
    def url(self) -> str:
        return http_url(self._config.host, self._config.port)

    async def start(self) -> None:
        """Return when it serves. RltoolError, with the end of its log, where it does not in time."""
        await self._start_once()
        self._background.keep(self._watch(), "the gateway is watched no more")
        if self._view is not None:
            self._background.keep(self._write_views(self._view), "the gateway follows the engines no more")

    async def close(self) -> None:
        await self._background.close()
        if self._process is not None:
            await self._end(self._process)

    async def _start_once(self) -> None:
        # -P: it runs in the user's directory, whose modules it must not pick up.
        argv = (sys.executable, "-P", "-m", "rltool.gateway.main", "--config", self._config.model_dump_json())
        with self._log_file.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *argv, "--parts", self._parts.model_dump_json(), stdout=output, stderr=output, start_new_session=True,
                stdin=asyncio.subprocess.DEVNULL if self._view is None else asyncio.subprocess.PIPE,
            )  # fmt: skip
        try:
            async with asyncio.timeout(self._config.ready_timeout):
                while not await self._serves():
                    if self._process.returncode is not None:
                        code = self._process.returncode
                        raise RltoolError(f"the gateway ended with exit code {code}: {self._log_file}")
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            await self._end(self._process)
            seconds = self._config.ready_timeout
            raise RltoolError(f"the gateway did not serve within {seconds:g} s: {self._log_file}") from None

    async def _serves(self) -> bool:
        try:
            await self._client.request(self.url, HttpRequest("GET", "/health"), timeout=5.0, retry=False)
        except EngineError:
            return False
        return True

    async def _watch(self) -> None:
        pause = RESTART_SECONDS
        while True:
            assert self._process is not None
            code = await self._process.wait()
            self._log(f"the gateway ended ({code}) and is started again; its sessions go on")
            self.counts["gateway_restarts"] += 1
            try:
                await self._start_once()
                pause = RESTART_SECONDS
            except (RltoolError, OSError) as error:  # it does not serve, or cannot even be started now
                self._log(str(error))
                await asyncio.sleep(pause)
                pause = min(2 * pause, 16 * RESTART_SECONDS)

    async def _write_views(self, now: Callable[[], FleetView]) -> None:
        """Each change, and the same again after REPEAT_SECONDS: an engine that the gateway had left out for its health
        may serve again."""
        written: tuple[asyncio.subprocess.Process, FleetView] | None = None
        due = 0.0
        loop = asyncio.get_running_loop()
        while True:
            process, view = self._process, now()
            assert process is not None and process.stdin is not None
            if (process, view) != written or loop.time() >= due:
                written, due = (process, view), loop.time() + REPEAT_SECONDS
                with contextlib.suppress(OSError):  # it has just died, and the next one gets it
                    process.stdin.write(f"{view.to_json()}\n".encode())
                    await process.stdin.drain()
            await asyncio.sleep(VIEW_SECONDS)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
