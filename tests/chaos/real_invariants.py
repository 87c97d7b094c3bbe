"""What must hold while a real run meets real faults, looked at from outside: its metrics and recorded rollouts, its
driver's status, and what the engines and the router say of themselves."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.fleet import State
from rltool.engines.run_client import DRIVER_ROLE, Driver, EngineStatus, driver_of
from rltool.engines.sync_client import probe
from rltool.engines.weight_version import WeightVersion
from rltool.errors import RltoolError
from rltool.processes.run_directory import RunDirectory
from rltool.processes.state import read_state
from rltool.rollout.measure.dump import read_dump
from rltool.router.workers import list_workers
from tests.chaos.invariants import Violation
from tests.e2e.engines import RunningEngine
from tests.e2e.job import Job

GROUPS, SAMPLES = 8, 4
CHECKPOINT_STEPS = 3
LOOK_SECONDS = 1.0
ASK_SECONDS = 2.0
STALL_SECONDS = 180.0
"""Without a step: three times the goal for an engine that is stopped."""
NOTICE_SECONDS = 60.0
"""In which a wrong worker list, or an engine that is READY with other weights, is noticed: several probes, each with a
deadline of 5 s, and the longest look at a router."""
AGREEMENT = 5e-5
"""Mean |log-probability difference| of a step; SGLang's kernels come to 1e-5. Weights of another step differ by
hundreds of times as much."""
MAY_BE_LISTED = (State.READY, State.PAUSED)


class RealInvariants:
    """engines: all of the run; staleness: rollout.max_staleness."""

    def __init__(
        self, job: Job, run: str, engines: Sequence[RunningEngine], router: EngineEndpoint, staleness: int
    ) -> None:
        self._job, self._name, self._engines, self._router = job, run, engines, router
        self._staleness = staleness
        self._trained: dict[int, int] = {}
        """Group -> the step that trained it, along the line of weights that survives."""
        self._dropped = 0
        """Step -> groups that were dropped while it was waited for."""
        self.attempt: int | None = None
        """Of the newest recorded step; each resume is a new one."""
        self._ancestors: dict[int, int] = {}
        """Earlier attempt -> the step that was resumed from: what it made beyond that is discarded."""
        self._run_id: str | None = None
        self.steps = self.completed = self._tokens = 0
        """steps: of the surviving line; completed: all that were recorded, those that were done again included."""
        self._last_step_at = self._next_look = time.monotonic()
        self._struck: dict[str, float] = {}
        """Kinds of faults since the last step, and when the first of each was."""
        self._waits: defaultdict[str, list[float]] = defaultdict(list)
        self._since: dict[str, float] = {}
        """What is not as it should be, and since when."""
        self._rows: list[EngineStatus] = []
        self._disagreement = 0.0
        self._totals: dict[str, int] = {}

    def strikes(self, kind: str) -> None:
        """A fault of this kind happens now."""
        self._struck.setdefault(kind, time.monotonic())

    def look(self, struck: Collection[str]) -> list[str]:
        """At every tick. struck: URLs of the processes that a fault holds now. Returns what is new, for the journal;
        raises Violation."""
        news = self._read_steps()
        now = time.monotonic()
        driver = self._driver()
        if driver is None:  # it is being started: what was wrong before says nothing of what will be
            self._last_step_at = now
            self._since.clear()
            self._rows = []
        elif now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            self._look_at_engines(driver, struck)
        if self.steps and now - self._last_step_at > STALL_SECONDS:
            raise Violation(f"no step was completed for {STALL_SECONDS:g} s: {self._states()}")
        return news

    @property
    def rows(self) -> Sequence[EngineStatus]:
        """Of the engines, as the driver last said."""
        return self._rows

    def all_serve(self) -> bool:
        """Every engine of the run is READY, or paused by a sync, and the router has them all."""
        served = [row["url"] for row in self._rows if row["state"] in MAY_BE_LISTED]
        return len(served) == len(self._engines) and not self._since

    def check_end(self) -> list[str]:
        """The books of the whole run, once it has ended in order. What is new."""
        news = self._read_steps()
        missing, dropped = set(range(max(self._trained) + 1)) - self._trained.keys(), self._dropped
        _require(len(missing) <= dropped, f"groups {sorted(missing)} were lost, {dropped} dropped")
        return news

    def lines(self) -> list[str]:
        """What there is to report."""
        waits = {kind: f"{min(found):.1f} to {max(found):.1f}" for kind, found in sorted(self._waits.items())}
        return [
            f"{self.completed} steps ({self.completed - self.steps} of them done again after a resume), "
            f"{self._tokens} tokens trained, {self._dropped} groups dropped",
            f"seconds from a fault to the next completed step: {waits}",
            f"largest mean |log-probability difference| of a step: {self._disagreement:.1e}",
            f"the run's counts: {self._totals}",
        ]

    # -- after a step

    def _read_steps(self) -> list[str]:
        metrics = self._job.runs / self._name / "metrics.jsonl"
        lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("\n")]  # who is killed may leave half a line
        if records and _version_after(records[-1]).attempt != self.attempt:
            self._begin_attempt(records)
        new = records[self.steps :]
        for record in new:
            self._check_step(record)
        return [f"step {record['step']} is done" for record in new]

    def _begin_attempt(self, records: Sequence[dict]) -> None:
        """Its records begin where it was resumed; those of steps that it undid are gone from the file."""
        newest = _version_after(records[-1])
        first = next(record["step"] for record in records if _version_after(record).attempt == newest.attempt)
        _require(self._run_id in (None, newest.run), f"the run has become {newest.run}")
        _require(first <= self.steps, f"the run was resumed from step {first}, after {self.steps}")
        lost = self.steps - first
        # The last of them may have been recorded just before it was to be saved.
        _require(lost <= CHECKPOINT_STEPS, f"{lost} steps were lost: a checkpoint is written every {CHECKPOINT_STEPS}")
        self._ancestors = {attempt: min(step, first) for attempt, step in self._ancestors.items()}
        if self.attempt is not None:
            self._ancestors[self.attempt] = first
        self._run_id, self.attempt, self.steps = newest.run, newest.attempt, first
        self._trained = {group: step for group, step in self._trained.items() if step < first}

    def _check_step(self, record: dict) -> None:
        step = record["step"]
        _require(step == self.steps, f"step {step} was recorded after {self.steps} steps")
        dump = read_dump(self._job.runs / self._name / "rollouts", step)
        groups = Counter(sample.group_id for sample in dump.samples)
        sizes = set(groups.values())
        _require(
            len(groups) == GROUPS and sizes == {SAMPLES}, f"step {step} has {len(groups)} groups of {sizes} samples"
        )
        twice = {group: self._trained[group] for group in groups if group in self._trained}
        _require(not twice, f"step {step} trains groups again (group: step before): {twice}")
        self._trained |= dict.fromkeys(groups, step)
        for sample in dump.samples:
            name, at = f"sample {sample.group_id}/{sample.index} of step {step}", 0
            for span in sample.versions:
                version = WeightVersion.parse(span.version)
                _require(span.start == at, f"{name}: no version for tokens {at} to {span.start}")
                last = step if version.attempt == self.attempt else self._ancestors.get(version.attempt, -1)
                _require(
                    version.run == self._run_id and step - self._staleness <= version.number <= last,
                    f"{name} was sampled with {version}",
                )
                at = span.end
            _require(at == len(sample.response_ids) > 0, f"{name}: versions end at {at}")
            self._tokens += at
        difference = record.get("train/logprob_abs_diff_mean", 0.0)
        _require(difference < AGREEMENT, f"step {step}: engines and trainer differ by {difference:.1e}")
        self._note_step(record, difference)

    def _note_step(self, record: dict, difference: float) -> None:
        now = time.monotonic()
        self._dropped = int(record.get("rollout/groups_dropped_total", 0))
        self.steps, self.completed, self._last_step_at = self.steps + 1, self.completed + 1, now
        self._disagreement = max(self._disagreement, difference)
        for kind, at in self._struck.items():
            self._waits[kind].append(now - at)
        self._struck.clear()
        self._totals = {name: int(value) for name, value in record.items() if name.endswith("_total")}

    # -- at every moment

    def _look_at_engines(self, driver: Driver, struck: Collection[str]) -> None:
        try:
            status = driver.status()
        except RltoolError:  # busy; whether the run goes on is seen by its steps
            return
        self._rows = status.get("engines", [])
        serving = {row["url"]: row for row in self._rows if row["state"] == State.READY}
        versions = {row["weight_version"] for row in serving.values()}
        _require(len(versions) <= 1, f"READY engines hold different weights: {versions}")
        _require(None not in versions, f"an engine is READY without a sync: {self._states()}")
        for engine in self._engines:
            row = serving.get(engine.url)
            holds = row is None or engine.url in struck or self._holds(engine, row["weight_version"])
            self._expect(holds, f"{engine.url} is READY and holds other weights than the run's")
        follows = self._router.url in struck or not serving or self._router_follows(set(serving))
        self._expect(follows, "the router's workers are not the engines that serve")

    def _holds(self, engine: RunningEngine, version: str | None) -> bool:
        try:
            return probe(engine.endpoint, timeout=ASK_SECONDS).weight_version == version
        except RltoolError:
            return True  # it says nothing, so nothing wrong

    def _router_follows(self, serving: set[str]) -> bool:
        may = {row["url"] for row in self._rows if row["state"] in MAY_BE_LISTED}
        try:
            return serving <= {worker.url for worker in list_workers(self._router)} <= may
        except RltoolError:
            return False

    def _expect(self, holds: bool, otherwise: str) -> None:
        """Two processes were asked at two moments, so only what stays wrong is wrong."""
        if holds:
            self._since.pop(otherwise, None)
            return
        since = self._since.setdefault(otherwise, time.monotonic())
        _require(time.monotonic() - since < NOTICE_SECONDS, f"{otherwise}, for {NOTICE_SECONDS:g} s: {self._states()}")

    def _driver(self) -> Driver | None:
        run = RunDirectory(self._job.runs / self._name)  # it may not be there yet
        return driver_of(run, read_state(run, DRIVER_ROLE))

    def _states(self) -> str:
        return "; ".join(f"{row['url']} {row['state']} at {row.get('weight_version')}" for row in self._rows)


def _version_after(record: dict) -> WeightVersion:
    """The weights that the step of this record made."""
    return WeightVersion.parse(record["weight_version"])


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Violation(otherwise)
