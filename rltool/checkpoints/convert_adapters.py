"""Adapters -> an adapter of peft's, or merged into their model, in one process on the CPU; verified as `convert` does.

One parameter at a time is in memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rltool.checkpoints import directory as directories
from rltool.checkpoints import manifest as manifests
from rltool.checkpoints.convert import Conversion, Report, chosen_dtype, single_process, summary
from rltool.checkpoints.hf_export import MAX_SHARD_BYTES, write_hf_directory
from rltool.checkpoints.lora import check_base, lora_of
from rltool.checkpoints.peft_format import PeftAdapter, adapters_in, is_peft, read_settings, write_peft
from rltool.checkpoints.streamed import AdapterLayout, ShardedLayout, TorchDistReader
from rltool.checkpoints.torch_dist import STATE, open_verified
from rltool.checkpoints.verify import ConversionMismatch, compare_carried, compare_logits, compare_tensors
from rltool.config.sections import LoraConfig
from rltool.errors import UsageError
from rltool.megatron.export_plan import full_plan
from rltool.megatron.runtime import Runtime
from rltool.models.adapters import Adapted, adapters_of, merged
from rltool.models.base import Family, Parameter
from rltool.models.hf_directory import HFTensors, check_tensors
from rltool.models.registry import dtype_in, family_for, read_hf_config

Read = Callable[[Parameter], Tensor]


@dataclass(frozen=True)
class _Source:
    """adapted, read: the adapters; scale: of B A; base: directory of their model; dtype: that it was trained in."""

    family: Family
    adapted: tuple[Adapted, ...]
    read: Read
    scale: float
    base: Path
    dtype: str


def holds_adapters(directory: Path) -> bool:
    """Whether it is an adapter of peft's, or a checkpoint of adapters alone."""
    return is_peft(directory) or (manifests.is_checkpoint(directory) and bool(manifests.read(directory).lora))


def adapters_to_peft(
    source: Path, target: Path, *, own: str | None = None, report: Report = lambda _: None
) -> Conversion:
    """Writes the directory of peft's `target` from a checkpoint of adapters, and compares every tensor.

    UsageError for another source, CheckpointDamaged before anything is loaded from a damaged one, ConversionMismatch.
    """
    started = time.monotonic()
    if not manifests.is_checkpoint(source) or not holds_adapters(source):
        raise UsageError(f"{source} is no checkpoint of a run with [lora]; --to peft takes one")
    directories.refuse_existing(target)
    family, lora = family_for(read_hf_config(source), own), lora_of(manifests.read(source))
    with directories.reading(source), single_process() as runtime:
        report(f"checking the hashes of {source}")
        manifest = open_verified(runtime, family, source)
        read = TorchDistReader(AdapterLayout(), source / STATE).read
        report(f"writing {target}")
        adapted = write_peft(target, family, lora, manifest.lora["base_path"], read)
        parameters = [parameter for each in adapted for parameter in each.parameters]
        with PeftAdapter(target, adapted) as written:
            for parameter in parameters:
                if not torch.equal(written.read(parameter), read(parameter)):
                    raise ConversionMismatch(f"{parameter.hf[0][0]} differs after the round trip")
    numbers = sum(torch.Size(parameter.merged_shape).numel() for parameter in parameters)
    return Conversion(
        architecture=family.architecture, dtype="float32", tensors=len(parameters), parameters=numbers,
        weight_bytes=4 * numbers, seconds=time.monotonic() - started, carried=(), carried_tensors=0,
        tensors_equal=len(parameters), logit_difference=None,
    )  # fmt: skip


def merge_to_hf(
    source: Path, target: Path, *, base: Path | None = None, dtype: str | None = None, verify: bool = True,
    own: str | None = None, report: Report = lambda _: None,
) -> Conversion:  # fmt: skip
    """Writes the Hugging Face directory `target`: the adapters of `source` (a checkpoint of a run with [lora], or an
    adapter of peft's) merged into their model.

    base: directory of that model; None: where the adapters say. dtype: None, as trained, or as peft's model is stored.
    Errors as in `adapters_to_peft`; UsageError for a model other than that of the checkpoint.
    """
    started = time.monotonic()
    directories.refuse_existing(target)
    with single_process() as runtime, _opened(source, base, own, runtime, report) as found:
        chosen = chosen_dtype(dtype or found.dtype)
        plan = full_plan(found.family, chosen)
        checked: list[tuple[int, float]] = []
        with _model(found, chosen, runtime) as read_model:
            beside = {each.base.name: each for each in found.adapted}

            def read(parameter: Parameter) -> Tensor:
                weight, each = read_model(parameter), beside.get(parameter.name)
                if each is None:
                    return weight
                a, b = ([found.read(part) for part in parts] for parts in (each.a, each.b))
                return merged(each, weight, a, b, scale=found.scale, groups=each.base.query_groups)

            def check(partial: Path) -> None:
                report("comparing every tensor, and the logits with transformers'")
                with HFTensors(partial) as written:
                    check_tensors(found.family, written, partial)
                    equal = compare_tensors(plan, read, partial)
                    compare_carried(found.base, partial, plan.carried)
                    difference = compare_logits(found.family, runtime, written.merged, partial, chosen)
                    checked.append((equal, difference))

            report(f"writing {target}")
            write_hf_directory(
                target, plan.made(read), plan, found.base, max_shard_bytes=MAX_SHARD_BYTES,
                check=check if verify else None,
            )  # fmt: skip
    return summary(found.family.architecture, plan, started, found.base, checked)


@contextmanager
def _opened(source: Path, base: Path | None, own: str | None, runtime: Runtime, report: Report) -> Iterator[_Source]:
    if is_peft(source):
        base = base or Path(read_settings(source).base or "")
        config = read_hf_config(base)
        family = family_for(config, own)
        settings, adapted = adapters_in(source, family)
        dtype = dtype_in(config)
        with PeftAdapter(source, adapted) as adapter:
            yield _Source(family, adapted, adapter.read, settings.alpha / settings.rank, base, dtype)
        return
    if not holds_adapters(source):
        raise UsageError(f"{source} holds no adapters to merge; leave out --merge")
    family = family_for(read_hf_config(source), own)
    with directories.reading(source):
        report(f"checking the hashes of {source}")
        manifest = open_verified(runtime, family, source)
        base = base or Path(manifest.lora["base_path"])
        report(f"checking the hashes of {base}")
        check_base(manifest, base, source)
        lora: LoraConfig = lora_of(manifest)
        adapted = adapters_of(family, lora.rank, lora.targets)
        read = TorchDistReader(AdapterLayout(), source / STATE).read
        yield _Source(family, adapted, read, lora.scale, base, manifest.dtype)


@contextmanager
def _model(found: _Source, dtype: torch.dtype, runtime: Runtime) -> Iterator[Read]:
    """The model's parameters, in dtype."""
    if manifests.is_checkpoint(found.base):
        with directories.reading(found.base):
            open_verified(runtime, found.family, found.base)
            yield TorchDistReader(ShardedLayout(found.family, dtype, runtime), found.base / STATE).read
        return
    with HFTensors(found.base) as tensors:
        check_tensors(found.family, tensors, found.base)
        yield lambda parameter: tensors.merged(parameter).to(parameter.dtype(dtype))
