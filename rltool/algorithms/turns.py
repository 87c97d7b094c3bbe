"""Credit per turn: the return behind each turn of an episode, and advantages made of it. Pure tensor functions.

Shapes: N samples, T tokens back to back (see TrainBatch), K turns of all episodes. An episode may be several samples;
its turns are numbered over all of them in order of time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rltool.algorithms.advantages import group_advantages
from rltool.algorithms.ragged import discounted_to_go, numbered, sample_of_token


@dataclass(frozen=True)
class TurnReturns:
    """returns: [K] float64, sorted by episode and time; groups: [K] int64, prompt group of each; alone: [K] bool, its
    episode is the only one of its group; places: [T] int64, the turn that each token belongs to, -1 for none."""

    returns: Tensor
    groups: Tensor
    alone: Tensor
    places: Tensor


def turn_returns(
    rewards: Tensor,
    group_ids: Tensor,
    episode_ids: Tensor,
    lengths: Tensor,
    turns: Tensor,
    turn_rewards: Tensor,
    token_rewards: Tensor | None = None,
    *,
    gamma: float,
) -> TurnReturns:
    """The discounted reward-to-go of each turn: G_k = sum over turns l >= k of the episode of gamma^(l - k) r_l.

    rewards, group_ids, episode_ids, lengths: [N]; turns, turn_rewards, token_rewards: [T]. r_l is what turn l has
    earned, plus the token_rewards of its tokens (a KL penalty; None: 0). What is left of an episode's reward, the mean
    of its samples', when all turn_rewards are taken out belongs to its last turn: a reward of the outcome, or what
    clipping and penalties have changed. With gamma 1 the first turn's return is the whole reward.
    """
    sampled = turns >= 0
    numbers, episode, samples = numbered(episode_ids)
    width = int(turns.max()) + 1 if len(turns) else 1
    keys, place, _ = numbered((episode[sample_of_token(lengths)] * width + turns)[sampled])
    episode_of_turn = keys // width
    earned = torch.zeros(len(keys), dtype=torch.float64).index_add(0, place, turn_rewards[sampled].double())
    whole = torch.zeros(len(numbers), dtype=torch.float64).index_add(0, episode, rewards.double()) / samples
    rest = whole.index_add(0, episode_of_turn, -earned)
    last = torch.ones_like(keys, dtype=torch.bool)
    last[:-1] = episode_of_turn[1:] != episode_of_turn[:-1]
    earned[last] += rest[episode_of_turn[last]]
    if token_rewards is not None:
        earned = earned.index_add(0, place, token_rewards[sampled].double())
    counts = torch.bincount(episode_of_turn, minlength=len(numbers))
    group = torch.zeros_like(numbers).index_put((episode,), group_ids)
    _, group_number, episodes_of_group = numbered(group)
    places = torch.full_like(turns, -1)
    places[sampled] = place
    return TurnReturns(
        discounted_to_go(earned, counts, torch.ones(len(keys)), gamma),
        group[episode_of_turn],
        (episodes_of_group == 1)[group_number][episode_of_turn],
        places,
    )


def turn_advantages(found: TurnReturns, loss_mask: Tensor, *, normalize_std: bool, std_over: str = "group") -> Tensor:
    """GRPO with each turn as a member of its group: (G - mean of the group's turns) / (their std + 1e-6), [T] float32.

    That is how Kevin (Baronio et al. 2025, "Kevin: Multi-Turn RL for Generating CUDA Kernels") trains each turn, with
    gamma 0.4. Returns are normalised, not rewards: the process supervision of DeepSeekMath (Shao et al. 2024, section
    4.1.3) sums normalised rewards, so that as many means are taken off as turns follow, and an episode gains or loses
    by its mere length. Here the baseline is one number. A group of one episode has advantage 0. normalize_std and
    std_over as in `group_advantages`; loss_mask: [T], 0 elsewhere.
    """
    values = group_advantages(found.returns, found.groups, normalize_std=normalize_std, std_over=std_over)
    return _at_tokens(torch.where(found.alone, 0.0, values), found.places, loss_mask)


def returns_as_token_rewards(found: TurnReturns, lengths: Tensor) -> Tensor:
    """[T] float32, at the last token of each turn what makes the sum behind it its return: G_k minus the return of the
    next turn of the same sample (0 behind the last). For estimators that sum the rewards of tokens, reinforce_pp and
    gae: with turns of several samples in an episode each still gets all that follows it in time. Made with gamma 1.
    """
    rows = (found.places >= 0).nonzero().squeeze(-1)
    out = torch.zeros(len(found.places), dtype=torch.float64)
    if len(rows) == 0:
        return out.float()
    place = found.places[rows]
    ends = torch.ones_like(rows, dtype=torch.bool)
    ends[:-1] = place[1:] != place[:-1]
    rows, place = rows[ends], place[ends]
    sample = sample_of_token(lengths)[rows]
    following = torch.zeros(len(rows), dtype=torch.float64)
    following[:-1] = torch.where(sample[1:] == sample[:-1], found.returns[place[1:]], 0.0)
    out[rows] = found.returns[place] - following
    return out.float()


def _at_tokens(values: Tensor, places: Tensor, loss_mask: Tensor) -> Tensor:
    out = torch.zeros(len(places), dtype=torch.float32)
    chosen = (places >= 0) & (loss_mask > 0)
    out[chosen] = values[places[chosen]].float()
    return out
