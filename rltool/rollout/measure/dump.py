"""Rollouts on disk: what `debug rollout-only` writes, `debug train-only` replays, and a resume test is fed.

One step is two files: `step_000012.safetensors` holds the long numeric fields of all samples back to back, and
`step_000012.json` everything else with the size and SHA-256 of the tensor file. The JSON is written last: a step
without it is not there. Every field of Sample comes back exactly; log-probabilities are stored as float64, so
bit-equal.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from rltool.algorithms.fields import Column, sample_columns
from rltool.config.train import TrainConfig
from rltool.engines.types import Drafts, VersionSpan
from rltool.errors import RltoolError
from rltool.processes.files import write_bytes_atomic
from rltool.rollout.json_fields import unwritable
from rltool.rollout.sample import Sample, SampleStatus, TurnReward

FORMAT_VERSION = 1

OF_EVERY_SAMPLE = {
    "prompt_ids": np.int64, "response_ids": np.int64, "response_mask": np.uint8, "response_logprobs": np.float64,
}  # fmt: skip
"""Lists in the tensor file, which also has the columns of the table in algorithms/fields.py (a file of an earlier
rltool lacks some): `NAME` holds all samples' values, `NAME.lengths` [num_samples] how many each has."""


def tensor_fields() -> list[str]:
    """The fields of a sample that the tensor file holds."""
    return [*OF_EVERY_SAMPLE, *sample_columns()]


class DumpError(RltoolError):
    """A dump that cannot be written or read; the text names the file and what is wrong with it."""


@dataclass(frozen=True)
class Dump:
    """One step's samples. weight_versions: all that occur, sorted; seed: the run's; info: what the writer added."""

    step: int
    seed: int
    samples: list[Sample]
    weight_versions: list[str]
    info: dict[str, Any]


def about_model(config: TrainConfig) -> dict[str, Any]:
    """For `info`: whose tokens these are, so that a recording can be read as text without its run's configuration."""
    # Not model.trust_remote_code: whether code of that directory may run is for the reader to choose.
    return {"model": {"path": str(config.model.path.absolute())}}


def dump_paths(directory: Path, step: int) -> tuple[Path, Path]:
    """(tensor file, JSON file) of a step."""
    return directory / f"step_{step:06d}.safetensors", directory / f"step_{step:06d}.json"


def dumped_steps(directory: Path) -> list[int]:
    """Steps that are completely there, ascending."""
    return sorted(int(path.stem.removeprefix("step_")) for path in directory.glob("step_[0-9]*.json"))


def write_dump(
    directory: Path, *, step: int, seed: int, samples: Sequence[Sample], info: dict[str, Any] | None = None
) -> Path:
    """Write one step atomically, replacing an earlier dump of it. Returns the JSON file.
    DumpError as for `encode`."""
    tensor_path, json_path = dump_paths(directory, step)
    data, text = encode(tensor_path.name, step=step, seed=seed, samples=samples, info=info)
    directory.mkdir(parents=True, exist_ok=True)
    json_path.unlink(missing_ok=True)  # never an old description beside new tensors
    write_bytes_atomic(tensor_path, data)
    write_bytes_atomic(json_path, text)
    return json_path


def encode(
    tensor_file: str, *, step: int, seed: int, samples: Sequence[Sample], info: dict[str, Any] | None = None
) -> tuple[bytes, bytes]:
    """(content of the tensor file, which is to be called `tensor_file`; content of the JSON file).
    DumpError if metadata, train_metadata or multimodal_inputs are not JSON; names sample, field and key."""
    tensors: dict[str, np.ndarray] = {}
    for name in tensor_fields():
        values = [getattr(sample, name) for sample in samples]
        dtype = np.dtype(OF_EVERY_SAMPLE.get(name) or _code(sample_columns()[name], values))
        tensors[f"{name}.lengths"] = np.array([len(value) for value in values], dtype=np.int64)
        tensors[name] = np.concatenate([np.zeros(0, dtype), *(np.asarray(value, dtype) for value in values)])
    data = save_tensors(tensors)
    document = {
        "format_version": FORMAT_VERSION,
        "step": step,
        "seed": seed,
        "weight_versions": sorted({span.version for sample in samples for span in sample.versions}),
        "info": info or {},
        "tensors": {"file": tensor_file, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()},
        "samples": [_to_json(sample) for sample in samples],
    }
    try:
        text = json.dumps(document, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        found = next(filter(None, map(unwritable, samples)), f"it cannot be written as JSON ({error})")
        raise DumpError(
            f"rollout of step {step}: {found}: "
            "keep `metadata` and `train_metadata` to text, finite numbers, lists and objects"
        ) from error
    return data, text.encode()


def read_dump(directory: Path, step: int) -> Dump:
    """Read one step back. DumpError if it is missing, truncated, altered, or of another format version."""
    tensor_path, json_path = dump_paths(directory, step)
    if not json_path.exists():
        there = dumped_steps(directory)
        have = f"it has steps {there[0]} to {there[-1]}" if there else "it has none"
        raise DumpError(f"no rollout of step {step} in {directory}: {have}")
    dump = read_files(tensor_path, json_path)
    if dump.step != step:
        raise DumpError(f"{json_path} is of step {dump.step}: was the file renamed?")
    return dump


def read_files(tensor_path: Path, json_path: Path) -> Dump:
    """The samples in a pair of files that `encode` made. DumpError as for `read_dump`."""
    try:
        document = json.loads(json_path.read_bytes())
    except OSError as error:
        raise DumpError(f"cannot read {json_path}: {error.strerror}") from error
    except ValueError as error:
        raise DumpError(f"{json_path} is truncated or not JSON: {error}") from error
    version = document.get("format_version") if isinstance(document, dict) else None
    if version != FORMAT_VERSION:
        raise DumpError(f"{json_path} has format version {version}; this rltool reads {FORMAT_VERSION}")
    columns = _read_tensors(tensor_path, document["tensors"], len(document["samples"]))
    samples = [
        _from_json(entry, {name: values[i] for name, values in columns.items()})
        for i, entry in enumerate(document["samples"])
    ]
    for sample in samples:
        try:
            sample.validate()
        except ValueError as error:
            raise DumpError(f"{json_path}: {error}") from error
    return Dump(document["step"], document["seed"], samples, document["weight_versions"], document["info"])


def _to_json(sample: Sample) -> dict[str, Any]:
    apart = tensor_fields()
    entry = {item.name: getattr(sample, item.name) for item in fields(sample) if item.name not in apart}
    entry["versions"] = [[span.version, span.start, span.end] for span in sample.versions]
    entry["turn_rewards"] = [astuple(turn) for turn in sample.turn_rewards]
    return entry


def _from_json(entry: dict[str, Any], columns: dict[str, list[Any]]) -> Sample:
    values = {**entry, **columns}
    values["status"] = SampleStatus(values["status"])
    values["versions"] = [VersionSpan(*span) for span in values["versions"]]
    values["turn_rewards"] = [TurnReward(*turn) for turn in values.get("turn_rewards", ())]
    values["drafts"] = Drafts(*values["drafts"]) if values.get("drafts") else None
    return Sample(**values)


def _read_tensors(path: Path, expected: dict[str, Any], num_samples: int) -> dict[str, list[Any]]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DumpError(f"cannot read {path}: {error.strerror}") from error
    if len(data) != expected["bytes"]:
        raise DumpError(f"{path} has {len(data)} bytes, its JSON file has {expected['bytes']}: the copy is incomplete")
    if hashlib.sha256(data).hexdigest() != expected["sha256"]:
        raise DumpError(
            f"{path} is not the file that its JSON file describes (SHA-256 differs): the two were mixed up or altered"
        )
    try:
        tensors = load_tensors(data)
        columns = {}
        for name in tensor_fields():
            column = sample_columns().get(name)
            if column is not None and name not in tensors:
                columns[name] = [column.empty() for _ in range(num_samples)]
                continue
            ends = np.cumsum(tensors[f"{name}.lengths"])
            if len(ends) != num_samples:
                raise DumpError(f"{path}: {name} covers {len(ends)} samples, the JSON file {num_samples}")
            pieces = np.split(tensors[name], ends[:-1]) if num_samples else []
            columns[name] = [_as_in_a_sample(column, piece) for piece in pieces]
    except (SafetensorError, KeyError) as error:
        raise DumpError(f"{path} lacks what this format needs: {error}") from error
    return columns


def _as_in_a_sample(column: Column | None, piece: np.ndarray) -> Any:
    if column is None or column.code is None:
        return piece.tolist()
    return array(piece.dtype.char if len(piece) else column.code, piece.tobytes())


def _code(column: Column, values: Sequence[Any]) -> str:
    """The type of all samples' values; numpy's characters of these types are array's."""
    if column.code is None:
        return "d"
    wider = column.wider is not None and any(value.typecode == column.wider for value in values if value)
    return column.wider if wider and column.wider is not None else column.code
