"""Extension points are import paths: `package.module:function`."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rltool.errors import UsageError


def load_callable(
    path: str, *, setting: str, takes: Sequence[str] = (), options: Iterable[str] = ()
) -> Callable[..., Any]:
    """The callable that `package.module:attribute` names. `setting` is the configuration key that the error message
    names; `takes`: the positional arguments that it will be called with, by name; none: not checked. options: names of
    keyword arguments that it gets besides.

    UsageError as of `load_attribute`, and for what is not callable or cannot be called with these arguments.
    """
    found = load_attribute(path, setting=setting)
    if not callable(found):
        raise UsageError(f"{setting} = {path!r}: expected a function, found {type(found).__name__}")
    if takes:
        _check_signature(found, takes, dict.fromkeys(options), f"{setting} = {path!r}")
    return found


def load_attribute(path: str, *, setting: str) -> Any:
    """What `package.module:attribute` names. UsageError if the path is malformed, the module is missing or fails while
    it is imported, or the attribute is missing."""
    module_name, colon, attribute = path.partition(":")
    if not (module_name and colon and attribute):
        raise UsageError(f"{setting} = {path!r}: expected `package.module:function`")
    # As `python -m` would: a user's module beside run.toml is found whichever way rltool was started. Last, so that it
    # shadows nothing; Ray hands the driver's path on to its workers.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{setting} = {path!r}: no module named {error.name!r}; install it, or put its directory on PYTHONPATH"
        ) from error
    except Exception as error:
        raise UsageError(
            f"{setting} = {path!r}: importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error
    found = getattr(module, attribute, None)
    if found is None:
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"{setting} = {path!r}: module {module_name} has no {attribute!r}{hint}")
    return found


def _check_signature(function: Callable[..., Any], takes: Sequence[str], options: dict[str, None], what: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # of some functions written in C nothing is known
    try:
        signature.bind(*takes, **options)
    except TypeError as error:
        called = ", ".join([*takes, *(f"{name}=..." for name in options)])
        raise UsageError(
            f"{what}: it is called as f({called}), which {signature} does not take ({error}); see the "
            "contract of this key in docs/extending.md"
        ) from None
