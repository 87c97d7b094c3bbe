"""The trainer's end of a weight transfer: it hosts one transfer group per engine and sends the same buckets into all.

One group per engine, not one for all: engines of different dialects rendezvous differently, and an engine that dies in
the middle of a transfer takes only its own group with it.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # public

from rltool.config.train import WeightsConfig
from rltool.engines import wire
from rltool.engines.types import Bucket, TensorMeta
from rltool.engines.wire import bucket_bytes, host_store
from rltool.errors import UsageError
from rltool.weights.address import local_address_towards
from rltool.weights.disk import DiskWriter
from rltool.weights.sglang_group import open_sglang_group
from rltool.weights.stream import fill_buckets

Stream = Iterable[tuple[TensorMeta, Tensor | None]]


@dataclass(frozen=True)
class Target:
    """An engine that shall receive weights: its control URL, dialect, and world size as it reports it."""

    url: str
    dialect: str
    world_size: int


@dataclass(frozen=True)
class Connection:
    """A transfer group of 1 + the engine's world size ranks;
    the trainer is rank 0 and hosts the store at address:port."""

    target: Target
    address: str
    port: int
    group: str

    @property
    def world_size(self) -> int:
        return 1 + self.target.world_size


@dataclass(frozen=True)
class SendReport:
    """bytes: of one copy of the weights; failures: URL -> reason, for engines that dropped out on the way."""

    bytes: int
    seconds: float
    failures: dict[str, str] = field(default_factory=dict)


class WeightSender:
    """Lives in trainer rank 0. Not thread-safe: one transfer at a time."""

    def __init__(self, config: WeightsConfig, *, timeout: float) -> None:
        """timeout: seconds for joining a group, and then for each broadcast."""
        self.config = config
        self.timeout = timeout
        self._hosted: list[tuple[Connection, TCPStore]] = []
        self._groups: dict[str, Any] = {}

    def host(self, targets: Sequence[Target], group: str) -> list[Connection]:
        """Open each of these engines' rendezvous, listening from now on, and say where it is.
        Groups with others stay."""
        self._hosted = []
        for target in targets:
            self._groups.pop(target.url, None)
            address = self.config.advertise_host or local_address_towards(target.url)
            store = _host_store(address, self.config.port_range, self.timeout)
            self._hosted.append((Connection(target, address, store.port, group), store))
        return [connection for connection, _ in self._hosted]

    def join(self) -> dict[str, str]:
        """Join all hosted groups, side by side with the engines' own joining.
        Returns URL -> reason for those that failed."""
        failures: dict[str, str] = {}
        with ThreadPoolExecutor(max(1, len(self._hosted))) as pool:
            waiting = [
                (connection, pool.submit(open_group, connection, store, self.timeout))
                for connection, store in self._hosted
            ]
            for connection, future in waiting:
                try:
                    self._groups[connection.target.url] = future.result()
                except RuntimeError as error:  # all of torch's rendezvous errors are; it is this engine's alone
                    failures[connection.target.url] = f"joining its transfer group: {error}"
        self._hosted = []
        return failures

    def send(self, stream: Stream, buckets: Sequence[Bucket], urls: Collection[str]) -> SendReport:
        """Broadcast every bucket into the groups of these engines, which receive side by side. Other engines' groups
        stay as they are.

        An engine whose broadcast fails is left out from there on. The stream is drained in any case: producing it is a
        collective of all trainer ranks.
        """
        started = time.perf_counter()
        failures = {url: "it has no transfer group with the trainer" for url in urls if url not in self._groups}
        for _, flat in fill_buckets(stream, buckets):
            works = {url: self._groups[url].broadcast(flat, 0) for url in urls if url not in failures}
            for url, work in works.items():
                try:
                    work.wait()
                except RuntimeError as error:
                    failures[url] = f"sending weights: {error}"
        for url in failures:  # its peer is gone or out of step; a new group is needed in any case
            self._groups.pop(url, None)
        return SendReport(sum(map(bucket_bytes, buckets)), time.perf_counter() - started, failures)

    def leave(self, urls: Collection[str]) -> None:
        """Leave the groups with these engines. A dropped group or store is closed by its destructor."""
        for url in urls:
            self._groups.pop(url, None)

    def close(self) -> None:
        """Leave all groups."""
        self._hosted = []
        self._groups = {}


def _host_store(address: str, port_range: tuple[int, int] | None, timeout: float) -> TCPStore:
    if port_range is None:
        return host_store(address, 0, timeout)
    for port in range(port_range[0], port_range[1] + 1):
        try:
            return host_store(address, port, timeout)
        except OSError:
            continue
    raise UsageError(f"weights.port_range: no free port on {address} from {port_range[0]} to {port_range[1]}")


def write_to_disk(stream: Stream, buckets: Sequence[Bucket], directory: Path, model_files: Path) -> SendReport:
    """The disk transport's send: one safetensors file per bucket in a Hugging Face layout (see disk.py)."""
    started = time.perf_counter()
    writer = DiskWriter(directory, model_files)
    for bucket, flat in fill_buckets(stream, buckets):
        assert flat is not None, "only the rank that has the tensors writes them"
        writer.write(bucket, flat)
    writer.finish()
    return SendReport(sum(map(bucket_bytes, buckets)), time.perf_counter() - started)


def drain(stream: Stream) -> None:
    """What the ranks that do not send do: take part in the collectives that produce the stream."""
    for _ in stream:
        pass


def open_group(connection: Connection, store: TCPStore, timeout: float) -> Any:
    """Join the engine's group as rank 0, in the way its dialect rendezvouses.
    Returns an object with broadcast(flat, root) -> work."""
    if connection.target.dialect == "sglang":
        return open_sglang_group(store, connection.world_size, connection.group, timeout)
    return wire.open_group(
        connection.address, connection.port, 0, connection.world_size, connection.group, timeout, store=store
    )


def remove_old_versions(root: Path, run_id: str, keep: int = 2) -> None:
    """Delete all but the newest `keep` version directories of this run: an engine may still be reading the one before.

    Only names that this run's versions have are touched: what else lies there is somebody else's.
    """
    mine = re.compile(rf"{re.escape(run_id)}-(\d+)-(\d+)")
    found = [(match, path) for path in root.iterdir() if path.is_dir() and (match := mine.fullmatch(path.name))]
    newest_last = sorted(found, key=lambda item: (int(item[0][1]), int(item[0][2])))
    for _, old in newest_last[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
