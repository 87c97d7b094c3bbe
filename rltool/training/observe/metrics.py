"""What a run measures, written as it goes: metrics.jsonl (one record per step), loggers, and one console line per
step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rltool.processes.files import writing
from rltool.terminal import Console
from rltool.training.observe.loggers import MetricLogger


class MetricsWriter:
    """Appends records to metrics.jsonl; a resumed run first drops records of steps that it will do again.

    loggers get the same numbers. One that fails is left out from then on: a server for charts is no reason to end a
    run, and metrics.jsonl has everything.
    """

    def __init__(
        self, file: Path, *, console: Console, loggers: Sequence[MetricLogger] = (), first_step: int = 0
    ) -> None:
        self._console = console
        self._loggers = list(loggers)
        if file.exists():
            _drop_from(file, first_step)
        self._file = file.open("a")
        self._was_removed = False

    def write(self, step: int, weight_version: str, metrics: dict[str, float], **facts: Any) -> None:
        """One record. A value that is not finite is written as null: JSON has no NaN, and readers would stumble.
        OutputFailed."""
        record: dict[str, Any] = {"step": step, "weight_version": weight_version, **facts}
        record.update({name: float(value) if math.isfinite(value) else None for name, value in sorted(metrics.items())})
        with writing("metrics", Path(self._file.name)):
            self._follow_removal()
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        for logger in list(self._loggers):
            try:
                logger.log(step, finite)
            except Exception as error:  # a client library may raise anything when its server has gone
                self._loggers.remove(logger)
                self._failed(logger, "failed and gets nothing more", error)

    def log(self, text: str) -> None:
        self._console.print(text)

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:  # what could not be written before is tried once more
            self.log(f"{self._file.name} lacks its last record: {error.strerror or error}")
        if self._was_removed:
            self._warn(f"{self._file.name} was removed during the run: it lacks the steps before that")
        for logger in self._loggers:
            try:
                logger.close()
            except Exception as error:
                self._failed(logger, "could not be closed", error)

    def _follow_removal(self) -> None:
        """Go on in a new file where this one, or the directory of the run, was removed or replaced: what is written to
        a file without a name is lost."""
        path = Path(self._file.name)
        try:
            if os.path.samestat(path.stat(), os.fstat(self._file.fileno())):
                return
        except FileNotFoundError:
            pass
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file.close()
        self._file = path.open("a")
        self._was_removed = True
        self._warn(
            f"{path} was removed, with all its records: they go on in a new file. If the directory of the run was, so "
            "were its state and its lock: no other command finds this run any more, and none is kept out of it"
        )

    def _warn(self, line: str) -> None:
        self._console.print(line, style="yellow", highlight=False, markup=False, soft_wrap=True)

    def _failed(self, logger: MetricLogger, what: str, error: Exception) -> None:
        line = f"{type(logger).__name__} {what}: {type(error).__name__}: {error}"
        self._console.print(line)


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
        parts.append(f"skipped {metrics['train/skipped_steps']:.0f}")
    return "  ".join(part for part in parts if part)


def progress_line(waited: float, *, ready: int, needed: int, running: int, serving: int) -> str:
    """Of a rollout that takes long. The time left is an extrapolation of the groups that are ready: too short where the
    longest answers come last, and not given before the first. serving: engines that do."""
    line = f"rollout: {waited:.0f} s, {ready} of {needed} groups ready, {running} running"
    if not serving:
        line += ", no engine serves"
    elif 0 < ready < needed:
        line += f", about {waited * (needed - ready) / ready:.0f} s left"
    return line


def step_speed(metrics: Mapping[str, float], *, tokens: int, ranks: int) -> dict[str, float]:
    """metrics: of a finished step; tokens: of its batch, prompts included; ranks: of the trainer, one a GPU.

    time/non_generation_seconds is the part of the step not spent waiting for samples: in a synchronous run
    the engines' idle time.
    """
    found: dict[str, float] = {}
    seconds = metrics.get("time/train_seconds", 0.0)
    if seconds > 0:
        found["train/tokens_per_second"] = tokens / seconds
        found["train/tokens_per_second_per_gpu"] = tokens / seconds / ranks
    if "time/wait_seconds" in metrics and "time/step_seconds" in metrics:
        found["time/non_generation_seconds"] = metrics["time/step_seconds"] - metrics["time/wait_seconds"]
    return found
