"""The rewards of a run: one function, or several that are added up or chosen by a field of each sample."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rltool.config.reward import RewardConfig
from rltool.rollout.rewards.pool import RewardFailure, RewardPool, load_reward
from rltool.rollout.sample import Sample
from rltool.rollout.serving.model_clients import Models


class Part(NamedTuple):
    name: str
    weight: float
    pool: RewardPool


class RewardParts:
    """Several rewards as one. A sample's reward is the sum of its parts times their weights, and its `reward_parts`
    hold the parts. select_by: see RewardConfig."""

    def __init__(self, parts: Sequence[Part], *, select_by: str | None = None) -> None:
        self._parts, self._select_by = parts, select_by

    async def score(self, samples: list[Sample], texts: list[str]) -> list[float | RewardFailure]:
        """As RewardPool.score. A sample fails where one of its parts fails, or select_by leads to none."""
        scored = await asyncio.gather(*(self._score_part(part, samples, texts) for part in self._parts))
        outcomes: list[float | RewardFailure] = []
        for number, sample in enumerate(samples):
            values = {
                part.name: found[number]
                for part, found in zip(self._parts, scored, strict=True)
                if number in found
            }  # fmt: skip
            outcomes.append(self._total(sample, values))
        return outcomes

    async def _score_part(
        self, part: Part, samples: list[Sample], texts: list[str]
    ) -> dict[int, float | RewardFailure]:
        """Of the samples that it scores, by number."""
        own = [number for number, sample in enumerate(samples) if self._scores(part, sample)]
        if not own:
            return {}
        values = await part.pool.score([samples[number] for number in own], [texts[number] for number in own])
        return dict(zip(own, values, strict=True))

    def _scores(self, part: Part, sample: Sample) -> bool:
        return self._select_by is None or sample.metadata.get(self._select_by) == part.name

    def _total(self, sample: Sample, values: dict[str, float | RewardFailure]) -> float | RewardFailure:
        if not values:
            found = sample.metadata.get(self._select_by or "")
            names = ", ".join(part.name for part in self._parts)
            return RewardFailure(f"metadata[{self._select_by!r}] is {found!r}, which is none of reward.parts: {names}")
        numbers: dict[str, float] = {}
        for name, value in values.items():
            if isinstance(value, RewardFailure):
                return RewardFailure(f"{name}: {value.reason}")
            numbers[name] = value
        sample.reward_parts = numbers
        return sum(part.weight * numbers[part.name] for part in self._parts if part.name in numbers)

    async def close(self) -> None:
        await asyncio.gather(*(part.pool.close() for part in self._parts))


def start_rewards(config: RewardConfig, *, timeout: float, models: Models) -> RewardPool | RewardParts:
    """The rewards of a run, their workers started. timeout: seconds for each sample. UsageError for one that cannot be
    imported."""

    def pool(function: str, options: Mapping[str, Any]) -> RewardPool:
        return RewardPool(
            function, options=options, workers=config.workers, timeout=timeout, models=models
        )

    if not config.parts:
        return pool(config.function, config.options)
    check_rewards(config)  # all of them before the first process
    return RewardParts(
        [Part(part.name, part.weight, pool(part.function, part.options)) for part in config.parts],
        select_by=config.select_by,
    )


def check_rewards(config: RewardConfig) -> None:
    """UsageError for a reward that cannot be imported, lacks a package, or does not take its options."""
    if not config.parts:
        load_reward(config.function, config.options)
    for part in config.parts:
        load_reward(part.function, part.options, setting=f"reward.parts ({part.name})")
