"""How `train` ends: its exit codes towards --restarts, and its last lines."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, cast

import pytest

from rltool.commands.train import _told_apart, finish
from rltool.errors import EngineError, PartLost, RltoolError, SaveFailed, TrainingStopped, UsageError
from rltool.processes.attempts import ENDED_FOR_GOOD
from rltool.training.ray_start import RayStartFailed
from rltool.training.report import _how_it_ended
from rltool.training.session import Outcome


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PartLost("a rank died"), 1),
        (RayStartFailed("busy"), 1),
        (TrainingStopped("non-finite steps"), ENDED_FOR_GOOD),
        (SaveFailed("no space"), ENDED_FOR_GOOD),
        (EngineError("all engines are gone"), ENDED_FOR_GOOD),
        (UsageError("a typo"), 2),
    ],
)
def test_only_a_fault_asks_for_another_attempt(error, code):
    plain = error.exit_code
    with pytest.raises(RltoolError), _told_apart(0):
        raise error
    assert error.exit_code == plain, "without --restarts every failure is a 1"
    with pytest.raises(RltoolError) as ended, _told_apart(1):
        raise error
    assert ended.value.exit_code == code


SAVED = Path("checkpoints/step_3")


@pytest.mark.parametrize(
    ("outcome", "line"),
    [
        (Outcome(3, SAVED, "a" * 64, 0), "done after step 3; parameters sha256:aaaaaaaaaaaaaaaa"),
        (
            Outcome(3, SAVED, "a" * 64, 130, "Ctrl-C"),
            "stopped by Ctrl-C after step 3; parameters sha256:aaaaaaaaaaaaaaaa",
        ),
        (
            Outcome(0, None, None, 0, "SIGTERM"),
            "stopped by SIGTERM before a step was done: nothing was trained, no checkpoint was written",
        ),
        (
            Outcome(3, SAVED, None, 130, "Ctrl-C"),
            "stopped by Ctrl-C before a step was done: nothing was trained, its newest checkpoint stands",
        ),
    ],
)
def test_the_last_line_says_how_it_ended_and_only_a_finished_run_is_done(outcome, line):
    assert _how_it_ended(outcome) == line


@pytest.mark.parametrize(("attempt", "code"), [(0, 1), (1, ENDED_FOR_GOOD)])
def test_a_fault_of_a_run_that_was_asked_to_stop_is_followed_by_no_attempt(monkeypatch, attempt, code):
    def execute(prepared, lock, console, stop):
        stop.requested = signal.SIGTERM
        raise PartLost("a rank died as it saved")

    monkeypatch.setattr("rltool.training.session.execute", execute)
    with pytest.raises(PartLost) as ended:
        finish(cast(Any, None), cast(Any, None), attempt=attempt)
    assert ended.value.exit_code == code
