"""disk: a weight version as a directory in Hugging Face layout, a safetensors file per bucket, which all engines read.

rltool's vLLM plugin reads it bucket by bucket as it is announced; SGLang's /update_weights_from_disk, or any other
reader of the layout, takes the directory as a whole.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rltool.engines.transfer.wire import bucket_bytes, split_flat
from rltool.engines.types import Bucket, EngineInfo, HttpRequest
from rltool.models.quantized import described
from rltool.weights.memory import Memory
from rltool.weights.transport import Receiver, Rendezvous, SenderOptions, SenderTransport, Transport, TransportError
from rltool.weights.transports import sglang, vllm

VERSIONS_KEPT = 2
"""An engine may still be reading the one before."""


def bucket_file(directory: Path, index: int, count: int) -> Path:
    """Where bucket `index` (from 0) of `count` lies."""
    return directory / f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def version_directory(root: Path, version: str) -> Path:
    """A directory name for a weight version (RUN:ATTEMPT:N; a colon is no good in a file name everywhere)."""
    return root / version.replace(":", "-")


class Written:
    def wait(self, seconds: float) -> None: ...


class DiskSender(SenderTransport):
    """Writes into a temporary sibling, which `finish` renames: a reader never sees half a
    version."""

    device = torch.device("cpu")

    def __init__(self, receiver: Receiver, options: SenderOptions) -> None:
        self._world_size, self.options = 1 + receiver.world_size, options
        self._version = ""
        self._buckets: Sequence[Bucket] = ()
        self._written = 0

    def host(self) -> Rendezvous:
        directory = str(self.options.directory.absolute())
        return Rendezvous("disk", self._world_size, self.options.group, directory=directory)

    def join(self, seconds: float) -> None: ...

    @property
    def memory(self) -> Memory:
        """The bucket whose tensors are written."""
        return Memory(host=max(map(bucket_bytes, self._buckets), default=0))

    def begin(self, version: str, buckets: Sequence[Bucket]) -> None:
        self._version, self._buckets, self._written = version, buckets, 0
        # Also of earlier versions that could not be written: each is as large as the model.
        for left in self.options.directory.glob(f".{glob.escape(version.split(':')[0])}-*.partial"):
            shutil.rmtree(left, ignore_errors=True)
        self._temporary.mkdir(parents=True)

    def send(self, bucket: Bucket, flat: Tensor) -> Written:
        # safetensors refuses tensors that share memory, as views of one bucket do.
        tensors = {name: tensor.clone() for name, tensor in split_flat(flat, bucket)}
        file = bucket_file(self._temporary, self._written, len(self._buckets))
        try:
            save_file(tensors, file, metadata={"format": "pt"})
        except SafetensorError as error:  # a full disk is one
            raise TransportError(f"{file}: {error}") from error
        self._written += 1
        return Written()

    def finish(self) -> None:
        weight_map = {
            meta.name: bucket_file(self._temporary, index, len(self._buckets)).name
            for index, bucket in enumerate(self._buckets)
            for meta in bucket
        }
        total = sum(map(bucket_bytes, self._buckets))
        index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)
        (self._temporary / "model.safetensors.index.json").write_text(index_text)
        for file in self.options.model_files.glob("*.json"):
            if not file.name.endswith(".index.json"):
                shutil.copy2(file, self._temporary / file.name)
        if self.options.quantization is not None:
            config = self._temporary / "config.json"
            found = described(json.loads(config.read_text(encoding="utf-8")), self.options.quantization)
            config.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        directory = version_directory(self.options.directory, self._version)
        shutil.rmtree(directory, ignore_errors=True)
        os.replace(self._temporary, directory)
        remove_old_versions(directory, self._version.split(":")[0])

    def abort(self, reason: str) -> None:
        """A write cannot be ended; what it leaves is never read."""

    def close(self) -> None: ...

    @property
    def _temporary(self) -> Path:
        final = version_directory(self.options.directory, self._version)
        return final.with_name(f".{final.name}.partial")


def remove_old_versions(written: Path, run_id: str) -> None:
    """Delete all but the newest VERSIONS_KEPT version directories of this run, and the one that was just written.

    Only names that this run's versions have are touched: other files there are not ours.
    """
    mine = re.compile(rf"{re.escape(run_id)}-(\d+)-(\d+)")
    siblings = written.parent.iterdir()
    found = [(match, path) for path in siblings if path.is_dir() and (match := mine.fullmatch(path.name))]
    newest_last = sorted(found, key=lambda item: (int(item[0][1]), int(item[0][2])))
    for _, old in newest_last[:-VERSIONS_KEPT]:
        if old != written:
            shutil.rmtree(old, ignore_errors=True)


class VllmDiskControl(vllm.VllmControl):
    after_send = True

    def init(self, rendezvous: Rendezvous, *, rank_offset: int, timeout_seconds: float) -> list[HttpRequest]:
        return [vllm.init_request(transport="disk")]

    def announce(
        self, buckets: Sequence[Bucket], rendezvous: Rendezvous, *, version: str
    ) -> list[tuple[HttpRequest, int]]:
        directory = _announced_directory(rendezvous, version)
        return [
            (vllm.bucket_request(bucket, path=str(bucket_file(directory, index, len(buckets)))), 1)
            for index, bucket in enumerate(buckets)
        ]


class SglangDiskControl(sglang.SglangControl):
    after_send = True

    def init(self, rendezvous: Rendezvous, *, rank_offset: int, timeout_seconds: float) -> list[HttpRequest]:
        return []

    def announce(
        self, buckets: Sequence[Bucket], rendezvous: Rendezvous, *, version: str
    ) -> list[tuple[HttpRequest, int]]:
        return [sglang.load_request(str(_announced_directory(rendezvous, version)), buckets)]


def _announced_directory(rendezvous: Rendezvous, version: str) -> Path:
    assert rendezvous.directory is not None, "DiskSender.host names it"
    return version_directory(Path(rendezvous.directory), version)


def _vllm_obstacle(info: EngineInfo, trainer_device: str) -> str | None:
    return vllm.without_plugin(info, "cannot load weights from disk while it serves: its backend is")


def _sglang_obstacle(info: EngineInfo, trainer_device: str) -> str | None:
    return None  # its disk route is always there


VLLM = Transport(DiskSender, VllmDiskControl(), _vllm_obstacle, shared=True, listens=False)
SGLANG = Transport(DiskSender, SglangDiskControl(), _sglang_obstacle, shared=True, listens=False)
