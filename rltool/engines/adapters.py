"""Adapters (LoRA) under names at engines that serve.

A name stands for one adapter for ever: engines find cached keys and values by it, so a name that came to stand for
another would be answered from the old one's cache (vllm#48312). No engine is paused: a request names the adapter that
all of its tokens are sampled with, and goes on with it however many others are published meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rltool.engines.client import EngineClient
from rltool.engines.dialects.table import adapts
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.types import EngineInfo, GenerateRequest
from rltool.engines.weight_version import WeightVersion
from rltool.errors import EngineError, EngineRejected, UsageError

EXTRA_SLOTS = 2
"""Beside those of the versions before: one that new requests name, and one that is loaded meanwhile."""
PEFT_WEIGHTS, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"


def adapter_name(version: WeightVersion) -> str:
    """Of a run's adapter after `version.number` training steps: another attempt at the same step has another name."""
    return f"{version.run}-{version.attempt}-v{version.number:06d}"


def lacks_adapter(error: EngineRejected, name: str) -> bool:
    """Whether an engine refused a request because it has no adapter of this name, such as one that was started again.
    vLLM answers 404; SGLang 400, and says so."""
    return bool(name) and (error.status == 404 or (error.status == 400 and "not loaded" in str(error)))


def adapter_obstacle(info: EngineInfo, rank: int, slots: int) -> str | None:
    """Why an engine cannot take adapters of this rank, `slots` at a time; None: it can, or does not report it."""
    if info.plugin and info.lora_rank is None:
        return 'is an earlier rltool\'s, which takes no adapters: update it there, or set weights.lora_sync to "merged"'
    start = f"start it with `rltool serve-engines --lora-rank {rank} --lora-slots {slots}`"
    if info.lora_rank == 0:
        return f'takes no adapters, as weights.lora_sync = "adapter" needs: {start}, or set it to "merged"'
    if info.lora_rank is not None and info.lora_rank < rank:
        return f"takes adapters up to rank {info.lora_rank}, and lora.rank is {rank}: {start}"
    if info.lora_slots is not None and info.lora_slots < slots:
        return (
            f"holds {info.lora_slots} adapters at a time, but a run with rollout.max_staleness = "
            f"{slots - EXTRA_SLOTS} has requests of {slots - EXTRA_SLOTS + 1} versions, and loads one more: {start}, "
            "or lower rollout.max_staleness"
        )
    return None


def write_adapter(directory: Path, config: Mapping[str, Any], tensors: Iterable[tuple[str, Any]]) -> Path:
    """A directory in peft's format, complete or not there. config: of adapter_config.json; tensors: by peft's names.
    UsageError if it exists: its name is taken."""
    from safetensors.torch import save_file

    if directory.exists():
        raise UsageError(f"{directory} exists; a name stands for one adapter for ever, so take another")
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    # safetensors refuses tensors that share memory, as views of one buffer do.
    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors}, partial / PEFT_WEIGHTS)
    (partial / PEFT_CONFIG).write_text(json.dumps(dict(config), indent=2) + "\n")
    os.replace(partial, directory)
    return directory


@dataclass
class _Published:
    directory: Path
    holders: dict[str, EngineEndpoint] = field(default_factory=dict)


class NamedAdapters:
    """Publish, sample with, unload: by the engines' own routes, so of stock servers too.

    deadline: seconds for each engine to load or unload one. Engines read the directories under the paths that are
    given here.
    """

    def __init__(self, client: EngineClient, *, deadline: float) -> None:
        self._client, self._deadline = client, deadline
        self._published: dict[str, _Published] = {}
        self._unloaded: set[str] = set()

    async def publish(
        self, name: str, directory: Path, engines: Sequence[EngineEndpoint]
    ) -> dict[str, EngineError]:
        """Have these engines load it. Called again with the same directory it reaches engines that are new, or whose
        process is another; UsageError for a name that stands, or stood, for another adapter. Returns URL -> why not."""
        if not directory.is_absolute():
            raise UsageError(f"{directory}: engines need an absolute path")
        known = self._published.get(name)
        if name in self._unloaded or (known is not None and known.directory != directory):
            raise UsageError(f"adapter {name!r} was published before: a name stands for one adapter for ever")
        if not (directory / PEFT_CONFIG).is_file() or not (directory / PEFT_WEIGHTS).is_file():
            raise UsageError(f"{directory} is no adapter of peft's: {PEFT_CONFIG} and {PEFT_WEIGHTS} make one")
        published = self._published.setdefault(name, _Published(directory))
        path = str(directory)

        async def load(engine: EngineEndpoint) -> None:
            held = published.holders.get(engine.url)
            if held is not None and held.boot_id is not None and held.boot_id == engine.boot_id:
                return
            request = adapts(engine.dialect or "", plugin=engine.plugin).load_adapter(name, path)
            await self._client.run(engine, [request], timeout=self._deadline)
            published.holders[engine.url] = engine

        return await _failures(engines, load)

    def sampling_with(self, name: str, request: GenerateRequest) -> GenerateRequest:
        """The request under this adapter. UsageError for one that is not published."""
        if name not in self._published:
            raise UsageError(f"adapter {name!r} is not published, so nothing can be sampled with it")
        return replace(request, adapter=name)

    def holders(self, name: str) -> frozenset[str]:
        """URLs of engines that have it."""
        published = self._published.get(name)
        return frozenset(published.holders) if published is not None else frozenset()

    async def unload(self, name: str) -> dict[str, EngineError]:
        """Free its place. Requests that run with it end with it; new ones are refused. The name is never taken again.
        Returns URL -> why not, for engines that still have it: unload it once more."""
        published = self._published.get(name)
        if published is None:
            return {}

        async def unload(engine: EngineEndpoint) -> None:
            request = adapts(engine.dialect or "", plugin=engine.plugin).unload_adapter(name)
            await self._client.run(engine, [request], timeout=self._deadline)
            published.holders.pop(engine.url, None)

        failures = await _failures(list(published.holders.values()), unload)
        if not failures:
            del self._published[name]
            self._unloaded.add(name)
        return failures


async def _failures(engines: Sequence[EngineEndpoint], act: Any) -> dict[str, EngineError]:
    results = await asyncio.gather(*(act(engine) for engine in engines), return_exceptions=True)
    failures: dict[str, EngineError] = {}
    for engine, result in zip(engines, results, strict=True):
        if isinstance(result, EngineError):
            failures[engine.url] = result
        elif isinstance(result, BaseException):
            raise result
    return failures
