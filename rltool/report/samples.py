"""Samples of a run for people to look at: what is kept of each step, which ones, and how they are read back.

One step is one JSON file, RUN/samples/step_000012.json, counted as in metrics.jsonl. It holds texts beside token ids,
so that it is read without the tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rltool.errors import RltoolError

FORMAT_VERSION = 1


@dataclass(frozen=True)
class SampleRecord:
    """One sample. group and index name it within the run.

    tokens, token_ids, mask and engine_logprobs have one entry for each token of the response; mask is 1 where the
    policy sampled the token, 0 where an environment inserted it. trainer_logprobs: None where the trainer has none (no
    loss on that token, or the sample was not compared). versions: (weight version, start, end) in the response.
    pictures: of the prompt, what the row calls each and a data URL of it, made smaller where it is large.
    """

    group: int
    index: int
    prompt: str
    text: str
    reward: float | None
    status: str
    prompt_tokens: int
    tokens: tuple[str, ...]
    token_ids: tuple[int, ...]
    mask: tuple[int, ...]
    engine_logprobs: tuple[float, ...]
    trainer_logprobs: tuple[float | None, ...] | None = None
    label: str | None = None
    versions: tuple[tuple[str, int, int], ...] = ()
    pictures: tuple[tuple[str, str], ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    train_metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def differences(self) -> tuple[float | None, ...]:
        """Trainer's minus engine's log-probability of each token, None where there is nothing to compare."""
        if self.trainer_logprobs is None:
            return (None,) * len(self.tokens)
        return tuple(
            None if trainer is None or not sampled else trainer - engine
            for trainer, engine, sampled in zip(self.trainer_logprobs, self.engine_logprobs, self.mask, strict=True)
        )

    @property
    def spans(self) -> list[Span]:
        """The response cut where its mask changes: turns of the policy, and what came between them."""
        found: list[Span] = []
        for position, value in enumerate(self.mask):
            if found and found[-1].mask == value:
                found[-1] = Span(value, found[-1].start, position + 1)
            else:
                found.append(Span(value, position, position + 1))
        return found


@dataclass(frozen=True)
class Span:
    """Response tokens [start, end), all with this mask."""

    mask: int
    start: int
    end: int


@dataclass(frozen=True)
class StepSamples:
    """What is kept of one step. of: how many samples it had."""

    step: int
    of: int
    samples: tuple[SampleRecord, ...]


def spread(rewards: Sequence[float], count: int) -> list[int]:
    """Positions of at most `count` samples, evenly over the samples in order of their reward: with one the median, with
    two the worst and the best, with three all of these. In ascending order of reward."""
    order = sorted(range(len(rewards)), key=lambda position: (rewards[position], position))
    count = min(count, len(order))
    if count <= 1:
        return [order[len(order) // 2]] if count == 1 else []
    return [order[round(i * (len(order) - 1) / (count - 1))] for i in range(count)]


def median(records: Sequence[SampleRecord]) -> SampleRecord:
    """By reward. ValueError for none."""
    if not records:
        raise ValueError("no samples")
    return sorted(records, key=_reward)[len(records) // 2]


def ordered(records: Iterable[SampleRecord], by: str) -> list[SampleRecord]:
    """by: reward (best first), length (longest first), difference (largest mean |log-probability difference| first), or
    index (as in the batch). ValueError for another key."""
    if by == "index":
        return list(records)
    if by == "reward":
        return sorted(records, key=_reward, reverse=True)
    if by == "length":
        return sorted(records, key=lambda record: len(record.tokens), reverse=True)
    if by == "difference":
        return sorted(records, key=lambda record: mean_difference(record) or 0.0, reverse=True)
    raise ValueError(f"unknown order {by!r}")


def mean_difference(record: SampleRecord) -> float | None:
    """Mean of |trainer - engine| over the tokens that can be compared; None where there is none."""
    found = [abs(value) for value in record.differences if value is not None]
    return sum(found) / len(found) if found else None


def _reward(record: SampleRecord) -> float:
    return float("-inf") if record.reward is None else record.reward


# -- files


def sample_file(directory: Path, step: int) -> Path:
    return directory / f"step_{step:06d}.json"


def recorded_steps(directory: Path) -> list[int]:
    """Steps with samples in this directory, ascending."""
    return sorted(int(path.stem.removeprefix("step_")) for path in directory.glob("step_[0-9]*.json"))


def encoded(kept: StepSamples) -> bytes:
    """What the step's file holds. Of metadata what is no JSON becomes text."""
    return json.dumps({"format_version": FORMAT_VERSION, **asdict(kept)}, default=str).encode()


def read_samples(directory: Path, step: int) -> StepSamples:
    """RltoolError where the step is not there, or its file cannot be read."""
    path = sample_file(directory, step)
    try:
        document = json.loads(path.read_bytes())
        version = document["format_version"]
        if version != FORMAT_VERSION:
            raise RltoolError(f"{path} has format version {version}; this rltool reads {FORMAT_VERSION}")
        return StepSamples(document["step"], document["of"], tuple(_record(entry) for entry in document["samples"]))
    except FileNotFoundError:
        there = recorded_steps(directory)
        have = f"it has steps {there[0]} to {there[-1]}" if there else "it has none"
        raise RltoolError(f"no samples of step {step} in {directory}: {have}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise RltoolError(f"{path} holds no samples that can be read: {type(error).__name__}: {error}") from error


def _record(entry: dict[str, Any]) -> SampleRecord:
    lists = ("tokens", "token_ids", "mask", "engine_logprobs")
    return SampleRecord(
        **{
            **entry,
            **{name: tuple(entry[name]) for name in lists},
            "trainer_logprobs": None if entry["trainer_logprobs"] is None else tuple(entry["trainer_logprobs"]),
            "pictures": tuple((name, url) for name, url in entry.get("pictures", ())),
            "versions": tuple((version, start, end) for version, start, end in entry["versions"]),
        }
    )
