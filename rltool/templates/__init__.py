"""Run templates that ship with rltool: TOML files beside this module."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from rltool.errors import UsageError


def algorithm_names() -> list[str]:
    """Fragments of an [algorithm] section: `algorithms/NAME`."""
    files = resources.files(__name__).joinpath("algorithms").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def template_text(name: str) -> str:
    return resources.files(__name__).joinpath(f"{name}.toml").read_text()


def write_template(name: str, path: Path) -> None:
    """Raises UsageError if `path` exists or cannot be written."""
    try:
        with path.open("x") as file:
            file.write(template_text(name))
    except FileExistsError:
        raise UsageError(f"{path} exists already and is left as it is: name another file") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
