"""The difference of two tensors by their bits, and files of such differences. Needs torch and safetensors alone.

Between two policy steps about 99 % of bf16 weights keep their bits (PULSE, arXiv 2602.03839), so a patch lists the
elements that changed: their distances and their new bits. It compares and writes integers, never floats: -0.0 differs
from 0.0, and a NaN keeps its payload.

A file holds, under KIND/NAME for each tensor NAME that changed, either `whole` (all elements) or `gaps` and `values`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from rltool.engines.transfer.wire import split_flat
from rltool.engines.types import Bucket
from rltool.errors import RltoolError

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> the integers that it is compared and written as."""

GAPS = {torch.uint8: 1 << 8, torch.uint16: 1 << 16}
"""Type of the gaps -> the largest distance between two listed elements."""


class BadPatch(RltoolError):
    """A patch that does not fit the tensor that it is for."""


def bits(tensor: Tensor) -> Tensor:
    """[elements] integers: the tensor's own memory where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(INTEGERS[tensor.element_size()])


def difference(old: Tensor, new: Tensor) -> dict[str, Tensor]:
    """What makes `new` of `old`: {}, {"whole"}, or {"gaps", "values"}, whichever has the fewest bytes.

    old, new: of one shape and dtype. gaps: [listed] uint8 or uint16, the elements between a listed one and the one
    before; values: [listed] integers, the bits of `new` there. None of them shares memory with `new`.
    """
    before, after = bits(old), bits(new)
    changed = (before != after).nonzero()[:, 0]
    if not len(changed):
        return {}
    size = after.element_size()
    if len(changed) * (1 + size) < len(after) * size:
        gaps = min((code_gaps(changed, dtype) for dtype in GAPS), key=lambda g: len(g) * (g.element_size() + size))
        if len(gaps) * (gaps.element_size() + size) < len(after) * size:
            return {"gaps": gaps, "values": after[positions(gaps)]}
    return {"whole": after.clone()}


def apply_difference(tensor: Tensor, parts: Mapping[str, Tensor]) -> None:
    """The inverse of `difference`, in place; `tensor` is contiguous. Raises BadPatch, and has changed nothing then."""
    target = bits(tensor)
    if parts.keys() == {"whole"}:
        if parts["whole"].shape != target.shape or parts["whole"].dtype != target.dtype:
            raise BadPatch(f"{_form(parts['whole'])} cannot replace {_form(target)}")
        target.copy_(parts["whole"])
    elif parts.keys() == {"gaps", "values"}:
        gaps, values = parts["gaps"], parts["values"]
        if gaps.dtype not in GAPS or gaps.shape != values.shape or values.dtype != target.dtype or gaps.ndim != 1:
            raise BadPatch(f"gaps {_form(gaps)} and values {_form(values)} do not fit {_form(target)}")
        where = positions(gaps)
        if len(where) and int(where[-1]) >= len(target):
            raise BadPatch(f"element {int(where[-1])} lies outside {_form(target)}")
        target[where] = values
    else:
        raise BadPatch(f"a patch has gaps and values, or whole, not {sorted(parts)}")


def code_gaps(indices: Tensor, dtype: torch.dtype) -> Tensor:
    """indices: [n >= 1] ascending. Returns [m >= n] gaps of `dtype`, whose `positions` contain the indices.

    Where two neighbours are too far apart for `dtype`, elements between them are listed as well: a patch has an
    element's new value, whether it changed or not, so they are not marked and look like changed ones.
    """
    reach = GAPS[dtype]
    steps = torch.diff(indices, prepend=indices.new_tensor([-1]))
    between = (steps - 1) // reach
    total = int(between.sum())
    if not total:
        return (steps - 1).to(dtype)
    owner = torch.repeat_interleave(torch.arange(len(indices)), between)
    rank = torch.arange(total) - (between.cumsum(0) - between)[owner]
    fillers = (indices - steps)[owner] + (rank + 1) * reach
    merged = torch.cat((indices, fillers)).sort().values
    return (torch.diff(merged, prepend=merged.new_tensor([-1])) - 1).to(dtype)


def positions(gaps: Tensor) -> Tensor:
    """[listed] int64: where the listed elements are."""
    return (gaps.to(torch.int64) + 1).cumsum(0) - 1


def patch_file(tensors: Iterable[tuple[str, Tensor, Tensor]]) -> bytes | None:
    """(name, old, new) of some tensors as a patch file, None if nothing changed."""
    entries = {
        f"{kind}/{name}": part for name, old, new in tensors for kind, part in difference(old, new).items()
    }
    return save(entries) if entries else None


def flat_patch(bucket: Bucket, old: Tensor, new: Tensor) -> bytes | None:
    """Two versions of a bucket ([bytes] uint8 each) as a patch file, None if nothing changed."""
    pairs = zip(split_flat(old, bucket), split_flat(new, bucket), strict=True)
    return patch_file((name, before, after) for (name, before), (_, after) in pairs)


def apply_patch_file(tensors: Mapping[str, Tensor], data: bytes) -> None:
    """Change the named tensors in place. Raises BadPatch; a part of them may have changed then."""
    by_name: dict[str, dict[str, Tensor]] = {}
    for key, part in _load(data).items():
        kind, _, name = key.partition("/")
        by_name.setdefault(name, {})[kind] = part
    for name, parts in by_name.items():
        if name not in tensors:
            raise BadPatch(f"the patch is for {name}, which is not there")
        try:
            apply_difference(tensors[name], parts)
        except BadPatch as error:
            raise error.with_context(before=f"{name}: ") from error


def whole_file(tensors: Mapping[str, Tensor]) -> bytes:
    """A safetensors file in Hugging Face's form. Tensors may be views of one another's memory."""
    return save({name: tensor.clone() for name, tensor in tensors.items()}, metadata={"format": "pt"})


def read_whole_file(data: bytes) -> dict[str, Tensor]:
    """The inverse of `whole_file`. Raises BadPatch."""
    return _load(data)


def _load(data: bytes) -> dict[str, Tensor]:
    try:
        return load(data)
    except SafetensorError as error:
        raise BadPatch(f"this is no safetensors file: {error}") from error


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
