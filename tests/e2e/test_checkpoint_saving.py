"""Saving beside training: the bytes are of the step that was saved, one save at a time, failures are everybody's."""

from __future__ import annotations

import errno
import os
import threading
import time
from contextlib import closing, contextmanager

import pytest

from rltool.checkpoints import directory as directories
from rltool.checkpoints import manifest
from rltool.errors import RltoolError
from tests.e2e.megatron_models import make_trainer, policy_batch, save_hf
from tests.e2e.test_checkpoint_resume import steps
from tests.e2e.test_megatron_trainer import LENGTHS

pytestmark = pytest.mark.e2e

PATIENCE = 60.0
"""Seconds for what takes milliseconds."""


@contextmanager
def held_back(before):
    """Calls before(plan) in the writing thread, before anything is written."""
    from rltool.megatron.save_plan import SavePlan

    original = SavePlan.write

    def write(plan):
        before(plan)
        return original(plan)

    SavePlan.write = write
    try:
        yield
    finally:
        SavePlan.write = original


# Cases: run in the ranks.


def case_save_while_training(place, path, settings, batch, directory, asynchronous):
    """Saves after two steps; asynchronous: nothing is written before two further steps are done."""
    from rltool.checkpoints.saving import CheckpointSaver

    trained = threading.Event()
    with closing(make_trainer(place, path, **settings)) as trainer:
        steps(trainer, batch, 2)
        saver = CheckpointSaver(trainer, asynchronous=asynchronous)
        with held_back(lambda _: asynchronous and trained.wait(PATIENCE)):
            saver.save(directory, {"step": 2}, {"eval/heldout/accuracy": 0.5})
            early = saver.has_ended
            after = steps(trainer, batch, 2)
            trained.set()
            saved = saver.wait()
        saver.close()
        return early, after, trainer.parameter_hash(), saved


def case_resume(place, path, settings, batch, directory):
    from rltool.checkpoints.torch_dist import load_checkpoint

    with closing(make_trainer(place, path, load=False, **settings)) as trainer:
        load_checkpoint(trainer, directory)
        return steps(trainer, batch, 2), trainer.parameter_hash()


def case_second_save_waits(place, path, directory):
    from rltool.checkpoints.saving import CheckpointSaver

    order = []

    def slow(plan):
        if "step_1" in str(plan.directory):
            timer = threading.Event()
            timer.wait(0.5)
        order.append(plan.directory.parent.name)

    with closing(make_trainer(place, path)) as trainer:
        saver = CheckpointSaver(trainer, asynchronous=True)
        with held_back(slow):
            saver.save(directory / "step_1", {"step": 1})
            saver.save(directory / "step_2", {"step": 2})
            done_before_the_second = directories.list_checkpoints(directory)
            saver.wait()
        nothing = saver.wait()
        saver.close()
        return order, [found.name for found in done_before_the_second], nothing


def case_pointer_cannot_be_written(place, path, directory):
    from rltool.checkpoints.saving import CheckpointSaver

    with closing(make_trainer(place, path)) as trainer:
        saver = CheckpointSaver(trainer, asynchronous=True)
        saver.save(directory / "step_1", {"step": 1})
        saved = saver.wait()
        saver.close()
        return saved


def case_one_rank_fails(place, path, batch, directory, failing_rank):
    """The disk of one rank is full at the first save and not at the second."""
    from rltool.checkpoints.saving import CheckpointSaver

    def full(plan):
        if place.rank == failing_rank and plan.directory.parent.name.startswith(".step_1"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(plan.directory))

    with closing(make_trainer(place, path)) as trainer:
        saver = CheckpointSaver(trainer, asynchronous=True)
        with held_back(full):
            saver.save(directory / "step_1", {"step": 1})
            metrics = steps(trainer, batch, 1)
            try:
                saver.wait()
                error = None
            except RltoolError as raised:
                error = type(raised).__name__, str(raised)
            left = sorted(found.name for found in directory.iterdir()) if place.rank == 0 else None
            saver.save(directory / "step_2", {"step": 2})
            saver.wait()
        saver.close()
        return error, left, metrics


def case_something_breaks(place, path, directory, what):
    """One rank has no state, or no plan; or the exchange between the ranks fails. Then a second save is fine."""
    from rltool.checkpoints import saving

    def no_state(saver):
        raise KeyError("no such state")

    def plan(*arguments, original=saving.plan_save):
        original(*arguments)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def no_exchange(*_, **__):
        raise RuntimeError("Connection closed by peer")

    with closing(make_trainer(place, path)) as trainer, pytest.MonkeyPatch.context() as patch:
        saver = saving.CheckpointSaver(trainer, asynchronous=False)
        if what == "state" and place.rank == 1:
            patch.setattr(saving.CheckpointSaver, "_state", no_state)
        if what == "plan" and place.rank == 1:
            patch.setattr(saving, "plan_save", plan)
        if what == "exchange":
            patch.setattr(saving.dist, "gather_object", no_exchange)
        try:
            saver.save(directory / "step_1", {"step": 1})
            saver.wait()
            error = None
        except RltoolError as raised:
            error = type(raised).__name__, str(raised)
        left = sorted(found.name for found in directory.iterdir()) if place.rank == 0 else None
        patch.undo()
        saver.save(directory / "step_2", {"step": 2})
        saver.wait()
        saver.close()
        return error, left


def case_closed_while_a_save_hangs(place, path, directory):
    from rltool.checkpoints import saving

    released, started = threading.Event(), time.monotonic()
    with closing(make_trainer(place, path)) as trainer, pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "CLOSE_SECONDS", 0.2)
        saver = saving.CheckpointSaver(trainer, asynchronous=True)
        with held_back(lambda _: released.wait(PATIENCE)):
            saver.save(directory / "step_1", {"step": 1})
            started = time.monotonic()
            saver.close()
            closed, ended = time.monotonic() - started, saver.has_ended
            released.set()
            saver.wait()
        return closed, ended


# Tests.


LAYOUTS = {"one": (1, {}), "tp2": (2, {"tp": 2}), "dp2-distributed": (2, {"trainer": {"distributed_optimizer": True}})}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_asynchronous_save_has_the_bytes_of_its_step_although_training_went_on(ranks, tmp_path, layout):
    path, batch = save_hf(tmp_path / "hf"), policy_batch(LENGTHS)
    world, settings = LAYOUTS[layout]
    found = {}
    for name, asynchronous in (("sync", False), ("async", True)):
        (tmp_path / name).mkdir()
        results = ranks.run(
            case_save_while_training, world, path, settings, batch, tmp_path / name / "step_2", asynchronous
        )
        assert all(early is not asynchronous for early, *_ in results), "nothing was written before training went on"
        assert results[0][3].directory == tmp_path / name / "step_2" and results[0][3].bytes > 100_000
        found[name] = results
    sync, beside = (manifest.read(tmp_path / name / "step_2") for name in found)
    manifest.verify(tmp_path / "async" / "step_2", beside)
    # torch writes the directory's name into its index of the files.
    assert sync.files.pop("torch_dist/.metadata") and beside.files.pop("torch_dist/.metadata")
    assert beside.files == sync.files and any(name.endswith(".distcp") for name in sync.files)
    assert beside.metrics == {"eval/heldout/accuracy": 0.5}
    assert [result[1:3] for result in found["sync"]] == [result[1:3] for result in found["async"]], (
        "saving changes nothing"
    )
    again, hashed = ranks.run(case_resume, world, path, settings, batch, tmp_path / "async" / "step_2")[0]
    assert (again, hashed) == found["async"][0][1:3] and again[0]["train/grad_norm"] != again[1]["train/grad_norm"]


def test_a_second_save_waits_for_the_first(ranks, tmp_path):
    path = save_hf(tmp_path / "hf")
    order, before_second, nothing = ranks.run(case_second_save_waits, 2, path, tmp_path)[0]
    assert order == [".step_1.partial", ".step_2.partial"] and before_second == ["step_1"] and nothing is None
    assert directories.latest_checkpoint(tmp_path) == tmp_path / "step_2"


def test_a_pointer_that_cannot_be_written_fails_no_save(ranks, tmp_path):
    path, target = save_hf(tmp_path / "hf"), tmp_path / "checkpoints"
    (target / directories.LATEST).mkdir(parents=True)
    for saved in ranks.run(case_pointer_cannot_be_written, 2, path, target):
        assert saved.directory == target / "step_1" and "is complete, but" in saved.warning
    assert directories.latest_checkpoint(target) == target / "step_1"


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_full_disk_of_one_rank_fails_the_save_on_all_and_training_goes_on(ranks, tmp_path, failing_rank):
    path, batch, target = save_hf(tmp_path / "hf"), policy_batch(LENGTHS), tmp_path / "checkpoints"
    target.mkdir()
    for error, left, metrics in ranks.run(case_one_rank_fails, 2, path, batch, target, failing_rank):
        kind, text = error
        assert kind == "DiskFull" and "No space left on device" in text and str(target / "step_1") in text
        assert "bytes and a little more" in text and "bytes are free in" in text
        assert left in (None, []) and metrics[0]["train/grad_norm"] > 0
    assert [found.name for found in directories.list_checkpoints(target)] == ["step_2"]


@pytest.mark.parametrize(
    ("what", "why"),
    [("state", "KeyError: 'no such state'"), ("plan", "Input/output error"), ("exchange", "closed by peer")],
)
def test_a_rank_that_breaks_off_its_save_fails_it_on_all_at_once_and_leaves_nothing(ranks, tmp_path, what, why):
    path, target = save_hf(tmp_path / "hf"), tmp_path / "checkpoints"
    target.mkdir()
    for error, left in ranks.run(case_something_breaks, 2, path, target, what):
        assert error[0] == "SaveFailed" and f"{target / 'step_1'} was not written" in error[1] and why in error[1]
        assert left in (None, [])
    assert [found.name for found in directories.list_checkpoints(target)] == ["step_2"]


def test_a_save_that_hangs_does_not_keep_the_end_of_the_run_waiting(ranks, tmp_path):
    path = save_hf(tmp_path / "hf")
    [(closed, ended)] = ranks.run(case_closed_while_a_save_hangs, 1, path, tmp_path)
    assert not ended and closed < PATIENCE / 2
