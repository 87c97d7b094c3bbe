"""What must hold at every moment of a run, whatever happens to its engines.

Everything is compared with what the engines really hold and with books of our own, never with the service's word alone.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter, deque
from collections.abc import Mapping

from rltool.engines.fleet.fleet import State
from rltool.engines.weight_version import BadWeightVersion, WeightVersion
from rltool.rollout.sample import Sample, SampleStatus
from rltool.training.manager.service import Rollout, RolloutService
from tests.chaos.engines import WitnessEngine
from tests.chaos.weights import logprob, weights_of

TIMES_TOLD = 4
"""Answers to probes, with nothing broken, after which the fleet must know: one may be on its way, one be judged."""
KEPT_LINES = 400
NEVER = -1


class Violation(AssertionError):
    """Something that must never be."""


class Journal:
    """What happened last, for the dump of a run that failed."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)

    def note(self, line: str) -> None:
        self._lines.append(f"{time.monotonic() - self._started:9.3f}  {line}")

    def text(self) -> str:
        return "\n".join(self._lines)


class TrainedGroups:
    """Which step trained which group, along the line of weights that survives. Four bytes a group: an hour trains
    hundreds of thousands, and must not grow by what it keeps of them."""

    def __init__(self) -> None:
        self._steps = array("i")
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, group: int) -> bool:
        return group < len(self._steps) and self._steps[group] != NEVER

    def step_of(self, group: int) -> int:
        return self._steps[group]

    def add(self, group: int, step: int) -> None:
        self._steps.extend([NEVER] * (group + 1 - len(self._steps)))
        self._steps[group] = step
        self._count += 1

    def forget_from(self, step: int) -> None:
        """What was trained at `step` or later is undone."""
        self._steps = array("i", (NEVER if found >= step else found for found in self._steps))
        self._count = len(self._steps) - self._steps.count(NEVER)


class Invariants:
    """engines: all of them by URL, in the fleet or not. `violations` collects what was found between two steps: an
    assertion that failed inside the service would be taken for a failure of the service."""

    def __init__(self, engines: Mapping[str, WitnessEngine], *, run: str, batch: int, samples: int, staleness: int):
        self._engines, self._run, self._batch, self._samples = engines, run, batch, samples
        self._staleness = staleness
        self._ancestors: dict[int, int] = {}
        self._attempt = 0
        self._trained = TrainedGroups()
        self._told_dropped: Counter[str] = Counter()
        self._service: RolloutService | None = None
        self.violations: list[str] = []
        self.tokens = 0

    def begin(self, service: RolloutService, attempt: int, ancestors: Mapping[int, int], done: int) -> None:
        """An attempt begins after `done` steps: what later ones trained is forgotten with their weights."""
        self._service, self._attempt, self._ancestors = service, attempt, dict(ancestors)
        self._trained.forget_from(done)
        self._told_dropped = Counter(service.collector.ledger.dropped)

    def end(self) -> None:
        self._service = None

    # -- at every moment

    def look(self) -> None:
        """After every change of a group, and of the fleet."""
        if self._service is not None and not self.violations:
            try:
                self._service.collector.ledger.check()
                self._check_ready(self._service)
            except AssertionError as error:
                self.violations.append(str(error))

    def _check_ready(self, service: RolloutService) -> None:
        failures = service._monitor.counts["monitor_failures"]
        _require(failures == 0, f"the fleet's monitor failed {failures} times: see the journal")
        version = str(service.fleet.version)
        for member in service.fleet.members():
            if member.state is not State.READY:
                continue
            engine = self._engines[member.url]
            _require(
                str(member.version) == version,
                f"{member.url} is READY at {member.version}, the fleet is at {version}",
            )
            done = {boot for boot, *what in list(engine.completed) if what == [version, weights_of(version)]}
            truth = engine.truth
            told = engine.truth_told  # read second: it falls to 0 before the truth changes, in a thread of its own
            # A process that has brought it to its end may have been restarted since, twice before anybody asked.
            _require(
                bool(done) and (told < TIMES_TOLD or bool({member.boot_id, engine.boot_id} & done)),
                f"{member.url} is READY at {version}, and never brought that sync to its end",
            )
            _require(
                truth == (version, weights_of(version)) or told < TIMES_TOLD,
                f"{member.url} is READY at {version}, and has told {told} probes that it holds {truth}",
            )

    # -- after a step

    def check_step(self, step: int, rollout: Rollout) -> None:
        """The batch of `step`, just handed out, before anything else runs."""
        assert self._service is not None
        groups = Counter(sample.group_id for sample in rollout.samples)
        _require(len(groups) == self._batch, f"the batch of step {step} has {len(groups)} groups")
        _require(set(groups.values()) == {self._samples}, f"groups of {set(groups.values())} samples at step {step}")
        twice = {group: self._trained.step_of(group) for group in groups if group in self._trained}
        _require(not twice, f"step {step} trains groups again (group: step before): {twice}")
        for group in groups:
            self._trained.add(group, step)
        for sample in rollout.samples:
            self._check_sample(sample, step)
        for name, count in rollout.metrics.items():
            if name.startswith("rollout/dropped_groups_"):
                self._told_dropped[name.removeprefix("rollout/dropped_groups_")] += int(count)
        self._check_books()
        self.raise_found()

    def raise_found(self) -> None:
        self.look()
        if self.violations:
            raise Violation(self.violations[0])

    def _check_sample(self, sample: Sample, step: int) -> None:
        name = f"sample {sample.group_id}/{sample.index} of step {step}"
        _require(sample.status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED), f"{name} is {sample.status}")
        at = 0
        for span in sample.versions:
            _require(span.start == at, f"{name}: no version for tokens {at} to {span.start}")
            at = span.end
            self._check_version(span.version, step, name)
            expected = [logprob(token, weights_of(span.version)) for token in sample.response_ids[span.start : at]]
            _require(
                sample.response_logprobs[span.start : at] == expected,
                f"{name}: tokens {span.start} to {at} do not come from the weights {span.version} that they name",
            )
        _require(at == len(sample.response_ids) > 0, f"{name}: versions end at {at} of {len(sample.response_ids)}")
        self.tokens += at

    def _check_version(self, text: str, step: int, name: str) -> None:
        try:
            version = WeightVersion.parse(text)
        except BadWeightVersion:
            raise Violation(f"{name} was sampled with {text!r}") from None
        last = step if version.attempt == self._attempt else self._ancestors.get(version.attempt, -1)
        _require(version.run == self._run and version.number <= last, f"{name} was sampled with {version}")
        age = step - version.number
        _require(age <= self._staleness, f"{name} holds tokens {age} steps old: max_staleness is {self._staleness}")

    def _check_books(self) -> None:
        """issued = trained + dropped + open, by numbers of groups, and each drop told with its reason."""
        assert self._service is not None
        collector = self._service.collector
        ledger = collector.ledger
        known = len(self._trained) + sum(group.id not in self._trained for group in ledger.groups())
        lost = ledger.issued - known - ledger.dropped.total()
        _require(
            lost == 0,
            f"{ledger.issued} groups were issued, {known} are trained or open, {ledger.dropped.total()} dropped",
        )
        told = self._told_dropped + collector._since.dropped
        _require(told == ledger.dropped, f"metrics tell of drops {dict(told)}, the books of {dict(ledger.dropped)}")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Violation(otherwise)
