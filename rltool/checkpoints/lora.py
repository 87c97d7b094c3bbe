"""The model beside which adapters were trained: named by its path and by what its files hold. Pure files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rltool.checkpoints import manifest as manifests
from rltool.checkpoints.completion import STATE
from rltool.checkpoints.manifest import Manifest
from rltool.config.sections import LoraConfig
from rltool.errors import UsageError
from rltool.models.weight_files import weight_files


def describe_base(directory: Path) -> dict[str, dict[str, Any]]:
    """Size and hash of the weight files: those of a checkpoint of ours by its manifest."""
    if manifests.is_checkpoint(directory):
        files = manifests.read(directory).files
        return {name: entry for name, entry in files.items() if name.startswith(f"{STATE}/")}
    paths = {path.relative_to(directory).as_posix(): path for path in sorted(weight_files(directory))}
    described = manifests.side_by_side(manifests.describe_file, list(paths.values()))
    return dict(zip(paths, described, strict=True))


def describe_lora(lora: LoraConfig, base: Path, files: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """`Manifest.lora`. files: of `describe_base`."""
    targets = lora.targets if lora.targets == "all-linear" else list(lora.targets)
    described = {"rank": lora.rank, "alpha": lora.alpha, "targets": targets}
    return {**described, "base_path": str(Path(base).absolute()), "base_files": files}


def lora_of(manifest: Manifest) -> LoraConfig:
    """What its adapters are; rank 0 for a whole model."""
    return LoraConfig.model_validate({key: manifest.lora[key] for key in ("rank", "alpha", "targets") if manifest.lora})


def check_lora(manifest: Manifest, lora: LoraConfig, directory: Path) -> None:
    """UsageError when the checkpoint's adapters are not those of this configuration, or one of both has none."""
    saved = lora_of(manifest)
    if saved.rank and not lora.rank:
        raise UsageError(
            f"{directory} holds adapters alone, of a run with lora.rank = {saved.rank}, but there is no [lora] now: "
            "set lora.init to it for further adapters, or write the whole model first "
            f"(rltool convert-ckpt {directory} OUT --to hf --merge)"
        )
    for key in ("rank", "alpha", "targets"):
        ours, theirs = getattr(lora, key), getattr(saved, key)
        if ours != theirs:
            raise UsageError(
                f"{directory} was saved with lora.{key} = {theirs!r}, but it is {ours!r} now; set it to that of the "
                "checkpoint, or start a new run"
            )


def check_base(manifest: Manifest, base: Path, directory: Path, *, part: int = 0, parts: int = 1) -> None:
    """UsageError when the model in `base` is not the one that the adapters were trained beside. part, parts: as for
    `manifests.verify`; a checkpoint of ours is known by its manifest, whose hashes are checked where it is loaded."""
    expected: dict[str, dict[str, Any]] = manifest.lora["base_files"]
    if manifests.is_checkpoint(base):
        found = describe_base(base)
    else:
        paths = {path.relative_to(base).as_posix(): path for path in weight_files(base)}
        found = {name: {"bytes": path.stat().st_size} for name, path in paths.items()}
        if {name: entry["bytes"] for name, entry in found.items()} == {n: e["bytes"] for n, e in expected.items()}:
            mine = sorted(expected)[part::parts]
            described = manifests.side_by_side(manifests.describe_file, [paths[name] for name in mine])
            found = {**expected, **dict(zip(mine, described, strict=True))}
    if found != expected:
        names = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        raise UsageError(
            f"the adapters in {directory} were trained beside {manifest.lora['base_path']}, and {base} holds another "
            f"model ({names[0]} differs)"
        )
