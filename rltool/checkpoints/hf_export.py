"""Writing a Hugging Face directory: safetensors shards with their index, config, tokenizer. Atomic. And where
the copy in FP8 lies that engines are started on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import rltool
from rltool.checkpoints import directory as directories
from rltool.checkpoints.carried import CarriedTensors, carried_files, carried_tensors, carry
from rltool.engines.launch.start import Order
from rltool.engines.types import Bucket, TensorMeta
from rltool.errors import ExportFailed
from rltool.megatron.export_plan import ExportPlan, drain
from rltool.megatron.fp8 import quantization_config
from rltool.models.registry import family_for, read_hf_config
from rltool.models.tensor_files import write_tensor_file
from rltool.models.weight_files import INDEX, SINGLE
from rltool.processes.run_directory import RunDirectory

if TYPE_CHECKING:
    from rltool.megatron.trainer import MegatronTrainer

MAX_SHARD_BYTES = 5 * 1000**3
"""What transformers used by default for years; small enough for any file system."""


def write_tensors(
    directory: Path,
    tensors: Iterable[tuple[TensorMeta, Tensor]],
    plan: ExportPlan,
    carried: CarriedTensors,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Safetensors files from the plan's tensors, in its order; each is written as it comes. Behind them the carried."""
    shards, stream = plan.files(max_shard_bytes), iter(tensors)

    def announced(shard: Bucket) -> Iterator[Tensor]:
        for expected in shard:
            meta, tensor = next(stream)
            if meta != expected:
                raise RuntimeError(f"tensor {meta} came where {expected} was announced")
            yield tensor

    weight_map = {}
    files = len(shards) + bool(carried.layout)
    names = [SINGLE] if files == 1 else [f"model-{i:05d}-of-{files:05d}.safetensors" for i in range(1, files + 1)]
    for name, shard in zip(names, shards, strict=False):
        layout = [(meta.name, getattr(torch, meta.dtype), tuple(meta.shape)) for meta in shard]
        write_tensor_file(directory / name, layout, announced(shard))
        weight_map |= {meta.name: name for meta in shard}
    if carried.layout:
        carried.write(directory / names[-1])
        weight_map |= {name: names[-1] for name, _, _ in carried.layout}
    if files > 1:
        index = {"metadata": {"total_size": plan.bytes + carried.bytes}, "weight_map": weight_map}
        directories.write_text(directory / INDEX, json.dumps(index, indent=1) + "\n")


def write_hf_directory(
    final: Path,
    tensors: Iterable[tuple[TensorMeta, Tensor]],
    plan: ExportPlan,
    source: Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    check: Callable[[Path], None] | None = None,
) -> None:
    """A complete model directory, or none: weights, and config, tokenizer, generation config and the tensors that the
    plan only names carried along from `source`.

    check: called with the unfinished directory before it gets its name; raises if it is not good. UsageError if `final`
    exists.
    """
    partial = directories.begin(Path(final))
    try:
        with carried_tensors(source, plan.carried) as carried:
            write_tensors(partial, tensors, plan, carried, max_shard_bytes)
        carry(source, partial, dtype=plan.dtype, quantization=plan.quantization)
        if check is not None:
            check(partial)
        directories.commit(partial, Path(final))
    except BaseException:
        directories.abandon(partial)
        raise


def export_hf(trainer: MegatronTrainer, directory: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """The trainer's current weights as a Hugging Face directory. Collective; rank 0 writes. UsageError if it exists,
    ExportFailed where it cannot be written."""
    stream = trainer.export_weights()

    def write() -> None:
        tensors: Iterator[tuple[TensorMeta, Tensor]] = ((meta, t) for meta, t in stream if t is not None)
        try:
            write_hf_directory(
                directory, tensors, trainer.export_plan, trainer.model_path, max_shard_bytes=max_shard_bytes
            )
        except OSError as error:
            raise ExportFailed(f"Hugging Face export {directory} was not written: {error.strerror or error}") from error
        finally:
            # The other ranks are inside the same gather: it has to run to its end even if the disk is full.
            drain(stream)

    if trainer.coordinates.rank != 0:
        drain(stream)
    trainer.runtime.on_rank_zero(write, f"writing {directory}")


def order_in_fp8(order: Order, name: str, own: str | None, run: RunDirectory | None = None) -> Order:
    """With engines of this model in FP8. own: its family, where that is the user's. run: has the copy that those read
    which quantise nothing themselves (`convert.write_fp8_copy`); None: they are given the model. UsageError as in
    `fp8.linears_of`, FileNotFoundError where a file of the model is a link to nothing."""
    path = order.models[name].path
    config = quantization_config(family_for(read_hf_config(path), own))
    return order.quantized(name, config, _fp8_copy(path, config, run) if run and order.reads_quantized(name) else None)


def _fp8_copy(source: Path, config: Mapping[str, Any], run: RunDirectory) -> Path:
    """Named by who writes it, what is in FP8, and names, sizes and times of the model's files. FileNotFoundError where
    one is a link to nothing."""
    source = source.absolute()
    files = {*carried_files(source), *source.glob("*.json"), *source.glob("*.safetensors")}
    stats = sorted((path.name, path.stat()) for path in files)
    facts = [rltool.__version__, json.dumps(config), str(source)]
    facts += (f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)
    return run.quantized_dir / f"{source.name}-fp8-{hashlib.sha256(chr(10).join(facts).encode()).hexdigest()[:8]}"
