"""The quickstart's task: spell a word backward. Its rule carries over to words that were never seen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIN_LETTERS, MAX_LETTERS = 3, 5
"""8,400 distinct words. Longer ones are learned far more slowly, shorter ones are too few."""
PROMPT_END = "="
"""Ends the prompt: short, because every token costs the tiny model's engines time and teaches nothing more."""


@dataclass(frozen=True)
class TaskFiles:
    """JSONL files with `prompt`, `label` and `metadata`; no word is in both."""

    train: Path
    heldout: Path


def make_task(directory: Path, *, seed: int, num_train: int = 6000, num_heldout: int = 256) -> TaskFiles:
    """Write both splits, drawn without repetition from reasoning-gym's `spell_backward`."""
    items = _distinct_items(seed, num_train + num_heldout)
    heldout = [next(items) for _ in range(num_heldout)]
    train = [next(items) for _ in range(num_train)]
    directory.mkdir(parents=True, exist_ok=True)
    files = TaskFiles(directory / "train.jsonl", directory / "heldout.jsonl")
    for path, rows in ((files.train, train), (files.heldout, heldout)):
        path.write_text("".join(json.dumps(_row(item)) + "\n" for item in rows), encoding="utf-8")
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
