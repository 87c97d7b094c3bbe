"""What rollout-only checks beside what train does: settings that mean nothing to it, and a directory that is free."""

from __future__ import annotations

from pathlib import Path

from rltool.errors import UsageError
from rltool.rollout.measure.dump import dumped_steps

UNUSED_SECTIONS = ("trainer", "optimizer", "algorithm", "weights", "checkpoint", "ray", "monitor")
"""Sections of the configuration that mean nothing without a trainer."""
USED = frozenset({"algorithm.routing_replay"})
"""But for these: samples bring what the trainer will replay."""


def check_settings(origins: dict[str, str]) -> list[str]:
    """Settings that a configuration file gives and rollout-only does not use, as sentences to print.

    origins: dotted key -> where it was set. UsageError where one was typed for this very command (--set, a flag): then
    it is a misunderstanding; in a file it is most likely the file of a training run.
    """
    unused = {
        key: origin
        for key, origin in origins.items()
        if key.split(".")[0] in UNUSED_SECTIONS and key not in USED
    }
    typed = [f"{key} ({origin})" for key, origin in unused.items() if origin.startswith("--")]
    if typed:
        raise UsageError(
            f"rollout-only starts no trainer and sends no weights, so it cannot use {', '.join(typed)}: "
            "leave it out, or use `rltool train`"
        )
    sections = sorted({key.split(".")[0] for key in unused})
    return [f"not used without a trainer: {', '.join(f'[{section}]' for section in sections)}"] if sections else []


def check_directory(directory: Path, option: str = "--out") -> None:
    """UsageError if it holds rollouts already: two runs' steps would be mixed."""
    steps = dumped_steps(directory)
    if steps:
        raise UsageError(
            f"{directory} already holds rollouts of steps {steps[0]} to {steps[-1]}: "
            f"give another {option}, or remove them"
        )
