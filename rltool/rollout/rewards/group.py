"""What is done with the rewards of one prompt's samples together: ranks, comparisons, an own function."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from rltool.config.import_path import load_callable
from rltool.config.reward import SHIPPED_FOR_GROUPS, RewardConfig
from rltool.errors import UsageError
from rltool.processes.tasks import beside
from rltool.rollout.rewards.pool import CONTEXT, is_async, look_at, wants_context
from rltool.rollout.rewards.worker import describe, finite
from rltool.rollout.sample import Sample
from rltool.rollout.serving.model_clients import Models, RewardContext, TooSlow, ended_in_time

SETTING = "reward.group"


def rank(group: list[Sample], texts: list[str]) -> list[float]:
    """Each sample's rank by its reward, 0 for the worst to 1 for the best; equal rewards share the mean of their ranks.

    Groups of any spread of rewards then weigh the same. A group of one, and one of equal rewards, gets 0.5.
    """
    rewards = [sample.reward or 0.0 for sample in group]
    if len(rewards) == 1:
        return [0.5]
    return [
        (sum(other < own for other in rewards) + (sum(other == own for other in rewards) - 1) / 2) / (len(rewards) - 1)
        for own in rewards
    ]


class GroupReward:
    """reward.group as a run calls it. A plain function runs in a thread, an async one on the event loop, where it may
    take `context`. timeout: seconds for one group."""

    def __init__(self, config: RewardConfig, *, timeout: float, models: Models) -> None:
        self._function = load_group_reward(config)
        self._options = dict(config.group_options)
        asks = wants_context(self._function)
        self._models = models if asks else Models()
        if asks:
            self._options[CONTEXT] = RewardContext(models)
        self._timeout = timeout

    async def apply(self, samples: list[Sample], texts: list[str]) -> None:
        """Replace each sample's reward; the one before is kept in raw_reward. Raises what the function raises,
        ValueError for anything but one finite number for each sample, TooSlow."""
        # Its end is not waited for: a function may ignore its cancellation.
        async with beside(self._values(samples, texts), grace=0) as (scoring,):
            scoring.add_done_callback(look_at)
            late = await ended_in_time([scoring], self._timeout, self._models)
            if late is not None:
                raise TooSlow(late)
            values = scoring.result()
        numbers = _checked(values, len(samples))
        for sample, value in zip(samples, numbers, strict=True):
            sample.raw_reward, sample.reward = sample.reward, value

    async def _values(self, samples: list[Sample], texts: list[str]) -> Any:
        function: Callable[..., Any] = self._function
        try:
            if is_async(function):
                return await function(samples, texts, **self._options)
            return await asyncio.to_thread(function, samples, texts, **self._options)
        except SystemExit as error:  # of a task it would end the event loop
            raise RuntimeError(describe(error)) from error


def _checked(values: Any, count: int) -> list[float]:
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != count:
        found = f"{len(values)} values" if isinstance(values, Sequence) else type(values).__name__
        raise ValueError(f"{SETTING} returned {found} for a group of {count} samples")
    return [finite(value) for value in values]


def load_group_reward(config: RewardConfig) -> Callable[..., Any]:
    """reward.group as a function; UsageError for what is none, or does not take its options."""
    shipped = SHIPPED_FOR_GROUPS.get(config.group)
    path = shipped.path if shipped is not None else config.group
    function = load_callable(path, setting=SETTING)
    options = [*config.group_options, *([CONTEXT] if wants_context(function) else [])]
    if wants_context(function) and not is_async(function):
        raise UsageError(f"{SETTING} = {config.group!r} takes a context, so it must be `async def`")
    return load_callable(path, setting=SETTING, takes=("group", "texts"), options=options)
