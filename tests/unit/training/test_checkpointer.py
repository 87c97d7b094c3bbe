"""What the loop's checkpoints do about time, failures and space, with the trainer replaced by a record of calls."""

from __future__ import annotations

import io
import math

import pytest

from rltool.checkpoints import directory as directories
from rltool.checkpoints.completion import Saved
from rltool.checkpoints.manifest import FILE, Manifest, describe_files, to_text
from rltool.config.sections import CheckpointConfig
from rltool.errors import PartLost, SaveFailed
from rltool.rollout.measure.dump import DumpError
from rltool.terminal import Console
from rltool.training.checkpointer import Checkpointer
from rltool.training.cluster.ray_calls import DeadlinePassed
from rltool.training.loop import Progress


class Trainer:
    """Saves at once, or when `finish` is called; those in `broken` fail."""

    def __init__(self):
        self.calls: list[str] = []
        self.broken: set[int] = set()
        self.slow = False
        self._in_flight = None

    def save_checkpoint(self, directory, extra, metrics, files):
        self.calls.append(f"save {extra['step']}")
        assert self._in_flight is None, "one at a time"
        self._in_flight = directory, extra["step"], metrics

    def saved(self, *, wait):
        if self._in_flight is None or (self.slow and not wait):
            return None
        (directory, step, metrics), self._in_flight = self._in_flight, None
        self.calls.append(f"complete {step}")
        if step in self.broken:
            raise SaveFailed(f"no space for {step}")
        directory.mkdir(parents=True)
        (directory / "data").write_text("x" * step)
        manifest = Manifest(
            kind="training",
            architecture="a",
            dtype="float32",
            step=step,
            metrics=metrics,
            files=describe_files(directory),
        )
        (directory / FILE).write_text(to_text(manifest))
        return Saved(directory, 10, 0.5, directories.set_latest(directory))


class Run:
    def __init__(self, tmp_path, resumed_from=None, **settings):
        self.trainer, self.out, self.directory = Trainer(), io.StringIO(), tmp_path
        config = CheckpointConfig(**settings)
        self.checkpoints = Checkpointer(
            config,
            self.trainer,
            tmp_path,
            lambda at: ({"step": at.step}, {}),
            Console(file=self.out, width=200),
            resumed_from=resumed_from,
        )

    def save(self, step, **metrics):
        self.checkpoints.save(
            Progress(step, metrics={name.replace("__", "/"): value for name, value in metrics.items()})
        )

    def steps(self):
        return [directories.step_of(path) for path in directories.list_checkpoints(self.directory)]


def test_a_step_is_held_once_its_checkpoint_is_complete_or_on_its_way_and_not_where_it_failed(tmp_path):
    run = Run(tmp_path, resumed_from=1, async_save=True, on_save_failure="continue")
    held = run.checkpoints.holds
    assert held(1, wait=True) and not held(2, wait=False)
    run.trainer.slow, run.trainer.broken = True, {3}
    run.save(2)
    assert run.trainer.calls == ["save 2"] and held(2, wait=False)
    assert held(2, wait=True) and run.steps() == [2]
    run.save(3)
    assert held(3, wait=False) and not held(3, wait=True) and held(2, wait=True)


def test_a_synchronous_save_is_complete_on_return_and_reports_once(tmp_path):
    run = Run(tmp_path)
    run.save(2)
    assert run.steps() == [2] and "checkpoint: " in run.out.getvalue()
    metrics = run.checkpoints.check()
    assert metrics.pop("checkpoint/blocked_seconds") >= 0
    assert metrics == {"checkpoint/write_seconds": 0.5, "checkpoint/bytes": 10.0} and run.checkpoints.check() == {}


def test_an_asynchronous_one_is_waited_for_by_the_next_and_at_the_end(tmp_path):
    run = Run(tmp_path, async_save=True)
    run.trainer.slow = True
    run.save(1)
    run.checkpoints.check()
    assert run.steps() == []
    run.save(2)
    assert run.steps() == [1]
    run.checkpoints.finish(Progress(2))
    assert run.trainer.calls == ["save 1", "complete 1", "save 2", "complete 2"]


def test_a_pointer_that_cannot_be_written_is_a_warning_and_no_failed_save(tmp_path):
    (tmp_path / directories.LATEST).mkdir()
    run = Run(tmp_path)
    run.save(2)
    shown = run.out.getvalue().splitlines()
    assert run.steps() == [2] and shown[0] == f"checkpoint: {tmp_path}/step_2"
    assert shown[1].startswith(f"warning: checkpoint {tmp_path}/step_2 is complete, but {tmp_path}/latest")
    assert "checkpoint/failures" not in run.checkpoints.check()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failure_stops_the_run_at_the_step_boundary_by_default(tmp_path, asynchronous):
    run = Run(tmp_path, async_save=asynchronous)
    run.trainer.broken = {1}
    with pytest.raises(SaveFailed, match="no space for 1"):  # noqa: PT012  # by the second where it is asynchronous
        run.save(1)
        run.checkpoints.check()
    run.checkpoints.wait()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_if_so_configured_a_failure_is_counted_and_the_run_goes_on(tmp_path, asynchronous):
    run = Run(tmp_path, async_save=asynchronous, on_save_failure="continue")
    run.trainer.broken = {1, 2}
    run.save(1)
    run.save(2)
    run.save(3)
    assert run.checkpoints.check()["checkpoint/failures"] == 2 and run.steps() == [3]
    assert run.out.getvalue().count("warning: no space") == 2


def test_the_checkpoint_at_the_end_is_tried_again_and_must_succeed(tmp_path):
    run = Run(tmp_path, async_save=True, on_save_failure="continue")
    run.trainer.slow, run.trainer.broken = True, {4}
    run.save(4)
    with pytest.raises(SaveFailed):
        run.checkpoints.finish(Progress(4))
    assert run.trainer.calls == ["save 4", "complete 4", "save 4", "complete 4"]
    run.trainer.broken = set()
    run.checkpoints.finish(Progress(4))
    assert run.steps() == [4]


def test_what_no_checkpoint_can_hold_is_a_save_that_failed(tmp_path):
    """Such as a sample's metadata with a set in it, which a generate function has put there."""
    run = Run(tmp_path, on_save_failure="continue")
    describe, wrong = run.checkpoints._describe, {2}

    def refuses(at):
        if at.step in wrong:
            raise DumpError("sample 0/1: metadata['seen'] cannot be written as JSON")
        return describe(at)

    run.checkpoints._describe = refuses
    run.save(2)
    assert "step_2 was not written: sample 0/1: metadata['seen']" in run.out.getvalue()
    assert run.checkpoints.check()["checkpoint/failures"] == 1
    run.save(3)
    assert run.steps() == [3]
    with pytest.raises(SaveFailed, match="metadata"):
        run.checkpoints.finish(Progress(2))
    stops = Run(tmp_path / "stops", on_save_failure="stop")
    stops.checkpoints._describe = refuses
    with pytest.raises(SaveFailed, match="metadata"):
        stops.save(2)


def test_an_old_checkpoint_that_cannot_be_deleted_or_replaced_is_no_unexpected_error(tmp_path):
    run = Run(tmp_path, keep_last=1)
    run.save(1)
    (tmp_path / ".step_1.deleting").write_text("in the way")
    run.save(2)
    assert run.steps() == [1, 2] and "step_1 cannot be deleted" in run.out.getvalue()
    with pytest.raises(SaveFailed, match="step_1 cannot be replaced"):
        run.save(1)


def test_a_manager_that_is_lost_or_late_is_no_matter_of_the_checkpoint(tmp_path):
    """`train --restarts` goes on after these, and not after a save that failed."""
    run = Run(tmp_path, on_save_failure="continue")

    for error in (PartLost("the rollout manager died"), DeadlinePassed("the rollout manager did not answer")):

        def describe(at, error=error):
            raise error

        run.checkpoints._describe = describe
        with pytest.raises(type(error)):
            run.save(2)


def test_nothing_is_saved_again_at_the_end_if_it_is_there(tmp_path):
    run = Run(tmp_path, resumed_from=4)
    run.checkpoints.finish(Progress(4))
    assert run.trainer.calls == []


def test_the_newest_and_the_best_stay(tmp_path):
    run = Run(tmp_path, keep_last=1, keep_best=1, best_metric="eval/heldout/accuracy")
    for step, accuracy in ((1, 0.1), (2, 0.7), (3, math.nan), (4, 0.3), (5, None)):
        run.save(step, **({} if accuracy is None else {"eval__heldout__accuracy": accuracy}))
    assert run.steps() == [2, 5]


def test_what_a_resume_reads_is_not_deleted(tmp_path):
    run = Run(tmp_path, keep_last=1)
    run.save(1)
    with directories.reading(tmp_path / "step_1"):
        run.save(2)
        assert run.steps() == [1, 2]
    run.save(3)
    assert run.steps() == [3]


def test_a_step_that_is_done_again_replaces_what_is_left_of_the_first_time(tmp_path):
    """A run resumed from step 1: step 2 is damaged, or its killed trainer completed it as it died."""
    (tmp_path / "step_2").mkdir()
    run = Run(tmp_path, resumed_from=1)
    run.save(2)
    assert run.steps() == [2]


# -- evaluations that end after the checkpoint was written

BEST = {"keep_last": 1, "keep_best": 1, "best_metric": "eval/a/accuracy"}


def measure(run, step, accuracy):
    run.checkpoints.measured(step, {"eval/a/accuracy": accuracy, "eval/a/samples": 8.0})


def test_a_checkpoint_stays_until_it_is_known_how_good_it_is(tmp_path):
    run = Run(tmp_path, **BEST)
    run.checkpoints.awaits(1)
    for step in (1, 2, 3):
        run.save(step)
    assert run.steps() == [1, 3]
    measure(run, 1, 0.5)
    run.checkpoints.awaits(3)
    run.save(4)
    run.save(5)
    assert run.steps() == [1, 3, 5]
    measure(run, 3, 0.75)
    assert run.steps() == [3, 5]
    assert all(directories.list_checkpoints(tmp_path)), "and no checkpoint was touched"


def test_what_was_measured_later_is_known_to_a_run_that_resumes_and_not_of_a_checkpoint_that_is_made_anew(tmp_path):
    first = Run(tmp_path, **BEST)
    first.save(1)
    measure(first, 1, 0.5)
    first.save(2)
    run = Run(tmp_path, resumed_from=2, **BEST)
    run.save(3, eval__a__accuracy=0.25)
    assert run.steps() == [1, 3]
    again = Run(tmp_path, **BEST)
    again.save(1)  # a new start from before it: nobody has evaluated these weights
    again.save(4)
    assert again.steps() == [3, 4]


def test_what_is_not_the_metric_of_the_best_or_has_no_checkpoint_is_not_kept(tmp_path):
    run = Run(tmp_path, **BEST)
    run.checkpoints.measured(7, {"eval/a/accuracy": 1.0})
    run.save(1)
    run.checkpoints.measured(1, {"eval/b/accuracy": 1.0})
    assert not (tmp_path / "measured.json").exists()
    plain = Run(tmp_path, keep_last=1)
    plain.checkpoints.awaits(1)
    plain.save(2)
    assert plain.steps() == [2], "without best_metric nothing waits"


def test_a_save_in_flight_is_waited_for_before_its_value_is_kept(tmp_path):
    run = Run(tmp_path, async_save=True, **BEST)
    run.trainer.slow = True
    run.save(1)
    measure(run, 1, 0.5)
    assert run.steps() == [1] and "0.5" in (tmp_path / "measured.json").read_text()


def test_a_file_of_values_that_is_broken_is_no_reason_to_fail(tmp_path):
    (tmp_path / "measured.json").write_text("[1")
    run = Run(tmp_path, **BEST)
    run.save(1)
    measure(run, 1, 0.5)
    assert run.steps() == [1]


def test_a_checkpoint_that_is_moved_away_while_others_are_thinned_out_is_a_warning(tmp_path, monkeypatch):
    run = Run(tmp_path, **BEST)
    for step in (1, 2, 3):
        run.save(step, eval__a__accuracy=float(-step))
    listed = directories.list_checkpoints(tmp_path)
    assert run.steps() == [1, 3]
    monkeypatch.setattr(directories, "list_checkpoints", lambda _: [tmp_path / "step_2", *listed])
    run.save(4, eval__a__accuracy=0.5)
    monkeypatch.undo()
    assert "step_2 is not looked at" in run.out.getvalue()
    assert "checkpoint/failures" not in run.checkpoints.check(), "every save was written"
    assert 4 in run.steps()
