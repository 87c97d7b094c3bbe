"""What a run measures, written as it goes: metrics.jsonl (one record per step), TensorBoard, and one console line per
step."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console


class MetricsWriter:
    """Appends records to metrics.jsonl; a resumed run first drops records of steps that it will do again."""

    def __init__(self, file: Path, *, tensorboard: Path | None, console: Console, first_step: int = 0) -> None:
        self._console = console
        if file.exists():
            _drop_from(file, first_step)
        self._file = file.open("a")
        self._board: Any = None
        if tensorboard is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(tensorboard), purge_step=first_step)

    def write(self, step: int, weight_version: str, metrics: dict[str, float], **facts: Any) -> None:
        """One record. A value that is not finite is written as null: JSON has no NaN, and readers would stumble."""
        record: dict[str, Any] = {"step": step, "weight_version": weight_version, **facts}
        record.update({name: float(value) if math.isfinite(value) else None for name, value in sorted(metrics.items())})
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in metrics.items():
                self._board.add_scalar(name, value, step)

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def _drop_from(file: Path, first_step: int) -> None:
    """Keep the records before first_step; a last line torn by a crash goes too."""
    kept = []
    for line in file.read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record.get("step", -1) < first_step:
            kept.append(line + "\n")
    temporary = file.with_suffix(".partial")
    temporary.write_text("".join(kept))
    temporary.replace(file)


def step_line(step: int, steps: int, metrics: dict[str, float]) -> str:
    """The console's line of one step; parts that were not measured are left out."""
    parts = [f"step {step + 1}/{steps}"]

    def add(label: str, name: str, form: str) -> None:
        if name in metrics:
            parts.append(f"{label} {metrics[name]:{form}}")

    add("reward", "rollout/reward_mean", ".3f")
    for name, value in metrics.items():
        if name.startswith("eval/") and name.endswith("/accuracy"):
            parts.append(f"{name.removeprefix('eval/').removesuffix('/accuracy')} accuracy {value:.3f}")
    add("loss", "train/loss", ".4f")
    add("logp diff", "train/logprob_abs_diff_mean", ".1e")
    add("grad", "train/grad_norm", ".3f")
    add("kl", "train/kl", ".4f")
    add("tok/s", "rollout/tokens_per_second", ".0f")
    phases = [
        ("gen", "time/generate_seconds"),
        ("train", "time/train_seconds"),
        ("sync", "time/sync_seconds"),
        ("step", "time/step_seconds"),
    ]
    parts.append(" ".join(f"{label} {metrics[name]:.2f}s" for label, name in phases if name in metrics))
    if metrics.get("train/skipped_steps"):
        parts.append(f"[yellow]skipped {metrics['train/skipped_steps']:.0f}[/yellow]")
    return "  ".join(part for part in parts if part)
