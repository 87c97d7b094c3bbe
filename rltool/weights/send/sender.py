"""The end of a weight transfer in one rank: a connection for each engine that it sends to, all fed from one gather of
the weights.

Each connection has a thread of its own (channel.py), so engines take buckets side by side and each at its own pace, at
most two buckets behind the gather. One that holds a bucket longer than its deadline is dropped from the sync.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rltool.config.parallel import ParallelLayout
from rltool.config.rollout import WeightsConfig
from rltool.engines.transfer.wire import bucket_bytes
from rltool.engines.types import Bucket
from rltool.errors import RltoolError
from rltool.megatron.export_plan import ExportPlan, Stream, drain
from rltool.megatron.shards import OwnPart, interleaved
from rltool.processes import garbage
from rltool.weights.delta.encoder import DeltaEncoder
from rltool.weights.memory import NONE, Memory, most
from rltool.weights.send.buffers import BUFFERS, CPU, BucketBuffers, Taking
from rltool.weights.send.channel import Call, Channel
from rltool.weights.send.stream import fill_buckets
from rltool.weights.sync_report import Failures
from rltool.weights.transport import (
    Receiver,
    Rendezvous,
    SenderFactory,
    SenderOptions,
    SenderTransport,
    TransportError,
    Work,
    transport,
)

SENDING = "sending weights"
JOINING = "joining its transfer group"
NOT_CONNECTED = "it has no transfer group with the trainer"


@dataclass(frozen=True)
class SendReport:
    """bytes: of one copy of the weights; failures: URL -> reason, for engines that dropped out on the way; patch_bytes:
    with weights.delta, of what changed since the weights that were sent before, None where there were none; memory:
    that the sync held at most beside model and engines: buckets, what was gathered, copies that deltas are made with;
    sent_bytes: with weights.sharded, what the rank itself has sent, to all workers; of all ranks in order, once joined.
    """

    bytes: int
    seconds: float
    failures: dict[str, str] = field(default_factory=dict)
    patch_bytes: int | None = None
    memory: Memory = NONE
    sent_bytes: tuple[int, ...] = ()


class Rank(NamedTuple):
    """Of the trainer. gpu: see SenderOptions; layout: of all ranks."""

    number: int = 0
    gpu: str = ""
    layout: ParallelLayout = ParallelLayout()


class WeightSender:
    """Lives in each trainer rank. One call at a time; `abort` and `ready` alone may come from other threads, at any
    time. All ranks get the same calls, in the same order.

    plan: what is sent; device: where the tensors are; deadline: seconds for joining an engine, and then for each bucket
    (DeadlinesConfig.bucket); model_files: see SenderOptions. UsageError, with weights.sharded, for a plan that
    cannot be sharded.
    """

    def __init__(
        self, config: WeightsConfig, plan: ExportPlan, *, device: torch.device, deadline: float, model_files: Path,
        rank: Rank = Rank(),
    ) -> None:  # fmt: skip
        self.config, self.device, self.deadline, self.model_files = config, device, deadline, model_files
        self.rank, self.gpu = rank.number, rank.gpu
        plan = interleaved(plan, rank.layout.pp) if config.sharded else plan
        self.plan, self._buckets, self._peft = plan, plan.buckets(config.bucket_bytes), plan.peft
        self.part = OwnPart(plan, rank.layout, rank.number, config.bucket_bytes) if config.sharded else None
        self._channels: dict[str, Channel] = {}
        self._elsewhere: set[str] = set()  # engines that other ranks send to
        self._by_every_rank: set[str] = set()  # engines of transports whose senders are in every rank
        self._dropped: dict[str, str] = {}  # engines whose connection has failed, and why
        self._shared: dict[SenderFactory, Channel] = {}
        self._hosted: list[str] = []
        sends_patches = any(weights.delta for _, weights in config.variants())
        self._encoder = DeltaEncoder(anchor_every=config.anchor_every, kept=BUFFERS) if sends_patches else None

    def host(self, receivers: Sequence[Receiver], group: str, directory: Path) -> dict[str, Rendezvous]:
        """Open a connection for each of these engines that this rank sends to, listening from now on; returns where it
        is, by URL; where that fails, `join` has why. Connections with others stay. directory: of this run alone, for
        transports that leave files."""
        options = SenderOptions(
            group, self.config, self.device, self.deadline, directory, self.model_files, self.gpu,
            max(map(bucket_bytes, self._buckets), default=0), self._encoder, self._peft,
            sum(map(bucket_bytes, self._buckets)), self.part, self.plan.quantization,
        )  # fmt: skip
        self.leave([receiver.url for receiver in receivers])
        here = [receiver for receiver in receivers if self._sends_to(receiver)]
        self._hosted = [receiver.url for receiver in here]
        self._channels |= {receiver.url: self._channel(receiver, options) for receiver in here}
        meeting = {}
        for url in self._hosted:
            try:
                meeting[url] = self._channels[url].transport.host()
            except (OSError, RuntimeError, RltoolError) as error:
                self._channels[url].fail(f"opening its transfer group: {error}")
        return meeting

    def join(self) -> dict[str, str]:
        """Join all that were hosted, side by side with the engines' own joining. Returns URL -> reason for those that
        failed."""
        hosted, self._hosted = self._hosted, []
        joining = [
            (channel, channel.submit(JOINING, partial(channel.transport.join, self.deadline), self.deadline))
            for channel in self._of(hosted)
        ]
        for channel, call in joining:
            channel.wait(call)
        return self._drop_failed(hosted)

    @garbage.paused()
    def send(self, stream: Stream, version: str, urls: Collection[str], *, stream_bytes: int = 0) -> SendReport:
        """Send the plan's tensors to these engines. Other engines' connections stay as they are. stream_bytes: what the
        stream holds on the device while it is produced, which is reported with the rest.

        An engine that fails, or holds a bucket too long, is left out from there on. The stream is drained in any case:
        producing it is a collective of all trainer ranks.
        """
        started = time.perf_counter()
        known = [url for url in urls if url in self._channels]
        unknown = {url: NOT_CONNECTED for url in urls if url not in self._channels and url not in self._elsewhere}
        channels = self._of(known)
        encoder = self._encoder if any(c.transport.encoder is not None for c in channels) else None
        memory = Memory.on(self.device, stream_bytes)
        try:
            if channels:
                memory += self._feed(stream, version, channels, encoder)
            else:
                drain(stream)
        except BaseException as error:  # of the stream: the engines' peers must not wait
            for channel in channels:
                channel.fail(f"the trainer failed: {type(error).__name__}: {error}")
            if isinstance(error, Exception):
                drain(stream)
            raise
        finally:
            failures = self._drop_failed(known)
            if encoder is not None:
                encoder.release()
        size = sum(map(bucket_bytes, self._buckets))
        patch_bytes = encoder.patch_bytes if encoder is not None else None
        counts = [c.transport.sent_bytes for c in channels if c.transport.sent_bytes is not None]
        sent = () if self.part is None else (sum(counts),)
        return SendReport(size, time.perf_counter() - started, unknown | failures, patch_bytes, memory, sent)

    def needs_all_ranks(self, urls: Collection[str]) -> bool:
        """Whether every rank needs the tensors, to send them to these engines. The same on all ranks, whatever has
        failed on one of them: producing the stream is a collective."""
        return not self._by_every_rank.isdisjoint(urls)

    def ready(self, url: str, version: str, number: int, seconds: float) -> str | None:
        """See SenderTransport.ready. None: the next bucket is there; else why it does not come."""
        channel = self._channels.get(url)
        if channel is None:
            return self._dropped.get(url, NOT_CONNECTED)
        try:
            channel.transport.ready(version, number, seconds)
        except TransportError as error:
            return str(error)
        return None

    def abort(self, urls: Collection[str], reason: str) -> None:
        """End what is in flight to these engines, which have failed: no one waits for them any more. An engine that
        shares its sender with others has nothing of its own to end."""
        for url in urls:
            channel = self._channels.get(url)
            if channel is not None and not channel.shared:
                channel.fail(reason)

    def leave(self, urls: Collection[str]) -> None:
        """Leave the groups with these engines."""
        self._elsewhere -= set(urls)
        self._by_every_rank -= set(urls)
        self._close(urls)

    def _close(self, urls: Collection[str]) -> None:
        for url in urls:
            channel = self._channels.pop(url, None)
            if channel is not None and channel not in self._channels.values():
                self._shared = {factory: shared for factory, shared in self._shared.items() if shared is not channel}
                channel.close()

    def close(self) -> None:
        """Leave all groups."""
        self.leave({*self._channels, *self._elsewhere, *self._by_every_rank})
        if self._encoder is not None:
            self._encoder.forget()

    def _sends_to(self, receiver: Receiver) -> bool:
        senders = transport(receiver.dialect, receiver.backend).senders
        if senders == "owners":
            return True
        if senders == "rank0":
            sends = self.rank == 0
        else:
            self._by_every_rank.add(receiver.url)
            sends = self.gpu in receiver.gpus
        if not sends:
            self._elsewhere.add(receiver.url)
        return sends

    def _channel(self, receiver: Receiver, options: SenderOptions) -> Channel:
        kind = transport(receiver.dialect, receiver.backend)
        if kind.sender in self._shared:
            return self._shared[kind.sender]
        name = receiver.backend if kind.shared else receiver.url
        channel = Channel(kind.sender(receiver, options), name, shared=kind.shared)
        if kind.shared:
            self._shared[kind.sender] = channel
        return channel

    def _feed(self, stream: Stream, version: str, channels: Sequence[Channel], encoder: DeltaEncoder | None) -> Memory:
        """encoder: where a channel sends what it makes, which is on the CPU. Returns what all of them held at most."""

        def submit(channel: Channel, function: Callable[[], object]) -> Call:
            return channel.submit(SENDING, function, self.deadline)

        buckets = self._buckets if self.part is None else self.part.buckets
        if encoder is not None:
            encoder.begin(version, buckets)
        begun = [(channel, submit(channel, partial(channel.transport.begin, version, buckets))) for channel in channels]
        for channel, call in begun:  # it must know what its engine waits for, before anything can fail
            channel.wait(call)
        buffers = BucketBuffers(self.device, {channel.transport.device for channel in channels})
        behind: list[tuple[Channel, Sending, list[Taking]]] = []  # the last bucket, where the next goes out before
        for bucket, flat in fill_buckets(stream, buckets, buffers.take):
            if flat is None:  # of which this rank holds nothing
                continue
            copies = buffers.filled()
            if encoder is not None:
                encoder.add(bucket, copies[CPU])
            takers, before, behind = list[Taking](), behind, []
            for channel in (channel for channel in channels if channel.failure is None):
                sending = Sending(channel.transport, bucket, copies[channel.transport.device], self.deadline)
                if sending.is_pipelined:
                    submit(channel, sending.begin)
                    behind.append((channel, sending, takers))
                else:
                    takers.append((channel, submit(channel, sending.whole)))
            end_in_order(before, submit)
            buffers.sent_to(takers)
        end_in_order(behind, submit)
        if encoder is not None:
            encoder.finish()
        for channel, last in [(channel, submit(channel, channel.transport.finish)) for channel in channels]:
            channel.wait(last)
        own = sum((channel.transport.memory for channel in channels), NONE)
        return buffers.memory + own + Memory(host=encoder.held_bytes if encoder is not None else 0)

    def _of(self, urls: Collection[str]) -> list[Channel]:
        """The channels of these engines, each once."""
        return list(dict.fromkeys(self._channels[url] for url in urls))

    def _drop_failed(self, urls: Collection[str]) -> dict[str, str]:
        """A peer that is gone or out of step needs a new connection in any case. URL -> reason."""
        reasons = {url: self._channels[url].failure for url in urls}
        failures = {url: reason for url, reason in reasons.items() if reason is not None}
        self._dropped |= failures
        self._close(list(failures))
        return failures


class Sending:
    """One bucket to one engine, on its channel's thread: `whole`, or `begin` and, behind the next one's, `end`.

    A transport whose engine waits for all buckets has the next one enqueued while the one before is on its way: between
    two broadcasts lies nothing then. With the wait in between, the thread's way back to the GPU took some 0.3 ms a
    bucket (two H200, buckets of 256 MiB, which travel for 0.7 ms).
    """

    def __init__(self, to: SenderTransport, bucket: Bucket, flat: Tensor, seconds: float) -> None:
        self._to, self._bucket, self._seconds = to, bucket, seconds
        self._flat: Tensor | None = flat
        self._work: Work | None = None

    @property
    def is_pipelined(self) -> bool:
        return self._to.announced_ahead

    def begin(self) -> None:
        assert self._flat is not None, "once"
        self._work, self._flat = self._to.send(self._bucket, self._flat), None

    def end(self) -> None:
        assert self._work is not None, "begin comes first"
        self._work.wait(self._seconds)
        self._work = None

    def whole(self) -> None:
        self.begin()
        self.end()


def end_in_order(
    behind: Sequence[tuple[Channel, Sending, list[Taking]]],
    submit: Callable[[Channel, Callable[[], object]], Call],
) -> None:
    """Their buffers are free when they have ended. One whose channel has failed by now may still read its buffer, which
    is returned too."""
    for channel, sending, takers in behind:
        takers.append((channel, submit(channel, sending.end)))


def one_meeting(meetings: Sequence[Mapping[str, Rendezvous]]) -> dict[str, Rendezvous]:
    """URL -> where the engine meets the ranks; meetings: what each rank has hosted. An engine that several ranks send
    to has the handles, or the stores, of all of them."""
    found: dict[str, Rendezvous] = {}
    for meeting in meetings:
        for url, rendezvous in meeting.items():
            before = found.get(url, rendezvous)
            handles = {gpu: handle or before.handles[gpu] for gpu, handle in rendezvous.handles.items()}
            found[url] = replace(before, handles=handles, stores=before.stores | rendezvous.stores)
    return found


def one_report(reports: Sequence[SendReport]) -> SendReport:
    """bytes: of one copy, as in each of them; a failure of one rank is the engine's; memory: of the rank that held
    most."""
    failures = one_answer([report.failures for report in reports])
    seconds = max(report.seconds for report in reports)
    memory = most(report.memory for report in reports)
    sent = tuple(size for report in reports for size in report.sent_bytes)
    return SendReport(reports[0].bytes, seconds, failures, reports[0].patch_bytes, memory, sent)


def one_answer(failures: Sequence[Failures]) -> Failures:
    """The first rank's that has a reason counts."""
    return {url: reason for each in reversed(failures) for url, reason in each.items()}
