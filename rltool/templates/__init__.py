"""Run templates that ship with rltool: TOML files beside this module."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from rltool.errors import UsageError


def algorithm_names() -> list[str]:
    """Fragments of an [algorithm] section: `algorithms/NAME`."""
    files = resources.files(__name__).joinpath("algorithms").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def template_text(name: str) -> str:
    return resources.files(__name__).joinpath(f"{name}.toml").read_text()


ON_A_CPU = {
    "--gpus 0,1 --detach     prints the --rollout-external line; without a GPU: --device cpu":
        "--device cpu --max-model-len 256 --detach     prints the --rollout-external line",
    "steps = 100": "steps = 50",
    "max_prompt_tokens = 1024": "max_prompt_tokens = 64",
    "max_response_tokens = 1024": "max_response_tokens = 64",
    "lr = 1e-6": "lr = 3e-4",
    "#torch_threads = 4": "torch_threads = 1",
}  # fmt: skip
"""What the run's template has for a small model on a CPU, which engines and trainer share, in place of what."""

IN_BFLOAT16 = {'#dtype = "float32"': 'dtype = "bfloat16"'}
"""The same for GPUs that compute in bfloat16."""

WITH_MUCH_MEMORY = {"#max_tokens_per_micro_batch = 4096": "max_tokens_per_micro_batch = 16384"}
"""The same for GPUs with the memory for that in bfloat16, for models that one of them can train."""


def write_template(name: str, path: Path, changes: Mapping[str, str] | None = None) -> None:
    """changes: text of the template -> what stands there instead. UsageError if `path` exists or cannot be written."""
    text = template_text(name)
    for general, special in (changes or {}).items():
        text = text.replace(general, special, 1)
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} exists already and is left as it is: name another file") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
