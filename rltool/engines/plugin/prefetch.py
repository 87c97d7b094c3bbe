"""Weights that come into a vLLM worker while it generates, in a thread of their own.

They come into a copy in host memory, as deltas from a store or as messages from the trainer, or from the trainer into a
second buffer.

The model is loaded from them while the engine is paused (rltool.engines.plugin.receiver).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rltool.engines.delta.memory import MemoryCopy
from rltool.engines.delta.messages import Receive, take
from rltool.engines.delta.rebuild import Rebuilt, bring
from rltool.engines.delta.store import open_store
from rltool.engines.types import Bucket

logger = logging.getLogger(__name__)

Buckets = Iterable[tuple[Bucket, Tensor]]
"""(tensors, their bytes as [bytes] uint8) of all weights."""
Prepare = Callable[[Buckets], Any]
"""What is made of them in the same thread."""


class NotFetched(RuntimeError):
    """The version that is asked for is not there; the text goes to the trainer."""


@dataclass(eq=False)
class _Fetch:
    """One version on its way. buckets: what came; prepared: what was made of them; error: why it did not come. To be
    read once `done` is set."""

    version: str
    seconds: float
    prepare: Prepare | None = None
    done: threading.Event = field(default_factory=threading.Event)
    buckets: Sequence[tuple[Bucket, Tensor]] = ()
    prepared: Any = None
    error: str | None = None


class Prefetcher:
    """All methods are called on the worker's one thread.

    pin: see MemoryCopy. The copy has the whole checkpoint, in each worker, from the first version of deltas on.
    """

    def __init__(self, *, pin: bool) -> None:
        self._copy = MemoryCopy(pin=pin)
        self._fetch: _Fetch | None = None

    def fetch(self, store: str, version: str, seconds: float, prepare: Prepare | None = None) -> None:
        """From a store, within this many seconds. Raises NotFetched while another version comes."""
        self._rebuild(lambda copy: bring(copy, open_store(store), version, seconds=seconds), version, seconds, prepare)

    def take(self, source: Receive, buckets: Sequence[Bucket], version: str, seconds: float) -> None:
        """From the trainer, as messages. Raises NotFetched while another version comes."""
        self._rebuild(lambda copy: take(copy, source, buckets, version), version, seconds)

    def _rebuild(
        self, act: Callable[[MemoryCopy], Rebuilt], version: str, seconds: float, prepare: Prepare | None = None
    ) -> None:
        copy = self._copy

        def rebuilt() -> Buckets:
            got = act(copy)
            kind = "all of them" if got.anchor else "patches"
            logger.info("got weights %s: %s, %d bytes in %.3f s", version, kind, got.bytes, got.seconds)
            return copy.buckets()

        self.receive(rebuilt, version, seconds, prepare)

    def receive(
        self, source: Callable[[], Buckets], version: str, seconds: float, prepare: Prepare | None = None
    ) -> None:
        """What `source` gives; it ends by itself. Raises NotFetched while another version comes."""
        fetch = self._fetch
        if fetch is not None and not fetch.done.is_set():
            if fetch.version == version:
                return
            raise NotFetched(f"weights {fetch.version} are still on their way; {version} has to wait for them")
        self._fetch = _Fetch(version, seconds, prepare)
        threading.Thread(target=_run, args=(self._fetch, source), name=f"weights {version}", daemon=True).start()

    @property
    def is_busy(self) -> bool:
        """A version is on its way."""
        return self._fetch is not None and not self._fetch.done.is_set()

    def fetched(self, version: str) -> bool:
        """Whether `version` has come; False: it is on its way. Raises NotFetched for one that does not come."""
        fetch = self._fetch
        if fetch is None or fetch.version != version:
            raise NotFetched(f"weights {version} were not asked for: POST /rltool/prefetch comes before the update")
        if not fetch.done.is_set():
            return False
        if fetch.error is not None:
            raise NotFetched(fetch.error)
        return True

    def buckets(self, version: str) -> Buckets:
        """Waits for them if they are on their way. Raises NotFetched."""
        arrived, fetch = self.fetched(version), self._fetch
        assert fetch is not None, "fetched would have raised"
        if not arrived:
            fetch.done.wait(fetch.seconds)
            if not self.fetched(version):
                raise NotFetched(f"weights {version} did not come within {fetch.seconds:g} s")
        return fetch.buckets

    def prepared(self, version: str) -> Any:
        """What was made of it, in place of its buckets; None where nothing was to be. Once it has come."""
        return self._fetch.prepared if self._fetch is not None and self._fetch.version == version else None

    def forget(self) -> None:
        """What was received is freed, what is on its way is dropped; the copy stays, if nothing is on its way into
        it."""
        if self._fetch is not None and not self._fetch.done.is_set():
            self._copy = self._copy.fresh()
        self._fetch = None


def _run(fetch: _Fetch, source: Callable[[], Buckets]) -> None:
    started = time.perf_counter()
    try:
        fetch.buckets = list(source())
        logger.info("received %s in %.4f s", fetch.version, time.perf_counter() - started)
        if fetch.prepare is not None:
            fetch.prepared, fetch.buckets = fetch.prepare(fetch.buckets), ()
    except Exception as error:  # every waiter gets it
        fetch.error = f"{type(error).__name__}: {error}"
        logger.warning("weights %s did not come: %s", fetch.version, fetch.error)
    finally:
        fetch.done.set()
