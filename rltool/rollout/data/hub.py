"""Rows of what the package `datasets` reads: a directory that it saved, or a data set of the Hugging Face hub."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from rltool.errors import UsageError
from rltool.rollout.data.files import without_nan
from rltool.rollout.data.spec import DataSpec


def saved_rows(spec: DataSpec) -> Iterator[tuple[str, Any]]:
    """Of a directory written by `Dataset.save_to_disk`, memory-mapped. A DatasetDict's splits are directories in it."""
    datasets = _datasets(spec)
    try:
        found = datasets.load_from_disk(spec.name)
    except (FileNotFoundError, OSError, ValueError) as error:
        raise UsageError(
            f"data set {spec.text!r}: the directory cannot be read as one of `datasets` ({error}); name files of it, "
            "or save it with Dataset.save_to_disk"
        ) from error
    if isinstance(found, datasets.DatasetDict):
        example = f"{spec.name.rstrip('/')}/{next(iter(found))}"
        raise UsageError(f"data set {spec.text!r} has the splits {', '.join(found)}: name one, {example}")
    yield from _numbered(spec, found)


def hub_rows(spec: DataSpec) -> Iterator[tuple[str, Any]]:
    """Of a data set of the hub, from the cache where it is there. Options: config, split (train), revision.

    Raises UsageError, with what to do, for one that does not exist, that is not in the cache while the network is
    switched off, or that has several configurations.
    """
    datasets = _datasets(spec)
    try:
        found = datasets.load_dataset(
            spec.name, spec.options.get("config"), split=spec.options.get("split", "train"),
            revision=spec.options.get("revision"),
        )  # fmt: skip
    except Exception as error:  # datasets, huggingface_hub and their HTTP clients each raise their own
        raise UsageError(_explain(spec, error)) from error
    yield from _numbered(spec, found)


def _explain(spec: DataSpec, error: Exception) -> str:
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return (
            f"data set {spec.text!r} is not in the cache of the Hugging Face hub, and HF_HUB_OFFLINE forbids to fetch "
            f"it ({reason}): load it once where there is a network, or give a file"
        )
    return (
        f"data set {spec.text!r} cannot be loaded from the Hugging Face hub: {reason}; if a local path was meant, it "
        "does not exist"
    )


def _numbered(spec: DataSpec, found: Any) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(found, 1):
        yield f"{spec.text}, row {number}", without_nan(row)


def _datasets(spec: DataSpec) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UsageError(f"data set {spec.text!r} needs the package datasets: pip install 'rltool[data]'") from error
    return datasets
