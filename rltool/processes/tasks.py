"""Tasks of the event loop: none of them ends unheard, and none outlives its owner.

Nothing else in rltool makes a task (tests/unit/project/test_architecture.py). One that runs for as long as its owner
belongs to a `Background`; one that is wanted within a function is made by `beside`, or `all_of`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from rltool.errors import RltoolError

T = TypeVar("T")

logger = logging.getLogger(__name__)


class TaskFailed(RltoolError):
    """A task of a Background ended as it was not to. `__cause__`: what it raised, None where it just ended."""


class Background:
    """The tasks of one owner, until `close`. failed: called with each failure; it writes a line, or ends the run."""

    def __init__(self, failed: Callable[[TaskFailed], None] = logger.error) -> None:
        self._failed = failed
        self._tasks: set[asyncio.Task[Any]] = set()
        self._endless: set[asyncio.Task[Any]] = set()
        self._closing = False

    def start(self, work: Coroutine[Any, Any, T], name: str, *, awaited: bool = False) -> asyncio.Task[T]:
        """A task that ends by itself, or is cancelled by its owner. What it raises is a failure. awaited: is for the
        caller instead, who waits for it; asyncio logs exceptions that were never retrieved."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard if awaited else self._ended)
        return task

    def keep(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """A task that is to run until `close`: however it ends before, that is a failure."""
        self._endless.add(self.start(work, name))

    def repeat(self, step: Callable[[], Awaitable[None]], name: str, *, seconds: float) -> None:
        """`step` again and again, `seconds` before each. One that raises is a failure, and the next comes all the
        same."""

        async def run() -> None:
            while True:
                await asyncio.sleep(seconds)
                try:
                    await step()
                except Exception as error:
                    self._report(name, error)

        self.keep(run(), name)

    async def close(self) -> None:
        """Cancel every task, and return when they have ended."""
        self._closing = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        is_early = task in self._endless and not self._closing
        self._tasks.discard(task)
        self._endless.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._report(task.get_name(), error)
        elif is_early:
            self._report(task.get_name(), None, "was cancelled" if task.cancelled() else "ended")

    def _report(self, name: str, error: BaseException | None, ended: str = "") -> None:
        if error is not None:
            ended = str(error) if isinstance(error, RltoolError) else f"{type(error).__name__}: {error}"
        failure = TaskFailed(f"{name}: {ended}")
        failure.__cause__ = error
        self._failed(failure)


@asynccontextmanager
async def beside(*works: Awaitable[T], grace: float | None = None) -> AsyncIterator[tuple[asyncio.Future[T], ...]]:
    """A task for each, which runs beside the block; at its end those that still run are cancelled and waited for.

    grace: seconds to wait at most, None: until they have ended. What a task raises is for the block to look at; asyncio
    logs what was never retrieved.
    """
    tasks = tuple(asyncio.ensure_future(work) for work in works)
    try:
        yield tasks
    finally:
        for task in tasks:
            if not (isinstance(task, asyncio.Task) and task.cancelling()):  # else it may be cleaning up already
                task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=grace)


async def all_of(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results, in order. The first failure is raised once the others are cancelled and have ended.

    Not a TaskGroup: in Python 3.11 one whose task fails leaves its parent counted as cancelled, and a timeout around
    the call would then end in CancelledError in place of TimeoutError. Not a bare gather: it lets the others run on.
    """
    async with beside(*coroutines) as tasks:
        return await asyncio.gather(*tasks)
