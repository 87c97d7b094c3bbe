"""Where fake SGLang engines hand KV caches over: as the real ones, a prefill answers when its cache is taken, and a
decode starts when it has one. A cache is the weights that filled it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

NOWHERE = "2.2.2.2"
_caches: dict[tuple[str, int, int], Any] = {}
"""By host, port and room. Of engines that run in several threads."""
_LOOK_SECONDS = 0.001


async def offer(room: tuple[str, int, int], cache: Any, given_up: Callable[[], bool]) -> bool:
    """Whether it was taken before it was given up."""
    _caches[room] = cache
    while room in _caches:
        if given_up():
            return _caches.pop(room, None) is None
        await asyncio.sleep(_LOOK_SECONDS)
    return True


async def take(room: tuple[str, int, int], given_up: Callable[[], bool]) -> Any | None:
    """None: it was given up."""
    while room not in _caches:
        if given_up():
            return None
        await asyncio.sleep(_LOOK_SECONDS)
    return _caches.pop(room)
