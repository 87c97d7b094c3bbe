"""Evaluation without a trainer: the same service as in training, in this process, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rltool.config.train import TrainConfig
from rltool.errors import UsageError
from rltool.rollout.evaluation import Evaluated
from rltool.training.rollout_engines import Engines
from rltool.training.rollout_service import RolloutService


def evaluate_alone(config: TrainConfig, engines: Engines, *, say: Callable[[str], None]) -> Evaluated:
    """Every set of [eval] with the engines as they are. UsageError where there is no set."""
    if not config.eval.sets:
        raise UsageError("eval.sets names no set: give one with --set eval.sets.NAME=prompts.jsonl")
    # Training data is not read: the service wants prompts, and these are there anyway.
    data = config.data.model_copy(update={"train": tuple(config.eval.sets.values()), "weights": (), "source": None})
    return asyncio.run(_evaluate(config.model_copy(update={"data": data}), engines, say))


async def _evaluate(config: TrainConfig, engines: Engines, say: Callable[[str], None]) -> Evaluated:
    service = RolloutService(config, engines, log=say)
    try:
        await service.start()
        return await service.evaluate()
    finally:
        await service.close()
