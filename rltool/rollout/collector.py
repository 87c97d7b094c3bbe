"""From prompts to batches: one task a group (generate, score, filter), admitted, collected in order, and never lost.

What may start and what makes a batch is decided in admission.py; what a group is and how it ends, in groups.py. Here
are the tasks. Synchronous, one step off-policy and asynchronous rollouts differ in the policy's numbers alone: with
max_staleness 0 a batch's groups start when it is asked for, else they start whenever the policy lets them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rltool.config.own_functions import raised
from rltool.errors import EngineError, EngineRejected, RltoolError, TrainingStopped
from rltool.processes.tasks import Background
from rltool.rollout.admission import AdmissionPolicy, Candidate, choose
from rltool.rollout.data import PromptSupply
from rltool.rollout.groups import Group, GroupLedger, GroupState, is_complete, new_samples
from rltool.rollout.serving.data_plane import PoisonousRequest

INTERRUPT_SECONDS = 10.0
"""How long a group that is put aside may take to return what it has; then, if it is still being generated,
its task is cancelled and its open requests are lost."""


class CollectionInterrupted(RltoolError):
    """The batch that was waited for will not come: the run is stopping."""


class GroupFailed(RltoolError):
    """The task of a group raised what is none of our errors, which is the cause."""


class Published(Protocol):
    """The part of the version book that admission reads."""

    published: int | None


class GroupWork(Protocol):
    """What is done with one group."""

    async def generate(self, group: Group, interrupted: Callable[[], bool]) -> None:
        """Fill its samples in place. Once `interrupted` is True, come back with what there is."""
        ...

    async def finish(self, group: Group) -> str | None:
        """Score and filter its samples, in place. Returns why the group is dropped, or None."""
        ...

    async def abort(self, groups: Collection[int]) -> None:
        """Have the engines return what they have of these groups' requests."""
        ...

    def keeps_partial_groups(self) -> bool:
        """Whether an interrupted group can go on where it stood (not so with state in a custom function)."""
        ...


@dataclass(frozen=True)
class CollectorConfig:
    """samples_per_prompt and run_seed make the groups; deadlines in seconds;
    max_filtered: groups filtered out for one batch; max_failed: groups that engines failed on, for one batch.
    judges_age False: versions are another run's, no group is too old."""

    samples_per_prompt: int
    run_seed: int
    group_deadline: float
    batch_deadline: float
    max_filtered: int
    max_failed: int = 0
    judges_age: bool = True


@dataclass
class Collected:
    """A batch. seconds: since it was asked for; interval: since the batch before (or the first start); tokens: sampled
    in it, by all groups that ended generation. dropped, resampled, interrupted: groups since the batch before;
    resampled_tokens: what was thrown away of those sampled again. filtered_reward: mean reward of the samples of
    scored groups that were dropped, None without any."""

    groups: list[Group]
    seconds: float
    interval: float
    tokens: int
    dropped: Counter[str]
    resampled: int
    resampled_tokens: int
    interrupted: int
    filtered_reward: float | None = None


@dataclass
class _Since:
    """Counts since the last batch."""

    at: float
    tokens: int = 0
    failed: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    resampled: int = 0
    resampled_tokens: int = 0
    interrupted: int = 0
    filtered_rewards: float = 0.0
    filtered_samples: int = 0
    filtered_groups: int = 0
    """Of which every sample was scored."""
    filtered_equal: Counter[float] = field(default_factory=Counter)
    """Reward -> those of them of which every sample had it."""

    @property
    def filtered_reward(self) -> float | None:
        return self.filtered_rewards / self.filtered_samples if self.filtered_samples else None

    def add_filtered(self, group: Group, reason: str) -> None:
        self.dropped[reason] += 1
        rewards = [sample.reward for sample in group.samples if sample.reward is not None]
        self.filtered_rewards += sum(rewards)
        self.filtered_samples += len(rewards)
        if len(rewards) == len(group.samples):
            self.filtered_groups += 1
            if len(set(rewards)) == 1:
                self.filtered_equal[rewards[0]] += 1

    def filtered_scores(self) -> str:
        """What the dropped groups have scored, for an error; "" where none was scored. Right and wrong are, as a rule,
        the two rewards that most groups of equal ones have."""
        if self.filtered_reward is None:
            return ""
        shares = ((reward, count / self.filtered_groups) for reward, count in self.filtered_equal.most_common(2))
        return f"; the mean reward of those that were scored is {self.filtered_reward:.3g}" + "".join(
            f"; {share:.0%} of them got {reward:.3g} for every sample" for reward, share in shares
        )


class Collector:
    """Owned by one event loop. delivered: batches handed out since the run's first step,
    which is the step of the next one."""

    competing = (GroupState.RUNNING, GroupState.PARTIAL, GroupState.READY)
    """Groups that the next batch may wait for."""

    def __init__(
        self,
        source: PromptSupply,
        policy: AdmissionPolicy,
        work: GroupWork,
        versions: Published,
        config: CollectorConfig,
        *,
        on_event: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """on_event: called after every change of a group."""
        self.source, self.policy, self.versions, self.config = source, policy, versions, config
        self.ledger = GroupLedger()
        self.delivered = 0
        self._work, self._judges_age, self._on_event, self._clock = work, config.judges_age, on_event, clock
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._scoring: set[int] = set()  # of the groups with a task those whose generation has ended
        self._putting_aside: set[int] = set()
        self._background = Background(self.fail)
        self._changed = asyncio.Event()
        self._requested = False
        self._ages_due = False  # whether a ready group may be too old for the next batch
        self._set_aside: dict[int, Group] = {}  # that were made partial since the last look at those
        self._looked: tuple[int | None, bool] | None = None  # version and request at the last look at all of them
        self._stopped = False
        self._failure: BaseException | None = None
        self._since = _Since(clock())

    # -- what the owner calls

    def weights_published(self) -> None:
        """Engines serve newer weights: more groups may start."""
        self._admit()

    async def next(self, step: int) -> Collected:
        """The batch of training step `step`, groups in the order of their numbers; the batch before counts as trained.

        Raises the first failure of a group's task, TrainingStopped when too many groups were filtered out,
        CollectionInterrupted after `interrupt`, and RltoolError when deadlines.step passes.
        """
        if step != self.delivered:
            raise ValueError(f"batch {step} was asked for, the next one is {self.delivered}")
        self.trained()
        started = self._clock()
        self._requested = self._ages_due = True
        try:
            async with asyncio.timeout(self.config.batch_deadline):
                groups = await self._complete(step)
        except TimeoutError as error:
            counts = self.ledger.counts()
            raise RltoolError(
                f"the batch of step {step} was not complete within "
                f"deadlines.step = {self.config.batch_deadline:g} s: {counts}"
            ) from error
        finally:
            self._requested = False
        now = self._clock()
        since, self._since = self._since, _Since(now)
        self._admit()
        return Collected(
            groups,
            now - started,
            now - (started if self.policy.max_staleness == 0 else since.at),
            since.tokens,
            since.dropped,
            since.resampled,
            since.resampled_tokens,
            since.interrupted,
            since.filtered_reward,
        )

    def trained(self) -> None:
        """The trainer has made its optimizer steps on the batch in hand."""
        for group in self.ledger.groups(GroupState.IN_HAND):
            self._move(group, GroupState.TRAINED)

    async def interrupt(self) -> None:
        """End every task now; nothing starts any more. Groups that ran are partial,
        with the tokens of requests that had ended."""
        self._stopped = True
        await self._background.close()
        for group in self.ledger.groups(GroupState.RUNNING):  # its task was cancelled before it had begun
            self._set_back(group)
        self._changed.set()

    def fail(self, error: RltoolError) -> None:
        """Whoever waits for a batch, now or next, gets this error: it will not come."""
        self._fail(error)
        self._changed.set()

    def restore(self, groups: Sequence[Group], *, issued: int, delivered: int, dropped: Mapping[str, int]) -> None:
        """The open groups of a checkpoint; nothing may have started yet."""
        self.ledger.issued, self.ledger.dropped, self.delivered = issued, Counter(dropped), delivered
        for group in groups:
            self.ledger.restore(group)
        # What is neither here nor dropped was trained before the checkpoint.
        self.ledger.trained = issued - len(groups) - self.ledger.dropped.total()
        self._on_event()

    # -- starting

    def _admit(self) -> None:
        if self._stopped or self._failure is not None:
            return
        is_open = self.versions.published is not None and (self._requested or self.policy.max_staleness > 0)
        counts = self.ledger.counts()
        now = self.versions.published, self._requested
        if is_open and counts["partial"]:
            # Those that wait are not all looked at by each group that ends.
            news = sorted(self._set_aside.items()) if now == self._looked else None
            found = [group for _, group in news] if news is not None else self.ledger.groups(GroupState.PARTIAL)
            self._looked, self._set_aside = now, {}
            for group in found:
                # One that was put aside goes on under the next weights, or it would be sampled further under those it
                # was cut off at.
                waits = group.put_aside_at == self.versions.published and not self._requested
                if group.state is GroupState.PARTIAL and group.id not in self._tasks and not waits:
                    self._start(group)
        capacity = self.policy.capacity(
            published=self.versions.published,
            delivered=self.delivered,
            live=counts["running"] + counts["partial"] + counts["ready"],
            requested=self._requested,
        )
        if capacity:
            for prompt in self.source.next(capacity):
                group = self.ledger.issue(
                    prompt, samples_per_prompt=self.config.samples_per_prompt, run_seed=self.config.run_seed
                )
                self._run_task(group)
            self._on_event()

    def _start(self, group: Group) -> None:
        self._move(group, GroupState.RUNNING)
        self._run_task(group)

    def _run_task(self, group: Group) -> None:
        if group.started_at is None:
            group.started_at = self.versions.published
        task = self._tasks[group.id] = self._background.start(self._run(group), f"group {group.id}")
        task.add_done_callback(lambda _: self._ended(group))

    async def _run(self, group: Group) -> None:
        before, deadline = sampled_tokens(group), asyncio.timeout(self.config.group_deadline)
        try:
            async with deadline:
                await self._work.generate(group, lambda: group.id in self._putting_aside)
            self._since.tokens += sampled_tokens(group) - before
            if group.id in self._putting_aside and not is_complete(group.samples):
                self._move(group, GroupState.PARTIAL)
                return
            self._scoring.add(group.id)
            reason = await self._work.finish(group)
            if reason is not None:
                self._since.add_filtered(group, reason)
            self._move(group, GroupState.READY if reason is None else GroupState.DROPPED, reason)
            self._ages_due |= self._judges_age and self.policy.is_too_old(group.oldest_version, self.delivered)
        except asyncio.CancelledError:
            self._set_back(group)
            raise
        except (EngineRejected, PoisonousRequest) as error:
            self._lose(group, error)
        except Exception as error:
            self._set_back(group)
            if isinstance(error, TimeoutError) and deadline.expired():
                seconds = self.config.group_deadline
                error = RltoolError(f"group {group.id} was not generated within deadlines.group = {seconds:g} s")
            self._failed_at(group, error)

    def _ended(self, group: Group) -> None:
        """Of its task, also where that was cancelled before its first line."""
        del self._tasks[group.id]
        self._scoring.discard(group.id)
        self._putting_aside.discard(group.id)
        self._note_partial(group)
        self._changed.set()
        try:
            self._admit()
        except Exception as error:  # of where prompts come from
            self._failed_at(group, error)

    def _failed_at(self, group: Group, error: Exception) -> None:
        if not isinstance(error, RltoolError):  # unexpected; the trainer's state is whole, and is to be saved
            failure = GroupFailed(f"group {group.id}: {raised(error)}")
            failure.__cause__ = error
            error = failure
        self._fail(error)

    def _set_back(self, group: Group) -> None:
        """Its task ended early. Where it was still generated, what a function or an environment holds cannot be taken
        up again, whatever its samples' status: between two turns they are COMPLETED, as the last reply was."""
        if not self._work.keeps_partial_groups() and group.id not in self._scoring:
            self._restart(group)
        if group.state is GroupState.RUNNING:
            self._move(group, GroupState.PARTIAL)

    def _lose(self, group: Group, error: EngineError) -> None:
        """Engines cannot generate this group: it is dropped, unless that happens too often."""
        self._since.failed += 1
        reason = "rejected" if isinstance(error, EngineRejected) else "poisonous"
        if self._since.failed > self.config.max_failed:
            self._set_back(group)
            self._fail(
                TrainingStopped(
                    f"engines failed on {self._since.failed} groups for one batch, more than "
                    f"rollout.max_failed_fraction allows ({self.config.max_failed}); the last one: {error}"
                )
            )
        else:
            self._since.dropped[reason] += 1
            self._move(group, GroupState.DROPPED, reason)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error

    # -- collecting

    async def _complete(self, step: int) -> list[Group]:
        while True:
            self._changed.clear()
            if self._failure is not None:
                await self.interrupt()
                raise self._failure
            if self._stopped:
                raise CollectionInterrupted(f"the rollout of step {step} was interrupted: the run is stopping")
            self._admit()
            groups = self._take(step)
            if groups is not None:
                return groups
            if self._since.dropped.total() >= self.config.max_filtered:
                raise TrainingStopped(
                    f"step {step}: {self._since.dropped.total()} groups were dropped ({dict(self._since.dropped)}) "
                    f"before {self.policy.batch} good ones were found (rollout.max_filtered_batches)"
                    f"{self._since.filtered_scores()}: are the prompts all too easy or too hard for "
                    "rollout.group_filter?"
                )
            await self._changed.wait()

    def _take(self, step: int) -> list[Group] | None:
        # Each group that ends wakes this up: thousands of them must not look at thousands each time.
        if self.ledger.counts()["ready"] < self.policy.batch and not self._ages_due:
            return None
        self._ages_due = False
        live = {g.id: g for g in self.ledger.groups(*self.competing)}
        oldest = (lambda group: group.oldest_version) if self._judges_age else (lambda group: None)
        candidates = [
            Candidate(g.id, g.state is GroupState.READY, oldest(g), g.id in self._scoring) for g in live.values()
        ]
        choice = choose(self.policy, candidates, step)
        for number in choice.too_old:
            group = live[number]
            self._since.resampled += 1
            self._since.resampled_tokens += sampled_tokens(group)
            self._move(group, GroupState.PARTIAL)
            self._restart(group)
        if choice.too_old:
            self._admit()
        if choice.batch is None:
            return None
        batch = [live[number] for number in choice.batch]
        self.delivered += 1
        for group in batch:
            self._move(group, GroupState.IN_HAND)
        self._drop_surplus([live[number] for number in choice.surplus])
        if choice.interrupt:
            self._put_aside([live[number] for number in choice.interrupt])
        return batch

    def _drop_surplus(self, groups: Sequence[Group]) -> None:
        """They lost the race for a batch; their tasks, if any, end. One abort for all: each is calls to engines."""
        tasks = {group.id: task for group in groups if (task := self._tasks.get(group.id)) is not None}
        for group in groups:
            self._since.dropped["surplus"] += 1
            self._move(group, GroupState.DROPPED, "surplus")
        for task in tasks.values():
            task.cancel()
        if tasks:
            self._background.start(self._work.abort(tasks.keys()), "aborting surplus groups")

    def _put_aside(self, groups: Sequence[Group]) -> None:
        for group in groups:
            group.put_aside_at = self.versions.published
        running = {group.id: self._tasks[group.id] for group in groups if group.id in self._tasks}
        self._since.interrupted += len(running)
        self._putting_aside.update(running)
        if running:
            self._background.start(self._interrupt_groups(running), "interrupting groups")

    async def _interrupt_groups(self, running: Mapping[int, asyncio.Task[None]]) -> None:
        """running: their tasks when they were put aside. While the abort is waited for, a group may have been started
        again, and its new task is none of these."""
        try:
            await self._work.abort(running.keys())
            await asyncio.wait(running.values(), timeout=INTERRUPT_SECONDS)
        finally:  # an abort may raise anything: they end anyway
            for number, task in running.items():
                # Its request waits for an engine, or its environment for something else. One that was generated to its
                # end meanwhile is only scored.
                if not task.done() and number not in self._scoring:
                    task.cancel()

    def _restart(self, group: Group) -> None:
        group.restart(
            new_samples(group.id, group.prompt, count=self.config.samples_per_prompt, run_seed=self.config.run_seed)
        )

    def _move(self, group: Group, state: GroupState, reason: str | None = None) -> None:
        if group.state is GroupState.DROPPED:  # dropped while its task was ending
            return
        self.ledger.move(group, state, reason=reason)
        self._note_partial(group)
        self._on_event()

    def _note_partial(self, group: Group) -> None:
        if group.state is GroupState.PARTIAL:
            self._set_aside[group.id] = group


def sampled_tokens(group: Group) -> int:
    """By the policy, in all of its samples."""
    return sum(sum(sample.response_mask) for sample in group.samples)
