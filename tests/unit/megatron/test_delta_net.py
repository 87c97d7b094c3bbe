"""The gated delta rule in plain torch: against the definition token by token, transformers, and sequences alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rltool.megatron.delta_net import ShortConvolution, chunked_delta_rule
from rltool.megatron.packing import cut, pack

LENGTHS = (5, 64, 1, 17, 130, 33)
HEADS, KEY, VALUE = 3, 16, 24


def inputs(dtype=torch.float32, total=sum(LENGTHS)):
    """Query, key, value, decay, beta. Decays from almost nothing kept to almost everything."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(total, HEADS, *shape, generator=generator, dtype=torch.float64)

    decay = -F.softplus(3 * draw())
    found = draw(KEY), draw(KEY), draw(VALUE), decay, draw().sigmoid()
    return [x.to(dtype).requires_grad_() for x in found]


def recurrent(query, key, value, decay, beta):
    """The definition, one token after the other, of one sequence."""
    unit = lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()  # noqa: E731
    query, key = unit(query) * KEY**-0.5, unit(key)
    state, out = query.new_zeros(HEADS, KEY, VALUE), []
    for q, k, v, g, b in zip(query, key, value, decay, beta, strict=True):
        state = state * g.exp()[:, None, None]
        known = torch.einsum("hkv,hk->hv", state, k)
        state = state + torch.einsum("hk,hv->hkv", k, b[:, None] * (v - known))
        out.append(torch.einsum("hkv,hk->hv", state, q))
    return torch.stack(out)


def by_sequence(rule, found):
    split = zip(*(x.split(LENGTHS) for x in found), strict=True)
    return torch.cat([rule(*each) for each in split])


def gradients(out, leaves):
    by_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [out, *torch.autograd.grad(out, leaves, by_out.to(out.dtype))]


@pytest.mark.parametrize("size", [1, 8, 64])
def test_chunked_is_the_definition_token_by_token_with_gradients(size):
    found = inputs()
    exact = inputs(torch.float64)
    expected = gradients(by_sequence(recurrent, exact), exact)
    chunks = cut(torch.tensor(LENGTHS), torch.device("cpu"), size)
    for a, b in zip(gradients(chunked_delta_rule(*found, chunks), found), expected, strict=True):
        assert (a - b).norm() <= 2e-6 * b.norm()


def test_packed_sequences_are_those_alone():
    found = inputs()
    together = chunked_delta_rule(*found, cut(torch.tensor(LENGTHS), torch.device("cpu"), 8))

    def alone(*each):
        return chunked_delta_rule(*each, cut(torch.tensor([len(each[0])]), torch.device("cpu"), 8))

    torch.testing.assert_close(together, by_sequence(alone, found), rtol=0, atol=1e-6)


def test_chunked_is_that_of_transformers():
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    found = [x.detach() for x in inputs()]

    def theirs(*each):
        return torch_recurrent_gated_delta_rule(*(x[None] for x in each), use_qk_l2norm_in_kernel=True)[0][0]

    mine = chunked_delta_rule(*found, cut(torch.tensor(LENGTHS), torch.device("cpu")))
    torch.testing.assert_close(mine, by_sequence(theirs, found), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kernel", [1, 4])
def test_convolution_sees_its_own_sequence_alone(kernel):
    class Config:
        params_dtype = torch.float32

    convolution = ShortConvolution(Config(), 6, kernel)
    torch.nn.init.normal_(convolution.weight, generator=torch.Generator().manual_seed(0))
    x = torch.randn(sum(LENGTHS), 6, generator=torch.Generator().manual_seed(1))

    def theirs(each):
        return F.silu(F.conv1d(F.pad(each.t(), (kernel - 1, 0))[None], convolution.weight, groups=6)[0].t())

    expected = torch.cat([theirs(each) for each in x.split(LENGTHS)])
    found = convolution(x, pack(torch.tensor(LENGTHS), torch.device("cpu")).positions)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(convolution(x[:2], torch.arange(2)), found[:2])
