"""What happens to the engines of a run, drawn from a seed: which event, to which engine, when, and for how long."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.fleet import State
from rltool.engines.weight_version import WeightVersion
from rltool.errors import RltoolError
from rltool.rollout.serving.data_plane import KEEPS_REQUESTS
from rltool.training.manager.service import RolloutService
from tests.chaos.engines import GENERATE, WitnessEngine
from tests.chaos.weights import FROM_DISK, weights_of

OTHER_RUN = "d" * 32
SYNC_ROUTES = (
    "/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume", "/reset_prefix_cache",
    "/reset_encoder_cache", "/sleep", "/wake_up",
    "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/rltool/update_weights",
    "/rltool/finish_weight_update",
)  # fmt: skip
ROUTES = (GENERATE, GENERATE, GENERATE, "/health", "/rltool/info", "/weight_info", "/v1/models", *SYNC_ROUTES)
LEAST_MEMBERS = 2
LOST_VERSIONS = ("default", "older", "unpublished", "foreign")
WITHDRAW_SECONDS = 20.0
"""For a hung engine to be noticed and left: hundreds of probes."""


class Run(Protocol):
    """The run that events happen to. service: None between two attempts; version: of its present weights."""

    engines: Sequence[WitnessEngine]
    service: RolloutService | None
    version: WeightVersion
    faults_end: bool

    def kill(self) -> None: ...
    def note(self, line: str) -> None: ...
    def found(self, violation: str) -> None: ...
    def endpoint(self, engine: WitnessEngine) -> EngineEndpoint: ...


class Events:
    """One source of them. mean_pause: seconds between two events; longest: of a fault; driver_dies: share of the events
    that kill the driver."""

    def __init__(
        self, run: Run, seed: int, *, mean_pause: float = 0.03, longest: float = 0.4, driver_dies: float = 0.01
    ) -> None:
        self._run, self._rng = run, random.Random(seed)
        self._mean_pause, self._longest, self._driver_dies = mean_pause, longest, driver_dies
        self._busy: set[str] = set()
        self._foreign: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self.counts: Counter[str] = Counter()
        self._kinds: dict[Callable[[WitnessEngine], Coroutine[Any, Any, None]], int] = {
            self._dies: 4, self._hangs: 3, self._hangs_until_noticed: 2, self._breaks: 8, self._samples_badly: 4,
            self._holds_other_weights: 4, self._rejects: 1, self._leaves: 1, self._joins: 2,
        }  # fmt: skip

    async def happen(self) -> None:
        """One after another until the run says that faults end; then waits until all have ended."""
        try:
            while not self._run.faults_end:
                await asyncio.sleep(self._rng.expovariate(1 / self._mean_pause))
                self._next()
            await asyncio.gather(*self._tasks)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _next(self) -> None:
        # What is drawn depends on the seed alone: whether it can happen now is asked afterwards.
        kills = self._rng.random() < self._driver_dies
        [kind] = self._rng.choices(list(self._kinds), list(self._kinds.values()))
        engine = self._rng.choice(self._run.engines)
        if kills:
            self.counts["driver_dies"] += 1
            self._run.kill()
        elif engine.url not in self._busy:
            self._busy.add(engine.url)
            name = kind.__name__.strip("_")
            self.counts[name] += 1
            task = asyncio.create_task(self._one(kind(engine), engine, name), name=f"chaos {name}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _one(self, event: Coroutine[Any, Any, None], engine: WitnessEngine, name: str) -> None:
        self._run.note(f"event: {engine.url} {name}")
        try:
            await event
        except RltoolError as error:  # what the owner of an engine is told
            self._run.note(f"event: {engine.url} {name}: {type(error).__name__}: {error}")
        finally:
            await asyncio.to_thread(engine.heal)
            self._busy.discard(engine.url)
            self._run.note(f"event: {engine.url} {name} is over")

    async def _a_while(self) -> None:
        await asyncio.sleep(self._rng.uniform(0, self._longest))

    # -- kinds

    async def _dies(self, engine: WitnessEngine) -> None:
        try:
            await asyncio.to_thread(engine.die)
            await self._a_while()
        finally:
            await asyncio.to_thread(engine.revive)

    async def _hangs(self, engine: WitnessEngine) -> None:
        engine.stop()
        await self._a_while()

    async def _hangs_until_noticed(self, engine: WitnessEngine) -> None:
        """Nobody waits for an engine that is out of service: its requests are elsewhere by then."""
        engine.stop()
        noticed = False
        try:
            async with asyncio.timeout(WITHDRAW_SECONDS):
                while (service := self._run.service) is not None:
                    states = {member.url: member.state for member in service.fleet.members()}
                    noticed = states.get(engine.url) not in KEEPS_REQUESTS
                    if noticed and not service._plane.in_flight_at(engine.url):
                        return
                    if states.get(engine.url) is State.PAUSED:
                        noticed = False
                    await asyncio.sleep(0.01)
        except TimeoutError:
            what = "still has requests of ours" if noticed else "still counts as healthy"
            self._run.found(f"{engine.url} has hung for {WITHDRAW_SECONDS:g} s and {what}")

    async def _breaks(self, engine: WitnessEngine) -> None:
        path = self._rng.choice(ROUTES)
        how = self._rng.choice(("fail", "reset", "garble", "hold"))
        self._run.note(f"  {how} {path}")
        getattr(engine, how)(path)
        await self._a_while()

    async def _samples_badly(self, engine: WitnessEngine) -> None:
        setattr(engine, self._rng.choice(("missing_logprobs", "wrong_count", "sentinel_logprob")), True)
        await self._a_while()

    async def _holds_other_weights(self, engine: WitnessEngine) -> None:
        """Of another run (the second time the engine is left to it, so once a run), of none, or of another step."""
        kind = self._rng.choice(LOST_VERSIONS)
        ours = self._run.version
        if kind == "foreign" and self._foreign[engine.url]:
            kind = "default"
        self._foreign[engine.url] += kind == "foreign"
        version = {
            "default": "default",
            "older": str(WeightVersion(ours.run, ours.attempt, max(ours.number - 1, 0))),
            "unpublished": str(WeightVersion(ours.run, ours.attempt, ours.number + 3)),
            "foreign": str(WeightVersion(OTHER_RUN, 0, ours.number)),
        }[kind]
        number = FROM_DISK if kind in ("default", "foreign") else weights_of(version)
        self._run.note(f"  {version}")
        await asyncio.to_thread(engine.overwrite, version, number)

    async def _rejects(self, engine: WitnessEngine) -> None:
        engine.fail(GENERATE, 400, times=1)
        await self._a_while()

    async def _leaves(self, engine: WitnessEngine) -> None:
        service = self._run.service
        if service is not None and len(service.present_engines()) > LEAST_MEMBERS:
            await service.remove_engine(engine.url)

    async def _joins(self, engine: WitnessEngine) -> None:
        if self._run.service is not None:
            await self._run.service.add_engine(self._run.endpoint(engine))
