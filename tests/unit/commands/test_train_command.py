"""How `train` ends: its exit codes towards --restarts, and its last lines."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, cast

import pytest

from rltool.cli import main
from rltool.commands.train import _marking_final_exit, finish
from rltool.config.train import TrainConfig
from rltool.errors import EngineError, PartLost, RltoolError, SaveFailed, TrainingStopped, UsageError
from rltool.processes.attempts import ENDED_FOR_GOOD
from rltool.processes.run_directory import RunDirectory, open_run
from rltool.training.cluster.ray_start import RayStartFailed
from rltool.training.observe.report import _how_it_ended
from rltool.training.prepare import nothing_left
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
    with pytest.raises(RltoolError), _marking_final_exit(0):
        raise error
    assert error.exit_code == plain, "without --restarts every failure is a 1"
    with pytest.raises(RltoolError) as ended, _marking_final_exit(1):
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
            Outcome(3, SAVED, None, 130, "Ctrl-C", gave_up=True),
            "stopped by Ctrl-C after step 3; the training on the next rollout was dropped",
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


@pytest.fixture
def run_at_step_3(tmp_path, monkeypatch):
    """A run whose newest checkpoint is of step 3; whatever would start Ray or look further fails."""
    monkeypatch.setenv("RLTOOL_RUNS", str(tmp_path))
    monkeypatch.setattr("rltool.training.prepare.prepare", lambda *_, **__: pytest.fail("it went on"))
    run = open_run("mine", create=True)
    monkeypatch.setattr(
        "rltool.training.prepare.latest_checkpoint",
        lambda directory: directory / "step_3" if directory == run.checkpoints_dir else None,
    )
    return run


def train(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(["train", "--set", "model.path=m", *words])
    out = capsys.readouterr()
    return ended.value.code, out.out + out.err


@pytest.mark.parametrize("more", [[], ["--dry-run"], ["--set", "steps=2"]])
def test_a_resumed_run_with_nothing_left_to_do_says_so_at_once(run_at_step_3, capsys, more):
    code, said = train(capsys, "--run", "mine", "--resume", "--set", "steps=3", *more)
    steps = 2 if "steps=2" in more else 3
    assert code == 0 and f"run mine is already at step 3 of {steps}; raise --steps" in said


def test_what_is_left_to_do_is_done(run_at_step_3):
    def left(**changes):
        return nothing_left(TrainConfig(model={"path": "m"}, **changes), run_at_step_3) is None

    exports = [{"save_hf_at_end": True}, {"save_hf_every": 3}]
    assert left(steps=4) and not left(steps=3) and not left(steps=3, checkpoint={"save_hf_every": 2})
    assert all(left(steps=3, checkpoint=export) for export in exports)
    run_at_step_3.hf_export(3).mkdir(parents=True)
    assert not any(left(steps=3, checkpoint=export) for export in exports)
    assert nothing_left(TrainConfig(model={"path": "m"}), RunDirectory(run_at_step_3.path.parent / "new")) is None


def test_a_fresh_run_is_named_only_where_it_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RLTOOL_RUNS", str(tmp_path))

    def refuse(*_, **__):
        raise UsageError("no")

    monkeypatch.setattr("rltool.training.prepare.prepare", refuse)
    assert train(capsys) == (2, "error: no\n")
    assert "run mine (named by --run)" in train(capsys, "--run", "mine")[1]
    monkeypatch.setattr("rltool.training.prepare.prepare", lambda *_, **__: "prepared")
    monkeypatch.setattr("rltool.training.observe.report.print_plan", lambda *_: print("the plan"))
    assert train(capsys, "--dry-run") == (0, "the plan\n")
    monkeypatch.setattr("rltool.commands.train.finish", lambda *_, **__: None)
    assert "(a new run)" in train(capsys)[1]
