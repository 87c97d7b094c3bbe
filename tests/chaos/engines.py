"""A fake vLLM that keeps a record of what it really holds, and can be broken in every way that the driver knows."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from aiohttp import web

from tests.chaos.weights import FROM_DISK, NAME, logprob
from tests.contract.fakes.generation import Batch
from tests.contract.fakes.server import START_SECONDS, Recorded
from tests.contract.fakes.vllm import FakeVllm

GENERATE = "/rltool/generate"
PROBED = "/weight_info"
KEPT_STATES = 100


class WitnessEngine(FakeVllm):
    """completed: the last updates that were brought to their end, as (boot id, version, number). `truth` is what it
    holds now, as (version label, number), and `truth_told` how often a probe was told so, with nothing broken.
    """

    def __init__(self, *, seconds: float) -> None:
        self.completed: deque[tuple[str, str, int]] = deque(maxlen=KEPT_STATES)
        self.truth_told = 0
        self._wake: threading.Event | None = None
        super().__init__()
        self.vocab_size, self.seconds = 64, seconds
        self.requests = deque(maxlen=50)  # type: ignore[assignment]
        self._held_paths: set[str] = set()
        self._garbled: set[str] = set()

    # -- what it holds

    def forget(self) -> None:
        super().forget()
        self.batch = Batch(("default", FROM_DISK))
        self.truth_told = 0

    @property
    def truth(self) -> tuple[str, int]:
        return self.batch.state

    @property
    def version(self) -> str:
        return self.truth[0]

    @version.setter
    def version(self, version: str) -> None:
        self._hold(version, self.truth[1])

    def _hold(self, version: str, number: int) -> None:
        self.truth_told = 0
        self.batch.note((version, number))
        del self.batch._history[:-KEPT_STATES]

    async def _update(self, recorded: Recorded) -> web.Response:
        response = await super()._update(recorded)
        if NAME in self.tensors:
            self._hold(self.version, int(self.tensors[NAME][0]))
        return response

    async def _finish_update(self, recorded: Recorded) -> web.Response:
        response = await super()._finish_update(recorded)
        if response.status == 200:
            self.completed.append((self.boot_id, *self.truth))
        return response

    def _choice(self, index: int, planned: list[int], sampling: dict[str, Any], states: list[Any]) -> dict[str, Any]:
        choice = super()._choice(index, planned, sampling, [label for label, _ in states])
        for entry, (_, number) in zip((choice["logprobs"] or {"content": []})["content"], states, strict=False):
            if entry["logprob"] != -9999.0:
                entry["logprob"] = logprob(entry["token_id"], number)
        return choice

    # -- what breaks

    @property
    def is_broken(self) -> bool:
        flags = self.missing_logprobs, self.wrong_count, self.sentinel_logprob, self.is_stopped, self._loop is None
        return bool(self.faults or self._held_paths or self._garbled or any(flags))

    @property
    def is_stopped(self) -> bool:
        return self._wake is not None

    def overwrite(self, version: str, number: int) -> None:
        """Somebody else has loaded other weights. Not in the middle of an update, whose result would be neither."""
        self.there(lambda: None if self.updating else self._hold(version, number))

    def garble(self, path: str) -> None:
        """Half of the answer arrives, with status 200."""
        self._garbled.add(path)

    def hold(self, path: str) -> None:
        """Requests for this route wait until `heal`, then they are served."""
        self._held_paths.add(path)

    def stop(self) -> None:
        """As SIGSTOP: the kernel still accepts connections, and nothing is answered."""
        if self._loop is None or self.is_stopped:
            return
        wake = self._wake = threading.Event()
        self._loop.call_soon_threadsafe(wake.wait)

    def go_on(self) -> None:
        """As SIGCONT."""
        if self._wake is not None:
            self._wake.set()
            self._wake = None

    def heal(self) -> None:
        """Whatever was broken works again; a process that died is not started."""
        super().heal()
        self.missing_logprobs = self.wrong_count = self.sentinel_logprob = False
        self._garbled.clear()
        self._held_paths.clear()
        self.go_on()
        self.truth_told = 0

    def die(self) -> None:
        self.go_on()
        super().die()

    def revive(self) -> None:
        """Started again by its owner, under the same address: another process, with the weights of its disk."""
        if self._loop is None:
            self.heal()
            self.forget()
            self.start()

    def there(self, act: Callable[[], None]) -> None:
        """In the engine's own thread, where it is running."""
        if self._loop is None or self.is_stopped:
            return
        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (act(), done.set()))
        assert done.wait(START_SECONDS)

    async def handle(self, recorded: Recorded) -> web.Response:
        while recorded.path in self._held_paths:
            await asyncio.sleep(0.01)
        response = await super().handle(recorded)
        if recorded.path in self._garbled:
            return web.Response(text=json.dumps({"choices": [1]})[:-4], content_type="application/json")
        if recorded.path == PROBED and not self.is_broken:
            self.truth_told += 1
        return response
