"""The turns of samples, as the tensors of a batch that credit per turn is made of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from rltool.rollout.sample import Sample, TurnReward


def turn_tensors(samples: Sequence[Sample]) -> tuple[Tensor | None, Tensor | None]:
    """(turns [T] int64, turn_rewards [T] float32) as TrainBatch has them; None where each sample is one turn without a
    reward of its own.

    Where a sample has no turns recorded, they are the stretches of tokens that the policy has sampled, and have
    earned nothing by themselves; those of several trajectories follow each other in the order of these.
    """
    if not any(sample.turn_rewards or sample.turns > 1 or sample.trajectory for sample in samples):
        return None, None
    turns: list[int] = []
    rewards: list[float] = []
    following: defaultdict[tuple[int, int], int] = defaultdict(int)
    for sample in samples:
        episode = (sample.group_id, sample.index)
        own = sample.turn_rewards or _stretches(sample.response_mask, following[episode])
        numbers, earned = [-1] * len(sample.response_ids), [0.0] * len(sample.response_ids)
        for turn in own:
            numbers[turn.start : turn.end] = [turn.turn] * (turn.end - turn.start)
            earned[turn.end - 1] = turn.reward
            following[episode] = turn.turn + 1
        _check(sample, numbers)
        turns += [-1] * len(sample.prompt_ids) + numbers
        rewards += [0.0] * len(sample.prompt_ids) + earned
    return torch.tensor(turns), torch.tensor(rewards, dtype=torch.float32)


def _stretches(mask: Sequence[int], first: int) -> list[TurnReward]:
    """The turns of a response: stretches of mask 1, numbered from `first`."""
    found: list[TurnReward] = []
    for sampled, tokens in groupby(range(len(mask)), key=mask.__getitem__):
        places = list(tokens)
        if sampled:
            found.append(TurnReward(first + len(found), places[0], places[-1] + 1, 0.0))
    return found


def _check(sample: Sample, numbers: Sequence[int]) -> None:
    if any((number >= 0) != bool(sampled) for number, sampled in zip(numbers, sample.response_mask, strict=True)):
        raise ValueError(
            f"sample {sample.group_id}/{sample.index}: its turn_rewards {sample.turn_rewards} do not cover the tokens "
            "that the policy sampled, each once"
        )
