"""Dialects by name. Each is imported only when asked for."""

from __future__ import annotations

from functools import cache

from rltool.engines.dialect import Dialect
from rltool.errors import UsageError

NAMES = ("vllm", "sglang")


@cache
def dialect(name: str) -> Dialect:
    """The dialect called `name`. Raises UsageError for an unknown one."""
    if name == "vllm":
        from rltool.engines.vllm import VllmDialect

        return VllmDialect()
    if name == "sglang":
        from rltool.engines.sglang import SglangDialect

        return SglangDialect()
    raise UsageError(f"unknown engine kind {name!r}; known are {', '.join(NAMES)}")
