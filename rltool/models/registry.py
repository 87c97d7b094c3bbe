"""Which family a config.json belongs to."""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from rltool.config.base import is_list, is_table
from rltool.config.import_path import load_attribute
from rltool.errors import UsageError
from rltool.models import (
    deepseek_v3,
    gemma2,
    gemma3,
    glm4,
    glm4_moe,
    gpt_oss,
    llama,
    mistral,
    mixtral,
    olmo,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    qwen3_vl,
    smollm3,
)
from rltool.models.base import Family, FamilyDefinition

FAMILIES: tuple[FamilyDefinition, ...] = (
    llama.FAMILY, smollm3.FAMILY, qwen2.FAMILY, qwen2_moe.FAMILY, qwen3.FAMILY, qwen3_vl.FAMILY,
    qwen3_vl.EXPERTS_FAMILY, qwen3_moe.FAMILY, qwen3_next.FAMILY, qwen3_5.FAMILY, qwen3_5_moe.FAMILY, mistral.FAMILY,
    mixtral.FAMILY, phi3.FAMILY, gemma2.FAMILY, gemma3.FAMILY, olmo.FAMILY, olmoe.FAMILY, glm4.FAMILY,
    glm4_moe.FAMILY, deepseek_v3.FAMILY, gpt_oss.FAMILY,
)  # fmt: skip
_BY_ARCHITECTURE = {architecture: family for family in FAMILIES for architecture in family.architectures}
HOW_TO_ADD = 'docs/extending.md, "Adding a model family"'


def supported_architectures() -> list[str]:
    return sorted(_BY_ARCHITECTURE)


def definition_for(hf_config: dict[str, Any]) -> tuple[str, FamilyDefinition]:
    """(architecture, its family) of this config.json. UsageError for one that is not built, with the nearest that
    is."""
    architectures: Any = hf_config.get("architectures") or []
    if not is_list(architectures) or not all(isinstance(name, str) for name in architectures):
        raise UsageError(f"config.json: architectures = {architectures!r}, expected a list of names")
    known = [name for name in architectures if name in _BY_ARCHITECTURE]
    if known:
        return known[0], _BY_ARCHITECTURE[known[0]]
    near = nearest_architecture(architectures[0]) if architectures else None
    hint = f"the nearest that is built is {near} ({_BY_ARCHITECTURE[near].opens}); " if near else ""
    raise UsageError(
        f"unsupported architecture in config.json: {', '.join(architectures) or 'none named'}; {hint}"
        f"`rltool models` lists all. A family is about a screen of code: {HOW_TO_ADD}, describes how to add one"
    )


def nearest_architecture(name: str) -> str | None:
    """The built one whose name is most like this one, if any is like it; what stands behind "For" is not compared."""
    stems = {_stem(architecture): architecture for architecture in supported_architectures()}
    near = difflib.get_close_matches(_stem(name), list(stems), n=1, cutoff=0.65)
    return stems[near[0]] if near else None


def _stem(architecture: str) -> str:
    return re.split(r"For[A-Z]", architecture)[0].lower()


def family_for(hf_config: dict[str, Any], own: str | None = None) -> Family:
    """The model that this config.json describes. own: import path of a user's `FamilyDefinition` (model.family), which
    comes before those here for the architectures that it names.

    UsageError for an architecture or a feature that is not implemented.
    """
    definition = load_family(own) if own is not None else None
    if definition is not None and (named := set(hf_config.get("architectures") or ()) & set(definition.architectures)):
        architecture = named.pop()
    else:
        architecture, definition = definition_for(hf_config)
    try:
        family = definition.build(hf_config)
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"config.json describes no {architecture}: {type(error).__name__}: {error}") from error
    return family if own is None else replace(family, own=own)


def dtype_in(hf_config: dict[str, Any]) -> str:
    """Of the weights, by this config.json."""
    text: dict[str, Any] = hf_config.get("text_config") or {}
    found = (config.get(key) for config in (hf_config, text) for key in ("dtype", "torch_dtype"))
    return next(filter(None, found), "float32")


def load_family(path: str, *, setting: str = "model.family") -> FamilyDefinition:
    """A user's own, by its import path. UsageError where there is none."""
    found = load_attribute(path, setting=setting)
    if not isinstance(found, FamilyDefinition):
        raise UsageError(
            f"{setting} = {path!r}: expected a FamilyDefinition, found {type(found).__name__}; {HOW_TO_ADD}, shows one"
        )
    return found


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
