"""Evaluation without a trainer: the same service as in training, in this process, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rltool.config.train import TrainConfig
from rltool.errors import UsageError
from rltool.rollout.data.spec import parse_spec
from rltool.rollout.measure.evaluation import Evaluated
from rltool.training.checks.validate import check_data_files, check_model_directory
from rltool.training.manager.rollout_engines import Engines
from rltool.training.manager.service import RolloutService


def check_alone(config: TrainConfig) -> None:
    """What can be known to be wrong before an engine is asked or started: model directory, sets and their files.
    UsageError."""
    check_model_directory(config.model.path)
    if not config.eval.sets:
        raise UsageError("eval.sets names no set: give one with --set eval.sets.NAME=prompts.jsonl")
    check_data_files((f"eval.sets.{name}", parse_spec(held_out)) for name, held_out in config.eval.sets.items())


def evaluate_alone(config: TrainConfig, engines: Engines, *, log: Callable[[str], None]) -> Evaluated:
    """Every set of [eval] with the engines as they are. The configuration has passed `check_alone`."""
    # Training data is not read: the service wants prompts, and these are there anyway.
    data = config.data.model_copy(update={"train": tuple(config.eval.sets.values()), "weights": (), "source": None})
    return asyncio.run(_evaluate(config.model_copy(update={"data": data}), engines, log))


async def _evaluate(config: TrainConfig, engines: Engines, log: Callable[[str], None]) -> Evaluated:
    service = RolloutService(config, engines, log=log)
    try:
        await service.start()
        return await service.evaluate()
    finally:
        await service.close()
