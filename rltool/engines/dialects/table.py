"""Dialects by name (rltool.config.serve.ENGINES). Each is imported only when asked for."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from rltool.config.serve import ENGINES
from rltool.engines.dialects.protocol import Adapts, Controls, Generates, Inspects, Launches
from rltool.errors import UsageError

ROUTER = "sglang"
"""The dialect of sglang-router."""


def dialect(name: str, *, plugin: bool = False) -> Generates:
    """The dialect called `name`: the part that each has. Raises UsageError for an unknown one.

    plugin: whether rltool's plugin runs in the server. With "sglang" that is a router to vLLM servers only.
    """
    if name not in ENGINES:
        raise UsageError(f"unknown engine kind {name!r}; known are {', '.join(ENGINES)}")
    found = _made(ENGINES[name])
    return _made(found.with_plugin) if plugin and found.with_plugin else found


def controls(name: str, *, plugin: bool = False) -> Controls:
    """Its part for pauses, sleep and weights. Raises UsageError, a sentence without the engine's name, if it has
    none."""
    found = dialect(name, plugin=plugin)
    if not isinstance(found, Controls):
        raise UsageError(
            f"is of {found.label}, whose dialect has no control routes: rltool cannot pause it, put it to sleep, or "
            "send it weights"
        )
    return found


def adapts(name: str, *, plugin: bool = False) -> Adapts:
    """Its part for adapters. Raises UsageError as `controls`."""
    found = dialect(name, plugin=plugin)
    if not isinstance(found, Adapts):
        raise UsageError(f"is of {found.label}, whose dialect has no routes for adapters")
    return found


def inspects(name: str, *, plugin: bool = False) -> Inspects:
    """Its part for checksums, scores and classification. Raises UsageError as `controls`."""
    found = dialect(name, plugin=plugin)
    if not isinstance(found, Inspects):
        raise UsageError(f"is of {found.label}, whose dialect has no checksums, scores or classification")
    return found


def launches(name: str) -> Launches:
    """Its part for starting engines. Raises UsageError if it has none."""
    found = dialect(name)
    if not isinstance(found, Launches):
        raise UsageError(
            f'engine = "{name}": rltool does not start engines of {found.label}; start them, and give their addresses '
            "(engines.external)"
        )
    return found


def detections() -> dict[str, tuple[str, str]]:
    """name -> (route, field), in the order in which a server is asked for them: see Generates.detected_by."""
    return {name: dialect(name).detected_by for name in ENGINES}


def none_of_ours(url: str) -> UsageError:
    """For a server that answered none of `detections`."""
    routes = " nor ".join(route for route, _ in detections().values())
    return UsageError(f"the server at {url} is none of: {', '.join(ENGINES)} (neither {routes} answered as theirs do)")


@cache
def _made(path: str) -> Generates:
    module, name = path.split(":")
    return getattr(import_module(module), name)()
