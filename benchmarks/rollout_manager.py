"""What the rollout manager itself costs, against engines that answer by the clock: no model, no trainer, no Ray.

    python -m benchmarks.rollout_manager load        100,000 samples, 2,000 requests in flight: CPU per sample, memory
    python -m benchmarks.rollout_manager overlap     seconds per step where generation and training take a set time each
    python -m benchmarks.rollout_manager scale       what grows with engines and ranks: 16 to 256 engines, 4 to 64 ranks

`load`: each of four fake engines is a process of its own and takes `--seconds` for a request of eight samples.
`overlap`: generation takes about `--seconds`, training `--train-seconds`; the step is compared with the longer of the
two, for max_staleness 0 and 1. Weight syncs are left out of it: what takes part is admission, collection, rewards and
the batch.
`scale`: whole steps, syncs included, without a model: engines are fakes in a few processes, ranks are fakes in this
one, which answer at once. Each engine has four requests of eight samples a step. CPU is this process's, by phase.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch

from rltool.algorithms.batch import TrainBatch
from rltool.config.train import TrainConfig
from rltool.engines.endpoints import EngineEndpoint, ModelEndpoints
from rltool.engines.types import EngineInfo, TensorMeta
from rltool.engines.weight_version import Lineage
from rltool.megatron.export_plan import Export, ExportPlan
from rltool.models.base import Parameter
from rltool.quickstart.tiny_model import make_tiny_model
from rltool.training.checks.preflight import probe_fleet
from rltool.training.manager.rollout_engines import Engines, Syncing
from rltool.training.manager.service import RolloutService
from rltool.training.ranks.rank_handles import RankHandles
from rltool.training.ranks.sharding import Sharder
from rltool.weights.send.sender import SendReport
from rltool.weights.transport import Receiver, Rendezvous

IDLE = 5.0
"""Seconds without a step, for what the driver does all the time."""


def constant_reward(sample: object, text: str) -> float:
    return 1.0


@contextmanager
def fake_engines(count: int, *, seconds: float, tokens: int, each: int = 1) -> Iterator[list[EngineEndpoint]]:
    """So many processes of `each` engines; they end when their standard input is closed."""
    argv = [sys.executable, "-m", "benchmarks.fake_engine", "--seconds", str(seconds), "--tokens", str(tokens)]
    argv += ["--count", str(each)]
    processes = [subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        urls = [process.stdout.readline().split()[1] for process in processes if process.stdout for _ in range(each)]
        yield [EngineEndpoint(url=url, dialect="vllm") for url in urls]
    finally:
        for process in processes:
            if process.stdin:
                process.stdin.close()
            process.wait(30)


def config_of(root: Path, *, prompts: int, staleness: int, per_engine: int, steps: int) -> TrainConfig:
    model = make_tiny_model(root / "model", seed=0)
    data = root / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": "word=", "label": "x"}) + "\n" for _ in range(1000)))
    return TrainConfig.model_validate(
        {
            "model": {"path": model},
            "steps": steps,
            "data": {"train": [data]},
            "rollout": {"prompts_per_step": prompts, "max_staleness": staleness, "requests_per_engine": per_engine},
            "reward": {"function": "benchmarks.rollout_manager:constant_reward"},
        }
    )


def engines_of(endpoints: list[EngineEndpoint]) -> Engines:
    fleet = probe_fleet(ModelEndpoints(engines=tuple(endpoints)), 30.0)
    infos: dict[str, EngineInfo] = dict(fleet.infos)
    return Engines(fleet.endpoints.engines, infos)


async def load(config: TrainConfig, engines: Engines) -> dict[str, object]:
    service = RolloutService(config, engines, log=lambda line: None)
    process, samples, memory = psutil.Process(), 0, []
    await service.start()
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    most = 0.0
    try:
        for step in range(config.steps):
            rollout = await service.next_batch(step)
            samples += rollout.batch.num_samples
            most = max(most, rollout.metrics["rollout/event_loop_lag_max"])
            memory.append(round(process.memory_info().rss / 2**20))
        wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    finally:
        await service.close()
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "samples": samples,
        "seconds": round(wall, 1),
        "samples per second": round(samples / wall),
        "CPU ms per sample": round(1000 * cpu / samples, 3),
        "MiB after each batch": memory,
        "longest delay of the event loop, s": round(most, 3),
    }


async def overlap(config: TrainConfig, engines: Engines, train_seconds: float) -> float:
    """Seconds per step, the first two left out."""
    service = RolloutService(config, engines, log=lambda line: None)
    await service.start()
    times = []
    try:
        for step in range(config.steps):
            started = time.perf_counter()
            await service.next_batch(step)
            await asyncio.sleep(train_seconds)  # the trainer
            times.append(time.perf_counter() - started)
    finally:
        await service.close()
    return sum(times[2:]) / len(times[2:])


class FakeRank:
    """As a Ray actor is called, it answers at once. asked: how often each method was called, of all ranks."""

    def __init__(self, rank: int, asked: Counter[str]) -> None:
        self._rank, self._asked = rank, asked

    def __getattr__(self, name: str) -> Any:
        async def answer(*arguments: Any) -> Any:
            self._asked[name] += 1
            return getattr(type(self), f"_{name}", lambda *_: None)(self, *arguments)

        return SimpleNamespace(remote=answer)

    def _host(self, receivers: Sequence[Receiver], group: str, directory: Path) -> dict[str, Rendezvous]:
        hosts = receivers if self._rank == 0 else ()
        return {each.url: Rendezvous("nccl", 2, group, unique_id="", bucket_bytes=2**20) for each in hosts}

    def _join(self) -> dict[str, str]:
        return {}

    def _send(self, version: str, urls: list[str]) -> SendReport:
        return SendReport(2**20, 0.0)

    def _compute_logprobs(self, micro_batches: list[TrainBatch]) -> list[torch.Tensor | None]:
        return [micro.rollout_logprobs for micro in micro_batches]


def fake_ranks(config: TrainConfig, count: int, asked: Counter[str]) -> RankHandles:
    """The rollout manager's real handles of so many ranks, one each for a data-parallel replica."""
    export = Export(Parameter("a", (("a", (4,)),)), (TensorMeta("a", "float32", (4,)),))
    places: Any = [SimpleNamespace(dp_rank=rank) for rank in range(count)]
    handles = [FakeRank(rank, asked) for rank in range(count)]
    return RankHandles(handles, places, Sharder(config), ExportPlan((export,), "float32", 1, 0))


def sockets() -> int:
    links = (entry.path for entry in os.scandir("/proc/self/fd"))
    return sum(os.path.islink(path) and os.readlink(path).startswith("socket:") for path in links)


async def scale(config: TrainConfig, engines: Engines, directory: Path) -> dict[str, float]:
    """CPU ms by phase, the mean of all steps but the first, which connects."""
    asked: Counter[str] = Counter()
    ranks = fake_ranks(config, config.trainer.world_size, asked)
    syncing = Syncing(ranks, Lineage("c" * 32, 0), "cuda", directory, vocab_size=64)
    service = RolloutService(config, engines, syncing=syncing, log=lambda line: None)
    spent: defaultdict[str, list[float]] = defaultdict(list)

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        before = time.process_time()
        yield
        spent[name].append(1000 * (time.process_time() - before))

    with phase("start"):
        await service.start()
    samples = 0
    try:
        with phase("connect and sync"):
            await service.sync_weights(0)
        for step in range(config.steps):
            with phase("rollout"):
                rollout = await service.next_batch(step)
            samples = rollout.batch.num_samples
            with phase("shards"):
                await ranks.logprobs(rollout.batch)
            with phase("sync"):
                await service.sync_weights(step + 1)
        held = sockets()
        with phase("idle, a second"):
            await asyncio.sleep(IDLE)
        spent["idle, a second"][0] /= IDLE
        assert len(service.fleet.serving()) == len(engines.endpoints)
    finally:
        with phase("end"):
            await service.close()
    found = {name: round(sum(times[-2:]) / len(times[-2:]), 1) for name, times in spent.items()}
    return {
        "engines": len(engines.endpoints),
        "ranks": config.trainer.world_size,
        "samples a step": samples,
        **found,
        "sockets": held,
        "MiB": round(psutil.Process().memory_info().rss / 2**20),
        "calls of ranks a sync": asked["send"] / (config.steps + 1),
    }


def scale_at(root: Path, count: int, seconds: float) -> dict[str, float]:
    ranks = max(count // 4, 1)
    found = config_of(root, prompts=4 * count, staleness=0, per_engine=4, steps=3)
    trainer = found.trainer.model_copy(update={"world_size": ranks})
    config = TrainConfig.model_validate(
        found.model_dump() | {"trainer": trainer.model_dump(), "weights": {"pause_mode": "keep"}}
    )
    processes = max(count // 64, 1)
    with fake_engines(processes, seconds=seconds, tokens=16, each=count // processes) as endpoints:
        return asyncio.run(scale(config, engines_of(endpoints), root / "weights"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("load", "overlap", "scale"))
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--in-flight", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--train-seconds", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--engines", type=int, nargs="+", default=[16, 64, 256])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        if arguments.what == "scale":
            for count in arguments.engines:
                print(json.dumps(scale_at(Path(root), count, arguments.seconds)), flush=True)
            return
        if arguments.what == "load":
            # A batch has more groups than fit in flight, so that requests wait for a slot as well.
            prompts = arguments.in_flight * 5 // 4
            config = config_of(
                Path(root),
                prompts=prompts,
                staleness=0,
                per_engine=arguments.in_flight // 4,
                steps=-(-arguments.samples // (prompts * 8)),
            )
            with fake_engines(4, seconds=arguments.seconds, tokens=16) as endpoints:
                print(json.dumps(asyncio.run(load(config, engines_of(endpoints))), indent=1))
            return
        found = {}
        with fake_engines(1, seconds=arguments.seconds, tokens=16) as endpoints:
            for staleness in (0, 1):
                config = config_of(Path(root), prompts=32, staleness=staleness, per_engine=64, steps=arguments.steps)
                found[staleness] = asyncio.run(overlap(config, engines_of(endpoints), arguments.train_seconds))
        longer = max(arguments.seconds, arguments.train_seconds)
        for staleness, seconds in found.items():
            ratio = f"{seconds / longer:.2f} x the longer of generation and training"
            print(f"max_staleness {staleness}: {seconds:.3f} s a step, {ratio}")


if __name__ == "__main__":
    main()
