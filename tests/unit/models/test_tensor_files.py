"""Our reader and writer of safetensors files against the library's."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from rltool.models.tensor_files import TensorFile, TensorFileDamaged, write_tensor_file

TENSORS = {
    "b": torch.randn(3, 5),
    "a": torch.randn(7, dtype=torch.float64).to(torch.bfloat16),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
}


def same(found: dict, expected: dict) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


def read_all(path) -> dict:
    file = TensorFile(path)
    tensors = {name: file.read(name) for name in file.names}
    file.close()
    return tensors


def test_reads_what_the_library_writes(tmp_path):
    save_file(TENSORS, tmp_path / "x", metadata={"format": "pt"})
    assert same(read_all(tmp_path / "x"), TENSORS)


def test_library_reads_what_is_written_and_transposed_tensors_keep_their_values(tmp_path):
    tensors = {"w": torch.randn(6, 4).t(), "v": torch.randn(3)}
    layout = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    write_tensor_file(tmp_path / "x", layout, tensors.values())
    assert same(load_file(tmp_path / "x"), tensors) and same(read_all(tmp_path / "x"), tensors)


def test_tensor_that_was_not_announced_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="was announced"):
        write_tensor_file(tmp_path / "x", [("w", torch.float32, (2,))], [torch.zeros(3)])


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[:-1],
        lambda b: b + b"x",
        lambda b: b[:4],
        lambda b: b"\xff" * 8 + b[8:],
        lambda b: b[:8] + b"{" * (len(b) - 8),
    ],
)
def test_damaged_file_is_refused_by_name(tmp_path, damage):
    save_file(TENSORS, tmp_path / "x")
    (tmp_path / "x").write_bytes(damage((tmp_path / "x").read_bytes()))
    with pytest.raises(TensorFileDamaged, match=str(tmp_path / "x")):
        read_all(tmp_path / "x")
