"""What the rollout manager itself costs, against engines that answer by the clock: no model, no trainer, no Ray.

    python -m benchmarks.rollout_manager load        100,000 samples, 2,000 requests in flight: CPU per sample, memory
    python -m benchmarks.rollout_manager overlap     seconds per step where generation and training take a set time each

`load`: each of four fake engines is a process of its own and takes `--seconds` for a request of eight samples.
`overlap`: generation takes about `--seconds`, training `--train-seconds`; the step is compared with the longer of the
two, for max_staleness 0 and 1. Weight syncs are left out of it: what takes part is admission, collection, rewards and
the batch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from rltool.config.train import TrainConfig
from rltool.engines.endpoints import EngineEndpoint, ModelEndpoints
from rltool.engines.types import EngineInfo
from rltool.quickstart.tiny_model import make_tiny_model
from rltool.training.checks.preflight import probe_fleet
from rltool.training.manager.rollout_engines import Engines
from rltool.training.manager.service import RolloutService


def constant_reward(sample: object, text: str) -> float:
    return 1.0


@contextmanager
def fake_engines(count: int, *, seconds: float, tokens: int) -> Iterator[list[EngineEndpoint]]:
    """So many processes; they end when their standard input is closed."""
    argv = [sys.executable, "-m", "benchmarks.fake_engine", "--seconds", str(seconds), "--tokens", str(tokens)]
    processes = [subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        urls = [process.stdout.readline().split()[1] for process in processes if process.stdout]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("load", "overlap"))
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--in-flight", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--train-seconds", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
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
