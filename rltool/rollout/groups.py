"""A prompt group's life, and the books of all groups of a run. Pure: no clock, no engine, no task.

A group is issued once, under a running number that no restart repeats, and ends once: trained or dropped. In between it
is running (its samples are being generated or scored), partial (interrupted, with what was sampled so far), ready
(scored), or in hand (part of a batch that the trainer has been given and has not reported as trained). At every moment

    issued = running + partial + ready + in hand + trained + dropped

which `GroupLedger.check` asserts. A checkpoint counts groups in hand, running and partial as not trained.
"""

from __future__ import annotations

import copy
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from rltool.engines.weight_version import BadWeightVersion, WeightVersion
from rltool.rollout.data import Prompt
from rltool.rollout.sample import Sample, SampleStatus
from rltool.rollout.seeds import hash31


class GroupState(StrEnum):
    RUNNING = "running"  # being generated, scored or filtered
    PARTIAL = "partial"  # not running; holds what was sampled before it was interrupted, or nothing yet
    READY = "ready"  # scored, waiting for a batch
    IN_HAND = "in_hand"  # in a batch that the trainer holds
    TRAINED = "trained"
    DROPPED = "dropped"  # never trained on; the reason is counted


TRANSITIONS: dict[GroupState, frozenset[GroupState]] = {
    GroupState.RUNNING: frozenset({GroupState.PARTIAL, GroupState.READY, GroupState.DROPPED}),
    GroupState.PARTIAL: frozenset({GroupState.RUNNING, GroupState.DROPPED}),
    GroupState.READY: frozenset({GroupState.IN_HAND, GroupState.PARTIAL, GroupState.DROPPED}),
    GroupState.IN_HAND: frozenset({GroupState.TRAINED}),
    GroupState.TRAINED: frozenset(),
    GroupState.DROPPED: frozenset(),
}
"""All that exist. READY -> PARTIAL is a group whose tokens have become too old and which is sampled again."""

OPEN_STATES = (GroupState.RUNNING, GroupState.PARTIAL, GroupState.READY, GroupState.IN_HAND)


@dataclass
class Group:
    """The samples of one prompt. id: running number over the whole run, resumed attempts included;
    seeds follow from it."""

    id: int
    prompt: Prompt
    samples: list[Sample]
    state: GroupState = GroupState.RUNNING
    started_at: int | None = None
    """Training steps of the weights that were published when its first request was sent; None: it holds no token."""

    put_aside_at: int | None = None
    """Training steps of the weights that were published when it was interrupted to be finished later."""

    @property
    def oldest_version(self) -> int | None:
        """Training steps of the oldest weights behind its tokens, at least as far as they are known;
        None without a token."""
        spans = [_number(span.version) for sample in self.samples for span in sample.versions]
        known = [number for number in [*spans, self.started_at] if number is not None]
        return min(known, default=None)

    def restart(self, samples: list[Sample]) -> None:
        """Forget everything that was sampled."""
        self.samples, self.started_at, self.put_aside_at = samples, None, None


def _number(version: str) -> int | None:
    try:
        return WeightVersion.parse(version).number
    except BadWeightVersion:
        return None


def new_samples(group_id: int, prompt: Prompt, *, count: int, run_seed: int) -> list[Sample]:
    """Pending samples of one group; sample i is seeded with the group's seed + i (mod 2**31).

    The group's seed is a function of the run's seed and the group's number alone: the same in every process, and new
    for every repetition of a prompt.
    """
    seed = hash31("group", run_seed, group_id)
    samples = [
        Sample(
            group_id=group_id,
            index=i,
            prompt_index=prompt.index,
            prompt_ids=list(prompt.prompt_ids),
            prompt_text=prompt.text,
            label=prompt.label,
            metadata=copy.deepcopy(prompt.metadata),
            multimodal_inputs=copy.deepcopy(prompt.multimodal_inputs),
            seed=(seed + i) % 2**31,
        )
        for i in range(count)
    ]
    for sample in samples:
        sample.picture_places = array("q", prompt.picture_places)
    return samples


class IllegalMove(RuntimeError):
    """A group was moved in a way that does not exist: a programming error."""


@dataclass
class GroupLedger:
    """Every group that has not ended, and how many have. Owned by the collector."""

    issued: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    _open: dict[int, Group] = field(default_factory=dict)
    _in: dict[GroupState, dict[int, Group]] = field(default_factory=lambda: {state: {} for state in OPEN_STATES})
    """The open groups by state: thousands of them end in one batch, and each end looks here."""

    def issue(self, prompt: Prompt, *, samples_per_prompt: int, run_seed: int) -> Group:
        """A new group, RUNNING, under the next number."""
        samples = new_samples(self.issued, prompt, count=samples_per_prompt, run_seed=run_seed)
        group = Group(self.issued, prompt, samples)
        self._open[group.id] = self._in[group.state][group.id] = group
        self.issued += 1
        return group

    def restore(self, group: Group) -> None:
        """A group from a checkpoint, PARTIAL or READY, under the number it had."""
        if (
            group.state not in (GroupState.PARTIAL, GroupState.READY)
            or group.id >= self.issued
            or group.id in self._open
        ):
            raise IllegalMove(f"group {group.id} ({group.state}) cannot be restored")
        self._open[group.id] = self._in[group.state][group.id] = group

    def move(self, group: Group, state: GroupState, *, reason: str | None = None) -> None:
        """reason: why it is dropped; counted under it."""
        if self._open.get(group.id) is not group or state not in TRANSITIONS[group.state]:
            raise IllegalMove(f"group {group.id} cannot go from {group.state} to {state}")
        del self._in[group.state][group.id]
        group.state = state
        if state is GroupState.TRAINED:
            self.trained += 1
            del self._open[group.id]
        elif state is GroupState.DROPPED:
            self.dropped[reason or "unnamed"] += 1
            del self._open[group.id]
        else:
            self._in[state][group.id] = group

    def groups(self, *states: GroupState) -> list[Group]:
        """Open groups in these states (all open ones without any), by number."""
        chosen = [self._in[state] for state in set(states or OPEN_STATES)]
        return [group for _, group in sorted(item for groups in chosen for item in groups.items())]

    def counts(self) -> dict[str, int]:
        """Every term of the invariant."""
        ended = {"trained": self.trained, "dropped": self.dropped.total()}
        return {"issued": self.issued, **{state.value: len(self._in[state]) for state in OPEN_STATES}, **ended}

    def check(self) -> None:
        """AssertionError unless every group that was issued is in exactly one place."""
        counts = self.counts()
        found = Counter(group.state.value for group in self._open.values())
        wrong = {state.value for state in OPEN_STATES if found[state.value] != counts[state.value]}
        assert not wrong, f"{counts} groups were counted, but there are {dict(found)}"
        issued = counts.pop("issued")
        assert issued == sum(counts.values()), f"{issued} groups were issued, but {counts} are accounted for"


def is_complete(samples: Iterable[Sample]) -> bool:
    """Whether no sample of a group waits for tokens."""
    return all(sample.status not in (SampleStatus.PENDING, SampleStatus.ABORTED) for sample in samples)
