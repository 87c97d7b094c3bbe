"""Is what was written the same model? Tensor by tensor, and by its logits against transformers.
One layer in memory at a time."""

from __future__ import annotations

from pathlib import Path

import torch

from rltool.checkpoints.carried import carried_tensors
from rltool.checkpoints.logits import Read, megatron_logits, transformers_logits
from rltool.engines.transfer.wire import dtype_of
from rltool.errors import RltoolError
from rltool.megatron.export_plan import ExportPlan
from rltool.megatron.runtime import Runtime
from rltool.models.base import Family
from rltool.models.hf_directory import HFTensors

LOGIT_TOLERANCE = 1e-4
"""Largest |Megatron - transformers| logit in fp32."""
PROMPT_LENGTHS = (48, 16)
"""Two packed sequences, so that a leak from one into the other shows."""


class ConversionMismatch(RltoolError):
    """What was written is not the model that was read. The output is not kept."""


def compare_tensors(plan: ExportPlan, read: Read, hf_directory: Path) -> int:
    """Every tensor that the plan makes of the torch_dist side against the Hugging Face directory's, bit by bit. Returns
    their number.

    Raises ConversionMismatch naming the first that differs. What the directory holds in another precision is rounded
    first.
    """
    count = 0
    with HFTensors(hf_directory, fp8=plan.quantization is not None) as tensors:
        for meta, found in plan.made(read):
            dtype = dtype_of(meta.dtype)
            expected = tensors.read(meta.name).to(dtype)
            found = found.to(dtype)
            # FP8 has no comparison in torch.
            same = [x.view(torch.uint8) if dtype.itemsize == 1 else x for x in (found, expected)]
            if not torch.equal(*same):
                difference = (found.float() - expected.float()).abs().max().item()
                raise ConversionMismatch(
                    f"{meta.name} differs after the round trip (largest difference {difference:.3g})"
                )
            count += 1
    return count


def compare_carried(source: Path, target: Path, beginnings: tuple[str, ...]) -> None:
    """The tensors that are only handed on, bit by bit. Raises ConversionMismatch naming the first that differs."""
    with carried_tensors(source, beginnings) as expected, carried_tensors(target, beginnings) as found:
        if found.layout != expected.layout:
            raise ConversionMismatch(f"{target} has other tensors {', '.join(beginnings)} than {source}")
        for name, _, _ in expected.layout:
            if not torch.equal(found.read(name), expected.read(name)):
                raise ConversionMismatch(f"{name} differs after the round trip")


def compare_logits(family: Family, runtime: Runtime, read: Read, hf_directory: Path, dtype: torch.dtype) -> float:
    """Largest |difference| of Megatron's fp32 logits and transformers' on a fixed prompt.

    read: the weights for Megatron; hf_directory: those for transformers, rounded to `dtype` first; both compute in
    fp32. Raises ConversionMismatch above LOGIT_TOLERANCE.
    """
    longest = min(max(PROMPT_LENGTHS), family.max_position_embeddings)
    lengths = torch.tensor([min(length, longest) for length in PROMPT_LENGTHS])
    tokens = torch.randint(0, family.vocab_size, (int(lengths.sum()),), generator=torch.Generator().manual_seed(0))
    found = megatron_logits(family, runtime, read, tokens, lengths)
    expected = transformers_logits(family, hf_directory, dtype, tokens, lengths)
    difference = (found - expected).abs().max().item()
    if not difference <= LOGIT_TOLERANCE:
        raise ConversionMismatch(
            f"logits differ from transformers' by {difference:.3g} in fp32 on a prompt of {len(tokens)} tokens "
            f"(allowed: {LOGIT_TOLERANCE:g}), although every tensor is equal: "
            "this config.json uses something that is not implemented; please report it with the file"
        )
    return difference
