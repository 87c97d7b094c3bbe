"""Digests of bytes as the engines make them. Those of SGLang's kernel are its own: it ran in Triton's interpreter over
the same tensors (tests/e2e/test_sglang_digests.py does so again)."""

from __future__ import annotations

import hashlib

import pytest
import torch

from rltool.weights.verify import digests
from rltool.weights.verify.digests import sglang_cuda, sha256, sha256_64

OF_THE_KERNEL = [
    (1, "bf0fece2a2a8c3b2", "111d6844ee497f59"),
    (3, "edbaf87ad31b811e", "f1b8345db833aa74"),
    (8192, "3f7f55981c5517c5", "08ea770a541f5aaf"),
    (8193, "15f2da9526c7acd7", "9a7a6f5029235651"),
    (30001, "614ef8b36c935ae3", "1ceb9130b57d9658"),
    (225000, "5bc3ad49374fe738", "a3cd1a634395bf1d"),
]
"""(elements, digest in float32, in bfloat16) of random_vector."""


def random_vector(index: int, elements: int) -> torch.Tensor:
    """The same on every machine: torch's generator on the CPU, seeded by the place in OF_THE_KERNEL."""
    return torch.randn(elements, generator=torch.Generator().manual_seed(index))


@pytest.mark.parametrize("index", range(len(OF_THE_KERNEL)))
@pytest.mark.parametrize("at_once", [1, 4, 64])
def test_sglangs_digest_on_a_gpu_is_that_of_its_kernel_whatever_is_hashed_at_once(index, at_once, monkeypatch):
    monkeypatch.setattr(digests, "TILES_AT_ONCE", at_once)
    elements, float32, bfloat16 = OF_THE_KERNEL[index]
    tensor = random_vector(index, elements)
    assert (sglang_cuda(tensor), sglang_cuda(tensor.bfloat16())) == (float32, bfloat16)


def test_one_bit_another_place_and_another_size_are_another_digest():
    tensor = torch.zeros(20_000)
    found = {sglang_cuda(tensor), sglang_cuda(tensor[:-1])}
    for place in (0, 8191, 8192, 19_999):
        tensor[place] = 1e-45
        found.add(sglang_cuda(tensor))
        tensor[place] = 0.0
    assert len(found) == 6


@pytest.mark.parametrize("start", [1, 2])
def test_a_part_of_a_tensor_has_the_digest_of_its_copy_wherever_it_begins(start):
    tensor = random_vector(0, 41).bfloat16()
    assert sglang_cuda(tensor[start:]) == sglang_cuda(tensor[start:].clone())


def test_the_others_are_sha256_of_the_bytes():
    tensor = torch.arange(12.0).reshape(3, 4)[:, 1:3]  # a view with gaps
    expected = hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
    assert sha256(tensor) == expected and sha256_64(tensor) == expected[:16]
    assert sglang_cuda(tensor) == sglang_cuda(tensor.clone(memory_format=torch.contiguous_format))
    assert sglang_cuda(torch.empty(0)) == "0" * 16
