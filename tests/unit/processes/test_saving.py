"""Errors that a full disk causes, and others."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from rltool.errors import DiskFull, PartLost
from rltool.processes.files import saving, starting


@pytest.mark.parametrize("buffering", [-1, 0])
def test_a_save_of_torch_that_a_full_disk_ends_is_an_error_that_names_it(buffering):
    def save() -> None:
        with saving("weights", Path("/x")), open("/dev/full", "wb", buffering) as file:
            torch.save(torch.zeros(2**20), file)

    with pytest.raises(DiskFull, match="weights was not written to /x: No space left on device"):
        save()


def test_so_is_a_copy_of_a_directory_and_other_errors_stay_what_they_are(tmp_path):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "one").write_bytes(b"1")
    with pytest.raises(DiskFull), saving("a copy", tmp_path):
        shutil.copytree(tmp_path, tmp_path / "two", copy_function=full)
    for error in (OSError(5, "Input/output error"), ValueError("x"), PartLost("died: No space left on device")):
        with pytest.raises(type(error)), saving("it", tmp_path):
            raise error


def test_what_a_full_disk_keeps_from_starting_names_directory_and_bytes(tmp_path):
    directory = tmp_path / "not" / "made"
    text = rf"it cannot start: {directory} cannot be written .No space left on device., \d+ of the \d\d+ bytes"
    with pytest.raises(DiskFull, match=text), starting("it", directory):
        raise OSError(28, "No space left on device")
    for error in (OSError(5, "Input/output error"), PartLost("died")):
        with pytest.raises(type(error)), starting("it", directory):
            raise error
