"""Threads for functions of users that are not async, and may never come back."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rltool.errors import UsageError


@dataclass(eq=False)
class _Call:
    function: Callable[[], Any]
    name: str
    outcome: asyncio.Future[Any]
    given_up: bool = False


class PlainCalls:
    """At most `at_once` run side by side. One that its caller abandoned does not count among them, so that those
    that hang never stand in the way of others; at `most_hung` the next call is an error that names them.

    Not asyncio's own threads: slow functions must not keep the run's other work from them. Daemons: a function that
    hangs must not keep the process from ending.
    """

    def __init__(self, *, at_once: int = 32, most_hung: int = 256) -> None:
        self._at_once, self._most_hung = at_once, most_hung
        self._lock = threading.Lock()
        self._waiting: deque[_Call] = deque()
        self._running: set[_Call] = set()
        self._hung: Counter[str] = Counter()

    async def run(self, function: Callable[[], Any], name: str) -> Any:
        """Its result, or what it raises. UsageError where too many hang already."""
        call = _Call(function, name, asyncio.get_running_loop().create_future())
        with self._lock:
            if self._hung.total() >= self._most_hung:
                names = ", ".join(f"{name}: {count}" for name, count in self._hung.most_common(5))
                raise UsageError(
                    f"{self._hung.total()} calls were abandoned and still run ({names}), each in a thread, which "
                    "nothing can end: give these functions a timeout of their own, make them async, or have them run "
                    "what hangs in a process"
                )
            self._waiting.append(call)
            self._start()
        try:
            return await call.outcome
        except asyncio.CancelledError:
            self._give_up(call)
            raise

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._at_once:
            call = self._waiting.popleft()
            self._running.add(call)
            threading.Thread(target=self._carry_out, args=(call,), name=call.name, daemon=True).start()

    def _carry_out(self, call: _Call) -> None:
        result, error = None, None
        try:
            result = call.function()
        except Exception as raised:
            # A future takes no StopIteration.
            error = RuntimeError(f"{call.name} raised StopIteration") if isinstance(raised, StopIteration) else raised
        except BaseException as raised:  # sys.exit() of a tool is not the run's
            error = RuntimeError(f"{call.name} raised {type(raised).__name__}")
        with self._lock:
            if call.given_up:
                self._hung[call.name] -= 1
            self._running.discard(call)
            self._start()
        with suppress(RuntimeError):  # its loop is closed
            call.outcome.get_loop().call_soon_threadsafe(_settle, call.outcome, result, error)

    def _give_up(self, call: _Call) -> None:
        with self._lock:
            if call in self._running:
                call.given_up = True
                self._running.discard(call)
                self._hung[call.name] += 1
                self._start()
            elif call in self._waiting:
                self._waiting.remove(call)


def _settle(outcome: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if outcome.done():
        return
    if error is None:
        outcome.set_result(result)
    else:
        outcome.set_exception(error)
