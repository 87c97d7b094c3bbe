"""`rltool init`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rltool.errors import UsageError
from rltool.templates import algorithm_names, write_template


def init(
    path: Annotated[
        Path | None, typer.Argument(help="File to write; without it run.toml, or NAME.toml of the algorithm.")
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(help=f"Write the [algorithm] section of a paper instead: {', '.join(algorithm_names())}."),
    ] = None,
    device: Annotated[
        Literal["cuda", "cpu"], typer.Option(help="cpu: lengths, learning rate and threads for a small model.")
    ] = "cuda",
) -> None:
    """Write a commented run template (TOML) to edit. Never overwrites a file."""
    if algorithm is not None:
        if algorithm not in algorithm_names():
            raise UsageError(f"--algorithm {algorithm}: no such algorithm; known: {', '.join(algorithm_names())}")
        if device == "cpu":
            raise UsageError("--device cpu is for the template of a run; an algorithm is the same on every device")
        path = path or Path(f"{algorithm}.toml")
        write_template(f"algorithms/{algorithm}", path)
        print(f"wrote {path}; lay it over a run with: rltool train --config run.toml --config {path}")
        return
    path = path or Path("run.toml")
    write_template("grpo", path, cpu=device == "cpu")
    print(
        f"wrote {path}; edit model.path and data.train, then: rltool train --config {path} --rollout-external HOST:PORT"
    )
