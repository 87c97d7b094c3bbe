"""A connection's own thread in trainer rank 0, on which its transport may block without holding up the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

from rltool.errors import RltoolError
from rltool.weights.transport import SenderTransport

LATE_SECONDS = 1.0
"""What a call may take beyond its deadline: the transport's own error, which is nearer to the cause, comes first."""

CLOSE_SECONDS = 5.0
"""For a transport to close, which frees its port for the next one."""


@dataclass(eq=False)
class Call:
    """One call of a transport: waiting, running or ended. began: when it left the queue."""

    what: str
    function: Callable[[], object]
    seconds: float
    began: float | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def take(self) -> Callable[[], object]:
        """Its function, once: a call that has ended keeps no bucket alive."""
        function, self.function = self.function, _ended
        return function


def _ended() -> None: ...


class Channel:
    """Calls run in order. The first one that fails, takes too long or is aborted ends the channel: no other runs, and
    a waiter is released at once, even where the thread is still blocked in it.

    shared: it serves several engines. failure: why the channel has ended; None: it has not.
    """

    def __init__(self, transport: SenderTransport, name: str, *, shared: bool = False) -> None:
        self.transport, self.shared = transport, shared
        self.failure: str | None = None
        self._bug: BaseException | None = None
        self._lock = threading.Lock()
        self._queue: SimpleQueue[Call | None] = SimpleQueue()
        self._unfinished: list[Call] = []
        # A daemon: a thread that no abort can wake must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name=f"weights to {name}", daemon=True)
        self._thread.start()

    def submit(self, what: str, function: Callable[[], object], seconds: float) -> Call:
        """Run `function` after all that were submitted before. what: begins the message of its failure."""
        call = Call(what, function, seconds)
        with self._lock:
            if self.failure is not None:
                call.ended.set()
                return call
            self._unfinished.append(call)
        self._queue.put(call)
        return call

    def wait(self, call: Call) -> None:
        """Until the call, and those before it, have ended, or the channel has. Raises what is no failure of the
        transport but a bug."""
        while not call.ended.is_set():
            with self._lock:
                first = self._unfinished[0] if self._unfinished else call
            began = first.began or time.monotonic()
            if not first.ended.wait(max(0.0, began + first.seconds + LATE_SECONDS - time.monotonic())):
                self.fail(f"{first.what}: it took longer than {first.seconds:g} s, a quarter of deadlines.sync")
        if self._bug is not None:
            raise self._bug

    def fail(self, reason: str) -> None:
        """End the channel, from any thread. The first reason stays."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = reason
            unfinished, self._unfinished = self._unfinished, []
        for call in unfinished:
            call.ended.set()
        self.transport.abort(reason)
        self._queue.put(None)

    def close(self) -> None:
        """Once all calls have ended, the transport is closed. A channel that has failed is not waited for: its thread
        may be blocked."""
        self._queue.put(None)
        if self.failure is None:
            self._thread.join(CLOSE_SECONDS)

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            if self.failure is None:
                self._run(call)
        self.transport.close()

    def _run(self, call: Call) -> None:
        call.began = time.monotonic()
        try:
            call.take()()
        except (RuntimeError, OSError, RltoolError) as error:  # see TransportError; torch's rendezvous errors are such
            self.fail(f"{call.what}: {error}")
        except BaseException as error:
            self._bug = error
            self.fail(f"{call.what}: {type(error).__name__}: {error}")
        with self._lock:
            if call in self._unfinished:
                self._unfinished.remove(call)
        call.ended.set()
