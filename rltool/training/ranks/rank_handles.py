"""The trainer's ranks as the rollout manager awaits them: weights.connections.Ranks over Ray handles."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rltool.algorithms.batch import TrainBatch
from rltool.engines.dialects.checksums import ParameterLayout
from rltool.errors import EngineError
from rltool.megatron.export_plan import ExportPlan
from rltool.megatron.offload import Part
from rltool.processes.tasks import beside
from rltool.training.cluster.ray_calls import PEER_SECONDS, cause, has_crashed, has_died, rank_names
from rltool.training.ranks.sharding import Sharder
from rltool.weights.send.sender import SendReport, one_answer, one_meeting, one_report
from rltool.weights.transport import Receiver, Rendezvous

if TYPE_CHECKING:
    from rltool.megatron.runtime import Coordinates


class RankHandles:
    """handles: Ray actors by rank; coordinates: of each, as `TrainerActor.start` returned them; plan: of what they
    send; hosts: of each, for errors."""

    def __init__(
        self, handles: Sequence[Any], coordinates: Sequence[Coordinates], sharder: Sharder, plan: ExportPlan,
        hosts: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._handles, self._coordinates, self._sharder = list(handles), list(coordinates), sharder
        self._names = rank_names(len(handles), hosts)
        self.plan = plan
        self._senders: dict[str, list[int]] = {}  # of each engine, the ranks that have hosted it

    async def host(self, receivers: Sequence[Receiver], group: str, directory: Path) -> dict[str, Rendezvous]:
        meetings = await self._all([rank.host.remote(receivers, group, directory) for rank in self._handles])
        for receiver in receivers:
            self._senders[receiver.url] = [rank for rank, found in enumerate(meetings) if receiver.url in found]
        return one_meeting(meetings)

    async def join(self) -> dict[str, str]:
        return one_answer(await self._all([rank.join.remote() for rank in self._handles]))

    async def send(self, version: str, urls: Collection[str]) -> SendReport:
        return one_report(await self._all([rank.send.remote(version, list(urls)) for rank in self._handles]))

    async def ready(self, url: str, version: str, number: int, seconds: float) -> None:
        """Runs beside `send`: see TrainerActor."""
        ranks = self._senders[url]
        asked = [self._handles[rank].ready.remote(url, version, number, seconds) for rank in ranks]
        reasons = await self._all(asked, ranks)
        if any(reasons):
            raise EngineError(next(filter(None, reasons)))

    async def abort_transfer(self, urls: Sequence[str], reason: str) -> None:
        """Runs beside what the rank is doing: see TrainerActor."""
        await self._all([rank.abort_transfer.remote(urls, reason) for rank in self._handles])

    async def leave_transfer(self, urls: Sequence[str] | None = None) -> None:
        await self._all([rank.leave_transfer.remote(urls) for rank in self._handles])

    async def weight_checksums(self, layout: ParameterLayout) -> dict[str, tuple[str, ...]]:
        return (await self._all([rank.weight_checksums.remote(layout) for rank in self._handles]))[0]

    async def logprobs(self, batch: TrainBatch) -> Tensor:
        """[T] float32, aligned with batch.tokens: the current policy's log-probabilities."""
        shards = self._sharder.shard(batch, forward_only=True)
        pairs = zip(self._handles, self._coordinates, strict=True)
        parts = [shards.micro_batches(dp_rank) for dp_rank in range(len(shards.plan))]
        results = await self._all([rank.compute_logprobs.remote(parts[place.dp_rank]) for rank, place in pairs])
        return shards.in_order(self._coordinates, results)

    async def offload(self, parts: Sequence[Part]) -> None:
        await self._all([rank.offload.remote(parts) for rank in self._handles])

    async def onload(self, parts: Sequence[Part]) -> None:
        await self._all([rank.onload.remote(parts) for rank in self._handles])

    async def _all(self, refs: Sequence[Any], ranks: Sequence[int] | None = None) -> list[Any]:
        """All results, after every rank has ended its part: one that is left running would hold up the next training
        step. Once a rank has died there is none: then at once, and after a crash soon, as in ray_calls.get_all. ranks:
        that were asked, None: all."""
        names = self._names if ranks is None else [self._names[rank] for rank in ranks]
        failures: dict[str, BaseException] = {}
        patience: float | None = None
        async with beside(*map(_result, refs)) as asked:
            tasks = dict(zip(asked, names, strict=True))
            pending = set(asked)
            while pending:
                # Not at each that completes: hundreds of ranks would be looked at hundreds of times.
                done, pending = await asyncio.wait(pending, timeout=patience, return_when=asyncio.FIRST_EXCEPTION)
                failures |= {tasks[task]: error for task in done if (error := task.exception()) is not None}
                if not done or any(map(has_died, failures.values())):
                    break
                if any(map(has_crashed, failures.values())):
                    patience = PEER_SECONDS
            if failures:
                raise cause(failures, [tasks[task] for task in pending]) from next(iter(failures.values()))
            return [task.result() for task in asked]


async def _result(ref: Any) -> Any:
    return await ref
