"""adapters: a version of the run's adapters as a directory in peft's format, which engines load under its name by a
route of their own (weights.lora_sync = "adapter"): stock vLLM and SGLang, and rltool's plugin with "disk"."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from rltool.engines.adapters import adapter_name, write_adapter
from rltool.engines.dialects.table import adapts
from rltool.engines.transfer.wire import split_flat
from rltool.engines.types import Bucket, EngineInfo, HttpRequest
from rltool.engines.weight_version import WeightVersion
from rltool.weights.transport import Receiver, Rendezvous, SenderOptions, SenderTransport, Transport, TransportError

VERSIONS_KEPT = 32
"""An engine may read one again that it has put aside for a while, as long as a request names it."""


class AdapterSender(SenderTransport):
    device = torch.device("cpu")

    def __init__(self, receiver: Receiver, options: SenderOptions) -> None:
        self.options = options
        self._tensors: dict[str, Tensor] = {}
        self._version: WeightVersion | None = None

    def host(self) -> Rendezvous:
        return Rendezvous("adapters", 1, self.options.group, directory=str(self.options.directory.absolute()))

    def join(self, seconds: float) -> None: ...

    def begin(self, version: str, buckets: Sequence[Bucket]) -> None:
        self._tensors, self._version = {}, WeightVersion.parse(version)

    def send(self, bucket: Bucket, flat: Tensor) -> _Kept:
        self._tensors |= {name: tensor.clone() for name, tensor in split_flat(flat, bucket)}
        return _Kept()

    def finish(self) -> None:
        """The same version again, for an engine that came late, has the same bytes: it is there already."""
        assert self._version is not None and self.options.peft is not None
        directory = self.options.directory / adapter_name(self._version)
        tensors, self._tensors = self._tensors, {}
        if directory.exists():
            return
        try:
            write_adapter(directory, self.options.peft, tensors.items())
        except (SafetensorError, OSError) as error:  # a full disk is one
            raise TransportError(f"{directory}: {error}") from error
        mine = sorted(
            (path for path in directory.parent.glob(f"{self._version.run}-*-v*")), key=lambda path: path.stat().st_mtime
        )
        for old in mine[:-VERSIONS_KEPT]:
            shutil.rmtree(old, ignore_errors=True)

    def abort(self, reason: str) -> None:
        """A write cannot be ended; a directory that is not complete is never read."""

    def close(self) -> None: ...


class _Kept:
    def wait(self, seconds: float) -> None: ...


class AdapterControl:
    """Nothing is joined, and nothing stands still."""

    after_send = True
    staged = False
    acknowledged = False

    def __init__(self, dialect: str) -> None:
        self._dialect = dialect

    def init(self, rendezvous: Rendezvous, *, rank_offset: int, timeout_seconds: float) -> list[HttpRequest]:
        return []

    def prefetch(
        self, buckets: Sequence[Bucket], rendezvous: Rendezvous, *, version: str, seconds: float
    ) -> list[HttpRequest]:
        return []

    def begin(self) -> list[HttpRequest]:
        return []

    def announce(
        self, buckets: Sequence[Bucket], rendezvous: Rendezvous, *, version: str
    ) -> list[tuple[HttpRequest, int]]:
        assert rendezvous.directory is not None, "AdapterSender.host names it"
        name = adapter_name(WeightVersion.parse(version))
        return [(adapts(self._dialect).load_adapter(name, str(Path(rendezvous.directory) / name)), len(buckets))]

    def finish(self, version: str) -> list[HttpRequest]:
        return []

    def abandon(self) -> list[HttpRequest]:
        return []

    def leave(self, group: str) -> list[HttpRequest]:
        return []


def _obstacle(info: EngineInfo, trainer_device: str) -> str | None:
    return None  # whether it takes adapters is checked by what it reports (engines/adapters.py)


VLLM = Transport(AdapterSender, AdapterControl("vllm"), _obstacle, shared=True, listens=False)
SGLANG = Transport(AdapterSender, AdapterControl("sglang"), _obstacle, shared=True, listens=False)
