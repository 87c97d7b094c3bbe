"""Rollouts without a trainer: generate, score, write dumps. The same service as in training, in this process, without
Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from rltool.agents.gateway_process import GatewayPlace
from rltool.config.train import TrainConfig
from rltool.rollout.dump import write_dump
from rltool.training.metrics import step_line
from rltool.training.rollout_service import Engines, RolloutService


def record_rollouts(config: TrainConfig, engines: Engines, directory: Path, *, say: Callable[[str], None]) -> None:
    """Write config.steps dumps, from step 0. say(line): one line per step, once it is on disk.

    The engines' weights are whoever's they are: a version is recorded where there is one, and not demanded.
    """
    recorded = config.model_copy(update={"rollout": config.rollout.model_copy(update={"dump": True})})
    asyncio.run(_record(recorded, engines, directory, say))


async def _record(config: TrainConfig, engines: Engines, directory: Path, say: Callable[[str], None]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    place = GatewayPlace(directory / "sessions", directory / "gateway.key", directory / "gateway.log")
    service = RolloutService(config, engines, log=say, gateway=place)
    try:
        await service.start()
        for step in range(config.steps):
            rollout = await service.next_batch(step)
            write_dump(
                directory, step=step, seed=config.seed, samples=rollout.samples, info={"metrics": rollout.metrics}
            )
            say(step_line(step, config.steps, rollout.metrics))
    finally:
        await service.close()
