"""Rollouts without a trainer: generate, score, write dumps. The same service as in training, in this process, without
Ray."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from rltool.agents.gateway_process import GatewayPlace
from rltool.config.train import TrainConfig
from rltool.engines.dialects import supported
from rltool.engines.dialects.protocol import PauseMode
from rltool.engines.fleet.state import gpus_of
from rltool.rollout.measure.dump import about_model, write_dump
from rltool.training.engine_benchmark import Totals, simulate_sync
from rltool.training.manager.rollout_engines import Engines
from rltool.training.manager.service import RolloutService
from rltool.training.observe.metrics import step_line


def record_rollouts(
    config: TrainConfig, engines: Engines, directory: Path, *, simulated_sync: float | None = None,
    log: Callable[[str], None],
) -> None:  # fmt: skip
    """Write config.steps dumps, from step 0. log(line): one line per step, once it is on disk, and what the engines
    have done in all. simulated_sync: seconds for which they are paused before each rollout but the first, as a trainer
    would pause them to send weights.

    The engines may hold any weights: a version is recorded where there is one, and not required.
    """
    recorded = config.model_copy(update={"rollout": config.rollout.model_copy(update={"dump": True})})
    directory.mkdir(parents=True, exist_ok=True)
    try:
        asyncio.run(_until_terminated(_record(recorded, engines, directory, simulated_sync, log)))
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None


async def _until_terminated(work: Coroutine[Any, Any, None]) -> None:
    """SIGTERM ends it in order: what it has started ends too, such as the gateway."""
    task = asyncio.current_task()
    assert task is not None
    with contextlib.suppress(ValueError, RuntimeError):  # not in the main thread: who runs this ends it
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await work


async def _record(
    config: TrainConfig, engines: Engines, directory: Path, simulated_sync: float | None, log: Callable[[str], None]
) -> None:
    place = GatewayPlace(directory / "sessions", directory / "gateway.key", directory / "gateway.log")
    service, totals = RolloutService(config, engines, log=log, gateway=place), Totals()
    try:
        await service.start()
        for step in range(config.steps):
            if simulated_sync is not None and step > 0:
                asked, infos = config.weights.pause_mode, engines.infos
                modes: dict[str, PauseMode] = {
                    e.url: supported.pause_mode(asked, infos[e.url].dialect, infos[e.url].engine_version, e.role)
                    for e in engines.endpoints
                }
                totals.pauses.append(
                    await simulate_sync(
                        engines.endpoints, modes, seconds=simulated_sync, timeout=config.deadlines.sync
                    )
                )
            started = time.perf_counter()
            rollout = await service.next_batch(step)
            totals.add(rollout.metrics, time.perf_counter() - started)
            await asyncio.to_thread(  # with rollout.max_staleness, requests go on
                write_dump, directory, step=step, seed=config.seed, samples=rollout.samples,
                info={"metrics": rollout.metrics, **about_model(config)},
            )  # fmt: skip
            log(step_line(step, config.steps, rollout.metrics))
        for line in totals.lines(gpus=gpus_of(service.fleet.members())):
            log(line)
    finally:
        await service.close()
