"""Checkpoint directories as files: hashes, completeness, the latest pointer, leftovers of a crash."""

from __future__ import annotations

import json
import os

import pytest

from rltool.checkpoints import directory as directories
from rltool.checkpoints import manifest as manifests
from rltool.checkpoints.manifest import CheckpointDamaged, Manifest
from rltool.config.parallel import ParallelLayout
from rltool.errors import UsageError


def write_checkpoint(final, content: bytes = b"weights"):
    partial = directories.begin(final)
    (partial / "state").mkdir()
    (partial / "state" / "data.bin").write_bytes(content)
    (partial / "config.json").write_text("{}")
    manifest = Manifest("training", "Qwen2ForCausalLM", "float32", step=3, files=manifests.describe_files(partial))
    directories.write_text(partial / manifests.FILE, manifests.to_text(manifest))
    directories.commit(partial, final)
    return final


def test_manifest_reads_back_and_verifies(tmp_path):
    final = write_checkpoint(tmp_path / "step_3")
    manifest = manifests.read(final)
    assert manifest.step == 3 and set(manifest.files) == {"state/data.bin", "config.json"}
    manifests.verify(final, manifest)


def test_the_layout_stands_in_the_file_under_the_configurations_names_and_reads_back():
    saved = Manifest(
        "training",
        "Qwen2ForCausalLM",
        "float32",
        layout=ParallelLayout(16, tp=2, pp=2, cp=2, ep=4),
        distributed_optimizer=True,
    )
    sizes = {
        "tensor_parallel": 2,
        "pipeline_parallel": 2,
        "context_parallel": 2,
        "expert_parallel": 4,
        "data_parallel": 2,
        "distributed_optimizer": 1,
    }
    assert json.loads(manifests.to_text(saved))["layout"] == sizes


@pytest.mark.parametrize(
    "layout", [ParallelLayout(), ParallelLayout(2, cp=2), ParallelLayout(16, tp=2, pp=2, cp=2, ep=4)]
)
@pytest.mark.parametrize("distributed", [False, True])
def test_a_manifest_reads_back_as_it_was(tmp_path, layout, distributed):
    saved = Manifest(
        "training",
        "Qwen2ForCausalLM",
        "float32",
        step=1,
        layout=layout,
        distributed_optimizer=distributed,
        metrics={"a": 0.5},
    )
    (tmp_path / manifests.FILE).write_text(manifests.to_text(saved))
    assert manifests.read(tmp_path) == saved


def test_a_manifest_of_before_context_and_expert_parallelism_is_read(tmp_path):
    content = json.loads(manifests.to_text(Manifest("weights", "Qwen2ForCausalLM", "float32")))
    content["layout"] = {"tensor_parallel": 2, "pipeline_parallel": 1, "data_parallel": 3}
    (tmp_path / manifests.FILE).write_text(json.dumps(content))
    found = manifests.read(tmp_path)
    assert found.layout == ParallelLayout(6, tp=2) and not found.distributed_optimizer


def test_a_layout_that_cannot_be_is_damage(tmp_path):
    content = json.loads(manifests.to_text(Manifest("weights", "Qwen2ForCausalLM", "float32")))
    content["layout"]["tensor_parallel"] = 0
    (tmp_path / manifests.FILE).write_text(json.dumps(content))
    with pytest.raises(CheckpointDamaged, match="every parallel size is at least 1"):
        manifests.read(tmp_path)


def test_one_changed_byte_is_found(tmp_path):
    final = write_checkpoint(tmp_path / "step_3")
    (final / "state" / "data.bin").write_bytes(b"weighty")
    assert manifests.sizes_match(final, manifests.read(final))
    with pytest.raises(CheckpointDamaged, match=r"data\.bin is not the file that was saved"):
        manifests.verify(final, manifests.read(final))


@pytest.mark.parametrize("damaged", ["a.bin", "b.bin", "c.bin"])
def test_of_several_that_share_the_hashing_one_finds_the_damage_and_all_find_what_is_missing(tmp_path, damaged):
    for name, size in (("a.bin", 10), ("b.bin", 30), ("c.bin", 20)):
        (tmp_path / name).write_bytes(b"x" * size)
    manifest = Manifest("weights", "Qwen2ForCausalLM", "float32", files=manifests.describe_files(tmp_path))
    for part in (0, 1):
        manifests.verify(tmp_path, manifest, part=part, parts=2)
    (tmp_path / damaged).write_bytes(b"y" * manifest.files[damaged]["bytes"])
    found = []
    for part in (0, 1):
        try:
            manifests.verify(tmp_path, manifest, part=part, parts=2)
        except CheckpointDamaged as error:
            found.append(str(error))
    assert len(found) == 1 and damaged in found[0]
    (tmp_path / damaged).unlink()
    for part in (0, 1):
        with pytest.raises(CheckpointDamaged, match="is missing"):
            manifests.verify(tmp_path, manifest, part=part, parts=2)


def test_missing_short_and_added_files_are_found(tmp_path):
    manifest = manifests.read(final := write_checkpoint(tmp_path / "step_3"))
    (final / "evil.pkl").write_bytes(b"")
    with pytest.raises(CheckpointDamaged, match=r"does not name: evil\.pkl"):
        manifests.verify(final, manifest)
    (final / "evil.pkl").unlink()
    (final / "state" / "data.bin").write_bytes(b"w")
    with pytest.raises(CheckpointDamaged, match="has 1 bytes, the manifest has 7"):
        manifests.verify(final, manifest)
    (final / "state" / "data.bin").unlink()
    with pytest.raises(CheckpointDamaged, match=r"data\.bin is missing"):
        manifests.verify(final, manifest)


def test_directory_without_manifest_or_of_another_format_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"has no manifest\.json"):
        manifests.read(tmp_path)
    (tmp_path / manifests.FILE).write_text(json.dumps({"format": "other", "version": 9}))
    with pytest.raises(UsageError, match="format 'other' version 9"):
        manifests.read(tmp_path)
    (tmp_path / manifests.FILE).write_text("{")
    with pytest.raises(CheckpointDamaged, match="cannot be read"):
        manifests.read(tmp_path)


def test_existing_directory_is_never_overwritten(tmp_path):
    final = write_checkpoint(tmp_path / "step_3")
    with pytest.raises(UsageError, match="exists already"):
        directories.begin(final)


def test_checkpoints_are_listed_by_step_not_by_name(tmp_path):
    for step in (10, 9, 2):
        write_checkpoint(tmp_path / f"step_{step}")
    assert [path.name for path in directories.list_checkpoints(tmp_path)] == ["step_2", "step_9", "step_10"]
    assert directories.list_checkpoints(tmp_path / "absent") == []
    assert directories.latest_checkpoint(tmp_path / "absent") is None


def test_leftovers_of_a_crash_are_never_taken_for_a_checkpoint(tmp_path):
    good = write_checkpoint(tmp_path / "step_1")
    directories.set_latest(good)
    (directories.begin(tmp_path / "step_2") / "config.json").write_text("{}")
    (tmp_path / "step_3").mkdir()
    truncated = write_checkpoint(tmp_path / "step_4")
    os.truncate(truncated / "state" / "data.bin", 2)
    assert directories.list_checkpoints(tmp_path) == [good]
    assert directories.latest_checkpoint(tmp_path) == good
    # The next save of the same step starts from nothing.
    assert list(directories.begin(tmp_path / "step_2").iterdir()) == []


def test_a_checkpoint_whose_pointer_cannot_be_written_is_complete_all_the_same(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "step_1")
    (tmp_path / directories.LATEST).mkdir()
    warning = directories.set_latest(checkpoint)
    assert f"{checkpoint} is complete, but {tmp_path}/latest could not be written: Is a directory" in warning
    assert directories.latest_checkpoint(tmp_path) == checkpoint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_1"]


def test_a_resume_takes_the_highest_complete_step_wherever_the_pointer_is(tmp_path):
    """A crash before the pointer moves leaves it behind; a resume from there would meet its own newer checkpoint."""
    first, second = write_checkpoint(tmp_path / "step_1"), write_checkpoint(tmp_path / "step_2")
    directories.set_latest(first)
    assert directories.latest_checkpoint(tmp_path) == second and directories.pointed_at(tmp_path) == first
    (second / "config.json").unlink()
    assert directories.latest_checkpoint(tmp_path) == first


def test_a_deletion_that_is_cut_off_leaves_nothing_that_looks_whole_and_is_swept_up(tmp_path, monkeypatch):
    first, second = write_checkpoint(tmp_path / "step_1"), write_checkpoint(tmp_path / "step_2")

    def crash(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(directories.shutil, "rmtree", lambda path, **_: crash() if path.exists() else None)
        with pytest.raises(KeyboardInterrupt):
            directories.remove(first)
    assert directories.list_checkpoints(tmp_path) == [second]
    directories.begin(tmp_path / "step_3")
    (tmp_path / "notes").mkdir()
    assert [path.name for path in directories.sweep(tmp_path)] == [".step_1.deleting", ".step_3.partial"]
    assert {path.name for path in tmp_path.iterdir()} == {"step_2", "notes"}


def test_a_checkpoint_that_is_being_read_is_not_deleted(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "step_1")
    with directories.reading(checkpoint), directories.reading(checkpoint):
        assert not directories.remove_unread(checkpoint) and checkpoint.is_dir()
    assert directories.remove_unread(checkpoint) and not list(tmp_path.iterdir())


def test_a_damaged_checkpoint_can_be_deleted(tmp_path):
    (tmp_path / "step_1").mkdir()
    assert directories.remove_unread(tmp_path / "step_1") and not list(tmp_path.iterdir())


def test_a_checkpoint_that_is_deleted_while_it_is_opened_is_not_taken_for_kept(tmp_path, monkeypatch):
    checkpoint = write_checkpoint(tmp_path / "step_1")
    lock = directories._lock

    def deleted_before(descriptor, kind):
        monkeypatch.setattr(directories, "_lock", lock)
        assert directories.remove_unread(checkpoint)
        lock(descriptor, kind)

    monkeypatch.setattr(directories, "_lock", deleted_before)
    with pytest.raises(FileNotFoundError), directories.reading(checkpoint):
        pytest.fail("there is nothing to read")
