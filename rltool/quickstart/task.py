"""The quickstart's task: spell a word backward. Its rule carries over to words that were never seen.

The warm start imitates a careless speller, who knows the rule but swaps two letters in most words. So the model learns
the form and the rule, and answers wrongly as often as the speller: a share that the supervised steps approach from
below and cannot overshoot. What is left for reinforcement learning is to find out which of its
answers pay.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIN_LETTERS, MAX_LETTERS = 3, 5
"""8,400 distinct words. Longer ones are learned far more slowly, shorter ones are too few."""
PROMPT_END = "="
"""Ends the prompt: short, because every token costs the tiny model's engines time and teaches nothing more."""
MISTAKE_RATE = 0.64
"""Share of wrong answers in the warm start's data."""


@dataclass(frozen=True)
class TaskFiles:
    """JSONL files with `prompt`, `label` and `metadata`; no word of `heldout` is in the other two.

    warm_start: the words of `train` with a `response` besides, often wrong.
    """

    train: Path
    heldout: Path
    warm_start: Path


def make_task(
    directory: Path, *, seed: int, num_train: int = 6000, num_heldout: int = 256, mistake_rate: float = MISTAKE_RATE
) -> TaskFiles:
    """Write the splits, drawn without repetition from reasoning-gym's `spell_backward`. The same seed gives the same
    files."""
    items = _distinct_items(seed, num_train + num_heldout)
    heldout = [next(items) for _ in range(num_heldout)]
    train = [next(items) for _ in range(num_train)]
    directory.mkdir(parents=True, exist_ok=True)
    files = TaskFiles(directory / "train.jsonl", directory / "heldout.jsonl", directory / "warm_start.jsonl")
    rng = random.Random(f"careless speller {seed}")
    warm_start = [_row(item) | {"response": _careless(item["answer"], mistake_rate, rng)} for item in train]
    for path, rows in (
        (files.train, map(_row, train)),
        (files.heldout, map(_row, heldout)),
        (files.warm_start, warm_start),
    ):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return files


def _distinct_items(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """reasoning-gym draws words with replacement: items whose word (in any case) has been seen are skipped."""
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(
        "spell_backward", seed=seed, size=40 * count, min_word_len=MIN_LETTERS, max_word_len=MAX_LETTERS
    )
    seen: set[str] = set()
    for item in dataset:
        word = item["metadata"]["word"].lower()
        if word not in seen:
            seen.add(word)
            yield item


def _row(item: dict[str, Any]) -> dict[str, Any]:
    metadata = {key: item["metadata"][key] for key in ("source_dataset", "source_index", "word")}
    return {"prompt": item["metadata"]["word"] + PROMPT_END, "label": item["answer"], "metadata": metadata}


def _careless(answer: str, mistake_rate: float, rng: random.Random) -> str:
    """`answer`, or with probability mistake_rate two different letters of it swapped (one left out, if all are the
    same)."""
    if rng.random() >= mistake_rate:
        return answer
    pairs = [(i, j) for i in range(len(answer)) for j in range(i) if answer[i] != answer[j]]
    if not pairs:
        return answer[1:]
    letters = list(answer)
    i, j = rng.choice(pairs)
    letters[i], letters[j] = letters[j], letters[i]
    return "".join(letters)
