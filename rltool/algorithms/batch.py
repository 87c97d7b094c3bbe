"""The typed batch that travels from rollout to training, one per data-parallel rank, and its slicing. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from rltool.algorithms.fields import BatchFields, fields_of, record
from rltool.algorithms.ragged import numbers, sum_per_sample

Weights = Literal["policy", "reference", "teacher"]
"""Whose log-probabilities: the model in training, or one of its frozen companions."""


@dataclass(frozen=True)
class Ragged:
    """Any number of values a sample. values: [sum of lengths], sample after sample; lengths: [N] int64."""

    values: Tensor
    lengths: Tensor

    def select(self, samples: Tensor) -> Ragged:
        """Of these samples, [n] int64, in this order."""
        each = torch.split(self.values, numbers(self.lengths))
        return Ragged(torch.cat([self.values[:0], *(each[i] for i in numbers(samples))]), self.lengths[samples])


@record(frozen=True, kw_only=True)
class TrainBatch(BatchFields):
    """N samples with T tokens in all, ragged: sample i owns tokens[offsets[i] : offsets[i+1]], offsets =
    cumsum(lengths). Its fields are those of the table in algorithms/fields.py.

    Everything with T entries is aligned with `tokens`; the value at t belongs to the event "tokens[t] was chosen given
    the tokens before it in its sample". The first token of a sample never has a loss.

    metadata: name -> [N] float32, the numbers of the samples' train_metadata, for functions of the user's; true is 1
    """

    metadata: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])

    def __post_init__(self) -> None:
        num_tokens, num_samples = int(self.lengths.sum()), len(self.lengths)
        rows: dict[str, int] = {}
        for name, item in fields_of(self).items():
            value = getattr(self, name)
            if value is None:
                continue
            expected: tuple[int, ...] = (num_tokens if item.of == "token" else num_samples,)
            if item.of == "ragged":
                if len(value.lengths) != num_samples:
                    raise ValueError(f"TrainBatch.{name} is of {len(value.lengths)} samples, expected {num_samples}")
                value, expected = value.values, (int(value.lengths.sum()),)
            if item.row:
                expected += (rows.setdefault(item.row, value.shape[1]),) if value.dim() == 2 else (1,)
            if value.shape != expected:
                raise ValueError(f"TrainBatch.{name} has shape {tuple(value.shape)}, expected {expected}")
            dtype = getattr(torch, item.dtype_of(value.dtype))
            if value.dtype != dtype:
                raise ValueError(f"TrainBatch.{name} is {value.dtype}, expected {dtype}")
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
        changes: dict[str, Any] = {}
        for name, item in fields_of(self).items():
            value = getattr(self, name)
            if isinstance(value, Ragged):
                changes[name] = value.select(sample_index)
            elif value is not None:
                changes[name] = value[sample_index if item.of == "sample" else token_index]
        return TrainBatch(**changes, metadata={name: values[sample_index] for name, values in self.metadata.items()})

    def for_ranks(self) -> TrainBatch:
        """Without what the driver alone reads."""
        optional = {item.name for item in dataclasses.fields(self) if item.default is None}
        left_out = {name for name, item in fields_of(self).items() if item.cut == "driver"} & optional
        return self.replace(**dict.fromkeys(left_out))

    def micro_batch(self, samples: list[int]) -> TrainBatch:
        """`select`, but an empty list gives a filler: the shortest sample without any loss (see
        schedule.plan_micro_batches)."""
        if samples:
            return self.select(samples)
        filler = self.select([int(self.lengths.argmin())])
        silent = torch.zeros_like(filler.loss_mask)
        return filler.replace(loss_mask=silent, loss_weights=silent)
