"""Hugging Face exports of a run, with the trainer's replaced by a file."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rltool.checkpoints.hf_export import export_hf
from rltool.errors import ExportFailed
from rltool.processes.run_directory import RunDirectory
from rltool.training.hf_exports import HfExports
from tests.ranks import plan_of


class Trainer:
    """Its weights are a text."""

    weights = "of step 2"

    def save_hf(self, directory):
        directory.mkdir(parents=True)
        (directory / "model.safetensors").write_text(self.weights)


def test_a_step_that_is_done_again_replaces_its_export(tmp_path):
    trainer, said = Trainer(), []
    run = RunDirectory(tmp_path)
    exports = HfExports(trainer, run, said.append)
    assert not exports.has(2)
    exports.save(2)
    assert exports.has(2) and said == [f"Hugging Face export: {tmp_path}/hf/step_2"]
    trainer.weights = "of step 2, done again"
    exports.save(2)
    assert (run.hf_export(2) / "model.safetensors").read_text() == "of step 2, done again"


def in_the_way(tmp_path):
    """An export of step 2 that cannot be put aside."""
    (tmp_path / "hf" / "step_2").mkdir(parents=True)
    (tmp_path / "hf" / ".step_2.deleting").write_text("a file")


def test_one_that_cannot_be_replaced_ends_the_run_or_is_warned_of(tmp_path):
    in_the_way(tmp_path)
    with pytest.raises(ExportFailed, match="step_2 cannot be replaced: Not a directory"):
        HfExports(Trainer(), RunDirectory(tmp_path), print).save(2)
    said = []
    exports = HfExports(Trainer(), RunDirectory(tmp_path), said.append, stops=False)
    exports.save(2)
    assert len(said) == 1 and said[0].startswith("warning: ") and "step_2 cannot be replaced" in said[0]
    with pytest.raises(ExportFailed):
        exports.save(2, final=True)


def test_ranks_that_cannot_write_say_so_after_the_gather_has_ended(tmp_path):
    """The other ranks are in the same gather: one that is left would keep them there."""
    (tmp_path / "hf").write_text("a file")
    gathered = []
    trainer = SimpleNamespace(
        export_weights=lambda: (gathered.append(i) or (None, None) for i in range(3)),
        export_plan=plan_of({}), model_path=tmp_path, coordinates=SimpleNamespace(rank=0),
        runtime=SimpleNamespace(on_rank_zero=lambda action, what: action()),
    )  # fmt: skip
    with pytest.raises(ExportFailed, match=r"Hugging Face export .*step_1 was not written: "):
        export_hf(trainer, tmp_path / "hf" / "step_1")
    assert gathered == [0, 1, 2]
