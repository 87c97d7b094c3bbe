"""A run of training on fake engines that break all the time: a RolloutService as the driver of `train` uses it, and the
invariants after every step.

The seed gives the mode and the events, their order and their pauses. Sockets and threads make the rest, so a seed that
found something finds it again within a few runs, not always at the same step.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rltool.config.train import TrainConfig
from rltool.engines.client import EngineClient
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.fleet import Fleet, State
from rltool.engines.types import EngineInfo
from rltool.engines.weight_version import Lineage, WeightVersion
from rltool.errors import EngineError, RltoolError, TrainingStopped
from rltool.training.manager.rollout_engines import Engines, Syncing
from rltool.training.manager.service import RolloutService
from rltool.weights.sync_report import WeightSyncFailed
from tests.chaos.engines import WitnessEngine
from tests.chaos.events import Events
from tests.chaos.invariants import Invariants, Journal, Violation
from tests.chaos.resources import Resources, leftovers
from tests.chaos.speed import DEADLINES, POLICY, at_high_speed
from tests.chaos.weights import OneNumberRanks

RUN = "c" * 32
ENGINES = 4
BATCH, SAMPLES, RESPONSE_TOKENS = 4, 2, 16
RESPONSE_SECONDS = 0.02
STOPS = tuple(range(2, 10))
STEP_SECONDS = 45.0
"""For one step or sync, whatever happens meanwhile. Faults last a second at most."""
ENDING_SECONDS = 5.0
"""For tasks that end because the service has ended."""
WITHOUT_PROGRESS = 60
"""Attempts in a row that may end before their first step: the driver may be killed that often in unlucky seeds."""
STATE_SHARE, RESUME_SHARE = 0.3, 0.02
"""Share of the steps after which a checkpoint is taken, and after which the run is ended properly and resumed."""
WORDS = ("sun", "bird", "chess", "neon", "bingo", "bliss", "cat", "dog", "owl")
MODES: tuple[dict[str, Any], ...] = (
    {"max_staleness": 0},
    {"max_staleness": 1},
    {"max_staleness": 3},
    {"max_staleness": 0, "oversampling_factor": 1.5},
    {"max_staleness": 1, "oversampling_factor": 1.5, "partial_rollout": True},
    {"max_staleness": 3, "oversampling_factor": 2.0, "partial_rollout": True},
    {"max_staleness": 1, "on_stale": "resample"},
)
T = TypeVar("T")


@dataclass
class Report:
    """What a run has seen."""

    seed: int
    mode: dict[str, Any]
    pause_mode: str
    steps: int = 0
    attempts: int = 0
    tokens: int = 0
    events: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    stopped: Counter[str] = field(default_factory=Counter)

    def line(self) -> str:
        mode = " ".join(f"{name}={value}" for name, value in self.mode.items())
        return (
            f"seed {self.seed} ({mode}, pause_mode={self.pause_mode}): {self.events.total()} events, "
            f"{self.steps} steps, {self.tokens} tokens trained, {self.attempts} attempts\n"
            f"  events: {dict(self.events)}\n"
            f"  service: {dict(self.counts)}" + (f"\n  stopped by: {dict(self.stopped)}" if self.stopped else "")
        )


class ChaosRun:
    """One seed. directory: its own, empty. enough(report): whether faults may end now."""

    def __init__(
        self, seed: int, model: Path, directory: Path, *, enough: Callable[[Report], bool],
        resources: Resources | None = None,
    ) -> None:  # fmt: skip
        rng = self._rng = random.Random(f"run {seed}")
        mode = rng.choice(MODES)
        self.report = Report(seed, mode, rng.choice(("keep", "abort")))
        self.service: RolloutService | None = None
        self.engines = [WitnessEngine(seconds=RESPONSE_SECONDS) for _ in range(ENGINES)]
        self.journal = Journal()
        self._directory, self._enough, self._resources = directory, enough, resources
        self._config = self._make_config(model)
        self._members: tuple[EngineEndpoint, ...] = ()
        self._attempt = self._done = 0
        self._lineage = Lineage(RUN, 0)
        self._state: dict[str, Any] | None = None
        self._state_directory: Path | None = None
        self._ranks = OneNumberRanks(self._config.weights, 0, directory / "nothing")
        self._killed = asyncio.Event()
        self._events = Events(self, seed)
        self._events.counts = self.report.events
        self._tasks_before: set[asyncio.Task[Any]] = set()

    # -- what events see

    @property
    def version(self) -> WeightVersion:
        return WeightVersion(RUN, self._attempt, self._ranks.step)

    @property
    def faults_end(self) -> bool:
        return self._enough(self.report) or bool(self._invariants.violations)

    def kill(self) -> None:
        self.note("event: the driver is killed")
        self._killed.set()

    def note(self, line: str) -> None:
        self.journal.note(line)

    def found(self, violation: str) -> None:
        self._invariants.violations.append(violation)

    def endpoint(self, engine: WitnessEngine) -> EngineEndpoint:
        return EngineEndpoint(url=engine.url, dialect="vllm")

    # -- the run

    async def run(self) -> Report:
        """Raises Violation with all that is known of the moment."""
        # Tasks of a driver that is killed end with errors that nobody reads.
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self.note(str(context)))
        with ExitStack() as stack:
            for engine in self.engines:
                stack.enter_context(engine)
            by_url = {engine.url: engine for engine in self.engines}
            self._invariants = Invariants(
                by_url, run=RUN, batch=BATCH, samples=SAMPLES, staleness=self.report.mode["max_staleness"]
            )
            self._members = tuple(self.endpoint(engine) for engine in self.engines[:3])
            events = asyncio.create_task(self._events.happen(), name="chaos events")
            try:
                idle = 0
                while not (events.done() and self._has_recovered):
                    steps = self.report.steps
                    await self._one_attempt(events)
                    idle = idle + 1 if self.report.steps == steps else 0
                    if idle > WITHOUT_PROGRESS:
                        raise Violation(f"{idle} attempts in a row ended before their first step")
                await events
            except Violation as violation:
                raise Violation(f"{violation}\n{self._dump()}") from None
            finally:
                events.cancel()
                await asyncio.gather(events, return_exceptions=True)
                await self._kill()
        self.report.tokens = self._invariants.tokens
        return self.report

    _has_recovered = False

    async def _one_attempt(self, events: asyncio.Task[None]) -> None:
        self._killed.clear()
        self.report.attempts += 1
        await self._start()
        steps = asyncio.create_task(self._steps(events), name="chaos steps")
        killed = asyncio.create_task(self._killed.wait(), name="chaos killed")
        try:
            await asyncio.wait((steps, killed), return_when=asyncio.FIRST_COMPLETED)
            if steps.done():
                steps.result()
                self._end_books()
                await self._within(self._service.close(), "the end of the service")
                await self._nothing_runs()
        except (TrainingStopped, WeightSyncFailed) as error:  # engines failed on too many groups: said, and resumed
            self.report.stopped[type(error).__name__] += 1
            self.note(f"stopped: {error}")
        finally:
            for task in (steps, killed):
                task.cancel()
            await asyncio.gather(steps, killed, return_exceptions=True)
            await self._kill()

    async def _start(self) -> None:
        """As the driver of `train --resume` does, with those engines that answer; the others join later."""
        if self._attempt or self._state or self.report.attempts > 1:
            self._attempt += 1
            self._lineage = self._lineage.resumed(self._attempt, self._done)
        self._ranks = OneNumberRanks(self._config.weights, self._attempt, self._directory / "nothing")
        self._ranks.step = self._done
        infos, absent = await self._within(self._preflight(), "an engine that answers")
        service = self._service = RolloutService(
            self._config,
            Engines(tuple(e for e in self._members if e.url in infos), infos),
            syncing=Syncing(self._ranks, self._lineage, "cpu", self._directory / "weights", vocab_size=64),
            log=self.note,
            fleet=Fleet(POLICY),
            on_event=self._invariants.look,
        )
        await service.start()
        if self._state is not None:
            await service.load_state_dict(self._state, self._state_directory)
        self.note(f"attempt {self._attempt} begins after step {self._done} with {len(infos)} engines")
        self._invariants.begin(service, self._attempt, self._lineage.ancestors, self._done)
        self.service = service
        for endpoint in absent:
            with suppress(RltoolError):
                await service.add_engine(endpoint)

    async def _preflight(self) -> tuple[dict[str, EngineInfo], list[EngineEndpoint]]:
        infos: dict[str, EngineInfo] = {}
        async with EngineClient() as client:
            while not infos:
                for endpoint in self._members:
                    with suppress(EngineError):
                        infos[endpoint.url] = await client.probe(endpoint)
        return infos, [endpoint for endpoint in self._members if endpoint.url not in infos]

    async def _steps(self, events: asyncio.Task[None]) -> None:
        """The loop of training, until faults have ended and all engines serve again, or a resume is due."""
        service, step = self._service, self._done
        await self._within(service.sync_weights(step), f"the sync of step {step}")
        while True:
            rollout = await self._within(service.next_batch(step), f"the batch of step {step}")
            self._invariants.check_step(step, rollout)
            step += 1
            self._ranks.step = step
            await self._within(service.sync_weights(step), f"the sync of step {step}")
            self._invariants.raise_found()
            self.report.steps += 1
            self._members = service.present_engines() or self._members
            if self._resources is not None:
                self._resources.measure()
            self.note(f"step {step} is done: {service.collector.ledger.counts()}")
            resumes = self._rng.random() < RESUME_SHARE
            if resumes or self._rng.random() < STATE_SHARE:
                await self._save(step)
            if events.done():
                self._has_recovered = await self._within(self._recovered(), "READY engines after the last fault")
                return
            if resumes:
                return

    async def _recovered(self) -> bool:
        """Every engine of the fleet serves: those that a fault left STALE are synced while a batch is waited for, so
        steps go on."""
        service, step = self._service, self._ranks.step
        while any(member.state is not State.READY for member in service.fleet.members()):
            self._invariants.check_step(step, await service.next_batch(step))
            step += 1
            self._ranks.step = step
            await service.sync_weights(step)
            self._invariants.raise_found()
        return True

    async def _save(self, step: int) -> None:
        state = await self._service.state_dict(step)
        directory = Path(tempfile.mkdtemp(dir=self._directory, prefix=f"checkpoint-{step}-"))
        for name, content in state.files.items():
            (directory / name).write_bytes(content)
        if self._state_directory is not None:
            shutil.rmtree(self._state_directory)
        self._state, self._state_directory, self._done = json.loads(json.dumps(state.state)), directory, step

    # -- ends

    def _end_books(self) -> None:
        self._invariants.raise_found()
        self.report.counts.update(self._service._plane.counts)
        self.report.counts.update({f"engines_{name}": n for name, n in self._service._monitor.counts.items()})
        self._invariants.end()

    async def _kill(self) -> None:
        """As kill -9 of the driver: no goodbye to any engine, then no task of the service is left."""
        service, self.service = self.service, None
        self._invariants.end()
        if service is None:
            return
        service.collector._stopped = True  # a task that ends starts no other
        await service._client.__aexit__(None, None, None)
        while tasks := [task for task in asyncio.all_tasks() if not _is_ours(task)]:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=1)
        await service._rewards.close()
        self._ranks.sender.close()

    async def _nothing_runs(self) -> None:
        self.service = None
        left = {task for task in asyncio.all_tasks() if not _is_ours(task)}
        if left:  # an event of ours that probes an engine, to join, has tasks without our name: they end with it
            _, left = await asyncio.wait(left, timeout=ENDING_SECONDS)
        if left:
            raise Violation(f"tasks are left when the service has ended: {[task.get_name() for task in left]}")

    async def _within(self, work: Awaitable[T], what: str) -> T:
        try:
            async with asyncio.timeout(STEP_SECONDS):
                return await work
        except TimeoutError:
            raise Violation(f"{what} did not come within {STEP_SECONDS:g} s") from None

    def _dump(self) -> str:
        service = self._service
        members = [f"  {m}\n    truly {self._truth(m.url)}" for m in service.fleet.members()]
        return "\n".join(
            [
                self.report.line(),
                f"the fleet at {service.fleet.version}:", *members,
                f"the books: {service.collector.ledger.counts()}, dropped {dict(service.collector.ledger.dropped)}",
                "open: " + ", ".join(f"{g.id} {g.state.value}" for g in service.collector.ledger.groups()),
                "the last transitions:", *map(str, list(service._monitor.recent)[-20:]),
                "the last events:", self.journal.text(),
                f'again: make chaos ARGS="--seed {self.report.seed}"',
            ]
        )  # fmt: skip

    def _truth(self, url: str) -> str:
        [engine] = [engine for engine in self.engines if engine.url == url]
        return f"{engine.truth}, boot id {engine.boot_id}, paused {engine.paused}, broken {engine.is_broken}"

    def _make_config(self, model: Path) -> TrainConfig:
        rows = [{"prompt": f"{word}=", "label": word[::-1]} for word in WORDS]
        data = self._directory / "words.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return TrainConfig.model_validate(
            {
                "model": {"path": model},
                "seed": self.report.seed,
                "rollout": {
                    "prompts_per_step": BATCH, "samples_per_prompt": SAMPLES, "dump": True, "max_failed_fraction": 1.0,
                    "requests_per_engine": 4, "group_filter": "tests.chaos.functions:one_in_eight", **self.report.mode,
                },
                "sampling": {
                    "max_prompt_tokens": 8, "max_response_tokens": RESPONSE_TOKENS, "stop_token_ids": STOPS,
                },
                "weights": {"pause_mode": self.report.pause_mode, "transport": "disk"},
                "deadlines": DEADLINES,
                "data": {"train": [data]},
                "reward": {"function": "tests.chaos.functions:length"},
            }
        )  # fmt: skip


def _is_ours(task: asyncio.Task[Any]) -> bool:
    return task.get_name().startswith("chaos") or task is asyncio.current_task()


def run_seed(seed: int, model: Path, *, enough: Callable[[Report], bool], resources: Resources | None = None) -> Report:
    """One seed in an event loop of its own. Raises Violation; afterwards no socket, thread or file is left."""

    async def main(directory: Path) -> Report:
        task = asyncio.current_task()
        assert task is not None
        task.set_name("chaos main")
        return await ChaosRun(seed, model, directory, enough=enough, resources=resources).run()

    with leftovers() as temporary, at_high_speed():
        directory = temporary / "run"
        directory.mkdir()
        return asyncio.run(main(directory))


def events_or_seconds(events: int | None = None, seconds: float | None = None) -> Callable[[Report], bool]:
    """Faults end after so many events, or after so many seconds."""
    ends = None if seconds is None else time.monotonic() + seconds
    return lambda report: (
        (events is not None and report.events.total() >= events) or (ends is not None and time.monotonic() >= ends)
    )
