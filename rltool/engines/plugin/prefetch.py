"""Weights that a vLLM worker fetches from a store of deltas while it generates: a copy in host memory, and the thread
that brings it from version to version.

The model is loaded from the copy while the engine is paused (rltool.engines.plugin.receiver). Each worker has a copy of
the whole checkpoint.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from rltool.engines.delta.memory import MemoryCopy
from rltool.engines.delta.rebuild import bring
from rltool.engines.delta.store import open_store
from rltool.engines.types import Bucket

logger = logging.getLogger(__name__)


class NotFetched(RuntimeError):
    """The version that is asked for is not in the copy; the text goes to the trainer."""


@dataclass
class _Fetch:
    """One version on its way. error: why it did not come, to be read once `done` is set."""

    store: str
    version: str
    seconds: float
    done: threading.Event = field(default_factory=threading.Event)
    error: str | None = None


class Prefetcher:
    """All methods are called on the worker's one thread. pin: see MemoryCopy."""

    def __init__(self, *, pin: bool) -> None:
        self._copy = MemoryCopy(pin=pin)
        self._fetch: _Fetch | None = None

    def start(self, store: str, version: str, seconds: float) -> None:
        """Fetch `version` in the background, for so many seconds at most. Raises NotFetched while another one comes."""
        fetch = self._fetch
        if fetch is not None and not fetch.done.is_set():
            if (fetch.store, fetch.version) == (store, version):
                return
            raise NotFetched(f"weights {fetch.version} are still being fetched; {version} has to wait for them")
        self._fetch = _Fetch(store, version, seconds)
        threading.Thread(target=self._run, args=(self._fetch,), name=f"fetch {version}", daemon=True).start()

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

    def buckets(self, version: str) -> Iterator[tuple[Bucket, Tensor]]:
        """All weights of `version`, in host memory: (tensors, their bytes as [bytes] uint8). Waits for them if they are
        on their way. Raises NotFetched."""
        if not self.fetched(version):
            assert self._fetch is not None
            self._fetch.done.wait(self._fetch.seconds)
            if not self.fetched(version):
                raise NotFetched(f"weights {version} did not come within {self._fetch.seconds:g} s")
        return self._copy.buckets()

    def _run(self, fetch: _Fetch) -> None:
        try:
            rebuilt = bring(self._copy, open_store(fetch.store), fetch.version, seconds=fetch.seconds)
            kind = "an anchor" if rebuilt.anchor else "patches"
            logger.info("fetched weights %s: %s, %d bytes in %.3f s", fetch.version, kind, rebuilt.bytes, rebuilt.seconds)
        except Exception as error:  # whatever it is, whoever waits must hear of it
            fetch.error = f"{type(error).__name__}: {error}"
            logger.warning("weights %s could not be fetched: %s", fetch.version, fetch.error)
        finally:
            fetch.done.set()
