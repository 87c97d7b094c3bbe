"""Sleep and wake-up of engines on the trainer's own GPUs.

    sleep            the engine has nothing to do, and its GPUs are free
    wake_weights     room for weights, which an update then fills
    wake_caches      room for keys and values; after it the engine is resumed

Weights come before caches: an engine that has its caches generates. On a CPU, where neither vLLM nor SGLang can sleep,
a pause stands for it, and the processes take turns all the same.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from rltool.engines.dialects.protocol import Controls, SleepLevel
from rltool.engines.dialects.table import controls, launches
from rltool.engines.fleet.fleet import Fleet, State
from rltool.engines.types import EngineInfo, HttpRequest
from rltool.errors import UsageError
from rltool.megatron.offload import Part
from rltool.weights.connections import Trainer

SENT: tuple[Part, ...] = ("parameters",)
"""What a weight sync needs of the trainer on its devices."""
TRAINED: tuple[Part, ...] = ("gradients", "optimizer")


class EngineSleep(Protocol):
    """Requests to one engine, pure, in this order: sleep, wake_weights, wake_caches, and the dialect's resume."""

    def sleep(self) -> list[HttpRequest]: ...

    def wake_weights(self) -> list[HttpRequest]: ...

    def wake_caches(self) -> list[HttpRequest]: ...


@dataclass(frozen=True)
class Sleep:
    """level: see dialect.SleepLevel."""

    dialect: Controls
    level: SleepLevel

    def sleep(self) -> list[HttpRequest]:
        return self.dialect.sleep(self.level)

    def wake_weights(self) -> list[HttpRequest]:
        return self.dialect.wake(("weights",))

    def wake_caches(self) -> list[HttpRequest]:
        return self.dialect.wake(("kv_cache",))


@dataclass(frozen=True)
class SleepToDisk:
    """Without its weights, which it loads again from `model`, where it read them when it started."""

    dialect: Controls
    model: str | None

    def sleep(self) -> list[HttpRequest]:
        return self.dialect.sleep(2)

    def wake_weights(self) -> list[HttpRequest]:
        return [*self.dialect.wake(("weights",)), *self.dialect.reload(self.model)]

    def wake_caches(self) -> list[HttpRequest]:
        return self.dialect.wake(("kv_cache",))


@dataclass(frozen=True)
class Pause:
    """In place of sleep, where there is no GPU memory to free."""

    dialect: Controls

    def sleep(self) -> list[HttpRequest]:
        return self.dialect.pause("abort")

    def wake_weights(self) -> list[HttpRequest]:
        return []

    def wake_caches(self) -> list[HttpRequest]:
        return []


def sleep_of(
    info: EngineInfo, trainer_device: str, *, updated: bool, from_disk: bool = False
) -> EngineSleep:
    """How this engine frees its GPUs. updated: a sync brings its weights whenever it wakes up: they need not be kept.
    from_disk: they are loaded again then (models.NAME.sleep).

    UsageError, a sentence without the engine's name, for one that was not started for that.
    """
    engine_dialect, levels = controls(info.dialect, plugin=info.plugin), info.sleep_levels
    if updated and 2 in levels:
        return Sleep(engine_dialect, 2)
    if from_disk and 2 in levels:
        return SleepToDisk(engine_dialect, info.model_path)
    if from_disk and 1 in levels:
        raise UsageError(
            "keeps its weights in the host's memory while it sleeps (--enable-weights-cpu-backup), and models.NAME."
            'sleep is "disk": leave the flag out, or sleep'
        )
    if 1 in levels:
        return Sleep(engine_dialect, 1)
    if trainer_device == "cpu":
        return Pause(engine_dialect)
    memory = launches(info.dialect).memory
    flags = memory.sleep if updated or from_disk else (*memory.sleep, *memory.keep_weights)
    raise UsageError(f"cannot free the trainer's GPUs while it trains: it was started without {' '.join(flags)}")


def check_can_sleep(
    infos: Mapping[str, EngineInfo], trainer_device: str, *, updated: bool, from_disk: bool = False
) -> None:
    """UsageError for the first of these engines that cannot leave its GPUs to the trainer."""
    for url, info in infos.items():
        try:
            sleep_of(info, trainer_device, updated=updated, from_disk=from_disk)
        except UsageError as error:
            raise UsageError(f"the engine {url} {error}") from error


class SharedGpus:
    """What a weight sync asks where engines sit on the trainer's GPUs. end(url, why): ends the process of an engine,
    which is started again. updated: see sleep_of."""

    def __init__(self, trainer: Trainer, end: Callable[[str, str], Awaitable[None]], *, updated: bool = True) -> None:
        self._ranks, self._trainer_device, self.end, self._updated = trainer.ranks, trainer.device, end, updated
        self.offload_seconds = 0.0
        """For which the ranks gave their memory away in the last `parameters`."""

    def sleep_of(self, info: EngineInfo) -> EngineSleep:
        return sleep_of(info, self._trainer_device, updated=self._updated)

    @asynccontextmanager
    async def parameters(self) -> AsyncIterator[None]:
        """Inside, the ranks have their parameters on their devices and nothing else of the training; after it, not
        even these."""
        self.offload_seconds = 0.0
        await self._offload(TRAINED)
        await self._ranks.onload(SENT)
        try:
            yield
        finally:
            await self._offload(SENT)

    @asynccontextmanager
    async def in_a_sync(self, fleet: Fleet, awake: Callable[[], Collection[str]]) -> AsyncIterator[None]:
        """`parameters`; an engine of the fleet that was asleep and is not among `awake` at the end is ended."""
        asleep = [member.url for member in fleet.members(State.ASLEEP)]
        async with self.parameters():
            try:
                yield
            finally:
                woken = awake()
                for url in asleep:
                    if url not in woken:
                        await self.end(url, "it did not wake up")

    async def _offload(self, parts: Sequence[Part]) -> None:
        started = time.perf_counter()
        await self._ranks.offload(parts)
        self.offload_seconds += time.perf_counter() - started
