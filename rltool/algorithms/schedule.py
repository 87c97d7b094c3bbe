"""Which samples go into which micro-batch of which rank. Pure Python: lengths in, indices out."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from rltool.errors import UsageError


def balanced_shares(costs: Sequence[int], shares: int) -> list[list[int]]:
    """Split samples into `shares` lists whose sums of cost are near equal (greedy, dearest first to the lightest
    share).

    costs: per sample, its tokens or its FLOPs. Returns indices, ascending within a share. Every sample is in exactly
    one share; a share may be empty if there are fewer samples than shares.
    """
    result: list[list[int]] = [[] for _ in range(shares)]
    lightest = [(0, 0, share) for share in range(shares)]  # a heap of cost, samples, share
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, count, share = lightest[0]
        result[share].append(i)
        heapq.heapreplace(lightest, (load + costs[i], count + 1, share))
    return [sorted(share) for share in result]


def first_fit(lengths: Sequence[int], samples: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Pack the given samples into bins of at most max_tokens, first fit over decreasing lengths."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(samples, key=lambda i: (-lengths[i], i)):
        place = next((b for b, free in enumerate(room) if free >= lengths[i]), None)
        if place is None:
            place = len(bins)
            bins.append([])
            room.append(max_tokens)
        bins[place].append(i)
        room[place] -= lengths[i]
    return bins


def check_lengths(lengths: Sequence[int], max_tokens: int) -> None:
    """UsageError for a sample longer than a micro-batch."""
    longest = max(range(len(lengths)), key=lambda i: lengths[i])
    if lengths[longest] > max_tokens:
        raise UsageError(
            f"sample {longest} has {lengths[longest]} tokens, more than the {max_tokens} of a micro-batch; raise "
            "trainer.max_tokens_per_micro_batch (times trainer.context_parallel) to at least "
            "sampling.max_prompt_tokens + sampling.max_response_tokens"
        )


def plan_micro_batches(
    lengths: Sequence[int], *, max_tokens: int, data_parallel: int, costs: Sequence[int] | None = None
) -> list[list[list[int]]]:
    """plan[rank][micro_batch] = sample indices: packed to max_tokens, balanced over ranks, equal counts on all ranks.

    lengths: tokens per sample of one global batch; costs: what to balance in their place, for example FLOPs. Every
    sample appears exactly once. Megatron's schedules need the same number of micro-batches on every rank, or the
    collectives of one would wait for ever for the others: ranks with fewer bins have their largest ones split, and
    where there is nothing left to split (three full samples on two ranks) the micro-batch is empty, for `micro_batch`
    to fill without a loss. Raises UsageError for a sample longer than max_tokens.
    """
    check_lengths(lengths, max_tokens)
    costs = lengths if costs is None else costs
    plans = [first_fit(lengths, share, max_tokens) for share in balanced_shares(costs, data_parallel)]
    target = max(len(plan) for plan in plans)
    for plan in plans:
        while len(plan) < target:
            largest = max(range(len(plan)), key=lambda b: len(plan[b]), default=None)
            if largest is None or len(plan[largest]) < 2:
                plan.append([])
                continue
            whole = plan[largest]
            halves = balanced_shares([costs[i] for i in whole], 2)
            plan[largest : largest + 1] = [[whole[i] for i in half] for half in halves]
    return plans


def split_for_optimizer_steps(
    group_ids: Sequence[int], steps: int, *, has_loss: Sequence[bool] | None = None
) -> list[list[int]]:
    """Samples of a rollout for each of `steps` optimizer steps, whole prompt groups together, in order of first
    appearance.

    Groups go to the steps round-robin. has_loss: per sample, whether any of its tokens has a loss; None: all have.
    Groups without any go round last, so that no step is left with nothing to train on. UsageError if there are fewer
    groups with a loss than steps.
    """
    losses = [True] * len(group_ids) if has_loss is None else has_loss
    trained = dict.fromkeys(group for group, loss in zip(group_ids, losses, strict=True) if loss)
    if len(trained) < steps:
        raise UsageError(f"{len(trained)} prompt groups with a loss cannot feed {steps} optimizer steps per rollout")
    order = list(trained | dict.fromkeys(group_ids))
    owner = {group: i % steps for i, group in enumerate(order)}
    result: list[list[int]] = [[] for _ in range(steps)]
    for i, group in enumerate(group_ids):
        result[owner[group]].append(i)
    return result
