"""Dialects by name. Each is imported only when asked for."""

from __future__ import annotations

from functools import cache

from rltool.engines.dialect import Dialect
from rltool.errors import UsageError

NAMES = ("vllm", "sglang")

DETECTION = {"vllm": ("/version", "version"), "sglang": ("/model_info", "model_path")}
"""name -> (route, field): a GET that only this kind of engine answers with that field. The plugin gives vLLM a
/model_info too: in order."""


@cache
def dialect(name: str, *, plugin: bool = False) -> Dialect:
    """The dialect called `name`. Raises UsageError for an unknown one.

    plugin: whether rltool's plugin runs in the server. With "sglang" that is a router to vLLM servers only.
    """
    if name == "vllm" and plugin:
        from rltool.engines.vllm_arrays import ArrayVllmDialect

        return ArrayVllmDialect()
    if name == "vllm":
        from rltool.engines.vllm import VllmDialect

        return VllmDialect()
    if name == "sglang" and plugin:
        from rltool.engines.routed_vllm import RoutedVllmDialect

        return RoutedVllmDialect()
    if name == "sglang":
        from rltool.engines.sglang import SglangDialect

        return SglangDialect()
    raise UsageError(f"unknown engine kind {name!r}; known are {', '.join(NAMES)}")
