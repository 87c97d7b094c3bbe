"""A global batch cut into micro-batches for the data-parallel ranks, and their results put in order again. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rltool.algorithms.batch import TrainBatch, Wide
from rltool.algorithms.prefixes import runs_of
from rltool.algorithms.schedule import check_lengths, plan_micro_batches
from rltool.config.train import TrainConfig
from rltool.models.registry import family_for, read_hf_config

if TYPE_CHECKING:
    from rltool.megatron.runtime import Coordinates


@dataclass(frozen=True)
class Shards:
    """plan: per data-parallel rank its micro-batches as sample indices; an empty one is a filler without loss."""

    batch: TrainBatch
    plan: list[list[list[int]]]

    def micro_batches(self, dp_rank: int) -> list[TrainBatch]:
        batch = self.batch.for_ranks()
        return [batch.micro_batch(samples) for samples in self.plan[dp_rank]]

    def in_order(self, coordinates: Sequence[Coordinates], results: Sequence[list[Tensor] | None]) -> Tensor:
        """[T, ...] of the global batch from each rank's [tokens, ...] per micro-batch; None from ranks that hand
        nothing back.

        coordinates: of each rank.
        """
        given = next(values for result in results if result is not None for values in result)
        out = given.new_zeros(len(self.batch.tokens), *given.shape[1:])
        ends = self.batch.lengths.cumsum(0)
        starts = ends - self.batch.lengths
        for place, result in zip(coordinates, results, strict=True):
            if result is None:
                continue
            for samples, values in zip(self.plan[place.dp_rank], result, strict=True):
                at = 0
                for i in samples:  # a filler micro-batch has no samples: its values are dropped
                    size = int(self.batch.lengths[i])
                    out[starts[i] : starts[i] + size] = values[at : at + size]
                    at += size
        return out

    def wide_in_order(self, coordinates: Sequence[Any], results: Sequence[list[Wide] | None]) -> Wide:
        """Of the global batch, likewise, from each rank's of its micro-batches. What was put stays where it is."""
        names: tuple[str, ...] = ()
        blocks: list[Any] = []
        places = torch.zeros(self.batch.num_samples, 2, dtype=torch.int64)
        for place, result in zip(coordinates, results, strict=True):
            if result is None:
                continue
            for samples, wide in zip(self.plan[place.dp_rank], result, strict=True):
                if samples:
                    names = wide.names
                    places[samples] = wide.places + torch.tensor([len(blocks), 0])
                    blocks += wide.blocks
        return Wide(names, tuple(blocks), places)


class Sharder:
    """Cuts by trainer.max_tokens_per_micro_batch (logprob_tokens_per_micro_batch) and trainer.balance."""

    def __init__(self, config: TrainConfig) -> None:
        self._trainer = config.trainer
        self._cost = None
        if config.trainer.balance == "flops":
            self._cost = family_for(read_hf_config(config.model.path), config.model.family).cost()

    def shard(self, batch: TrainBatch, *, forward_only: bool = False) -> Shards:
        """forward_only: for a pass that trains nothing. UsageError where a sample is longer than a micro-batch that is
        trained on."""
        trainer, lengths = self._trainer, batch.lengths.tolist()
        check_lengths(lengths, trainer.micro_batch_tokens)
        most = trainer.forward_tokens * trainer.context_parallel if forward_only else trainer.micro_batch_tokens
        if trainer.shared_prefixes:
            return self._by_prefixes(batch, most)
        costs = [self._cost.training_flops(length) for length in lengths] if self._cost is not None else None
        return Shards(batch, plan_micro_batches(lengths, max_tokens=most, data_parallel=trainer.layout.dp, costs=costs))

    def _by_prefixes(self, batch: TrainBatch, most: int) -> Shards:
        """Samples that begin alike in one micro-batch, which is counted by its distinct tokens, `most` of them."""
        trainer = self._trainer
        runs = runs_of(
            batch.tokens,
            batch.lengths,
            max_tokens=most,
            least=trainer.layout.dp,
            cost_of=self._cost.training_flops if self._cost is not None else int,
        )
        plan = plan_micro_batches(
            [run.tokens for run in runs],
            max_tokens=most,
            data_parallel=trainer.layout.dp,
            costs=[run.cost for run in runs],
        )
        return Shards(batch, [[[i for run in micro for i in runs[run].rows] for micro in rank] for rank in plan])
