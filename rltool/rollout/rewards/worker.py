"""A process that runs a plain reward function for rltool.rollout.rewards.pool.

A job is the pickle of a list that has, for each sample of a group, the pickle of (sample, text). Its answers: ACCEPTED,
then for each sample in order the reward, a number, or {"failed": reason}. So the parent knows at any moment which
sample is being scored.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import pickle
import queue
from collections.abc import Callable, Mapping
from typing import Any

from rltool.config.import_path import load_callable
from rltool.errors import UsageError
from rltool.processes.worker_pool import Parent

ACCEPTED = "accepted"
CHANGED = "the function changed the sample"
REASON_CHARACTERS = 2000
"""How much of an error's text is reported: a function may put its whole input into it."""


def main(
    parent: Parent, function_path: str, options: Mapping[str, Any], refuse_changes: bool
) -> None:
    """Serve until killed. options: keyword arguments of each call."""
    try:
        function = functools.partial(load_callable(function_path, setting="reward.function"), **options)
    except UsageError as error:
        parent.unusable(str(error))
        return
    jobs: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
    parent.ready(lambda *job: jobs.put(job))
    while True:
        number, group = jobs.get()
        samples: list[bytes] = pickle.loads(group)
        parent.answer(number, ACCEPTED)
        for packed in samples:
            parent.answer(number, _score(function, packed, refuse_changes))


def _score(function: Callable[..., Any], packed: bytes, refuse_changes: bool) -> float | dict[str, str]:
    try:
        sample, text = pickle.loads(packed)
        before = copy.deepcopy(sample) if refuse_changes else sample
        reward = finite(function(sample, text))
        if before != sample:
            raise ValueError(CHANGED)
    except (
        Exception,
        SystemExit,
    ) as error:  # an exception of a user's code is that sample's failure, counted and reported
        return {"failed": describe(error)}
    return reward


def describe(error: BaseException) -> str:
    """How a failure is counted and reported."""
    return f"{type(error).__name__}: {error}"[:REASON_CHARACTERS]


def finite(value: Any) -> float:
    """The reward as a float. Raises UsageError for an awaitable, ValueError for anything that is no finite number.

    True and False are 1 and 0, and a numpy or torch scalar is what it holds; text is no number, not even "1".
    """
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()
        raise UsageError("the reward function returned an awaitable; declare it `async def`")
    if isinstance(value, str | bytes | bytearray):
        raise ValueError(f"returned text ({value[:40]!r}), expected a number: convert it in the function")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"returned {type(value).__name__}, expected a number") from None
    if not math.isfinite(number):
        raise ValueError(f"returned {number}, expected a finite number")
    return number
