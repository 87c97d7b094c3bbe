"""Rows for this recipe: sums of reasoning-gym's `chain_sum`, as chat messages with the sum as label.

    python -m recipes.arithmetic.make_data runs/arithmetic/data --digits 2 --terms 2

Writes train.jsonl and held_out.jsonl; no question of the second is in the first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import reasoning_gym

MOST_KNOWN = 300_000
"""Questions in a row that were there already: then there are no others."""
INSTRUCTION = "Answer with the number alone. "


def questions(*, seed: int, terms: int, digits: int) -> Iterator[tuple[str, str]]:
    """(question, sum), for ever. reasoning-gym makes number i of a set from seed + i, so the next set begins behind."""
    settings: dict[str, Any] = dict(min_terms=terms, max_terms=terms, min_digits=digits, max_digits=digits)
    while True:
        for entry in reasoning_gym.create_dataset("chain_sum", size=1000, seed=seed, **settings):
            yield entry["question"], entry["answer"]
        seed += 1000


def write_rows(path: Path, source: Iterator[tuple[str, str]], count: int, without: Container[str]) -> set[str]:
    """The next `count` questions that are not in `without`, once each; returns them."""
    written: set[str] = set()
    known = 0
    with path.open("w") as file:
        while len(written) < count:
            question, answer = next(source)
            if question in without or question in written:
                known += 1
                if known == MOST_KNOWN:
                    raise SystemExit(f"{path}: there seem to be no more than {len(written)} questions for it: ask for "
                                     "fewer (--train, --held-out), or for more digits or terms")
                continue
            known = 0
            written.add(question)
            row = {"messages": [{"role": "user", "content": INSTRUCTION + question}], "label": answer}
            file.write(json.dumps(row) + "\n")
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--terms", type=int, default=2)
    parser.add_argument("--digits", type=int, default=2, help="of each term")
    parser.add_argument("--train", type=int, default=15500, help="of 16,200 that there are with two digits and terms")
    parser.add_argument("--held-out", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    chosen.directory.mkdir(parents=True, exist_ok=True)
    source = questions(seed=chosen.seed, terms=chosen.terms, digits=chosen.digits)
    held_out = write_rows(chosen.directory / "held_out.jsonl", source, chosen.held_out, ())
    write_rows(chosen.directory / "train.jsonl", source, chosen.train, held_out)


if __name__ == "__main__":
    main()
