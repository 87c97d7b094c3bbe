"""Hugging Face exports of a run, with the trainer's replaced by a file."""

from __future__ import annotations

from rltool.processes.run_directory import RunDirectory
from rltool.training.hf_exports import HfExports


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
