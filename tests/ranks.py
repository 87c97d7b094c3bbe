"""The trainer's ranks in miniature, for tests of weight syncs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rltool.config.parallel import ParallelLayout
from rltool.config.rollout import WeightsConfig
from rltool.engines.dialects.checksums import ParameterLayout
from rltool.engines.transfer.wire import meta_of
from rltool.engines.types import Bucket, TensorMeta
from rltool.errors import EngineError
from rltool.megatron.export_plan import Export, ExportPlan, Stream
from rltool.megatron.offload import Part
from rltool.models.base import Parameter
from rltool.weights.send.sender import Rank, SendReport, WeightSender, one_answer, one_meeting, one_report
from rltool.weights.send.stream import named_tensors
from rltool.weights.sync_report import Failures
from rltool.weights.transport import Receiver, Rendezvous
from rltool.weights.verify.implied_checksums import implied_checksums


def flat_bytes(tensors: Mapping[str, Tensor], bucket: Bucket) -> Tensor:
    """A bucket as it travels: [bytes] uint8."""
    return torch.cat([tensors[meta.name].contiguous().reshape(-1).view(torch.uint8) for meta in bucket])


def whole(name: str, tensor: Tensor) -> Parameter:
    """Of a tensor that every rank of an engine holds as it is."""
    return Parameter(name, ((name, tuple(tensor.shape)),))


def plan_of(tensors: Mapping[str, Tensor], parameter: Callable[[str, Tensor], Parameter] = whole) -> ExportPlan:
    """These tensors as they are. parameter: by which engines cut one of them."""
    exports = tuple(Export(parameter(name, tensor), (meta_of(name, tensor),)) for name, tensor in tensors.items())
    return ExportPlan(exports, "float32", num_layers=1, num_experts=0)


def slowly_changing(step: int) -> dict[str, Tensor]:
    """A model of 657 elements in two dtypes, of which a few change at each step."""
    tensors = {
        "a.weight": torch.arange(600.0).reshape(20, 30),
        "b.weight": torch.arange(50, dtype=torch.bfloat16),
        "c.bias": torch.full((7,), 0.5),
    }
    for past in range(step):
        tensors["a.weight"][past % 20, 3] += past + 1
        tensors["b.weight"][past % 50] = -past
    return tensors


class SenderRanks:
    """One rank without Megatron: a real WeightSender in threads, as the Ray actor has it."""

    def __init__(
        self, config: WeightsConfig, model_files: Path, *, deadline: float = 60.0, device: str = "cpu"
    ) -> None:
        self.config, self._model_files, self._deadline, self._device = config, model_files, deadline, device
        self.sent = 0  # the training step whose weights were sent last
        self.stream_bytes = 0  # that a gather would hold

    @cached_property
    def plan(self) -> ExportPlan:
        return plan_of(self.weights(0))

    @cached_property
    def sender(self) -> WeightSender:
        device = torch.device(self._device)
        return WeightSender(
            self.config, self.plan, device=device, deadline=self._deadline, model_files=self._model_files
        )

    def close(self) -> None:
        """The sender's connections; a test that sends nothing has made none."""
        if "sender" in vars(self):
            self.sender.close()

    def weights(self, step: int) -> Mapping[str, Tensor]:
        """The model after so many training steps: its names and shapes are always the same."""
        raise NotImplementedError

    def stream(self, step: int) -> Iterator[tuple[TensorMeta, Tensor]]:
        weights = self.weights(step)
        return ((meta, weights[meta.name]) for meta in self.plan.tensors)

    async def host(self, receivers: Sequence[Receiver], group: str, directory: Path) -> dict[str, Rendezvous]:
        return await asyncio.to_thread(self.sender.host, receivers, group, directory)

    async def join(self) -> Failures:
        return await asyncio.to_thread(self.sender.join)

    async def send(self, version: str, urls: Collection[str]) -> SendReport:
        self.sent = int(version.rsplit(":", 1)[1])
        stream = self.stream(self.sent)
        return await asyncio.to_thread(self.sender.send, stream, version, urls, stream_bytes=self.stream_bytes)

    async def weight_checksums(self, layout: ParameterLayout) -> dict[str, tuple[str, ...]]:
        return implied_checksums(self.plan, named_tensors(self.stream(self.sent)), layout)

    async def abort_transfer(self, urls: Sequence[str], reason: str) -> None:
        self.sender.abort(urls, reason)

    async def leave_transfer(self, urls: Sequence[str] | None = None) -> None:
        if urls is None:
            self.sender.close()
        else:
            self.sender.leave(urls)


class RanksOnGpus(SenderRanks):
    """Ranks on these GPUs (UUIDs), each with a WeightSender; told what to do together, as RankHandles does over Ray.
    gathers: of each rank and sync, whether it got the tensors; held: what they have on their devices."""

    def __init__(
        self, config: WeightsConfig, model_files: Path, *, gpus: Sequence[str], deadline: float = 60.0,
        layout: ParallelLayout | None = None,
    ) -> None:  # fmt: skip
        layout = layout or ParallelLayout(len(gpus))
        self.config, self.sent, self.gathers, self.held = config, 0, [], []
        self.senders = [
            WeightSender(
                config, self.plan, device=torch.device("cpu"), deadline=deadline, model_files=model_files,
                rank=Rank(rank, gpu, layout),
            )
            for rank, gpu in enumerate(gpus)
        ]  # fmt: skip

    async def host(self, receivers: Sequence[Receiver], group: str, directory: Path) -> dict[str, Rendezvous]:
        self.meetings = await self._each(lambda sender: sender.host(receivers, group, directory))
        return one_meeting(self.meetings)

    async def join(self) -> Failures:
        return one_answer(await self._each(lambda sender: sender.join()))

    async def send(self, version: str, urls: Collection[str]) -> SendReport:
        self.sent = int(version.rsplit(":", 1)[1])

        def send(sender: WeightSender) -> SendReport:
            if sender.part is not None:
                return sender.send(sender.part.tensors(self.weights(self.sent)), version, urls)
            has_tensors = sender.rank == 0 or sender.needs_all_ranks(urls)
            self.gathers.append((sender.rank, has_tensors))
            stream: Stream = ((meta, tensor if has_tensors else None) for meta, tensor in self.stream(self.sent))
            return sender.send(stream, version, urls)

        return one_report(await self._each(send))

    async def ready(self, url: str, version: str, number: int, seconds: float) -> None:
        senders = [sender for sender, found in zip(self.senders, self.meetings, strict=True) if url in found]
        reasons = await self._each(lambda sender: sender.ready(url, version, number, seconds), senders)
        if any(reasons):
            raise EngineError(next(filter(None, reasons)))

    async def abort_transfer(self, urls: Sequence[str], reason: str) -> None:
        await self._each(lambda sender: sender.abort(urls, reason))

    async def leave_transfer(self, urls: Sequence[str] | None = None) -> None:
        await self._each(lambda sender: sender.close() if urls is None else sender.leave(urls))

    async def offload(self, parts: Sequence[Part]) -> None:
        self.held.append(("offload", *parts))

    async def onload(self, parts: Sequence[Part]) -> None:
        self.held.append(("onload", *parts))

    async def _each(self, act: Callable[[WeightSender], Any], senders: Sequence[WeightSender] | None = None) -> Any:
        chosen = self.senders if senders is None else senders
        return await asyncio.gather(*(asyncio.to_thread(act, sender) for sender in chosen))
