"""Metrics of a step as a whole, from those of its parts. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def step_speed(metrics: Mapping[str, float], *, tokens: int, ranks: int) -> dict[str, float]:
    """metrics: of a finished step; tokens: of its batch, prompts included; ranks: of the trainer, one a GPU.

    time/non_generation_seconds is the part of the step not spent waiting for samples: in a synchronous run
    the engines' idle time.
    """
    found: dict[str, float] = {}
    seconds = metrics.get("time/train_seconds", 0.0)
    if seconds > 0:
        found["train/tokens_per_second"] = tokens / seconds
        found["train/tokens_per_second_per_gpu"] = tokens / seconds / ranks
    if "time/wait_seconds" in metrics and "time/step_seconds" in metrics:
        found["time/non_generation_seconds"] = metrics["time/step_seconds"] - metrics["time/wait_seconds"]
    return found
