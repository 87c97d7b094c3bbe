"""Which versions of an engine rltool works with, and what differs between them, by the `versions` of its dialect. Pure.

Those were read in the sources of the released packages; vLLM 0.32 and SGLang 0.5.23 are the ones that the tests run for
real. Of vLLM 0.33 the Python part was run once, on a CPU with the compiled kernels of 0.32; its GPU kernels never were.
"""

from __future__ import annotations

import re
from typing import Literal

from rltool.engines.dialects.protocol import Feature, PauseMode, Version
from rltool.engines.dialects.table import dialect
from rltool.engines.plugin.info import PLUGIN_PROTOCOL
from rltool.engines.types import HALVES, EngineRole


def parse(version: str) -> Version | None:
    """(0, 5, 23) of "0.5.23.post1" or "v0.5.23+cpu"; None for a version without two numbers (a build from source)."""
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", version)
    return tuple(int(part) for part in found.groups() if part is not None) if found else None


def has(kind: str, version: str, feature: Feature) -> bool:
    """Whether an engine of this version has it. A version that cannot be read is taken for a new one."""
    since, found = dialect(kind).versions.since.get(feature), parse(version)
    return since is not None and (found is None or found >= since)


def newest(kind: str) -> str:
    """The newest version that rltool knows, as text."""
    return _text(dialect(kind).versions.newest)


def refusal(kind: str, version: str, *, newer: bool = False) -> str | None:
    """Why rltool does not work with this version, None if it does. newer: those after the newest known are taken."""
    name, versions, found = dialect(kind).label, dialect(kind).versions, parse(version)
    oldest, newest = versions.oldest, versions.newest
    known = f"rltool knows {name} {_text(oldest)} to {_text(newest)}"
    if found is not None and found < oldest:
        return f"is {name} {version}, which is too old: {known}"
    if (found is None or found[: len(newest)] > newest) and not newer:
        return f"is {name} {version}, and {known}; engines.newer_versions = true tries it all the same"
    return None


def exact_refusal(kind: str, version: str, *, newer: bool = False) -> str | None:
    """Why algorithm.exact does not go with this version, None if it does. newer: all are taken."""
    name, compared, found = dialect(kind).label, dialect(kind).versions.exact, parse(version)
    if newer or compared is None or (found is not None and found[: len(compared)] <= compared):
        return None
    return (
        f"is {name} {version}, and algorithm.exact was compared with {name} {_text(compared)}: install that, or try it "
        "with engines.newer_versions = true (the first log-probability that differs ends the run)"
    )


def plugin_refusal(protocol: int | None) -> str | None:
    """Why rltool does not work with an engine whose plugin is of this protocol, None if it does."""
    if protocol == PLUGIN_PROTOCOL:
        return None
    is_older = protocol is None or protocol < PLUGIN_PROTOCOL
    what = "runs the plugin of an older rltool" if is_older else "runs the plugin of a newer rltool"
    return (
        f"{what}: install this one in its environment, and start it anew (an engine keeps the plugin that it was "
        "started with)"
    )


def training_refusal(kind: str, version: str, pause_mode: str) -> str | None:
    """Why an engine of this version cannot be trained against with weights.pause_mode, though it generates; None if it
    can."""
    name, since = dialect(kind).label, dialect(kind).versions.since
    if not has(kind, version, Feature.VERSION_OF_REPLY):
        better = since.get(Feature.VERSION_OF_REPLY)
        install = f": install {name} {_text(better)}" if better else ""
        return (
            f"is {name} {version}, which does not report the weight version of its samples, so it cannot be trained "
            f"against{install} (as it is, it serves `debug rollout-only`)"
        )
    if not has(kind, version, Feature.VERSION_SPANS) and pause_mode not in ("auto", "abort"):
        better = since.get(Feature.VERSION_SPANS)
        every = f" ({_text(better)} reports it for every token)" if better else ""
        return (
            f"is {name} {version}, which reports one weight version for a response{every}, so none may run across "
            'a sync: set weights.pause_mode to "abort", or leave it at "auto"'
        )
    return None


def why_abort(kind: str, version: str, role: EngineRole) -> str | None:
    """Why no request of this engine may run across a weight sync; None: it may."""
    if role in HALVES:
        return "prefill and decode engines would use a KV cache of old weights"
    if not has(kind, version, Feature.VERSION_SPANS):
        return f"{dialect(kind).label} {version} gives one weight version for a whole response"
    return None


def pause_mode(asked: PauseMode | Literal["auto"], kind: str, version: str, role: EngineRole) -> PauseMode:
    """How one engine is paused for a weight sync. asked: weights.pause_mode."""
    if asked != "auto":
        return asked
    return "keep" if why_abort(kind, version, role) is None else "abort"


def _text(version: Version) -> str:
    return ".".join(map(str, version))
