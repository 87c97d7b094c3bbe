"""Every model family on a GPU, against transformers on the CPU."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace

import pytest
import torch

from tests.e2e.engines import free_port
from tests.e2e.megatron_models import EXPERTS, KINDS, hf_logprobs, hf_model, make_trainer, policy_batch, save_hf
from tests.e2e.test_model_families import LENGTHS, on_disk

pytestmark = pytest.mark.gpu


def trained_on_gpu(path, batch, dtype: str, **trainer):
    """(log-probabilities, metrics of one step of supervised training, exported weights), all on the CPU."""
    place = SimpleNamespace(rank=0, world_size=1, port=free_port())
    options = {"algorithm": {"loss": "sft"}, "optimizer": {"clip_grad": 0.0}, "trainer": trainer}
    with closing(make_trainer(place, path, dtype=dtype, **options)) as made:
        exported = {meta.name: tensor.cpu().clone() for meta, tensor in made.export_weights()}
        logprobs = torch.cat([x.cpu() for x in made.compute_logprobs([batch])])
        return logprobs, made.train_step([batch], global_loss_tokens=batch.num_loss_tokens), exported


@pytest.mark.parametrize("kind", KINDS)
def test_a_family_in_float32_is_that_of_transformers(kind, tmp_path):
    """Log-probabilities, loss, gradient norm; exported weights bit by bit; in bf16 as near as bf16 is."""
    path, model, batch = save_hf(tmp_path, kind, tied=False), hf_model(kind, tied=False), policy_batch(LENGTHS)
    expected = torch.cat([hf_logprobs(model, t, 1.0) for t in batch.tokens.split(batch.lengths.tolist())])
    at = batch.loss_mask > 0
    loss = -(batch.loss_weights[at] * expected[at]).sum() / at.sum()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])

    logprobs, metrics, exported = trained_on_gpu(path, batch, "float32")
    torch.testing.assert_close(logprobs, expected.detach(), rtol=0, atol=1e-4)
    assert metrics["train/loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert metrics["train/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    original = on_disk(path)
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in original.items())

    grouped = {"expert_products": "grouped"} if kind in EXPERTS else {}
    in_bf16, _, rounded = trained_on_gpu(path, batch, "bfloat16", **grouped)
    assert (in_bf16 - expected.detach())[at].abs().mean() < 0.1
    assert all(torch.equal(rounded[name], tensor.bfloat16()) for name, tensor in original.items())
