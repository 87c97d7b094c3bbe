"""delta: each version as a patch of the one before, in a store that engines fetch it from while they generate.

For engines on other hosts and clouds: trainer and engine need no connection but the store and the engine's HTTP port.
rltool's vLLM plugin fetches by itself when it is asked to; beside an SGLang server `rltool engines follow-weights`
rebuilds a directory, and reports in the store what the server can load.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rltool.engines.delta.follow import Report
from rltool.engines.delta.store import Store, StoreError, open_store
from rltool.engines.types import Bucket, EngineInfo, HttpRequest
from rltool.weights.delta.writer import DeltaWriter
from rltool.weights.memory import Memory
from rltool.weights.transport import Receiver, Rendezvous, SenderOptions, SenderTransport, Transport, TransportError
from rltool.weights.transports import sglang, vllm

REPORT_SECONDS = 0.2
"""Between two looks for a follower's report."""


class _Written:
    def wait(self, seconds: float) -> None: ...


class DeltaSender(SenderTransport):
    """One for all engines: a version is written once."""

    device = torch.device("cpu")

    def __init__(self, receiver: Receiver, options: SenderOptions) -> None:
        config = options.config
        assert config.store is not None, "WeightsConfig demands it with this transport"
        self._rendezvous = Rendezvous("delta", 1 + receiver.world_size, options.group, directory=config.store)
        self._options = options
        self._writer: DeltaWriter | None = None

    def host(self) -> Rendezvous:
        return self._rendezvous

    def join(self, seconds: float) -> None:
        if self._writer is None:
            options = self._options
            self._writer = DeltaWriter(
                open_store(options.config.store or ""), anchor_every=options.config.anchor_every,
                model_files=options.model_files, quantization=options.quantization,
            )  # fmt: skip

    @property
    def memory(self) -> Memory:
        return Memory(host=self._writer.held_bytes if self._writer is not None else 0)

    def begin(self, version: str, buckets: Sequence[Bucket]) -> None:
        self._joined.begin(version, buckets)

    def send(self, bucket: Bucket, flat: Tensor) -> _Written:
        self._joined.add(bucket, flat)
        return _Written()

    def finish(self) -> None:
        self._joined.finish()

    def abort(self, reason: str) -> None:
        """A write cannot be ended; a version without its manifest is never read."""

    def close(self) -> None:
        self._writer = None  # and the copy of the weights that it holds

    @property
    def _joined(self) -> DeltaWriter:
        assert self._writer is not None, "join comes first"
        return self._writer


class VllmDeltaControl(vllm.PluginUpdateControl):
    after_send = True

    def init(self, rendezvous: Rendezvous, *, rank_offset: int, timeout_seconds: float) -> list[HttpRequest]:
        return [vllm.init_request(transport="delta")]

    def prefetch(
        self, buckets: Sequence[Bucket], rendezvous: Rendezvous, *, version: str, seconds: float
    ) -> list[HttpRequest]:
        body = {"store": rendezvous.directory, "version": version, "seconds": seconds}
        return [HttpRequest("POST", "/rltool/prefetch", body)]

    def announce(
        self, buckets: Sequence[Bucket], rendezvous: Rendezvous, *, version: str
    ) -> list[tuple[HttpRequest, int]]:
        return [vllm.fetched_request(buckets, version)]


class SglangDeltaControl(sglang.SglangControl):
    after_send = True

    def init(self, rendezvous: Rendezvous, *, rank_offset: int, timeout_seconds: float) -> list[HttpRequest]:
        return []

    def announce(
        self, buckets: Sequence[Bucket], rendezvous: Rendezvous, *, version: str
    ) -> list[tuple[HttpRequest, int]]:
        """rendezvous.directory: the version's, on the engine's host (wait_for_follower)."""
        assert rendezvous.directory is not None, "wait_for_follower names it"
        return [sglang.load_request(rendezvous.directory, buckets)]


def wait_for_follower(url: str, rendezvous: Rendezvous, version: str, seconds: float) -> Rendezvous:
    """Until the follower of the engine at `url` has `version`; where that lies on its host. Raises TransportError."""
    assert rendezvous.directory is not None, "DeltaSender.host names the store"
    return replace(
        rendezvous, directory=_followed(open_store(rendezvous.directory), url, rendezvous.directory, version, seconds)
    )


def _followed(store: Store, url: str, address: str, version: str, seconds: float) -> str:
    until = time.monotonic() + seconds
    command = f"rltool engines follow-weights {address} --to DIR --engine {url}"
    while True:
        try:
            report = Report.read(store, url)
        except StoreError as error:
            raise TransportError(f"the report of its follower cannot be read: {error}") from error
        if report is None:
            raise TransportError(f"nothing rebuilds weights for it: run `{command}` beside it")
        if report.version == version and report.directory is not None:
            return report.directory
        if time.monotonic() > until:
            stands = f"it has {report.version}" + (f"; its last error: {report.error}" if report.error else "")
            raise TransportError(
                f"its follower did not have the weights within {seconds:g} s ({stands}): does `{command}` still run?"
            )
        time.sleep(REPORT_SECONDS)


def _vllm_obstacle(info: EngineInfo, trainer_device: str) -> str | None:
    return vllm.without_plugin(info, "cannot fetch deltas: its backend is")


def _sglang_obstacle(info: EngineInfo, trainer_device: str) -> str | None:
    return None  # whether something follows for it shows at the first sync


VLLM = Transport(DeltaSender, VllmDeltaControl(), _vllm_obstacle, shared=True, listens=False)
SGLANG = Transport(
    DeltaSender, SglangDeltaControl(), _sglang_obstacle, shared=True, listens=False, located=wait_for_follower
)
