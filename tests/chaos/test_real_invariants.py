"""What `make chaos ARGS="--real"` looks at is seen: recorded steps of a run that never was."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest

from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.types import VersionSpan
from rltool.processes.run_directory import open_run
from rltool.rollout.measure.dump import write_dump
from rltool.rollout.sample import Sample, SampleStatus
from tests.chaos import real_invariants
from tests.chaos.hosts import Ledger
from tests.chaos.invariants import Violation
from tests.chaos.real_invariants import GROUPS, SAMPLES, RealInvariants
from tests.e2e.job import Job

RUN = "never"
VERSION = "a" * 32


@pytest.fixture
def seen(tmp_path):
    open_run(RUN, create=True, root=tmp_path / "runs")
    router = EngineEndpoint(url="http://127.0.0.1:1", dialect="sglang")
    return RealInvariants(Job(tmp_path, tmp_path), RUN, [], router, staleness=1)


def sample(group: int, index: int, spans: list[VersionSpan]) -> Sample:
    return Sample(
        group, index, 0, [1], response_ids=[2, 3], response_mask=[1, 1], response_logprobs=[-1.0, -1.0],
        versions=spans, status=SampleStatus.COMPLETED,
    )  # fmt: skip


def record(
    seen: RealInvariants, step: int, groups: Iterable[int], *, version: int | None = None, attempt: int = 0,
    sampled_by: int | None = None, difference: float = 1e-6, dropped: int = 0,
) -> None:  # fmt: skip
    directory = seen._job.runs / RUN
    sampler = attempt if sampled_by is None else sampled_by
    spans = [VersionSpan(f"{VERSION}:{sampler}:{step if version is None else version}", 0, 2)]
    samples = [sample(group, index, spans) for group in groups for index in range(SAMPLES)]
    write_dump(directory / "rollouts", step=step, seed=0, samples=samples)
    metrics = {"step": step, "weight_version": f"{VERSION}:{attempt}:{step + 1}"}
    metrics |= {"train/logprob_abs_diff_mean": difference, "rollout/groups_dropped_total": dropped}
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics) + "\n")


def resume_at(seen: RealInvariants, step: int) -> None:
    """What a driver that resumes does to the records before its first step."""
    file = seen._job.runs / RUN / "metrics.jsonl"
    file.write_text("".join(line for line in file.read_text().splitlines(True) if json.loads(line)["step"] < step))


def batch(step: int) -> range:
    return range(GROUPS * step, GROUPS * (step + 1))


def test_a_run_that_is_still_being_started_is_nothing_to_look_at(tmp_path):
    router = EngineEndpoint(url="http://127.0.0.1:1", dialect="sglang")
    early = RealInvariants(Job(tmp_path, tmp_path), RUN, [], router, staleness=1)
    assert early.look(struck=()) == [] and early.attempt is None


def test_steps_in_order_with_every_group_once_are_what_should_be(seen):
    record(seen, 0, range(GROUPS))
    assert seen.look(struck=()) == ["step 0 is done"]
    record(seen, 1, [*range(GROUPS, 2 * GROUPS - 1), 2 * GROUPS], version=0, dropped=1)
    assert seen.look(struck=()) == ["step 1 is done"] and seen.look(struck=()) == []
    seen.check_end()
    assert seen.steps == 2


@pytest.mark.parametrize(
    ("step", "groups", "more", "what"),
    [
        (2, range(16, 24), {"version": 0}, "was sampled with"),
        (2, range(16, 24), {"version": 3}, "was sampled with"),
        (2, range(15, 23), {}, "trains groups again"),
        (2, range(16, 23), {}, "has 7 groups"),
        (2, range(16, 24), {"difference": 1e-3}, "differ by 1.0e-03"),
        (3, range(16, 24), {}, "recorded after 2 steps"),
    ],
)
def test_a_step_that_must_not_be_is_seen(seen, step, groups, more, what):
    record(seen, 0, range(GROUPS))
    record(seen, 1, range(GROUPS, 2 * GROUPS))
    record(seen, step, groups, **more)
    with pytest.raises(Violation, match=what):
        seen.look(struck=())


def test_a_driver_that_was_killed_in_a_line_and_resumed_does_steps_again(seen):
    for step in range(3):
        record(seen, step, batch(step))
    with (seen._job.runs / RUN / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "tr')
    assert len(seen.look(struck=())) == 3
    metrics = seen._job.runs / RUN / "metrics.jsonl"
    metrics.write_text(metrics.read_text().rpartition("\n")[0] + "\n")
    resume_at(seen, 2)
    assert seen.look(struck=()) == []
    record(seen, 2, batch(2), attempt=1, sampled_by=0)  # generated before the kill, kept in the checkpoint
    record(seen, 3, batch(3), attempt=1)
    assert seen.look(struck=()) == ["step 2 is done", "step 3 is done"]
    seen.check_end()
    assert (seen.attempt, seen.steps, seen.completed) == (1, 4, 5)


@pytest.mark.parametrize(
    ("step", "groups", "more", "what"),
    [
        (0, batch(0), {}, "4 steps were lost"),
        (2, batch(1), {}, "trains groups again"),
        (2, batch(2), {"sampled_by": 0, "version": 3}, "was sampled with"),  # by weights that were discarded
        (3, batch(3), {"sampled_by": 0, "version": 1}, "was sampled with"),  # by weights that are too old
        (5, batch(5), {}, "resumed from step 5, after 4"),
    ],
)
def test_a_resume_that_must_not_be_is_seen(seen, step, groups, more, what):
    for number in range(4):
        record(seen, number, batch(number))
    seen.look(struck=())
    resume_at(seen, step)
    record(seen, step, groups, attempt=1, **more)
    with pytest.raises(Violation, match=what):
        seen.look(struck=())


def test_a_group_that_was_neither_trained_nor_dropped_is_lost(seen):
    record(seen, 0, range(1, GROUPS + 1))
    seen.look(struck=())
    with pytest.raises(Violation, match=r"groups \[0\] were lost, 0 dropped"):
        seen.check_end()


def test_what_two_looks_see_differently_is_wrong_once_it_stays_so(seen, monkeypatch):
    monkeypatch.setattr(real_invariants, "NOTICE_SECONDS", 1e9)
    seen._expect(False, "the list is wrong")
    assert not seen.all_serve()
    seen._expect(True, "the list is wrong")
    assert seen.all_serve()
    monkeypatch.setattr(real_invariants, "NOTICE_SECONDS", 0.0)
    with pytest.raises(Violation, match="the list is wrong"):
        seen._expect(False, "the list is wrong")


def test_a_ledger_that_lacks_a_step_or_the_end_of_an_event_is_a_violation(tmp_path):
    ledger = Ledger(tmp_path / "build" / "ledger.jsonl")
    ledger.begin("the wire", "loss", hosts=[], seconds=2.0)
    ledger.add("step", step=0)
    with pytest.raises(Violation, match="did not end: {'the wire': 'loss'}"):
        ledger.check(1)
    ledger.end("the wire")
    with pytest.raises(Violation, match="has 1 steps, the run 2"):
        ledger.check(2)
    ledger.check(1)
    lines = [json.loads(line) for line in ledger.path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["begins", "step", "ends"] and lines[0]["seconds"] == 2.0
