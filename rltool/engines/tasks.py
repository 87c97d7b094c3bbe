"""Several coroutines, of which all are wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def all_of(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results, in order. The first failure is raised once the others are cancelled and have ended.

    Not a TaskGroup: in Python 3.11 one whose task fails leaves its parent counted as cancelled, and a timeout around
    the call would then end in CancelledError in place of TimeoutError. Not a bare gather: it lets the others run on.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
