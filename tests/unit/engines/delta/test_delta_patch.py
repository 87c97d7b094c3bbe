"""Differences by bits: whatever the tensors hold, a patch makes the new one of the old one, bit by bit."""

from __future__ import annotations

import random

import pytest
import torch

from rltool.engines.delta.patch import (
    BadPatch,
    apply_difference,
    apply_patch_file,
    bits,
    code_gaps,
    difference,
    patch_file,
    positions,
    read_whole_file,
    whole_file,
)

DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float8_e4m3fn, torch.float64, torch.int64, torch.bool)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Every bit pattern may come: NaNs with payloads, infinities, both zeros, subnormals."""
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(torch.bool)
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape, size), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def with_changes(tensor: torch.Tensor, share: float, generator: torch.Generator) -> torch.Tensor:
    other = random_tensor(tuple(tensor.shape), tensor.dtype, generator)
    return torch.where(torch.rand(tensor.shape, generator=generator) < share, other, tensor)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def size(parts: dict[str, torch.Tensor]) -> int:
    return sum(part.numel() * part.element_size() for part in parts.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share", [0.0, 0.0005, 0.01, 0.3, 1.0])
def test_a_patch_makes_the_new_tensor_of_the_old_one(dtype, share):
    generator = torch.Generator().manual_seed(1)
    for shape in ((), (1,), (0,), (300, 17), (70_001,)):
        old = random_tensor(shape, dtype, generator)
        new = with_changes(old, share, generator)
        parts = difference(old, new)
        patched = old.clone()
        if parts:
            apply_difference(patched, parts)
        assert same_bits(patched, new)
        assert size(parts) <= new.numel() * new.element_size()


def test_zeros_and_nans_are_told_apart_by_their_bits():
    old = torch.tensor([0.0, -0.0, 1.0, 1.0])
    new = torch.tensor([-0.0, -0.0, 1.0, 1.0])
    bits(new)[2] = 0x7FC0_1234  # a NaN with a payload
    other_nan = new.clone()
    bits(other_nan)[2] = 0x7FC0_4321
    patched = old.clone()
    apply_difference(patched, difference(old, new))
    assert same_bits(patched, new)
    assert difference(new, other_nan), "two NaNs differ by their payload"
    assert difference(new, new.clone()) == {}, "a NaN is equal to itself"


def test_one_percent_of_bf16_costs_four_bytes_a_change_at_most():
    generator = torch.Generator().manual_seed(2)
    old = torch.randn(100_000, generator=generator).bfloat16()
    changed = torch.rand(100_000, generator=generator) < 0.01
    new = torch.where(changed, -old, old)
    assert size(difference(old, new)) < 4 * int(changed.sum())


def test_few_far_apart_changes_do_not_make_gaps_long():
    old = torch.zeros(1_000_000)
    new = old.clone()
    new[[0, 999_999]] = 1.0
    parts = difference(old, new)
    assert parts["gaps"].dtype == torch.uint16 and size(parts) < 6 * 20
    apply_difference(old, parts)
    assert torch.equal(old, new)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16])
def test_positions_contain_the_indices_and_lie_between_them(dtype):
    rng = random.Random(3)
    for _ in range(50):
        reach = rng.choice([3, 1000, 200_000])
        indices = torch.tensor(sorted(rng.sample(range(reach), rng.randint(1, min(reach, 40)))))
        found = positions(code_gaps(indices, dtype))
        assert torch.equal(found, found.unique()), "ascending, none twice"
        assert set(indices.tolist()) <= set(found.tolist())
        assert int(found[-1]) == int(indices[-1])


def test_a_change_of_everything_is_the_whole_tensor():
    old, new = torch.zeros(50), torch.ones(50)
    assert difference(old, new).keys() == {"whole"}


@pytest.mark.parametrize(
    "parts",
    [
        {"whole": torch.zeros(9, dtype=torch.int32)},
        {"whole": torch.zeros(10, dtype=torch.int16)},
        {"gaps": torch.tensor([9, 0], dtype=torch.uint8), "values": torch.zeros(2, dtype=torch.int32)},
        {"gaps": torch.tensor([1], dtype=torch.uint8), "values": torch.zeros(2, dtype=torch.int32)},
        {"gaps": torch.tensor([1], dtype=torch.uint8), "values": torch.zeros(1, dtype=torch.int16)},
        {"gaps": torch.zeros((2, 2), dtype=torch.uint8), "values": torch.zeros((2, 2), dtype=torch.int32)},
        {"gaps": torch.tensor([-5], dtype=torch.int64), "values": torch.zeros(1, dtype=torch.int32)},
        {"gaps": torch.tensor([1], dtype=torch.uint8)},
        {"other": torch.zeros(1)},
    ],
    ids=["too few", "another dtype", "outside", "counts differ", "values of another size", "rows", "negative", "half",
        "kind"],
)  # fmt: skip
def test_a_patch_that_does_not_fit_changes_nothing(parts):
    tensor = torch.arange(10, dtype=torch.float32)
    with pytest.raises(BadPatch):
        apply_difference(tensor, parts)
    assert torch.equal(tensor, torch.arange(10, dtype=torch.float32))


def test_a_patch_that_lists_nothing_changes_nothing():
    tensor = torch.arange(10, dtype=torch.float32)
    parts = {"gaps": torch.empty(0, dtype=torch.uint8), "values": torch.empty(0, dtype=torch.int32)}
    apply_difference(tensor, parts)
    assert torch.equal(tensor, torch.arange(10, dtype=torch.float32))


def test_a_file_holds_what_changed_and_nothing_else():
    old = {"a": torch.zeros(1000, dtype=torch.bfloat16), "b": torch.ones(3), "c": torch.zeros(())}
    new = {name: tensor.clone() for name, tensor in old.items()}
    assert patch_file((name, old[name], new[name]) for name in old) is None
    new["a"][7] = 2.0
    new["c"] += 1
    data = patch_file((name, old[name], new[name]) for name in old)
    assert data is not None and b"a" in data and b"/b" not in data
    apply_patch_file(old, data)
    assert all(same_bits(old[name], new[name]) for name in old)


def test_a_file_for_other_tensors_is_refused():
    data = patch_file([("a", torch.zeros(3), torch.ones(3))])
    assert data is not None
    with pytest.raises(BadPatch, match="a, which is not there"):
        apply_patch_file({"b": torch.zeros(3)}, data)
    with pytest.raises(BadPatch, match="^a: "):
        apply_patch_file({"a": torch.zeros(4)}, data)
    with pytest.raises(BadPatch, match="no safetensors file"):
        apply_patch_file({"a": torch.zeros(3)}, data[:-3])


def test_whole_files_keep_names_and_bits_of_views():
    flat = torch.arange(10, dtype=torch.float32)
    tensors = {"x": flat[:4].view(2, 2), "y": flat[4:]}
    read = read_whole_file(whole_file(tensors))
    assert read.keys() == tensors.keys() and all(same_bits(read[n], tensors[n]) for n in tensors)
