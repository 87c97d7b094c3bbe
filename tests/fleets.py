"""Members of a fleet for tests that probe no engine, or want other facts about one than it gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.fleet import Fleet
from rltool.engines.types import EngineInfo


def endpoint(url: str, **facts: Any) -> EngineEndpoint:
    return EngineEndpoint(**{"url": url, "dialect": "vllm", **facts})


def info_of(engine: EngineEndpoint, *, version: str | None = None, **facts: Any) -> EngineInfo:
    """What an engine would answer that is all that its endpoint says."""
    found: dict[str, Any] = {
        "dialect": engine.dialect or "vllm", "engine_version": "0.32.0", "model_id": "m", "world_size": 1,
        "max_model_len": None, "vocab_size": None, "dtype": None, "weight_backend": engine.weight_backend,
        "weight_version": version, "boot_id": None, "plugin": engine.plugin,
    }  # fmt: skip
    return EngineInfo(**{**found, **facts})


def add(fleet: Fleet, engine: EngineEndpoint | str, *, takes_weights: bool = True) -> None:
    """-> STARTING."""
    where = endpoint(engine) if isinstance(engine, str) else engine
    fleet.add(where, info_of(where), takes_weights=takes_weights)


def add_probed(fleet: Fleet, engine: EngineEndpoint | str, *, takes_weights: bool = True, **facts: Any) -> None:
    """-> READY or STALE."""
    where = endpoint(engine) if isinstance(engine, str) else engine
    fleet.add_probed(where, info_of(where, **facts), takes_weights=takes_weights)


def answers(
    fleet: Fleet, url: str, *, sent_at: float, version: str | None = None, boot_id: str | None = None
) -> None:
    """A probe of this engine, which may have left."""
    engine = fleet.find(url)
    where = engine.endpoint if engine is not None else endpoint(url)
    fleet.probe_succeeded(url, info_of(where, version=version, boot_id=boot_id), sent_at=sent_at)


def describe(
    fleet: Fleet, url: str, *, endpoint: dict[str, Any] | None = None, info: dict[str, Any] | None = None
) -> None:
    """These facts about a member from now on."""
    engine = fleet.member(url)
    fleet._update(
        engine, endpoint=engine.endpoint.model_copy(update=endpoint or {}), info=replace(engine.info, **info or {})
    )
