"""What happens to a group once its samples are generated: rewards, the user's hook, the filter.
Counts what it takes out."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rltool.config.import_path import load_callable
from rltool.config.own_functions import named
from rltool.config.rollout import RolloutConfig
from rltool.errors import TrainingStopped, UsageError
from rltool.rollout.json_fields import unwritable
from rltool.rollout.rewards.pool import RewardFailure
from rltool.rollout.rewards.worker import describe
from rltool.rollout.sample import Sample, SampleStatus
from rltool.rollout.serving.model_clients import TooSlow

Decode = Callable[[Sequence[int]], str]
GroupFilter = Callable[[list[Sample]], str | None]
GroupHook = Callable[[list[Sample]], None]


class Rewards(Protocol):
    """reward_pool.RewardPool."""

    async def score(self, samples: list[Sample], texts: list[str]) -> list[float | RewardFailure]: ...


class RewardsTogether(Protocol):
    """group_reward.GroupReward."""

    async def apply(self, samples: list[Sample], texts: list[str]) -> None: ...


@dataclass
class ScoreStats:
    """Samples since the last batch. seconds: summed over groups, which overlap with generation and with each other."""

    scored: int = 0
    failed: int = 0
    aborted: int = 0
    groups: int = 0
    seconds: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)

    def describe(self) -> str:
        """One line for an error message or a log."""
        shown = "; ".join(f"{count} x {reason}" for reason, count in self.reasons.most_common(3))
        return f"{self.failed} of {self.scored} samples failed: {shown}"


def equal_rewards(group: list[Sample]) -> str | None:
    """DAPO's dynamic sampling (Yu et al. 2025, arXiv 2503.14476, eq. 11):
    a group whose rewards are all equal has no advantage."""
    return "equal_rewards" if len({sample.reward for sample in group}) < 2 else None


def load_filter(config: RolloutConfig) -> GroupFilter | None:
    """rollout.group_filter as a function; UsageError for an import path that leads nowhere. FunctionFailed for what one
    of the user's raises."""
    if config.group_filter == "none":
        return None
    if config.group_filter == "equal_rewards":
        return equal_rewards
    function = load_callable(config.group_filter, setting="rollout.group_filter", takes=("group",))
    return named(function, f"rollout.group_filter = {config.group_filter!r}")


def load_hook(config: RolloutConfig) -> GroupHook | None:
    """rollout.group_hook as a function. Errors as for `load_filter`."""
    if config.group_hook is None:
        return None
    function = load_callable(config.group_hook, setting="rollout.group_hook", takes=("group",))
    return named(function, f"rollout.group_hook = {config.group_hook!r}")


@dataclass(frozen=True)
class FailureLimit:
    """How many rewards may fail: this fraction of a batch's samples, of which there are `batch_samples` >= 1."""

    fraction: float = 1.0
    batch_samples: int = 1


class Scorer:
    """Scores groups one by one, side by side. function: what messages call the reward function."""

    def __init__(
        self,
        rewards: Rewards,
        decode: Decode,
        *,
        group_filter: GroupFilter | None = None,
        group_hook: GroupHook | None = None,
        group_reward: RewardsTogether | None = None,
        may_fail: FailureLimit = FailureLimit(),
        function: str = "the reward function",
    ) -> None:
        self._rewards, self._decode, self._filter, self._hook = rewards, decode, group_filter, group_hook
        self._group_reward = group_reward
        self._may_fail, self._function = may_fail, function
        self.stats = ScoreStats()

    async def rewards_of(self, samples: list[Sample]) -> ScoreStats:
        """Set each sample's reward: its episode's, where an environment or agent gave one, else that of the reward
        function; and what its turns have earned besides. A sample whose reward failed is FAILED and has none, as is one
        that failed before. Texts are decoded whole, environment tokens included."""
        started = asyncio.get_running_loop().time()
        stats = ScoreStats(scored=len(samples), groups=1)
        left: list[Sample] = []
        last = {(sample.group_id, sample.index): sample for sample in samples}
        earned: defaultdict[tuple[int, int], float] = defaultdict(float)
        for sample in samples:
            earned[sample.group_id, sample.index] += sample.earned
        for sample in samples:
            if sample.status is SampleStatus.FAILED:
                sample.reward = None
                stats.failed += 1
                stats.reasons[sample.failure or "failed while it was generated"] += 1
            elif sample.episode_reward is not None:
                sample.reward = sample.episode_reward + earned[sample.group_id, sample.index]
            elif last[sample.group_id, sample.index] is sample:
                left.append(sample)
        texts = await self._texts(left)
        values = await self._rewards.score(left, texts) if left else []
        for sample, value in zip(left, values, strict=True):
            if isinstance(value, RewardFailure):
                sample.reward, sample.status = None, SampleStatus.FAILED
                stats.failed += 1
                stats.reasons[value.reason] += 1
            else:
                sample.reward = value + earned[sample.group_id, sample.index]
        for sample in samples:
            # An episode of an agent has one reward, that of what it has come to in the end.
            if sample.status is not SampleStatus.FAILED and sample.episode_reward is None:
                scored = last[sample.group_id, sample.index]
                sample.reward = scored.reward
                sample.train_metadata = {**scored.train_metadata, **sample.train_metadata}
                if sample.reward is None:
                    sample.status = SampleStatus.FAILED
        stats.seconds = asyncio.get_running_loop().time() - started
        return stats

    async def finish(self, samples: list[Sample]) -> str | None:
        """Score a group, take failed and aborted samples out of the list, apply group reward, hook and filter.

        Returns why the group is dropped: "aborted" or "reward_failed" where no sample is left, the filter's reason, or
        None. TrainingStopped when rewards fail for more than reward.max_failure_fraction of a batch: the samples are
        then as they were, for the run that resumes to score them again. UsageError for train_metadata that is no JSON,
        on which the next checkpoint would fail.
        """
        finished = [sample for sample in samples if sample.status is not SampleStatus.ABORTED]
        self.stats.aborted += len(samples) - len(finished)
        samples[:] = finished
        if not samples:
            return "aborted"
        statuses = [sample.status for sample in finished]
        try:
            await self._score(samples)
        except TrainingStopped:
            samples[:] = finished
            for sample, status in zip(finished, statuses, strict=True):
                sample.status = status
            raise
        if not samples:
            return "reward_failed"
        if self._hook is not None:
            await asyncio.to_thread(self._hook, samples)
        for refused in filter(None, (unwritable(sample, ("train_metadata",)) for sample in samples)):
            raise UsageError(f"{refused}: keep it to text, finite numbers, lists and objects; a tensor's is .item()")
        if self._filter is None:
            return None
        reason = await asyncio.to_thread(self._filter, samples)
        if reason is not None and not isinstance(reason, str):
            raise UsageError(
                f"rollout.group_filter returned {type(reason).__name__}; "
                "expected the reason for dropping the group, or None"
            )
        return reason

    async def _score(self, samples: list[Sample]) -> None:
        """Rewards, then that of the group; samples without one are taken out."""
        self._add(await self.rewards_of(samples))
        self.check()
        samples[:] = [sample for sample in samples if sample.status is not SampleStatus.FAILED]
        if samples and self._group_reward is not None:
            self._add(await self._reward_together(samples, self._group_reward))
            self.check()

    async def _reward_together(self, samples: list[Sample], group_reward: RewardsTogether) -> ScoreStats:
        """A failure is that of all samples: they are FAILED and taken out."""
        try:
            await group_reward.apply(samples, await self._texts(samples))
        except (Exception, SystemExit) as error:  # a user's code may raise anything
            reason = f"reward.group: {error}" if isinstance(error, TooSlow) else describe(error)
            stats = ScoreStats(failed=len(samples), reasons=Counter({reason: len(samples)}))
            for sample in samples:
                sample.reward, sample.status = None, SampleStatus.FAILED
            samples.clear()
            return stats
        return ScoreStats()

    async def _texts(self, samples: list[Sample]) -> list[str]:
        return await asyncio.to_thread(lambda: [self._decode(sample.response_ids) for sample in samples])

    def take_stats(self) -> ScoreStats:
        """Counts since the last call."""
        stats, self.stats = self.stats, ScoreStats()
        return stats

    def check(self) -> None:
        """TrainingStopped as soon as a whole batch cannot come below the limit any more.

        The share is of a batch at least: an asynchronous run may have scored a single group since the last one.
        """
        if self.stats.failed / max(self.stats.scored, self._may_fail.batch_samples) > self._may_fail.fraction:
            raise TrainingStopped(
                f"{self.stats.describe()}. That is above reward.max_failure_fraction = "
                f"{self._may_fail.fraction:g}: check {self._function}"
            )

    def _add(self, more: ScoreStats) -> None:
        self.stats.scored += more.scored
        self.stats.failed += more.failed
        self.stats.groups += more.groups
        self.stats.seconds += more.seconds
        self.stats.reasons.update(more.reasons)
