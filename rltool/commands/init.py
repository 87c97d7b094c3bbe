"""`rltool init`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from rltool.config.methods import EXAMPLES, in_examples
from rltool.errors import UsageError
from rltool.processes.gpus import Gpu, visible_gpus
from rltool.templates import IN_BFLOAT16, ON_A_CPU, WITH_MUCH_MEMORY, algorithm_names, write_template
from rltool.terminal import write_line

_BFLOAT16_FROM = (8, 0)
"""Compute capability: Ampere's."""
_MUCH_MEMORY_MIB = 70 * 1024
"""16,384 tokens of a model of 1.5B, without recomputation, take 59 GiB with its optimizer (docs/parallelism.md)."""


def init(
    path: Annotated[
        Path | None, typer.Argument(help="File to write; without it run.toml, or NAME.toml of the algorithm.")
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(help=f"Write the [algorithm] section of a paper instead: {', '.join(algorithm_names())}."),
    ] = None,
    device: Annotated[
        Literal["auto", "cuda", "cpu"],
        typer.Option(
            help="Where the run will be. auto: on this host's GPUs, if it has any. cuda: bfloat16 also where no GPU is "
            "found here. cpu: lengths, learning rate and threads for a small model."
        ),
    ] = "auto",
) -> None:
    """Write a commented run template (TOML) to edit. Never overwrites a file."""
    if algorithm is not None:
        if algorithm in EXAMPLES:
            raise UsageError(f"--algorithm {algorithm}: {in_examples(algorithm)}")
        if algorithm not in algorithm_names():
            raise UsageError(f"--algorithm {algorithm}: no such algorithm; known: {', '.join(algorithm_names())}")
        if device == "cpu":
            raise UsageError("--device cpu is for the template of a run; an algorithm is the same on every device")
        path = path or Path(f"{algorithm}.toml")
        write_template(f"algorithms/{algorithm}", path)
        write_line(f"wrote {path}; lay it over a run with: rltool train --config run.toml --config {path}")
        return
    path = path or Path("run.toml")
    changes, why = fit(device, [] if device == "cpu" else visible_gpus())
    write_template("grpo", path, changes)
    write_line(why)
    write_line(
        f"wrote {path}; edit model.path and data.train, then: rltool train --config {path} --rollout-external HOST:PORT"
    )


def fit(device: Literal["auto", "cuda", "cpu"], gpus: Sequence[Gpu]) -> tuple[dict[str, str], str]:
    """What the template has for this device in place of what, and one line of what was chosen and why. Pure.

    gpus: those of this host that the run may take; the weakest decides.
    """
    if device == "cpu":
        return ON_A_CPU, 'model.dtype = "float32", and lengths for a small model: --device cpu'
    if not gpus and device == "cuda":
        return IN_BFLOAT16, (
            'model.dtype = "bfloat16": --device cuda; not checked, for no GPU is here: it needs '
            f"{_name(_BFLOAT16_FROM)}"
        )
    if not gpus:
        return {}, (
            'model.dtype = "float32": no GPU found on this host. For a run on GPUs elsewhere: --device cuda; for a '
            "small model on this CPU: --device cpu"
        )
    weakest = min(gpus, key=lambda gpu: gpu.capability or (0, 0))
    if weakest.capability is None:
        return {}, (
            f'model.dtype = "float32": nvidia-smi does not name the compute capability of GPU {weakest.index}, '
            f'{weakest.name}; with {_name(_BFLOAT16_FROM)} set "bfloat16"'
        )
    found = f"GPU {weakest.index}, {weakest.name}, has {_name(weakest.capability)}"
    if weakest.capability < _BFLOAT16_FROM:
        return {}, f'model.dtype = "float32": {found}, and bfloat16 needs {_name(_BFLOAT16_FROM)}'
    memory = min(gpu.memory_mib or 0 for gpu in gpus)
    if memory < _MUCH_MEMORY_MIB:
        return IN_BFLOAT16, f'model.dtype = "bfloat16": {found}'
    return IN_BFLOAT16 | WITH_MUCH_MEMORY, (
        f'model.dtype = "bfloat16" and trainer.max_tokens_per_micro_batch = 16384: {found} and {memory // 1024} GiB'
    )


def _name(capability: tuple[int, int]) -> str:
    return f"compute capability {capability[0]}.{capability[1]}"
