"""What of the driver grows with engines and ranks: fake engines and fake ranks, each step with a weight sync and a
batch. No model, no GPU, no Ray.

    python -m benchmarks.fleet_scale --engines 16 64 256 --ranks 64

A JSON line for each number of engines, CPU seconds of this process (fakes are processes of their own) and what it
holds; then one for the cutting of a batch over so many ranks and back. Each engine has the same number of requests, and
each rank of samples, so that what is linear is flat for each; `of_first` is the growth from line to line, 1 for that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from benchmarks.rollout_manager import config_of, engines_of, fake_engines
from rltool.algorithms.batch import TrainBatch
from rltool.config.rollout import WeightsConfig
from rltool.config.train import TrainConfig
from rltool.engines.weight_version import Lineage
from rltool.training.manager.rollout_engines import Engines, Syncing
from rltool.training.manager.service import RolloutService
from rltool.training.ranks.sharding import Sharder
from rltool.weights.send.rank_barrier import one_answer, one_meeting, one_report
from rltool.weights.send.sender import SendReport
from rltool.weights.transport import Receiver, Rendezvous
from tests.ranks import SenderRanks

REQUESTS = 16
"""Of each engine in a step, half of them at a time: one sample of 16 tokens each."""
SAMPLES = 16
"""Of each rank."""


class FakeRanks(SenderRanks):
    """So many: the first sends a tiny model by disk, the others have nothing to say, as in RankHandles."""

    def __init__(self, count: int, config: WeightsConfig, model: Path) -> None:
        super().__init__(config, model)
        self.count = count

    def weights(self, step: int) -> Mapping[str, Tensor]:
        return {"a.weight": torch.full((8, 8), float(step))}

    async def logprobs(self, batch: TrainBatch) -> Tensor:
        return batch.rollout_logprobs.clone()

    async def host(self, receivers: Sequence[Receiver], group: str, directory: Path) -> dict[str, Rendezvous]:
        first = await super().host(receivers, group, directory)
        return one_meeting([first, *await self._others({})])

    async def join(self) -> Mapping[str, str]:
        return one_answer([await super().join(), *await self._others({})])

    async def send(self, version: str, urls: Collection[str]) -> SendReport:
        first = await super().send(version, urls)
        return one_report([first, *await self._others(SendReport(0, 0.0, {}))])

    async def _others(self, answer: Any) -> list[Any]:
        async def one() -> Any:
            await asyncio.sleep(0)
            return answer

        return list(await asyncio.gather(*(one() for _ in range(self.count - 1))))


@dataclass
class Used:
    """CPU seconds since it was made."""

    at: float = 0.0

    def __post_init__(self) -> None:
        self.at = self._now()

    def take(self) -> float:
        now = self._now()
        taken, self.at = now - self.at, now
        return taken

    @staticmethod
    def _now() -> float:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime


async def steps(config: TrainConfig, engines: Engines, ranks: int, directory: Path) -> dict[str, Any]:
    """Of the last of config.steps: the first ones open connections."""
    ours: Any = FakeRanks(ranks, config.weights, config.model.path)
    syncing = Syncing(ours, Lineage("0" * 32, 0), "cpu", directory, vocab_size=64)
    service = RolloutService(config, engines, syncing=syncing, log=lambda line: None)
    process, found = psutil.Process(), dict[str, Any]()
    before = process.memory_info().rss
    await service.start()
    try:
        for step in range(config.steps):
            used, started = Used(), time.perf_counter()
            report = await service.sync_weights(step)
            sync = used.take()
            rollout = await service.next_batch(step)
            batch = used.take()
            assert len(report.updated) == len(engines.endpoints), report.failed
            found = {
                "engines": len(engines.endpoints),
                "ranks": ranks,
                "samples": rollout.batch.num_samples,
                "sync_cpu": round(sync, 3),
                "rollout_cpu": round(batch, 3),
                "seconds": round(time.perf_counter() - started, 2),
                "sync_ms_an_engine": round(1000 * sync / len(engines.endpoints), 2),
                "rollout_ms_a_request": round(1000 * batch / rollout.batch.num_samples, 3),
                "sockets": len(process.net_connections("inet")),
                "descriptors": process.num_fds(),
                "mib_since_start": round((process.memory_info().rss - before) / 2**20, 1),
            }
    finally:
        await service.close()
        ours.close()
    return found


def batch_of(samples: int) -> TrainBatch:
    """Of lengths from 100 to 1,000 tokens."""
    lengths = torch.randint(100, 1001, (samples,), generator=torch.Generator().manual_seed(0))
    tokens = int(lengths.sum())
    numbers = torch.arange(samples)
    return TrainBatch(
        tokens=torch.zeros(tokens, dtype=torch.int64), lengths=lengths, loss_mask=torch.ones(tokens),
        loss_weights=torch.ones(tokens),
        rollout_logprobs=torch.zeros(tokens), rewards=torch.zeros(samples), group_ids=numbers // 8,
    )  # fmt: skip


def cutting(config: TrainConfig, ranks: int) -> dict[str, Any]:
    """CPU seconds to cut a batch for so many data-parallel ranks, and to put what they compute in order."""

    @dataclass(frozen=True)
    class Place:
        dp_rank: int

    trainer = config.trainer.model_copy(update={"world_size": ranks, "max_tokens_per_micro_batch": 4096})
    sharder = Sharder(config.model_copy(update={"trainer": trainer}))
    batch = batch_of(SAMPLES * ranks)
    used = Used()
    shards = sharder.shard(batch)
    planned = used.take()
    parts = [shards.micro_batches(rank) for rank in range(ranks)]
    cut = used.take()
    values = [[part.rollout_logprobs for part in each] for each in parts]
    used.take()
    places: Any = [Place(rank) for rank in range(ranks)]
    together = shards.in_order(places, values)
    ordered = used.take()
    assert len(together) == len(batch.tokens)
    per_rank = 1000 * (planned + cut + ordered) / ranks
    return {
        "ranks": ranks,
        "samples": batch.num_samples,
        "plan_cpu": round(planned, 4),
        "cut_cpu": round(cut, 4),
        "order_cpu": round(ordered, 4),
        "ms_a_rank": round(per_rank, 2),
    }


def with_growth(lines: list[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    return [line | {"of_first": {name: round(line[name] / lines[0][name], 2) for name in names}} for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--ranks", type=int, default=64, help="fake ranks of the syncs")
    parser.add_argument("--cut-over", type=int, nargs="+", default=[16, 64, 256, 1024], help="data-parallel ranks")
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    lines = []
    for count in arguments.engines:
        with tempfile.TemporaryDirectory() as root:
            config = config_of(
                Path(root), prompts=REQUESTS * count, staleness=0, per_engine=REQUESTS // 2, steps=arguments.steps
            )
            config = config.model_copy(
                update={
                    "weights": WeightsConfig(transport="disk", disk_dir=Path(root) / "disk"),
                    "rollout": config.rollout.model_copy(update={"samples_per_prompt": 1}),
                }
            )
            with fake_engines(count, seconds=1.0, tokens=16, a_process=64) as endpoints:
                engines = engines_of(endpoints)
                lines.append(asyncio.run(steps(config, engines, arguments.ranks, Path(root) / "disk")))
    for line in with_growth(lines, ("sync_ms_an_engine", "rollout_ms_a_request")):
        print(json.dumps(line))
    with tempfile.TemporaryDirectory() as root:
        config = config_of(Path(root), prompts=8, staleness=0, per_engine=8, steps=1)
        cuts = [cutting(config, ranks) for ranks in arguments.cut_over]
    for line in with_growth(cuts, ("ms_a_rank",)):
        print(json.dumps(line))


if __name__ == "__main__":
    main()
