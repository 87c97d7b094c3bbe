"""A process that runs a plain reward function for rltool.rollout.reward_pool: what happens on its side of the socket.

In: frames of 8 bytes length (big endian) and the pickle of a list that has, for each sample of a group, the pickle of
(sample, text); from the parent alone, over a socket that it left to this process. Out: one JSON value per line. First
READY or {"unusable": reason}; then for each frame ACCEPTED, and for each of its samples in order the reward, a number,
or {"failed": reason}. So the parent knows at any moment which sample is being scored.

The protocol has its own socket, so a function may print; and the function runs in the main thread, where libraries that
set an alarm for their own time limits want to be.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
import math
import os
import pickle
import queue
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from rltool.config.import_path import load_callable
from rltool.errors import UsageError

LENGTH = struct.Struct(">Q")
READY = "ready"
ACCEPTED = "accepted"
CHANGED = "the function changed the sample"
REASON_CHARACTERS = 2000
"""How much of an error's text is reported: a function may put its whole input into it."""


def main(descriptor: int, function_path: str, refuse_changes: bool, slower: float = 0.0) -> None:
    """Serve until the parent closes its end of the socket, or dies. On stdin is the pickle of the keyword arguments of
    each call. slower: seconds that each takes longer."""
    options: dict[str, Any] = pickle.load(sys.stdin.buffer)
    os.set_inheritable(descriptor, False)
    connection = socket.socket(fileno=descriptor)
    frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, frames), daemon=True).start()
    try:
        function = functools.partial(load_callable(function_path, setting="reward.function"), **options)
    except UsageError as error:
        _send(connection, {"unusable": str(error)})
        return
    _send(connection, READY)
    while True:
        group: list[bytes] = pickle.loads(frames.get())
        _send(connection, ACCEPTED)
        for packed in group:
            time.sleep(slower)
            _send(connection, _score(function, packed, refuse_changes))


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
    ) as error:  # whatever a user's code raises is that sample's failure, counted and reported
        return {"failed": describe(error)}
    return reward


def describe(error: BaseException) -> str:
    """How a failure is counted and reported."""
    return f"{type(error).__name__}: {error}"[:REASON_CHARACTERS]


def finite(value: Any) -> float:
    """The reward as a float. Raises UsageError for an awaitable, ValueError for anything that is no finite number.

    True and False are 1 and 0, and a numpy or torch scalar is what it holds; text is no number, whatever it says.
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


def _receive(connection: socket.socket, frames: queue.SimpleQueue[bytes]) -> None:
    """Also the watch over the parent: when it has gone, this process and what its function started go too."""
    stream = connection.makefile("rb")
    with contextlib.suppress(OSError):
        while header := stream.read(LENGTH.size):
            frames.put(stream.read(LENGTH.unpack(header)[0]))
    os.killpg(0, signal.SIGKILL)


def _send(connection: socket.socket, value: Any) -> None:
    connection.sendall(json.dumps(value).encode() + b"\n")
