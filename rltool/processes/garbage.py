"""When Python collects cycles: not while engines stand still, not among what was there when the work began, and not
twice among the same objects in a server.

A full collection in a process with torch, transformers and the data of a run takes 0.07 to 0.15 s (190,000 objects), as
long as the whole sync of a model of 7B; a rollout manager answers no request meanwhile.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


@contextmanager
def paused() -> Iterator[None]:
    """No collection until the block ends; blocks may overlap in several threads, and the last one ends it."""
    global _pauses, _was_enabled
    with _lock:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if _pauses == 0 and _was_enabled:
                gc.enable()


def settle() -> None:
    """What there is now is there for good: later collections do not look at it."""
    gc.collect()
    gc.freeze()


COLLECT_NEW_SECONDS = 0.05
"""How often a server that looks at each object once does so: what came since then stops it for some milliseconds."""


def collect_each_once() -> None:
    """From now on each object is looked at by one collection, the next, and left out of all later ones; so for a server
    whose requests are in progress for long, and which runs `collect_new` every COLLECT_NEW_SECONDS.

    Of a gateway with 2,000 turns in progress, collections were a fifth of its CPU. Python looks again at what survives,
    and collects when 700 objects more have come than gone: between turns that come as fast as they go it waits, and
    then looks at those of hundreds of turns at once. Reference counts free what is left out all the same; cycles among
    it are found by `collect_all`.
    """

    def after(phase: str, about: dict[str, int]) -> None:
        if phase == "stop":
            gc.freeze()

    gc.callbacks.append(after)
    gc.set_threshold(10_000)
    gc.collect()


async def collect_new() -> None:
    gc.collect(0)


async def collect_all() -> None:
    gc.unfreeze()
    gc.collect()
