"""How many groups may start, and which of them make the next batch. Pure decisions; the collector carries them out.

Admission bounds staleness before anything is sampled. With batches of B groups, at most eta training steps of staleness
and weights of v finished training steps published, groups that have been given to the trainer, that run and that wait
may number

    (eta + v + 1) * B

in all (AReaL, arXiv 2505.24298, section 5.1, with groups in place of samples). Batches take groups in the order of
their numbers, so a group that starts at v is trained at step v + eta at the latest. eta = 0 is synchronous training: a
batch's groups start when the batch is asked for, under the weights that it trains. Groups that are filtered out leave
the sum, and others start for them.

The bound holds for what is *started*. What is handed out is judged again (`choose`): a group whose tokens are older
than eta, because a resumed run or another `on_stale` let it come to that, is never part of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rltool.config.train import TrainConfig

OnStale = Literal["wait", "resample", "mask"]


@dataclass(frozen=True)
class AdmissionPolicy:
    """batch: groups of a batch; max_staleness: in training steps;
    oversampling: groups started for a batch over `batch`, >= 1."""

    batch: int
    max_staleness: int = 0
    oversampling: float = 1.0
    on_stale: OnStale = "wait"
    partial_rollout: bool = False
    mask_older_than: int | None = None
    """Tokens older than this get no loss, so they do not make a group too old."""

    @classmethod
    def of(cls, config: TrainConfig) -> AdmissionPolicy:
        """Of [rollout] and algorithm.mask_tokens_older_than."""
        rollout = config.rollout
        return cls(
            batch=rollout.prompts_per_step,
            max_staleness=rollout.max_staleness,
            oversampling=rollout.oversampling_factor,
            on_stale=rollout.on_stale,
            partial_rollout=rollout.partial_rollout,
            mask_older_than=config.algorithm.mask_tokens_older_than,
        )

    def __post_init__(self) -> None:
        if self.batch < 1 or self.max_staleness < 0 or self.oversampling < 1:
            raise ValueError(f"not an admission policy: {self}")

    @property
    def window(self) -> int:
        """Groups that compete for a batch."""
        return math.ceil(self.oversampling * self.batch)

    @property
    def oldest_tokens_are_masked(self) -> bool:
        """Whether a group may hold tokens that are too old to be trained on."""
        masked = self.mask_older_than is not None and self.mask_older_than <= self.max_staleness
        return masked or self.on_stale == "mask"

    def capacity(self, *, published: int | None, delivered: int, live: int, requested: bool) -> int:
        """How many further groups may start now.

        published: training steps of the newest weights that engines serve, None before the first sync; delivered:
        batches given to the trainer since the run's first step; live: groups that run, are partial or ready; requested:
        a batch is waited for.
        """
        if published is None or (self.max_staleness == 0 and not requested):
            return 0
        surplus = self.window - self.batch
        return max(0, (self.max_staleness + published + 1 - delivered) * self.batch + surplus - live)

    def is_too_old(self, oldest: int | None, step: int) -> bool:
        """Whether tokens of weights `oldest` may not be trained on at `step`."""
        return oldest is not None and step - oldest > self.max_staleness and not self.oldest_tokens_are_masked


@dataclass(frozen=True)
class Candidate:
    """A live group as `choose` sees it. oldest: training steps of the oldest weights behind its tokens,
    None without a token. scoring: its tokens are complete, and it waits for its rewards alone."""

    id: int
    ready: bool
    oldest: int | None
    scoring: bool = False


@dataclass(frozen=True)
class Choice:
    """What becomes of the live groups, by number. batch is None while it is not complete.

    too_old: ready groups that may no longer be trained on; surplus: groups that lost the race for this batch and are
    not kept as they are; interrupt: those that are being generated or wait for it, and are kept, partial.
    """

    batch: tuple[int, ...] | None = None
    too_old: tuple[int, ...] = ()
    surplus: tuple[int, ...] = ()
    interrupt: tuple[int, ...] = ()


def choose(policy: AdmissionPolicy, candidates: Sequence[Candidate], step: int) -> Choice:
    """The batch of training step `step`. candidates: all live groups, in any order.

    The batch is the first `policy.batch` groups by number: those that started first wait for no other, and a long one
    is waited for (on_stale "wait"). With over-sampling, or another on_stale, the first `policy.batch` that are ready
    make it, by number, after those that are waited for because the next batch would come too late for them.
    """
    ordered = sorted(candidates, key=lambda candidate: candidate.id)
    too_old = {c.id for c in ordered if c.ready and policy.is_too_old(c.oldest, step)}
    live = [c for c in ordered if c.id not in too_old]
    competing = live[: policy.window] if policy.on_stale == "wait" else live
    last_chance = _last_chance(policy, competing, step)
    ready = [c for c in competing if c.ready]
    if len(ready) < policy.batch or not all(c.ready for c in last_chance):
        return Choice(too_old=tuple(sorted(too_old)))
    waited_for = {c.id for c in last_chance}
    chosen = [*last_chance, *(c for c in ready if c.id not in waited_for)][: policy.batch]
    choice = Choice(tuple(sorted(c.id for c in chosen)), tuple(sorted(too_old)))
    return choice if policy.oversampling == 1 else _with_surplus(policy, competing, choice, step)


def _last_chance(policy: AdmissionPolicy, competing: Sequence[Candidate], step: int) -> list[Candidate]:
    """Groups that the next batch could not train on any more, and which are therefore waited for, as far as a batch
    holds them.

    In synchronous training that would be all of them: there, over-sampling is a race.
    """
    if policy.on_stale != "wait" or policy.max_staleness == 0:
        return []
    return [c for c in competing if policy.is_too_old(c.oldest, step + 1)][: policy.batch]


def _with_surplus(policy: AdmissionPolicy, competing: Sequence[Candidate], choice: Choice, step: int) -> Choice:
    """Groups that competed and did not win: kept while the next batch may still train on them,
    else interrupted or dropped. With partial_rollout none is dropped that still runs, and those that are being scored
    go on: cancelled rewards would start over, batch after batch."""
    surplus, interrupt = [], []
    batch = set(choice.batch or ())
    for candidate in competing:
        if candidate.id in batch:
            continue
        if policy.partial_rollout and not candidate.ready:
            if not candidate.scoring:
                interrupt.append(candidate.id)
        elif policy.is_too_old(candidate.oldest, step + 1):
            surplus.append(candidate.id)
    return replace(choice, surplus=tuple(surplus), interrupt=tuple(interrupt))
