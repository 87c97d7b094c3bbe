"""What travels with the weights: config, tokenizer, generation config, and tensors that are not of the model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rltool.models.hf_directory import HFTensors
from rltool.models.quantized import described
from rltool.models.tensor_files import write_tensor_file
from rltool.models.weight_files import CARRIED, files_with_carried

PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "*processor_config.json",
)


def carried_files(source: Path) -> list[Path]:
    """Files of a model directory that are neither weights nor ours; of code, where its configuration names some
    (trust_remote_code)."""
    found = {path for pattern in PATTERNS for path in Path(source).glob(pattern) if path.is_file()}
    if any(b'"auto_map"' in path.read_bytes() for path in found if path.name.endswith("config.json")):
        found |= {path for path in Path(source).glob("*.py") if path.is_file()}
    return sorted(found)


def carry(
    source: Path, target: Path, *, dtype: str, quantization: Mapping[str, Any] | None = None
) -> list[str]:
    """Copies them; config.json gets the dtype and the quantization_config of the weights beside it, and no longer
    names what the source was quantised to. Returns the names."""
    files = carried_files(source)
    for path in files:
        shutil.copyfile(path, target / path.name)
    config = described(json.loads((target / "config.json").read_text(encoding="utf-8")), quantization)
    # transformers 5 writes "dtype", before it was "torch_dtype"; engines read either.
    config["torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"] = dtype
    if isinstance(text := config.get("text_config"), dict) and "dtype" in text:
        text["dtype"] = dtype
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return [path.name for path in files]


class CarriedTensors:
    """Of a model directory, those whose names begin with one of `beginnings`."""

    def __init__(self, tensors: HFTensors, beginnings: tuple[str, ...]) -> None:
        self._tensors = tensors
        names = [name for name in tensors.names if name.startswith(beginnings)]
        # As `write_tensor_file` wants them.
        names.sort(key=lambda name: (-tensors.dtype(name).itemsize, name))
        self.layout: list[tuple[str, torch.dtype, tuple[int, ...]]] = [
            (name, tensors.dtype(name), tensors.shape(name)) for name in names
        ]

    def read(self, name: str) -> torch.Tensor:
        return self._tensors.read(name)

    @property
    def bytes(self) -> int:
        return sum(torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in self.layout)

    def write(self, path: Path) -> None:
        """Bit by bit, one tensor in memory at a time."""
        write_tensor_file(path, self.layout, (self.read(name) for name, _, _ in self.layout))


@contextmanager
def carried_tensors(source: Path, beginnings: tuple[str, ...]) -> Iterator[CarriedTensors]:
    """source: a Hugging Face directory, or one of ours that may hold `CARRIED`."""
    with HFTensors(source, files_with_carried(source) if beginnings else ()) as tensors:
        yield CarriedTensors(tensors, beginnings)


def carry_tensors(source: Path, target: Path, beginnings: tuple[str, ...]) -> None:
    """Into a torch_dist directory, where there are any."""
    with carried_tensors(source, beginnings) as carried:
        if carried.layout:
            carried.write(target / CARRIED)
