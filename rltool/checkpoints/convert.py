"""Hugging Face directory <-> torch_dist directory, in one process on the CPU, verified before the result gets its name.

Parameter by parameter: at no time is more than a layer in memory, so that a model larger than memory is converted, too.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from rltool.checkpoints import directory as directories
from rltool.checkpoints import manifest as manifests
from rltool.checkpoints.carried import carried_files, carried_tensors, carry, carry_tensors
from rltool.checkpoints.hf_export import MAX_SHARD_BYTES, write_hf_directory
from rltool.checkpoints.manifest import Manifest
from rltool.checkpoints.streamed import ShardedLayout, TorchDistReader
from rltool.checkpoints.torch_dist import STATE, finish, open_verified
from rltool.checkpoints.verify import Read, compare_carried, compare_logits, compare_tensors
from rltool.config.parallel import ParallelLayout
from rltool.errors import RltoolError, UsageError
from rltool.megatron.export_plan import ExportPlan, full_plan
from rltool.megatron.fp8 import fp8_plan
from rltool.megatron.runtime import Rendezvous, Runtime
from rltool.models.hf_directory import HFTensors, check_tensors
from rltool.models.registry import dtype_in, family_for, read_hf_config
from rltool.models.weight_files import INDEX, SINGLE
from rltool.processes.run_directory import RunDirectory

_M_MMAP_THRESHOLD = -3
"""From glibc's malloc.h."""
DTYPES = ("float32", "bfloat16")
Report = Callable[[str], None]
"""Called with what is being done now."""


@dataclass(frozen=True)
class Conversion:
    """What was done. carried: files; carried_tensors: how many; logit_difference and tensors_equal are None when
    verification was off."""

    architecture: str
    dtype: str
    tensors: int
    parameters: int
    weight_bytes: int
    seconds: float
    carried: tuple[str, ...]
    carried_tensors: int
    tensors_equal: int | None
    logit_difference: float | None


def hf_to_torch_dist(
    source: Path, target: Path, *, dtype: str | None = None, verify: bool = True, own: str | None = None,
    report: Report = lambda _: None,
) -> Conversion:
    """Writes `target` from a Hugging Face directory. dtype: None keeps that of config.json; own: see
    `family_for`.

    UsageError for what cannot be converted (named), ConversionMismatch when verification fails; then there is no
    target.
    """
    started = time.monotonic()
    _check_no_run(source)
    config = read_hf_config(source)
    if manifests.is_checkpoint(source):
        raise UsageError(f"{source} is a torch_dist directory already; to write a Hugging Face directory use --to hf")
    family = family_for(config, own)
    directories.refuse_existing(target)
    chosen = chosen_dtype(dtype or dtype_in(config))
    plan = full_plan(family, chosen)
    checked: list[tuple[int, float]] = []
    with single_process() as runtime, HFTensors(source) as tensors:
        check_tensors(family, tensors, source)
        layout = ShardedLayout(family, chosen, runtime)

        def check(partial: Path) -> None:
            report("comparing every tensor, and the logits with transformers'")
            read = TorchDistReader(layout, partial / STATE).read
            equal = compare_tensors(plan, read, source)
            compare_carried(source, partial, plan.carried)
            checked.append((equal, compare_logits(family, runtime, read, source, chosen)))

        report(f"writing {target}")
        manifest = Manifest(kind="weights", architecture=family.architecture, dtype=plan.dtype)
        partial = directories.begin(target)
        try:
            (partial / STATE).mkdir()
            layout.write(partial / STATE, lambda parameter: tensors.merged(parameter).to(parameter.dtype(chosen)))
            carry(source, partial, dtype=plan.dtype)
            carry_tensors(source, partial, plan.carried)
            if verify:
                check(partial)
            finish(partial, target, manifest)
        except BaseException:
            directories.abandon(partial)
            raise
    return summary(family.architecture, plan, started, source, checked)


def to_fp8(
    source: Path,
    target: Path,
    *,
    verify: bool = True,
    own: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    report: Report = lambda _: None,
) -> Conversion:
    """Writes a Hugging Face directory in FP8 (`rltool.engines.transfer.fp8`) from a Hugging Face or a torch_dist
    directory, with the bytes that a run with engines.quantization = "fp8" sends for these weights. verify: every tensor
    is read again and compared. Errors as in `torch_dist_to_hf`."""
    started = time.monotonic()
    _check_no_run(source)
    family = family_for(read_hf_config(source), own)
    directories.refuse_existing(target)
    plan = fp8_plan(family)
    checked: list[tuple[int, None]] = []

    def write(read: Read) -> None:
        def check(partial: Path) -> None:
            report("comparing every tensor")
            compare_carried(source, partial, plan.carried)
            checked.append((compare_tensors(plan, read, partial), None))

        report(f"writing {target}")
        write_hf_directory(
            target, plan.made(read), plan, source, max_shard_bytes=max_shard_bytes, check=check if verify else None
        )

    if not manifests.is_checkpoint(source):
        with HFTensors(source) as tensors:
            check_tensors(family, tensors, source)
            write(tensors.merged)
    elif manifests.read(source).lora:
        raise UsageError(f"{source} holds adapters alone: write their model first, with --to hf --merge")
    else:
        with directories.reading(source), single_process() as runtime:
            report(f"checking the hashes of {source}")
            open_verified(runtime, family, source)
            dtype = chosen_dtype(manifests.read(source).dtype)
            write(TorchDistReader(ShardedLayout(family, dtype, runtime), source / STATE).read)
    return summary(family.architecture, plan, started, source, checked)


def write_fp8_copy(source: Path, target: Path, *, own: str | None, report: Report) -> None:
    """`to_fp8`, unless that was done. One process writes it at a time; the others wait. Earlier ones beside it are
    named and stay: an engine may be started on them again. Errors as in `to_fp8`, and RltoolError where it cannot be
    written."""
    try:
        with directories.alone(target.parent):
            if not target.exists():
                report(f"writing {source} in FP8 to {target}")
                to_fp8(source, target, verify=False, own=own)
                if earlier := sorted(path.name for path in target.parent.glob("[!.]*") if path != target):
                    report(f"earlier copies lie beside it; delete those that no engine reads: {', '.join(earlier)}")
    except OSError as error:
        reason = error.strerror or error
        raise RltoolError(f"{source} was not written in FP8 (half of it in bfloat16) to {target}: {reason}") from error


def _check_no_run(source: Path) -> None:
    """UsageError for the directory of a run, or that of all its checkpoints, in place of one checkpoint."""
    for directory, what in ((source, "holds the checkpoints of a run"), (source / "checkpoints", "is a run")):
        newest = directories.latest_checkpoint(directory)
        if newest is not None:
            raise UsageError(f"{source} {what}; take one of its checkpoints, such as {newest}")
    if RunDirectory(source).is_made:
        raise UsageError(f"{source} is a run without a complete checkpoint")


def torch_dist_to_hf(
    source: Path,
    target: Path,
    *,
    dtype: str | None = None,
    verify: bool = True,
    own: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    report: Report = lambda _: None,
) -> Conversion:
    """Writes the Hugging Face directory `target` from a torch_dist directory (of convert-ckpt or of a training run).

    Errors as in `hf_to_torch_dist`, and CheckpointDamaged before anything is loaded from a damaged source.
    """
    started = time.monotonic()
    _check_no_run(source)
    config = read_hf_config(source)
    if not manifests.is_checkpoint(source) and any((source / name).is_file() for name in (INDEX, SINGLE)):
        raise UsageError(f"{source} is a Hugging Face directory already; without --to hf it becomes a torch_dist one")
    family = family_for(config, own)
    if manifests.read(source).lora:
        raise UsageError(
            f"{source} holds adapters alone: add --merge to write their model with them, or write them with --to peft"
        )
    directories.refuse_existing(target)
    chosen = chosen_dtype(dtype or manifests.read(source).dtype)
    plan = full_plan(family, chosen)
    checked: list[tuple[int, float]] = []
    # A run that is still going may delete the checkpoint by its retention, unless it is being read.
    with directories.reading(source), single_process() as runtime:
        report(f"checking the hashes of {source}")
        open_verified(runtime, family, source)
        read = TorchDistReader(ShardedLayout(family, chosen, runtime), source / STATE).read

        def check(partial: Path) -> None:
            report("comparing every tensor, and the logits with transformers'")
            with HFTensors(partial) as written:
                check_tensors(family, written, partial)
                equal = compare_tensors(plan, read, partial)
                compare_carried(source, partial, plan.carried)
                checked.append((equal, compare_logits(family, runtime, written.merged, partial, chosen)))

        report(f"writing {target}")
        write_hf_directory(
            target,
            plan.made(read),
            plan,
            source,
            max_shard_bytes=max_shard_bytes,
            check=check if verify else None,
        )
    return summary(family.architecture, plan, started, source, checked)


def chosen_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise UsageError(f"dtype {name!r} is not supported; choose one of {', '.join(DTYPES)} with --dtype")
    return getattr(torch, name)


@contextmanager
def single_process() -> Iterator[Runtime]:
    """A world of one rank on loopback; Megatron's checkpointing wants process groups even so."""
    _return_freed_memory()
    runtime = Runtime(ParallelLayout(), Rendezvous(0, "127.0.0.1", 0, timeout=600), device="cpu", seed=0)
    try:
        yield runtime
    finally:
        runtime.close()


def _return_freed_memory() -> None:
    """Makes glibc give every freed tensor back to the system. Elsewhere nothing is done.

    Left alone, it raises the size from which it does so to 32 MiB and keeps smaller blocks in a heap, which freed
    tensors of many sizes fragment until most of the model is resident: 1.2 GB in place of 0.2 GB for a model of 1.5 GB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def summary(
    architecture: str, plan: ExportPlan, started: float, source: Path, checked: Sequence[tuple[int, float | None]]
) -> Conversion:
    equal, difference = checked[0] if checked else (None, None)
    with carried_tensors(source, plan.carried) as carried:
        others = len(carried.layout)
    return Conversion(
        architecture=architecture,
        dtype=plan.dtype,
        tensors=len(plan.tensors),
        parameters=sum(torch.Size(meta.shape).numel() for meta in plan.tensors),
        weight_bytes=plan.bytes,
        seconds=time.monotonic() - started,
        carried=tuple(path.name for path in carried_files(source)),
        carried_tensors=others,
        tensors_equal=equal,
        logit_difference=difference,
    )
