"""Agents on other hosts: both sides of the gateway's queue of episodes.

`RemoteAgents` is the trainer's side, where the agents of a run would be. `AgentWorker` is the other host's: it dials
the gateway, so nothing has to reach that host, and gives its agents the gateway's address as it knows it itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any
from urllib.parse import urlsplit

from rltool.agents.outcome import AgentFailed, Result, result_of
from rltool.agents.pool import Agents
from rltool.agents.sessions import GatewayClient
from rltool.agents.task import AgentTask
from rltool.engines.client import EngineClient
from rltool.engines.types import HttpRequest
from rltool.errors import EngineError, EngineRejected
from rltool.processes.tasks import all_of, beside

POLL_SECONDS = 10.0
"""Of one long poll; less than the silence after which the gateway drops a trainer or a worker."""
ALIVE_SECONDS = 5.0
"""Between two signs of life of an episode."""
PAUSE_SECONDS = 2.0
"""Before a gateway that did not answer is asked again."""
LEAVE_SECONDS = 3.0
"""For the goodbye request; without it, silence has the same effect."""
REPORT_SECONDS = 30.0
"""Between two lines of a worker about what it has done."""
CALL_SECONDS = 30.0
"""For one call of a worker, beside what a long poll takes."""


class RemoteAgents:
    """Agents that run wherever a worker has dialled the gateway. gateway: asked for each episode."""

    def __init__(self, gateway: Callable[[], GatewayClient]) -> None:
        self._gateway = gateway

    async def run(self, task: AgentTask) -> Result:
        """See Agents. An episode has its deadline to find a worker, and the same again from then on, as its worker
        counts it."""
        gateway, episode = self._gateway(), uuid.uuid4().hex
        await gateway.put_episode(episode, asdict(task))
        try:
            async with asyncio.timeout(2 * task.deadline + POLL_SECONDS):
                outcome = None
                while outcome is None:
                    outcome = await gateway.outcome(episode, wait=POLL_SECONDS)
        except TimeoutError:
            raise AgentFailed(
                f"no worker ended it within 2 x deadlines.agent = {2 * task.deadline:g} s; does one run? (`rltool "
                "agents`)"
            ) from None
        except EngineRejected as error:
            raise AgentFailed(f"the gateway lost it: {error}") from error
        finally:
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(LEAVE_SECONDS):
                    await gateway.withdraw(episode)
        if "failed" in outcome:
            raise AgentFailed(str(outcome["failed"]))
        try:
            return result_of(outcome["reward"])
        except ValueError as error:
            raise AgentFailed(f"its result: {error}") from error

    async def close(self) -> None:
        """What runs is withdrawn by its own `run`."""


class AgentWorker:
    """Runs episodes of a gateway's queue until it is cancelled. url, key: the gateway's; name: for its errors."""

    def __init__(
        self, client: EngineClient, url: str, key: str, agents: Agents, *, name: str, log: Callable[[str], None]
    ) -> None:
        self._client, self._url, self._key, self._agents = client, url.rstrip("/"), key, agents
        self._name, self._log = name, log
        self._away = False
        self.counts: Counter[str] = Counter()
        """Episodes since the start: begun, ended, failed, unwanted (the run withdrew them)."""

    async def work(self, at_once: int) -> None:
        """at_once: episodes side by side. Raises what the gateway refuses (a wrong key), and UsageError of an agent
        that cannot be run; a gateway that is away is waited for."""
        async with beside(self._report()):
            await all_of(self._one_after_another() for _ in range(at_once))

    async def _report(self) -> None:
        said = Counter[str]()
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            if self.counts != said:
                said = Counter(self.counts)
                self._log(self.line())

    def line(self) -> str:
        """What it has done and does."""
        ended, failed, unwanted = (self.counts[name] for name in ("ended", "failed", "unwanted"))
        running = self.counts["begun"] - ended - failed - unwanted
        more = f", {unwanted} not wanted any more" if unwanted else ""
        return f"{ended} episodes ended, {failed} failed{more}, {running} running"

    async def _one_after_another(self) -> None:
        while True:
            try:
                taken = await self._post("next", {"worker": self._name}, wait=POLL_SECONDS)
            except EngineRejected:
                raise
            except EngineError as error:
                if not self._away:
                    self._log(f"waiting for the gateway: {error}")
                self._away = True
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            self._away = False
            if taken is not None:
                self.counts["begun"] += 1
                await self._episode(taken["id"], self._as_seen_from_here(AgentTask(**taken["task"])))

    def _as_seen_from_here(self, task: AgentTask) -> AgentTask:
        """The trainer may know the gateway by another address, loopback for example."""

        def moved(url: str) -> str:
            return self._url + urlsplit(url).path

        return replace(task, base_url=moved(task.base_url), anthropic_base_url=moved(task.anthropic_base_url))

    async def _episode(self, episode: str, task: AgentTask) -> None:
        async with beside(self._agents.run(task)) as (running,):
            try:
                while not (await asyncio.wait([running], timeout=ALIVE_SECONDS))[0]:
                    if not await self._tell(f"{episode}/alive", {}):
                        self.counts["unwanted"] += 1
                        self._log(f"episode {episode} is not wanted any more")
                        return
                try:
                    outcome: dict[str, Any] = {"reward": running.result()}
                    self.counts["ended"] += 1
                except AgentFailed as error:
                    outcome = {"failed": str(error)}
                    self.counts["failed"] += 1
                    self._log(f"episode {episode} (row {task.row.get('index')}) failed: {error}")
                await self._tell(f"{episode}/outcome", outcome)
            except asyncio.CancelledError:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LEAVE_SECONDS):
                        await self._tell(f"{episode}/outcome", {"failed": f"its worker {self._name} was stopped"})
                raise

    async def _tell(self, path: str, body: dict[str, Any]) -> bool:
        """Whether the gateway still knows the episode. One that does not answer is asked again later."""
        try:
            await self._post(path, body, retry=True)
        except EngineRejected:
            return False
        except EngineError as error:
            self._log(str(error))
        return True

    async def _post(self, path: str, body: dict[str, Any], *, wait: float = 0.0, retry: bool = False) -> Any:
        """wait: seconds for which the gateway may keep it."""
        request = HttpRequest("POST", f"/episodes/{path}", body, query={"wait": f"{wait:g}"} if wait else {})
        return await self._client.request(self._url, request, key=self._key, timeout=CALL_SECONDS + wait, retry=retry)
