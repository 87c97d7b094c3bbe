"""Is what was written the same model? Tensor by tensor, and by its logits against transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel

from rltool.errors import RltoolError
from rltool.megatron.hf_weights import HFTensors, export_weights
from rltool.megatron.model import forward
from rltool.megatron.packing import pack
from rltool.megatron.runtime import Runtime
from rltool.models.base import Family

LOGIT_TOLERANCE = 1e-4
"""Largest |Megatron - transformers| logit in fp32: rounding in another order of summation stays well below it."""
PROMPT_LENGTHS = (48, 16)
"""Two packed sequences, so that a leak from one into the other shows."""


class ConversionMismatch(RltoolError):
    """What was written is not the model that was read. The output is not kept."""


@torch.no_grad()
def compare_tensors(model: GPTModel, family: Family, runtime: Runtime, hf_directory: Path, dtype: torch.dtype) -> int:
    """Every tensor that the model exports, in `dtype`, against the directory's, bit by bit. Returns their number.

    Raises ConversionMismatch naming the first that differs. dtype: that of the converted weights; what the directory holds
    in another precision is rounded to it first.
    """
    count = 0
    with HFTensors(hf_directory) as tensors:
        for meta, found in export_weights(model, family, dtype, runtime):
            expected = tensors.read(meta.name).to(dtype)
            if not torch.equal(found.to(dtype), expected):
                difference = (found.float() - expected.float()).abs().max().item()
                raise ConversionMismatch(f"{meta.name} differs after the round trip (largest difference {difference:.3g})")
            count += 1
    return count


@torch.no_grad()
def compare_logits(
    model: GPTModel, family: Family, runtime: Runtime, hf_directory: Path, dtype: torch.dtype
) -> float:
    """Largest |difference| of the fp32 logits of this model and of transformers' on a fixed prompt.

    model: an fp32 model; hf_directory: its weights, rounded to `dtype` before transformers computes with them in fp32.
    Raises ConversionMismatch above LOGIT_TOLERANCE.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    longest = min(max(PROMPT_LENGTHS), family.max_position_embeddings)
    lengths = torch.tensor([min(length, longest) for length in PROMPT_LENGTHS])
    tokens = torch.randint(0, family.vocab_size, (int(lengths.sum()),), generator=torch.Generator().manual_seed(0))
    with runtime.mode():
        found = forward(model, tokens, pack(lengths, runtime.device))[:, : family.vocab_size]
    reference = AutoModelForCausalLM.from_pretrained(
        hf_directory, dtype=dtype, local_files_only=True, attn_implementation="sdpa"
    )
    reference = reference.float().eval()
    expected = torch.cat([reference(sequence[None]).logits[0] for sequence in tokens.split(lengths.tolist())])
    difference = (found - expected).abs().max().item()
    if not difference <= LOGIT_TOLERANCE:
        raise ConversionMismatch(
            f"logits differ from transformers' by {difference:.3g} in fp32 on a prompt of {len(tokens)} tokens "
            f"(allowed: {LOGIT_TOLERANCE:g}), although every tensor is equal: this config.json uses something that is not "
            "implemented; please report it with the file"
        )
    return difference
