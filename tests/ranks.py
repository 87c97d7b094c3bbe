"""The trainer's ranks in miniature, for tests of weight syncs."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rltool.config.rollout import WeightsConfig
from rltool.engines.types import Bucket, TensorMeta
from rltool.engines.wire import meta_of, plan_buckets
from rltool.weights.implied_checksums import implied_checksums
from rltool.weights.sender import SendReport, WeightSender
from rltool.weights.sync_report import Failures
from rltool.weights.transport import Receiver, Rendezvous


def flat_bytes(tensors: Mapping[str, Tensor], bucket: Bucket) -> Tensor:
    """A bucket as it travels: [bytes] uint8."""
    return torch.cat([tensors[meta.name].contiguous().reshape(-1).view(torch.uint8) for meta in bucket])


class SenderRanks:
    """One rank without Megatron: a real WeightSender in threads, as the Ray actor has it."""

    def __init__(self, config: WeightsConfig, model_files: Path, *, deadline: float = 60.0) -> None:
        self.config = config
        self.sent = 0  # the training step whose weights were sent last
        self.sender = WeightSender(config, device=torch.device("cpu"), deadline=deadline, model_files=model_files)

    def weights(self, step: int) -> Mapping[str, Tensor]:
        """The model after so many training steps: its names and shapes are always the same."""
        raise NotImplementedError

    def stream(self, step: int) -> Iterator[tuple[TensorMeta, Tensor]]:
        return ((meta_of(name, tensor), tensor) for name, tensor in self.weights(step).items())

    async def weight_metadata(self) -> list[TensorMeta]:
        return [meta for meta, _ in self.stream(0)]

    async def host(self, receivers: Sequence[Receiver], group: str, directory: Path) -> dict[str, Rendezvous]:
        return await asyncio.to_thread(self.sender.host, receivers, group, directory)

    async def join(self) -> Failures:
        return await asyncio.to_thread(self.sender.join)

    async def send(self, version: str, urls: Collection[str]) -> SendReport:
        buckets = plan_buckets(await self.weight_metadata(), self.config.bucket_bytes)
        self.sent = int(version.rsplit(":", 1)[1])
        stream = self.stream(self.sent)
        return await asyncio.to_thread(self.sender.send, stream, buckets, version, urls)

    async def weight_checksums(self, dtype: str) -> dict[str, str]:
        tensors = self.weights(self.sent)
        return implied_checksums(list(tensors), tensors.items(), getattr(torch, dtype))

    async def abort_transfer(self, urls: Sequence[str], reason: str) -> None:
        self.sender.abort(urls, reason)

    async def leave_transfer(self, urls: Sequence[str] | None = None) -> None:
        if urls is None:
            self.sender.close()
        else:
            self.sender.leave(urls)
