"""The typed batch that travels from rollout to training, one per data-parallel rank, and its slicing. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import torch
from torch import Tensor

from rltool.algorithms.ragged import sum_per_sample

MATRICES = frozenset({
    "reward_parts", "part_weights", "teacher_topk_ids", "teacher_topk_logprobs", "sampling_mask", "routed_experts",
})  # fmt: skip
"""Fields of a TrainBatch with a row of several numbers a sample or a token."""
PER_SAMPLE = frozenset({
    "reward_parts", "part_weights", "lengths", "rewards", "baselines", "group_ids", "episode_ids", "kl_coefs",
    "entropy_coefs",
})  # fmt: skip
"""Fields with one entry a sample; all others have one a token."""
INTEGERS = frozenset({"tokens", "token_versions", "turns", "lengths", "group_ids", "episode_ids"})
SMALL_INTEGERS = frozenset({"teacher_topk_ids", "sampling_mask"})
"""INTEGERS are int64, these int32: there are K of them a token."""
SMALLEST = frozenset({"routed_experts"})
"""uint8, or int16 where that does not hold them."""
Weights = Literal["policy", "reference", "teacher"]
"""Whose log-probabilities: the model in training, or one of its frozen companions."""


@dataclass(frozen=True)
class TrainBatch:
    """N samples with T tokens in all, ragged: sample i owns tokens[offsets[i] : offsets[i+1]], offsets =
    cumsum(lengths).

    Everything with T entries is aligned with `tokens`; the value at t belongs to the event "tokens[t] was chosen given
    the tokens before it in its sample". The first token of a sample never has a loss.

    tokens: [T] int64, prompt then response of each sample
    lengths: [N] int64, tokens per sample
    loss_mask: [T] float32, 1 where the token has a loss: sampled by the policy and not masked, or a target of
        supervised training
    response_mask: [T] float32, 1 where the policy sampled the token, with a loss or without (truncated, removed or
        stale tokens may be masked); None: the same as loss_mask
    rollout_logprobs: [T] float32, behaviour log-probability by the engine, 0 where the policy did not sample the token;
        None for supervised data
    sampling_mask: [T, K] int32, the tokens that top-p and top-k left to choose from in each token's place, -1 beyond
        their number; all -1 where the policy did not sample the token. Log-probabilities of the model are then those
        of these tokens alone. None where sampling was not truncated
    advantages: [T] float32, 0 where loss_mask is 0; None until computed, and for supervised data
    loss_weights: [T] float32, weight of each token's loss, so that "weighted sum / loss tokens of the *global* batch"
        is the configured reduction whatever the split into ranks and micro-batches (algorithms/reduction.py)
    token_versions: [T] int64, training steps that the weights had which sampled the token, -1 where loss_mask is 0;
        None where unknown (recorded by an earlier release, synthetic) and for supervised data
    rewards: [N] float32
    baselines: [N] float32, reward of a greedy response to each sample's prompt; None unless one was sampled
    reward_parts, part_weights: [N, P] float32, what each of [[reward.parts]] gave the sample, and its weight; 0 and 0
        where it did not score the sample; None unless the advantages are made of them
    group_ids: [N] int64, equal for samples of one prompt
    episode_ids: [N] int64, equal for samples of one episode of an agent, which has one reward and counts once in its
        group's baseline; None: each sample is an episode
    turns: [T] int64, number of the turn within its episode in which the policy sampled the token, over all samples of
        the episode in order of time; -1 where it did not sample it. None: each sample is one turn; None again once
        there are advantages
    turn_rewards: [T] float32, at the last token of a turn what the turn has earned, as a part of `rewards`, 0
        elsewhere; None where turns is
    old_logprobs: [T] float32, trainer's log-probability before the first optimizer step; None until computed
    ref_logprobs: [T] float32, reference model's; None without a reference
    teacher_logprobs: [T] float32, teacher's; None without a teacher
    teacher_topk_ids: [T, K] int32, the teacher's K most probable tokens at each position, most probable first, and
        teacher_topk_logprobs: [T, K] float32, their log-probabilities; any values where loss_mask is 0. None unless
        the loss has a KL over them
    routed_experts: [T, layers * experts a token] uint8 or int16, the experts that the engine's router chose for the
        token, layer by layer; the dtype's largest value where it chose none. None unless they are replayed
    token_rewards: [T] float32, rewards of single tokens beside `rewards`: the KL penalty; 0 where the policy did not
        sample the token, None without
    old_entropies: [T] float32, entropy of the old policy's distribution at the token, in nats; None unless needed
    is_weights: [T] float32, factor of each token's policy loss (algorithms/corrections.py, token_selection.py); None: 1
    kl_cov_coefs: [T] float32, weight of |log p - log p_old| in each token's loss (token_selection.py); None: 0
    kl_coefs, entropy_coefs: [N] float32, algorithm.kl_coef and entropy_coef as they are in this training step
        (controllers.py); None: as configured
    values: [T] float32, critic's value of the state in which the token was chosen, before its first update on this
        rollout; 0 where loss_mask is 0, None without a critic
    value_targets: [T] float32, what the critic is trained towards (algorithms/gae.py); None without a critic
    metadata: name -> [N] float32, the numbers of the samples' train_metadata, for functions of the user's; true is 1
    """

    tokens: Tensor
    lengths: Tensor
    loss_mask: Tensor
    rewards: Tensor
    group_ids: Tensor
    loss_weights: Tensor
    baselines: Tensor | None = None
    reward_parts: Tensor | None = None
    part_weights: Tensor | None = None
    episode_ids: Tensor | None = None
    turns: Tensor | None = None
    turn_rewards: Tensor | None = None
    response_mask: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    token_versions: Tensor | None = None
    sampling_mask: Tensor | None = None
    advantages: Tensor | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    teacher_topk_ids: Tensor | None = None
    teacher_topk_logprobs: Tensor | None = None
    routed_experts: Tensor | None = None
    token_rewards: Tensor | None = None
    old_entropies: Tensor | None = None
    is_weights: Tensor | None = None
    kl_cov_coefs: Tensor | None = None
    kl_coefs: Tensor | None = None
    entropy_coefs: Tensor | None = None
    values: Tensor | None = None
    value_targets: Tensor | None = None
    metadata: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        num_tokens, num_samples = int(self.lengths.sum()), len(self.lengths)
        for item in fields(self):
            value = getattr(self, item.name)
            if value is None or item.name == "metadata":
                continue
            expected: tuple[int, ...] = (num_samples if item.name in PER_SAMPLE else num_tokens,)
            if item.name in MATRICES:
                expected += value.shape[1:2]
            if value.shape != expected or len(expected) != 1 + (item.name in MATRICES):
                raise ValueError(f"TrainBatch.{item.name} has shape {tuple(value.shape)}, expected {expected}")
            if item.name in SMALLEST:
                dtype = torch.int16 if value.dtype == torch.int16 else torch.uint8
            elif item.name in SMALL_INTEGERS:
                dtype = torch.int32
            else:
                dtype = torch.int64 if item.name in INTEGERS else torch.float32
            if value.dtype != dtype:
                raise ValueError(f"TrainBatch.{item.name} is {value.dtype}, expected {dtype}")
        for name, value in self.metadata.items():
            if value.shape != (num_samples,) or value.dtype != torch.float32:
                found = f"{value.dtype} of shape {tuple(value.shape)}"
                raise ValueError(f"TrainBatch.metadata[{name!r}] is {found}, expected float32 of ({num_samples},)")

    @property
    def num_samples(self) -> int:
        return len(self.lengths)

    @property
    def num_loss_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def sampled(self) -> Tensor:
        """[T] float32, 1 where the policy sampled the token: what a response's length and its reward are made of."""
        return self.loss_mask if self.response_mask is None else self.response_mask

    def replace(self, **changes: Tensor | Mapping[str, Tensor] | None) -> TrainBatch:
        return replace(self, **changes)

    def sample_rewards(self) -> Tensor:
        """[N] float32: rewards, each with its sample's token_rewards added."""
        if self.token_rewards is None:
            return self.rewards
        return self.rewards + sum_per_sample(self.token_rewards, self.lengths, self.sampled).float()

    def select(self, samples: list[int]) -> TrainBatch:
        """The batch of these samples, in this order. Token weights are kept as they are, not normalised again."""
        ends = self.lengths.cumsum(0)
        pieces = [torch.arange(int(ends[i] - self.lengths[i]), int(ends[i])) for i in samples]
        token_index = torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int64)
        sample_index = torch.tensor(samples, dtype=torch.int64)
        changes = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "metadata":
                changes[item.name] = {name: numbers[sample_index] for name, numbers in value.items()}
            elif value is not None:
                changes[item.name] = value[sample_index if item.name in PER_SAMPLE else token_index]
        return TrainBatch(**changes)

    def micro_batch(self, samples: list[int]) -> TrainBatch:
        """`select`, but an empty list gives a filler: the shortest sample without any loss (see
        schedule.plan_micro_batches)."""
        if samples:
            return self.select(samples)
        filler = self.select([int(self.lengths.argmin())])
        silent = torch.zeros_like(filler.loss_mask)
        return filler.replace(loss_mask=silent, loss_weights=silent)
