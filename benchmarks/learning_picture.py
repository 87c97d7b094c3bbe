"""What a run has learned, as a picture: the accuracy of an evaluation with its 95 % intervals, and batches' rewards.

    python -m benchmarks.learning_picture runs/arithmetic/metrics.jsonl --out docs/arithmetic.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.pictures import standalone
from rltool.report.charts import Series, line_chart


def picture(rows: Sequence[Mapping[str, float]], eval_set: str) -> str:
    """rows: of metrics.jsonl; the evaluation of step s is of what s + 1 steps have made."""
    name = f"eval/{eval_set}/accuracy"
    evaluated = [row for row in rows if name in row]
    if not evaluated:
        raise ValueError(f"no row has {name}")
    intervals = {row["step"] + 1: (row[f"{name}_low"], row[f"{name}_high"]) for row in evaluated}
    rewards = [(row["step"] + 1, row["rollout/reward_mean"]) for row in rows if "train/loss" in row]
    return standalone(
        line_chart(
            [
                Series("mean reward of the batch", rewards, "faint", color=1),
                Series(eval_set, [(row["step"] + 1, row[name]) for row in evaluated], "dots", 0, intervals),
            ],
            label="accuracy (blue), reward (red)",
            y_range=(0, 1),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", type=Path)
    parser.add_argument("--eval-set", default="held_out")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.write_text(picture([json.loads(line) for line in args.metrics.read_text().splitlines()], args.eval_set))


if __name__ == "__main__":
    main()
