"""Keeps a few samples of each step in RUN/samples, with the trainer's log-probabilities beside the engines'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from rltool.algorithms.batch import TrainBatch
from rltool.processes.files import write_bytes_atomic, writing
from rltool.report.samples import SampleRecord, StepSamples, encoded, sample_file


@dataclass(frozen=True)
class Scored:
    """The trainer's log-probabilities before the optimizer moved. logprobs: [T] of the samples of `batch`, which are
    the samples `rows` of the step's batch, in this order."""

    logprobs: Tensor
    batch: TrainBatch
    rows: Sequence[int]


def with_trainer_logprobs(kept: Mapping[int, SampleRecord], scored: Scored | None) -> list[SampleRecord]:
    """The records in the order of their rows. Tokens without a loss have no trainer's log-probability: a training
    forward pass computes no others."""
    if scored is None:
        return [kept[row] for row in sorted(kept)]
    ends = scored.batch.lengths.cumsum(0).tolist()
    place = {row: ends[i] for i, row in enumerate(scored.rows)}
    found = []
    for row in sorted(kept):
        record = kept[row]
        if row in place:
            response = slice(place[row] - len(record.tokens), place[row])
            values, loss = scored.logprobs[response].tolist(), scored.batch.loss_mask[response].tolist()
            record = replace(
                record, trainer_logprobs=tuple(v if m > 0 else None for v, m in zip(values, loss, strict=True))
            )
        found.append(record)
    return found


class SampleLog:
    """directory: RUN/samples."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, step: int, kept: Mapping[int, SampleRecord], *, of: int, scored: Scored | None) -> None:
        """Nothing where the source kept no samples of this step. of: samples in its batch. What an earlier attempt has
        written of it is replaced. OutputFailed."""
        if kept:
            found = StepSamples(step, of, tuple(with_trainer_logprobs(kept, scored)))
            with writing("the step's samples", self._directory):
                self._directory.mkdir(parents=True, exist_ok=True)
                write_bytes_atomic(sample_file(self._directory, step), encoded(found))
