"""Adapters as the peft package and engines read them: adapter_config.json and one safetensors file.

Tensors have the names of transformers 4, where every expert is a module of its own: vLLM reads these, and so does peft,
which fuses experts as it loads them. The package itself is not needed here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rltool.checkpoints import directory as directories
from rltool.config.base import is_table
from rltool.config.sections import LoraConfig
from rltool.errors import UsageError
from rltool.models.adapters import Adapted, adapters_of, peft_config
from rltool.models.base import Family, Parameter
from rltool.models.hf_directory import HFTensors
from rltool.models.tensor_files import write_tensor_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_PLAIN: dict[str, Any] = {
    "bias": "none", "use_dora": False, "use_rslora": False, "lora_bias": False, "fan_in_fan_out": False,
    "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None, "layers_to_transform": None,
    "layer_replication": None, "use_qalora": False, "alora_invocation_tokens": None, "trainable_token_indices": None,
}  # fmt: skip
"""Keys of peft's configuration that change what an adapter computes, with the only values that are implemented."""


@dataclass(frozen=True)
class PeftSettings:
    """Of an adapter_config.json."""

    rank: int
    alpha: float
    base: str | None


def is_peft(directory: Path) -> bool:
    """Whether the directory claims to be an adapter of peft's."""
    return (Path(directory) / CONFIG).is_file()


def read_settings(directory: Path) -> PeftSettings:
    """UsageError for what is no LoRA adapter, or one with a feature that is not implemented."""
    path = Path(directory) / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from error
    if not is_table(config) or config.get("peft_type") != "LORA":
        raise UsageError(f"{path}: expected a JSON object with peft_type = LORA")
    for key, value in _PLAIN.items():
        if (config.get(key) or None) not in (value, value or None):
            raise UsageError(f"{path}: {key} = {config[key]!r} is not implemented; only {value!r} is")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init != "gaussian":
        raise UsageError(f"{path}: init_lora_weights = {init!r} changes the model, which is not implemented")
    return PeftSettings(int(config["r"]), float(config["lora_alpha"]), config.get("base_model_name_or_path"))


def check_settings(directory: Path, lora: LoraConfig) -> None:
    """UsageError when rank or alpha are not those of [lora]."""
    settings = read_settings(directory)
    for key, found in (("rank", settings.rank), ("alpha", settings.alpha)):
        if found != getattr(lora, key):
            raise UsageError(
                f"{directory} has {key} = {found:g}, but lora.{key} is {getattr(lora, key):g}; set it to {found:g}"
            )


class PeftAdapter:
    """Read access to an adapter of peft's. UsageError where its tensors are not those of these adapters."""

    def __init__(self, directory: Path, adapted: Sequence[Adapted]) -> None:
        self._tensors = HFTensors(directory, [Path(directory) / WEIGHTS])
        expected = {name: shape for each in adapted for p in each.parameters for name, shape in p.hf}
        for what, names in (
            ("has", self._tensors.names - expected.keys()), ("lacks", expected.keys() - self._tensors.names)
        ):  # fmt: skip
            if names:
                self.close()
                fused = any(".experts.lora_" in name or ".experts.base_layer." in name for name in names)
                raise UsageError(
                    f"{directory} {what} {sorted(names)[0]}"
                    + (f" and {len(names) - 1} more" if len(names) > 1 else "")
                    + ", in contrast to the adapters that [lora] describes; "
                    + ("adapters of fused experts are not implemented" if fused else "set lora.targets to its modules")
                )

    def read(self, parameter: Parameter) -> Tensor:
        """The merged tensor of a parameter, in float32. Raises ShapeMismatch."""
        return self._tensors.merged(parameter).float()

    def close(self) -> None:
        self._tensors.__exit__()

    def __enter__(self) -> PeftAdapter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def names_in(directory: Path) -> set[str]:
    """Of the tensors of an adapter."""
    with HFTensors(directory, [Path(directory) / WEIGHTS]) as tensors:
        return tensors.names


def adapters_in(directory: Path, family: Family) -> tuple[PeftSettings, tuple[Adapted, ...]]:
    """Which products of the family an adapter of peft's is for."""
    settings, names = read_settings(directory), names_in(directory)
    every = adapters_of(family, settings.rank, "all-linear")
    return settings, tuple(each for each in every if each.a[0].hf[0][0] in names)


def write_peft(
    final: Path, family: Family, lora: LoraConfig, base: str, read: Callable[[Parameter], Tensor]
) -> tuple[Adapted, ...]:
    """A complete directory, or none. base: the model's path, for readers; read: a parameter's merged tensor. UsageError
    if `final` exists."""
    adapted = adapters_of(family, lora.rank, lora.targets)
    parameters = [parameter for each in adapted for parameter in each.parameters]
    tensors = (tensor for p in parameters for tensor in p.split(read(p)))
    config, layout = peft_config(family, adapted, lora, base), [hf for p in parameters for hf in p.hf]
    write_adapter_files(final, config, layout, tensors)
    return adapted


def write_adapter_files(
    final: Path, config: Mapping[str, Any], layout: Iterable[tuple[str, tuple[int, ...]]], tensors: Iterable[Tensor]
) -> None:
    """A complete directory, or none. config: of adapter_config.json; layout: name and shape of each of the tensors,
    which are float32. UsageError if `final` exists."""
    partial = directories.begin(final)
    try:
        write_tensor_file(partial / WEIGHTS, [(name, torch.float32, shape) for name, shape in layout], tensors)
        directories.write_text(partial / CONFIG, json.dumps(dict(config), indent=2) + "\n")
        directories.commit(partial, final)
    except BaseException:
        directories.abandon(partial)
        raise
