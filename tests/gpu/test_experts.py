"""Experts on a GPU: grouped products, gradients in Megatron's buffers, the dispatch, against what they replace."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe import moe_utils, token_dispatcher

from rltool.megatron.experts import GroupedExperts
from tests.e2e.engines import free_port
from tests.e2e.megatron_models import make_trainer, policy_batch, save_hf

pytestmark = pytest.mark.gpu

def gradients(path, batch, products, dtype="bfloat16"):
    """Of all parameters, in fp32, after two micro-batches; and the log-probabilities."""
    place = SimpleNamespace(rank=0, world_size=1, port=free_port())
    with closing(make_trainer(place, path, dtype=dtype, trainer={"expert_products": products})) as trainer:
        experts = [layer.mlp.experts for layer in trainer.gpt.decoder.layers]
        assert all(isinstance(each, GroupedExperts) and each.grouped for each in experts) == (products == "grouped")
        logprobs = trainer.compute_logprobs([batch])[0]
        trainer.forward_backward([batch, batch], global_loss_tokens=2 * batch.num_loss_tokens)
        return logprobs.cpu(), {name: p.main_grad.float().cpu().clone() for name, p in trainer.gpt.named_parameters()}


def test_grouped_experts_have_the_gradients_of_megatrons_own(monkeypatch, tmp_path):
    """Both in bf16: no tensor is further from fp32's gradients than Megatron's experts and dispatch are."""
    path, batch = save_hf(tmp_path, "qwen3_moe", tied=False), policy_batch([40, 3, 29, 57])
    logprobs, found = gradients(path, batch, "grouped")
    for name in ("permute", "unpermute", "sort_chunks_by_idxs"):
        monkeypatch.setattr(token_dispatcher, name, getattr(moe_utils, name))
    monkeypatch.setattr("rltool.megatron.model.dispatch_without_atomics", lambda: None)
    their_logprobs, theirs = gradients(path, batch, "sequential")
    exact_logprobs, exact = gradients(path, batch, "sequential", "float32")

    def error(x, reference):
        return float((x - reference).norm() / reference.norm())

    assert error(logprobs, exact_logprobs) < 1.5 * error(their_logprobs, exact_logprobs)
    assert found.keys() == exact.keys() and any("experts" in name for name in found)
    for name, gradient in found.items():
        ours, reference = error(gradient, exact[name]), error(theirs[name], exact[name])
        assert ours < 1.5 * reference + 0.01, f"gradient of {name} is off by {ours:.2g}, Megatron's by {reference:.2g}"


def test_the_dispatch_gives_the_same_bits_each_time(tmp_path):
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(4096, 256, device="cuda", generator=generator).bfloat16().requires_grad_()
    chosen = torch.rand(4096, 32, device="cuda", generator=generator).topk(4).indices
    routing = torch.zeros(4096, 32, dtype=torch.bool, device="cuda").scatter_(1, chosen, True)

    def there_and_back(module):
        rows, _, order, *_ = module.permute(x, routing, num_out_tokens=4096 * 4)
        back = module.unpermute(rows * 1.5, order, x.shape)
        (by_x,) = torch.autograd.grad(back.float().square().sum(), x)
        return rows.detach(), back.detach(), by_x

    from rltool.megatron.patches import dispatch_without_atomics

    dispatch_without_atomics()
    ours, again, theirs = map(there_and_back, (token_dispatcher, token_dispatcher, moe_utils))
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
    assert torch.equal(ours[0], theirs[0])
    for a, b in zip(ours, theirs, strict=True):
        assert (a.float() - b.float()).norm() / b.float().norm() < 0.01
