"""A rollout of the user's own, by import path (rollout.function): which prompts are taken, how they are sampled and
scored, and which groups make the batch.

The books stay the collector's. Groups are issued to the function under their running numbers, so seeds, checkpoints and
the staleness bound hold as ever: the function is called when the groups of a whole batch may start, and what it returns
is checked as if the run had generated it. What it was given and neither returns nor puts back is dropped, and counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from rltool.config.import_path import load_callable
from rltool.config.own_functions import named_async
from rltool.config.rollout import RolloutConfig
from rltool.errors import ContractViolation, RltoolError
from rltool.rollout.admission import AdmissionPolicy
from rltool.rollout.collector import Collector, CollectorConfig, GroupWork, Published, sampled_tokens
from rltool.rollout.data import PromptSupply
from rltool.rollout.generate import GenerateContext
from rltool.rollout.groups import Group, GroupState
from rltool.rollout.own_batch import SampleJudge

CALL = -1
"""In the place of a group's number: the task of the function's call."""
UNUSED = "unused"
"""Why a group was dropped that the function neither returned nor put back, unless the filter had a reason."""


class OwnWork(GroupWork, Protocol):
    """What the function can have done, beside what is done with one group."""

    def context(self) -> GenerateContext:
        """What generate functions get, for requests that are of no group."""
        ...


class RolloutContext:
    """What rollout.function gets.

    step: the training step that the batch is for; count: how many groups it is to return; generation: for requests of
    its own, as generate functions have it: `generate`, `sampling`, `tokenizer`, `http`, `model(NAME)`.
    """

    def __init__(self, collector: OwnCollector, step: int, count: int, generation: GenerateContext) -> None:
        self.step, self.count, self.generation = step, count, generation
        self._collector = collector
        self.reasons: dict[int, str] = {}
        """Group -> what rollout.group_filter, or a failed reward, has against it."""
        self.put_aside: set[int] = set()
        self.ended = False

    def groups(self, count: int) -> list[Group]:
        """The next groups: first those that were put back, or that a run which was resumed had begun; then new ones, of
        the data's next prompts. RltoolError after the call has ended: no other would end these groups."""
        if self.ended:
            raise RltoolError(f"context.groups: after rollout.function had ended its call for step {self.step}")
        return self._collector.issue(count)

    async def generate(self, group: Group) -> None:
        """Fill its samples as the run is configured to: built in, rollout.generate_function, environment or agent."""
        await self._collector.work.generate(group, lambda: False)

    async def score(self, group: Group) -> str | None:
        """Rewards, group reward, hook, filter, teacher and baseline, as configured. Samples that failed are taken out.
        Returns why the group should not be trained on, or None; the function may think otherwise."""
        reason = await self._collector.work.finish(group)
        if reason is not None:
            self.reasons[group.id] = reason
        return reason

    def put_back(self, group: Group) -> None:
        """Keep it, with what was sampled, for a later call; a run that resumes begins it anew."""
        self.put_aside.add(group.id)


RolloutFunction = Callable[[RolloutContext], Awaitable[Sequence[Group]]]
"""`async def f(context: RolloutContext) -> list[Group]`: context.count groups, each with scored samples."""


def load_rollout(config: RolloutConfig) -> RolloutFunction | None:
    """rollout.function as a function; None: the built-in rollout. UsageError for what is none. Called, it raises what
    the data plane does, and FunctionFailed for anything else."""
    if config.function is None:
        return None
    function = load_callable(config.function, setting="rollout.function", takes=("context",))
    return named_async(function, f"rollout.function = {config.function!r}")


class OwnCollector(Collector):
    """A collector whose groups come from one call of a function after the other, each for a whole batch."""

    competing = (GroupState.READY,)

    def __init__(
        self, function: RolloutFunction, judge: SampleJudge, source: PromptSupply, policy: AdmissionPolicy,
        work: OwnWork, versions: Published, config: CollectorConfig, **options: Any,
    ) -> None:  # fmt: skip
        """policy: without over-sampling. All but function and judge as for Collector."""
        super().__init__(source, policy, work, versions, config, **options)
        self._function, self._judge, self.work = function, judge, work
        self._given: dict[int, Group] = {}
        self._had: dict[int, int] = {}
        """Of the groups that the present call was given: themselves, and their tokens then."""

    def issue(self, count: int) -> list[Group]:
        partial = self.ledger.groups(GroupState.PARTIAL)[:count]
        for group in partial:
            self._move(group, GroupState.RUNNING)
        new = [
            self.ledger.issue(
                prompt, samples_per_prompt=self.config.samples_per_prompt, run_seed=self.config.run_seed
            )
            for prompt in (self.source.next(count - len(partial)) if count > len(partial) else ())
        ]
        for group in (*partial, *new):
            if group.started_at is None:
                group.started_at = self.versions.published
            self._given[group.id], self._had[group.id] = group, sampled_tokens(group)
        self._on_event()
        return [*partial, *new]

    def _admit(self) -> None:
        if self._stopped or self._failure is not None or self._tasks:
            return
        if self.versions.published is None or not (self._requested or self.policy.max_staleness > 0):
            return
        ready = self.ledger.counts()["ready"]
        room = self.policy.capacity(
            published=self.versions.published, delivered=self.delivered, live=ready, requested=self._requested
        )
        # of the batch that is not whole yet: a run that resumed may hold a part of one
        wanted = self.policy.batch - ready % self.policy.batch
        if room >= wanted:
            step = self.delivered + ready // self.policy.batch
            self._tasks[CALL] = self._background.start(self._call(step, wanted), f"rollout of step {step}")

    async def _call(self, step: int, count: int) -> None:
        self._given, self._had = {}, {}
        context = RolloutContext(self, step, count, self.work.context())
        try:
            found = await self._function(context)
            self._end(context, found)
        except asyncio.CancelledError:
            self._set_all_back()
            raise
        except Exception as error:
            self._set_all_back()
            self._fail(error)
        finally:
            context.ended = True
            del self._tasks[CALL]
            self._changed.set()
            self._admit()

    def _end(self, context: RolloutContext, found: Any) -> None:
        """ContractViolation, and nothing has moved, unless the batch can be trained on."""
        problem = self._problem(context, found)
        if problem is not None:
            raise ContractViolation(f"rollout.function {problem}")
        returned = {group.id for group in found}
        for number, group in self._given.items():
            self._since.tokens += sampled_tokens(group) - self._had[number]
            if number in returned:
                self._move(group, GroupState.READY)
                self._ages_due |= self._judges_age
            elif number in context.put_aside:
                self._move(group, GroupState.PARTIAL)
            else:
                reason = context.reasons.get(number, UNUSED)
                self._since.add_filtered(group, reason)
                self._move(group, GroupState.DROPPED, reason)

    def _problem(self, context: RolloutContext, found: Any) -> str | None:
        if not isinstance(found, list | tuple) or not all(isinstance(group, Group) for group in found):
            return f"returned {type(found).__name__}, expected a list of groups from context.groups"
        if len({group.id for group in found}) != len(found) or len(found) != context.count:
            return f"returned {len(found)} groups, expected context.count = {context.count} different ones"
        for group in found:
            if self._given.get(group.id) is not group:
                return f"returned group {group.id}, which context.groups did not give it in this call"
            if group.id in context.put_aside:
                return f"returned group {group.id} and put it back"
            if not group.samples:
                return f"returned group {group.id} without samples"
            for sample in group.samples:
                if getattr(sample, "group_id", None) != group.id:
                    return f"returned group {group.id} with a sample that is not of it"
                wrong = self._judge.problem(sample, context.step)
                if wrong is not None:
                    return f"returned what cannot be trained on: {wrong}"
        return None

    def _set_all_back(self) -> None:
        for group in self._given.values():
            if group.state is GroupState.RUNNING:
                self._restart(group)
                self._move(group, GroupState.PARTIAL)
