"""Waiting until a process serves: it fails at once when the process dies, and never waits for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar

from rltool.processes.spawn import RunningProcess, describe_exit
from rltool.processes.tasks import Background

T = TypeVar("T")

PROBE_TIMEOUT = 30.0
"""Seconds for one probe. The first generation of an engine on a busy CPU takes up to 8."""


class NotReady(Exception):
    """Raised by a probe: not yet, ask again. The message has what is missing."""


def decide(
    *, now: float, deadline: float, exit_code: int | None, ready: bool
) -> Literal["ready", "died", "late", "wait"]:
    """The whole rule. Death beats everything: a dead process' port may be answered by a stranger."""
    if exit_code is not None:
        return "died"
    if ready:
        return "ready"
    return "late" if now >= deadline else "wait"


async def wait_until_ready(
    process: RunningProcess,
    probe: Callable[[], Awaitable[T]],
    *,
    timeout: float,
    poll: float = 0.25,
    probe_timeout: float = PROBE_TIMEOUT,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> T:
    """The first value that `probe` returns; it is asked again, `poll` seconds later, while it raises NotReady.

    Raises ProcessFailed as soon as the process has ended (also while a probe hangs), or after `timeout` seconds, with
    the last thing that was missing. Any other exception of the probe is final and passed on.
    """
    deadline = clock() + timeout
    missing = "it was never asked"
    asked: asyncio.Task[T | NotReady] | None = None
    asked_until = 0.0
    background = Background()

    async def ask() -> T | NotReady:
        try:
            return await probe()
        except NotReady as error:
            return error

    try:
        while True:
            if asked is None:
                asked = background.start(ask(), "probe", awaited=True)
                asked_until = clock() + probe_timeout
            await sleep(poll)
            answer = None
            if asked.done():
                answer, asked = asked, None
                if answer.exception() is None and isinstance(found := answer.result(), NotReady):
                    missing, answer = str(found), None
            elif clock() >= asked_until:
                asked.cancel()
                missing, asked = f"it did not answer within {probe_timeout:g} s", None
            verdict = decide(now=clock(), deadline=deadline, exit_code=process.exit_code(), ready=answer is not None)
            if verdict == "died":
                raise process.failure(f"{describe_exit(process.exit_code() or 0)} while starting")
            if verdict == "late":
                raise process.failure(f"was not ready within {timeout:g} s ({missing})")
            if verdict == "ready" and answer is not None and not isinstance(found := answer.result(), NotReady):
                return found
    finally:
        await background.close()
