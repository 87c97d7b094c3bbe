"""Control calls to several engines side by side; the failure of one is that engine's alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.types import HttpRequest
from rltool.errors import EngineError, EngineTimedOut, EngineUnreachable
from rltool.weights.liveness import while_alive

LEAVE_SECONDS = 5.0
"""For an engine whose update failed to leave its group, or one that has fallen silent to resume;
if it does not answer that either, its deadline will do."""

Act = Callable[[EngineEndpoint], Awaitable[None]]


class EngineCalls:
    """deadline: seconds for each step (deadlines.sync)."""

    def __init__(self, engines: EngineSet, deadline: float) -> None:
        self.client, self.fleet, self.deadline = engines.client, engines.fleet, deadline

    async def run(self, endpoint: EngineEndpoint, requests: Sequence[HttpRequest]) -> None:
        await self.client.run(endpoint, requests, timeout=self.deadline)

    async def run_briefly(self, endpoint: EngineEndpoint, requests: Sequence[HttpRequest]) -> None:
        """To an engine that has failed already: its answer is not waited for long."""
        await self.client.run(endpoint, requests, timeout=LEAVE_SECONDS)

    async def answers(self, endpoint: EngineEndpoint) -> None:
        """EngineUnreachable if it does not. Any answer counts: a paused SGLang calls itself not ready."""
        try:
            await self.client.health(endpoint)
        except EngineUnreachable:
            raise
        except EngineError:
            pass

    async def gather(self, endpoints: Sequence[EngineEndpoint], act: Act) -> dict[str, EngineError]:
        """`act` on all of them; an engine that answers no health check any more meanwhile is dropped. Returns the
        errors by URL."""
        steps = (while_alive(self.client, endpoint, act(endpoint)) for endpoint in endpoints)
        results = await asyncio.gather(*steps, return_exceptions=True)
        errors = dict[str, EngineError]()
        for url, result in zip((endpoint.url for endpoint in endpoints), results, strict=True):
            if isinstance(result, EngineError):
                errors[url] = named_deadline(result)
            elif isinstance(result, BaseException):
                raise result  # a bug of ours, not a failure of the engine
        return errors


def named_deadline(error: EngineError) -> EngineError:
    """The error of a step, with the name of the deadline where it has passed one."""
    return error.named("deadlines.sync") if isinstance(error, EngineTimedOut) else error
