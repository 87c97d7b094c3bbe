"""Every model family on a GPU, against transformers on the CPU."""

from __future__ import annotations

from contextlib import closing
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig

from rltool.megatron.attention import attention_with_sinks, has_kernels
from rltool.megatron.delta_net import fla_error, fla_is_right
from rltool.megatron.layers import PackedCausalAttention, plain_attention
from rltool.megatron.packing import pack
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


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("blocks", [False, True])
def test_attention_with_sinks_at_real_sizes_is_plain_attention(window, blocks):
    """gpt-oss's heads, packed, also where blocks of queries see more keys (context parallelism). The kernel in bf16 is
    hardly further from fp32, gradients included, than plain attention in bf16."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((300, 700), (1, 1), (517, 517)) if blocks else ((700, 700), (1, 1), (517, 517))
    ends = [[0, *accumulate(size[i] for size in sizes)] for i in (0, 1)]
    packed = PackedSeqParams(
        cu_seqlens_q=torch.tensor(ends[0], dtype=torch.int32, device="cuda"),
        cu_seqlens_kv=torch.tensor(ends[1], dtype=torch.int32, device="cuda"),
        max_seqlen_q=max(size[0] for size in sizes),
        max_seqlen_kv=max(size[1] for size in sizes),
    )
    shapes = ((ends[0][-1], 64, 64), (ends[1][-1], 8, 64), (ends[1][-1], 8, 64), (64,))
    inputs = [torch.randn(*shape, generator=generator).bfloat16().cuda() for shape in shapes]
    by_output = torch.randn(*shapes[0], generator=generator).bfloat16().cuda()

    def plain(query, key, value, sinks):
        outputs = []
        for (queries, keys), *at in zip(sizes, *ends, strict=False):
            q, k, v = query[at[0] :][:queries], key[at[1] :][:keys], value[at[1] :][:keys]
            last = keys - queries + torch.arange(queries, device="cuda")[:, None]
            places = torch.arange(keys, device="cuda")
            seen = (places <= last) & (places > last - (window or keys))
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            options = {"attn_mask": seen, "is_causal": False, "scale": None, "enable_gqa": True}
            outputs.append(plain_attention(None, sinks, q, k, v, **options)[0].transpose(0, 1))
        return torch.cat(outputs)

    def run(attend, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        output = attend(*leaves)
        return [x.float() for x in (output.detach(), *torch.autograd.grad(output, leaves, by_output.to(dtype)))]

    exact, rounded = run(plain, torch.float32), run(plain, torch.bfloat16)
    found = run(lambda *leaves: attention_with_sinks(*leaves, packed, None, window), torch.bfloat16)
    for what, ours, theirs, expected in zip(("output", *"qkv", "sinks"), found, rounded, exact, strict=True):
        error, reference = ((x - expected).norm() / expected.norm() for x in (ours, theirs))
        print(what, float(error), float(reference))
        assert error < 1.5 * reference + 0.001, f"{what} is off by {error:.2g}, plain attention by {reference:.2g}"


@pytest.mark.parametrize("heads", [16, 128])
def test_latent_attention_at_real_sizes_is_plain_attention(heads):
    """Moonlight's heads and DeepSeek-V3's: keys of 192 and values of 128, packed, through what the trainer picks for
    them. In bf16 it is hardly further from fp32, gradients included, than plain attention in bf16."""
    for what, (error, reference) in latent_errors(heads, torch.device("cuda")).items():
        print(what, error, reference)
        assert error < 1.5 * reference + 0.001, f"{what} is off by {error:.2g}, plain attention by {reference:.2g}"


def latent_errors(heads: int, device: torch.device) -> dict[str, tuple[float, float]]:
    """Of output and gradients: relative distance to fp32 of the trainer's attention, and of plain attention. On a CPU
    the former is torch's own for padded rows."""
    lengths, scale = (700, 1, 517, 128), 1.3 * 192**-0.5  # YaRN has a factor in it
    config = TransformerConfig(num_layers=1, hidden_size=heads * 192, num_attention_heads=heads)
    core = PackedCausalAttention(config, 1, None, "self", softmax_scale=scale)
    rows = pack(torch.tensor(lengths), device)
    generator = torch.Generator().manual_seed(0)
    sizes = (192, 192, 128, 128)
    *inputs, by_output = (
        torch.randn(sum(lengths), 1, heads, size, generator=generator).bfloat16().to(device) for size in sizes
    )
    assert device.type == "cpu" or has_kernels(inputs[0])

    def plain(query, key, value):
        outputs = []
        for q, k, v in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
            q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
            options = {"attn_mask": None, "is_causal": True, "scale": scale, "enable_gqa": False}
            outputs.append(plain_attention(None, None, q, k, v, **options).permute(2, 0, 1, 3))
        return torch.cat(outputs)

    def run(attend, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        output = attend(*leaves).view_as(by_output)
        return [x.float() for x in (output.detach(), *torch.autograd.grad(output, leaves, by_output.to(dtype)))]

    exact, rounded = run(plain, torch.float32), run(plain, torch.bfloat16)
    found = run(lambda *leaves: core(*leaves, packed_seq_params=rows), torch.bfloat16)
    return {
        what: tuple(float((x - expected).norm() / expected.norm()) for x in (ours, theirs))
        for what, ours, theirs, expected in zip(("output", *"qkv"), found, rounded, exact, strict=True)
    }


@pytest.mark.parametrize("heads", [16, 32])
def test_fla_computes_gated_delta_nets_at_real_sizes(heads):
    """Heads of Qwen3-Next and Qwen3.5, 128 wide: the kernels serve, gradients included."""
    at = torch.device("cuda"), torch.bfloat16, heads, 128, 128
    print(fla_error(*at))
    assert fla_is_right(*at)


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
    assert all(torch.equal(rounded[name], tensor.to(rounded[name].dtype)) for name, tensor in original.items())
