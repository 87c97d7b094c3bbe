"""The disk transport: a weight version as a directory in Hugging Face layout, one safetensors file per bucket.

rltool's vLLM plugin reads it bucket by bucket as it is announced; SGLang's /update_weights_from_disk, or any other
reader of the layout, takes the directory as a whole.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from rltool.engines.types import Bucket
from rltool.engines.wire import bucket_bytes, split_flat


def bucket_file(directory: Path, index: int, count: int) -> Path:
    """Where bucket `index` (from 0) of `count` lies."""
    return directory / f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def version_directory(root: Path, version: str) -> Path:
    """A directory name for a weight version (RUN:ATTEMPT:N; a colon is no good in a file name everywhere)."""
    return root / version.replace(":", "-")


class DiskWriter:
    """Writes buckets into a temporary sibling, which `finish` renames: a reader never sees half a version."""

    def __init__(self, directory: Path, model_files: Path) -> None:
        self.directory = directory
        self.model_files = model_files
        self._temporary = directory.with_name(f".{directory.name}.partial")
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir(parents=True)
        self._buckets: list[Bucket] = []

    def write(self, bucket: Bucket, flat: Tensor) -> None:
        """flat: [bytes of the bucket] uint8, as fill_buckets yields it."""
        # safetensors refuses tensors that share memory, as views of one bucket do.
        tensors = {name: tensor.clone() for name, tensor in split_flat(flat, bucket)}
        save_file(tensors, self._temporary / f"bucket-{len(self._buckets)}", metadata={"format": "pt"})
        self._buckets.append(bucket)

    def finish(self) -> None:
        count = len(self._buckets)
        weight_map = {}
        for index, bucket in enumerate(self._buckets):
            file = bucket_file(self._temporary, index, count)
            os.replace(self._temporary / f"bucket-{index}", file)
            weight_map.update({meta.name: file.name for meta in bucket})
        total = sum(map(bucket_bytes, self._buckets))
        index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)
        (self._temporary / "model.safetensors.index.json").write_text(index_text)
        for file in self.model_files.glob("*.json"):
            if not file.name.endswith(".index.json"):
                shutil.copy2(file, self._temporary / file.name)
        shutil.rmtree(self.directory, ignore_errors=True)
        os.replace(self._temporary, self.directory)
