"""`rltool init`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rltool.templates import write_template


def init(path: Annotated[Path, typer.Argument(help="File to write.")] = Path("run.toml")) -> None:
    """Write a commented run template (TOML) to edit. Never overwrites a file."""
    write_template("grpo", path)
    print(f"wrote {path}; edit model.path and data.train, then: rltool train --config {path} --rollout-external HOST:PORT")
