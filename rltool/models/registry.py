"""Which family a config.json belongs to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rltool.config.base import is_list, is_table
from rltool.errors import UsageError
from rltool.models import (
    deepseek_v3,
    gemma2,
    gemma3,
    glm4,
    glm4_moe,
    llama,
    mistral,
    mixtral,
    olmo,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    smollm3,
)
from rltool.models.base import Family

_FAMILIES = (
    deepseek_v3, gemma2, gemma3, glm4, glm4_moe, llama, mistral, mixtral, olmo,
    phi3, qwen2, qwen2_moe, qwen3, qwen3_moe, smollm3,
)  # fmt: skip
_BUILDERS = {architecture: module.build for module in _FAMILIES for architecture in module.ARCHITECTURES}
HOW_TO_ADD = 'docs/extending.md, "Adding a model family"'


def supported_architectures() -> list[str]:
    return sorted(_BUILDERS)


def family_for(hf_config: dict[str, Any]) -> Family:
    """The model that this config.json describes. UsageError for an architecture or a feature that is not
    implemented."""
    architectures: Any = hf_config.get("architectures") or []
    if not is_list(architectures) or not all(isinstance(name, str) for name in architectures):
        raise UsageError(f"config.json: architectures = {architectures!r}, expected a list of names")
    known = [name for name in architectures if name in _BUILDERS]
    if not known:
        found = ", ".join(architectures) or "none named"
        raise UsageError(
            f"unsupported architecture in config.json: {found}; supported: {', '.join(supported_architectures())}. "
            f"A family is about a screen of code: {HOW_TO_ADD}, describes how to add one"
        )
    try:
        return _BUILDERS[known[0]](hf_config)
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"config.json describes no {known[0]}: {type(error).__name__}: {error}") from error


def read_hf_config(directory: Path) -> dict[str, Any]:
    """The config.json of a model directory. UsageError when there is none or it is no JSON object."""
    path = Path(directory) / "config.json"
    if not Path(directory).is_dir():
        raise UsageError(f"{directory} is not a directory; expected a Hugging Face model directory with a config.json")
    if not path.is_file():
        raise UsageError(f"{directory} has no config.json; expected a Hugging Face model directory")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from error
    if not is_table(config):
        raise UsageError(f"{path} holds a {type(config).__name__}, expected a JSON object")
    return config
