"""Norms and scaling of many tensors at once, and that Megatron clips by them."""

import pytest
import torch
from megatron.core import utils
from megatron.core.optimizer import clip_grads

from rltool.megatron import patches
from rltool.megatron.patches import optimizer

SHAPES = [(3, 4), (7,), (1,), (2, 2, 2)]


def tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def test_the_norm_is_that_of_all_numbers():
    given = tensors()
    norm, _ = optimizer.l2_norm(65536, torch.zeros(1), [given[:2], given[2:]])
    assert norm.shape == (1,)
    torch.testing.assert_close(norm[0], torch.cat([tensor.flatten() for tensor in given]).norm())


@pytest.mark.parametrize("in_place", [True, False])
def test_scaling_writes_the_second_list(in_place):
    sources = tensors()
    results = sources if in_place else [torch.full_like(tensor, torch.nan) for tensor in sources]
    expected = [0.25 * tensor for tensor in sources]
    optimizer.scale(65536, torch.zeros(1), [sources, results], 0.25)
    assert all(torch.equal(found, wanted) for found, wanted in zip(results, expected, strict=True))
    assert in_place or all(torch.equal(source, before) for source, before in zip(sources, tensors(), strict=True))


@pytest.mark.parametrize("name", ["l2_norm", "scale"])
def test_only_megatrons_loops_are_replaced(monkeypatch, name):
    attribute = {"l2_norm": "l2_norm_impl", "scale": "multi_tensor_scale_impl"}[name]
    loop = {"l2_norm": utils.local_multi_tensor_l2_norm, "scale": utils.local_multi_tensor_scale}[name]
    for installed, expected in ((loop, getattr(optimizer, name)), (another := object(), another)):
        monkeypatch.setattr(clip_grads, attribute, installed)
        patches.use_multi_tensor_kernels()
        assert getattr(clip_grads, attribute) is expected
