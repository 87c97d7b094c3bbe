"""The digests that an engine would give for its parameters if it held these tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from rltool.engines.checksums import parts_of_parameters

VOCABULARY_MULTIPLE = 64
"""vLLM pads the rows of an embedding to a multiple of it, with zeros."""


def implied_checksums(
    names: Sequence[str], tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> dict[str, str]:
    """vLLM's digests of its parameters: SHA-256 of the bytes in `dtype`, projections that vLLM keeps in one matrix
    below each other, embeddings padded.

    names: all Hugging Face names that come; tensors: in any order, on any device. At most the parts of parameters that
    are not complete yet are held, so the tensors may be a stream of a model larger than the host's memory.
    """
    parts = parts_of_parameters(names)
    parameter_of = {part: parameter for parameter, of_it in parts.items() for part in of_it}
    waiting: dict[str, dict[str, Tensor]] = {}
    digests: dict[str, str] = {}
    for name, tensor in tensors:
        parameter = parameter_of[name]
        held = waiting.setdefault(parameter, {})
        # A part outlives the stream's next step, which may overwrite what the tensor is a view of.
        held[name] = tensor.detach().to("cpu", dtype, copy=len(parts[parameter]) > 1)
        if len(held) == len(parts[parameter]):
            del waiting[parameter]
            digests[parameter] = _digest(parameter, [held[part] for part in parts[parameter]])
    return digests


def _digest(parameter: str, parts: Sequence[Tensor]) -> str:
    tensor = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
    if parameter.endswith(("embed_tokens.weight", "lm_head.weight")):
        tensor = _padded(tensor)
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().data).hexdigest()


def _padded(tensor: Tensor) -> Tensor:
    rows = -len(tensor) % VOCABULARY_MULTIPLE
    return torch.cat([tensor, tensor.new_zeros(rows, *tensor.shape[1:])]) if rows else tensor
