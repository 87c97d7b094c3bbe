"""The trainer's ranks as the rollout manager awaits them: weights.connections.Ranks over Ray handles."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rltool.algorithms.batch import TrainBatch
from rltool.engines.types import TensorMeta
from rltool.megatron.offload import Part
from rltool.training.ray_calls import PEER_SECONDS, cause, has_crashed, has_died, rank_names
from rltool.training.sharding import Sharder
from rltool.weights.sender import SendReport
from rltool.weights.transport import Receiver, Rendezvous


class RankHandles:
    """handles: Ray actors by rank; coordinates: of each, as `TrainerActor.start` returned them."""

    def __init__(self, handles: Sequence[Any], coordinates: Sequence[Any], sharder: Sharder) -> None:
        self._handles, self._coordinates, self._sharder = list(handles), list(coordinates), sharder

    async def weight_metadata(self) -> list[TensorMeta]:
        return (await self._all([rank.weight_metadata.remote() for rank in self._handles]))[0]

    async def host(self, receivers: Sequence[Receiver], group: str, directory: Path) -> dict[str, Rendezvous]:
        return (await self._all([self._handles[0].host.remote(receivers, group, directory)]))[0]

    async def join(self) -> dict[str, str]:
        return (await self._all([self._handles[0].join.remote()]))[0]

    async def send(self, version: str, urls: Collection[str]) -> SendReport:
        return (await self._all([rank.send.remote(version, list(urls)) for rank in self._handles]))[0]

    async def abort_transfer(self, urls: Sequence[str], reason: str) -> None:
        """Runs beside what the rank is doing: see TrainerActor."""
        await self._all([self._handles[0].abort_transfer.remote(urls, reason)])

    async def leave_transfer(self, urls: Sequence[str] | None = None) -> None:
        await self._all([self._handles[0].leave_transfer.remote(urls)])

    async def weight_checksums(self, dtype: str) -> dict[str, str]:
        return (await self._all([rank.weight_checksums.remote(dtype) for rank in self._handles]))[0]

    async def logprobs(self, batch: TrainBatch) -> Tensor:
        """[T] float32, aligned with batch.tokens: the current policy's log-probabilities."""
        shards = self._sharder.shard(batch)
        pairs = zip(self._handles, self._coordinates, strict=True)
        results = await self._all(
            [rank.compute_logprobs.remote(shards.micro_batches(place.dp_rank)) for rank, place in pairs]
        )
        return shards.in_order(self._coordinates, results)

    async def offload(self, parts: Sequence[Part]) -> None:
        await self._all([rank.offload.remote(parts) for rank in self._handles])

    async def onload(self, parts: Sequence[Part]) -> None:
        await self._all([rank.onload.remote(parts) for rank in self._handles])

    @staticmethod
    async def _all(refs: Sequence[Any]) -> list[Any]:
        """All results, after every rank has ended its part: one that is left running would hold up the next training
        step. Once a rank has died there is none: then at once, and after a crash soon, as in ray_calls.get_all."""
        names = rank_names(len(refs))
        tasks = {asyncio.ensure_future(_result(ref)): name for ref, name in zip(refs, names, strict=True)}
        pending: set[asyncio.Task[Any]] = set(tasks)
        failures: dict[str, BaseException] = {}
        patience: float | None = None
        while pending:
            done, pending = await asyncio.wait(pending, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            failures |= {tasks[task]: error for task in done if (error := task.exception()) is not None}
            if not done or any(map(has_died, failures.values())):
                break
            if any(map(has_crashed, failures.values())):
                patience = PEER_SECONDS
        if failures:
            raise cause(failures, [tasks[task] for task in pending]) from next(iter(failures.values()))
        return [task.result() for task in tasks]


async def _result(ref: Any) -> Any:
    return await ref
