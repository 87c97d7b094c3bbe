"""Waiting for Ray actors: our own errors as they were raised, deadlines with their names, and waits that a signal can
end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from rltool.errors import RltoolError

POLL_SECONDS = 0.2
"""How long one wait inside Ray takes at most: Python's signal handlers run between two of them."""


class DeadlinePassed(RltoolError):
    """An actor did not answer in time."""


def get_all(
    refs: Sequence[ray.ObjectRef], deadline: float, name: str, *, while_waiting: Callable[[float], None] | None = None
) -> list[Any]:
    """The results of all refs, in order. Raises what the actors raised, our own errors as they are.

    deadline: seconds; name: of the setting, which the error of a passed deadline quotes. while_waiting(seconds so far):
    called now and then.
    """
    started = time.monotonic()
    pending = list(refs)
    while pending:
        waited = time.monotonic() - started
        if waited > deadline:
            raise DeadlinePassed(
                f"no answer within {name} = {deadline:g} s; the logs of the run tell why (`rltool logs`)"
            )
        try:
            done, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL_SECONDS)
        except SystemError as error:  # what Ray makes of a KeyboardInterrupt that comes at the wrong moment
            raise error.__cause__ or error from None
        if pending:
            _raise_if_died(done)
        if while_waiting is not None and pending:
            while_waiting(waited)
    try:
        return ray.get(list(refs))
    except RayError as error:
        raise unwrapped(error) from error


def _raise_if_died(done: Sequence[ray.ObjectRef]) -> None:
    """A process that died is news at once: its peers would wait for it until their collective's deadline."""
    for ref in done:
        try:
            ray.get(ref)
        except RayActorError as error:
            raise unwrapped(error) from error
        except RayError:
            pass  # an error of its own, which its peers may share: raised when all have ended


def unwrapped(error: BaseException) -> BaseException:
    """Our own error inside Ray's wrapper, or one that says which process died; any other is returned as it is."""
    if isinstance(error, RayActorError):
        return RltoolError(
            f"a process of the run died: {error}\nIts log tells why (`rltool logs`); go on with `rltool train --resume`"
        )
    if isinstance(error, RayTaskError) and isinstance(error.cause, RltoolError):
        return error.cause
    return error
