"""Calls of users' functions: what they raise becomes an error of the run that names the setting and the place, so that
the run saves its state and ends in order."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rltool.errors import RltoolError


class FunctionFailed(RltoolError):
    """A function of the user's raised; its own exception is the cause."""


@contextmanager
def calling(what: str, function: Callable[..., Any]) -> Generator[None]:
    """FunctionFailed for whatever the block, a call of `function`, raises. what: the setting with its value. Our own
    errors go through: a generate function hands up those of the engines."""
    try:
        yield
    except RltoolError:
        raise
    except (Exception, SystemExit) as error:
        raise FunctionFailed(f"{what} raised {raised(error, function)}") from error


def named(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    """The function, called within `calling`."""

    @functools.wraps(function, updated=())
    def call(*arguments: Any) -> Any:
        with calling(what, function):
            return function(*arguments)

    return call


def named_async(function: Callable[..., Awaitable[Any]], what: str) -> Callable[..., Awaitable[Any]]:
    """The same of an async function."""

    @functools.wraps(function, updated=())
    async def call(*arguments: Any) -> Any:
        with calling(what, function):
            return await function(*arguments)

    return call


def raised(error: BaseException, function: Callable[..., Any] | None = None) -> str:
    """Its type, its text and where: the innermost line in the file of `function`, else the innermost of all."""
    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(function if hasattr(function, "__code__") else type(function).__call__, "__code__", None)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    place = (own or frames)[-1:]
    where = "".join(f" ({Path(frame.filename).name}, line {frame.lineno})" for frame in place)
    return f"{type(error).__name__}: {error}{where}"
