"""The typed batch that travels from rollout to training, one per data-parallel rank, and its slicing. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rltool.algorithms.fields import BatchFields, Field, fields_of, record
from rltool.algorithms.ragged import as_array, numbers, sum_per_sample

Weights = Literal["policy", "reference", "teacher"]
"""Whose log-probabilities: the model in training, or one of its frozen companions."""


@dataclass(frozen=True)
class Ragged:
    """Any number of values a sample. values: [sum of lengths], sample after sample; lengths: [N] int64."""

    values: Tensor
    lengths: Tensor

    def select(self, samples: Tensor) -> Ragged:
        """Of these samples, [n] int64, in this order."""
        ends = self.lengths.cumsum(0)[samples]
        bounds = zip(numbers(ends - self.lengths[samples]), numbers(ends), strict=True)
        return Ragged(torch.cat([self.values[:0], *(self.values[a:b] for a, b in bounds)]), self.lengths[samples])


Rows = np.ndarray[Any, Any]
"""What one sample has of a field: [n] or [n, numbers of a row], of its last n tokens; its others have the field's fill.
Of a ragged field all of its values."""

Put = Callable[[list[dict[str, Rows]]], Any]
"""Takes a block of samples, and gives a reference: hashable, small, and a hold on the block. `ray.put` is one."""

BLOCK_BYTES = 2**20
MOST_BLOCKS = 512
"""A rank reads whole blocks, so small ones have few samples of other ranks; references are sent with each call."""


@dataclass(frozen=True)
class Wide:
    """What the samples of a batch have of some fields, by reference.

    blocks: see Put. places: [N, 2] int64, of each sample its block's number and its own within the block.
    """

    names: tuple[str, ...]
    blocks: tuple[Any, ...]
    places: Tensor

    @classmethod
    def of(cls, rows: Mapping[str, Sequence[Rows]], put: Put) -> Wide:
        """rows: of each field those of all samples. They are copied by `put`, one block after the other."""
        samples = [dict(zip(rows, own, strict=True)) for own in zip(*rows.values(), strict=True)]
        sizes = [sum(value.nbytes for value in sample.values()) for sample in samples]
        enough = max(BLOCK_BYTES, sum(sizes) // MOST_BLOCKS)
        blocks: list[Any] = []
        places: list[tuple[int, int]] = []
        block: list[dict[str, Rows]] = []
        held = 0
        for sample, size in zip(samples, sizes, strict=True):
            if block and held + size > enough:
                blocks.append(put(block))
                block, held = [], 0
            places.append((len(blocks), len(block)))
            block.append(sample)
            held += size
        return cls(tuple(rows), (*blocks, put(block)), torch.tensor(places))

    @classmethod
    def cut(cls, values: Mapping[str, Tensor], lengths: Tensor, put: Put) -> Wide:
        """values: [T, ...] of each field, on the CPU; lengths: [N]."""
        cuts = {name: torch.split(value, numbers(lengths)) for name, value in values.items()}
        return cls.of({name: [as_array(own) for own in found] for name, found in cuts.items()}, put)

    def select(self, samples: Tensor) -> Wide:
        """Of these samples, [n] int64, in this order, without blocks of others alone."""
        chosen = self.places[samples]
        used = sorted(set(numbers(chosen[:, 0])))
        block = torch.searchsorted(torch.tensor(used), chosen[:, 0].contiguous())
        return replace(self, blocks=tuple(self.blocks[i] for i in used), places=torch.stack([block, chosen[:, 1]], 1))


def joined(rows: Sequence[Rows], lengths: Sequence[int], item: Field) -> Tensor | Ragged:
    """What a batch of samples with these rows and so many tokens has of the field. Shorter rows are filled up to the
    longest."""
    if item.of == "ragged":
        return Ragged(torch.as_tensor(np.concatenate(rows)), torch.tensor([len(own) for own in rows]))
    shape = (sum(lengths), *([max(own.shape[1] for own in rows)] if item.row else []))
    out = np.full(shape, item.filler(rows[0].dtype), rows[0].dtype)
    end = 0
    for own, length in zip(rows, lengths, strict=True):
        end += length
        out[(slice(end - len(own), end), *map(slice, own.shape[1:]))] = own
    return torch.as_tensor(out)


@record(frozen=True, kw_only=True)
class TrainBatch(BatchFields):
    """N samples with T tokens in all, ragged: sample i owns tokens[offsets[i] : offsets[i+1]], offsets =
    cumsum(lengths). Its fields are those of the table in algorithms/fields.py.

    Everything with T entries is aligned with `tokens`; the value at t belongs to the event "tokens[t] was chosen given
    the tokens before it in its sample". The first token of a sample never has a loss.

    metadata: name -> [N] float32, the numbers of the samples' train_metadata, for functions of the user's; true is 1
    wide: fields that are None here, and on ranks what the references stand for (`fetched`)
    """

    metadata: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    wide: tuple[Wide, ...] = ()

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
        for wide in self.wide:
            if len(wide.places) != num_samples:
                raise ValueError(f"TrainBatch.wide is of {len(wide.places)} samples, expected {num_samples}")
        by_reference = [name for wide in self.wide for name in wide.names]
        twice = [name for name in by_reference if getattr(self, name) is not None or by_reference.count(name) > 1]
        if twice:
            raise ValueError(f"TrainBatch.{twice[0]} is given twice, by reference at least once")

    @property
    def num_samples(self) -> int:
        return len(self.lengths)

    @property
    def num_loss_tokens(self) -> int:
        return int(self.loss_mask.sum())

    def has(self, name: str) -> bool:
        """Whether there is this field, here or by reference."""
        return getattr(self, name) is not None or any(name in wide.names for wide in self.wide)

    def at_tokens(self, name: str) -> Tensor:
        """[T, ...] of a field that ranks cut at tokens. ValueError where a ragged one has more or fewer values than the
        sample has tokens for them."""
        item, value = fields_of(self)[name], getattr(self, name)
        if not isinstance(value, Ragged):
            return value
        marked = getattr(self, item.at) != 0
        wanted = [int(own.sum()) for own in torch.split(marked, numbers(self.lengths))]
        if wanted != numbers(value.lengths):
            raise ValueError(
                f"TrainBatch.{name} has {numbers(value.lengths)} values a sample, and {item.at} marks {wanted} tokens"
            )
        out = value.values.new_full((len(marked),), item.filler(value.values.dtype))
        out[marked] = value.values
        return out

    def here(self) -> TrainBatch:
        """Without its references, which hold memory of others."""
        return self.replace(wide=())

    @property
    def sampled(self) -> Tensor:
        """[T] float32, 1 where the policy sampled the token: what a response's length and its reward are made of."""
        return self.loss_mask if self.response_mask is None else self.response_mask

    def replace(self, **changes: Any) -> TrainBatch:
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
        metadata = {name: values[sample_index] for name, values in self.metadata.items()}
        return TrainBatch(**changes, metadata=metadata, wide=tuple(wide.select(sample_index) for wide in self.wide))

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


def fetched(batches: Sequence[TrainBatch], get: Callable[[list[Any]], Sequence[Any]]) -> list[TrainBatch]:
    """The batches, with values in the place of references. get: gives the blocks of references, as `ray.get`; each is
    asked for once."""
    references = list(dict.fromkeys(ref for batch in batches for wide in batch.wide for ref in wide.blocks))
    blocks = dict(zip(references, get(references), strict=True)) if references else {}
    return [_with_values(batch, blocks) if batch.wide else batch for batch in batches]


def _with_values(batch: TrainBatch, blocks: Mapping[Any, Sequence[Mapping[str, Rows]]]) -> TrainBatch:
    lengths, table = numbers(batch.lengths), fields_of(batch)
    values: dict[str, Tensor | Ragged] = {}
    for wide in batch.wide:
        places: list[tuple[int, int]] = numbers(wide.places)
        samples = [blocks[wide.blocks[block]][place] for block, place in places]
        values |= {name: joined([sample[name] for sample in samples], lengths, table[name]) for name in wide.names}
    return batch.replace(**values, wide=())
