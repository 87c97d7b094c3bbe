"""A trainer that rounds what engines in FP8 round, against a transformers model that this file rounds by itself."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from torch.overrides import TorchFunctionMode

from rltool.megatron.model import global_names
from tests.e2e.megatron_models import VOCAB, hf_logprobs, hf_model, make_trainer, policy_batch, save_hf

pytestmark = pytest.mark.e2e

LENGTHS = [5, 17, 2, 9, 12, 3, 8, 40]
SIZES = {
    "hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "num_hidden_layers": 2,
}  # fmt: skip
CUT = SIZES | {"num_key_value_heads": 4, "intermediate_size": 512}
EXPERTS = SIZES | {"moe_intermediate_size": 128, "num_experts": 8, "norm_topk_prob": True}


def settings(fake=True, dtype="bfloat16", **trainer):
    trainer = {"fake_quantization": fake, **trainer}
    return {"dtype": dtype, "algorithm": {"loss": "sft"}, "optimizer": {"clip_grad": 0.0}, "trainer": trainer}


# The formula: E4M3 with a scale of a 448th of the largest number of a group.


def in_e4m3(x, group):
    """x: fp32 [..., whole groups]; group: how many dimensions at its end belong together."""
    dims = tuple(range(-group, 0))
    scale = x.abs().amax(dims, keepdim=True).clamp_min(1e-10) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def rounded_weight(weight):
    """[..., rows, columns], by blocks of 128 x 128."""
    rows, columns = weight.shape[-2] // 128, weight.shape[-1] // 128
    blocks = weight.float().unflatten(-1, (columns, 128)).unflatten(-3, (rows, 128)).transpose(-3, -2)
    return in_e4m3(blocks, 2).transpose(-3, -2).flatten(-2).flatten(-3, -2).to(weight.dtype)


def rounded_input(x):
    rounded = in_e4m3(x.float().unflatten(-1, (-1, 128)), 1).flatten(-2).to(x.dtype)
    return x + (rounded - x).detach()


class RoundedInputs(TorchFunctionMode):
    """Of linear layers, but for the head and routers."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear:
            rows = (args[1] if len(args) > 1 else kwargs["weight"]).size(0)
            if rows >= 128 and rows != VOCAB:
                args = (rounded_input(args[0]), *args[1:])
        return func(*args, **kwargs)


def reference(kind, sizes, batch, *, rounds, dtype=torch.float32, attention="sdpa"):
    """Log-probabilities, and gradients by name."""
    model = hf_model(kind, False, **sizes).to(dtype)
    model.set_attn_implementation(attention)
    if "moe" in kind:
        model.set_experts_implementation("eager")
    linears = [p for name, p in model.named_parameters() if "proj" in name and p.dim() > 1]
    if rounds:
        with torch.no_grad():
            for parameter in linears:
                parameter.copy_(rounded_weight(parameter))
    texts = batch.tokens.split(batch.lengths.tolist())
    with RoundedInputs() if rounds else torch.enable_grad():
        logprobs = torch.cat([hf_logprobs(model, text, 1.0) for text in texts])
    (-(logprobs * batch.loss_weights * batch.loss_mask).sum() / batch.num_loss_tokens).backward()
    return logprobs.detach(), {name: p.grad.float() for name, p in model.named_parameters()}


# Cases: run in the ranks.


def case_compute(place, path, batch, options):
    """Log-probabilities, and gradients by Megatron's names."""
    with closing(make_trainer(place, path, **options)) as trainer:
        logprobs = trainer.compute_logprobs([batch])
        trainer.forward_backward([batch], global_loss_tokens=batch.num_loss_tokens)
        named = global_names(trainer.gpt)
        gradients = {name: p.main_grad.clone() for name, p in named.items() if hasattr(p, "main_grad")}
        return None if logprobs is None else logprobs[0], gradients


def distance(found, expected):
    return float((found - expected).abs().mean())


def relative(found, expected):
    return float((found - expected).norm() / expected.norm())


COMPUTED = {
    "dense": ("qwen3", SIZES, {}),
    "fused in the checkpoint": ("phi3", SIZES | {"num_key_value_heads": 4}, {}),
    "rows in another order": ("glm4", SIZES | {"head_dim": 128}, {}),
    "other gates": ("gemma3", SIZES | {"num_hidden_layers": 4}, {}),
    "all computed again": ("llama", SIZES, {"recompute": "full"}),
    "gates computed again": ("llama", SIZES, {"recompute": "selective"}),
    "experts one after the other": ("qwen3_moe", EXPERTS, {"expert_products": "sequential"}),
    "experts at once": ("qwen3_moe", EXPERTS, {"expert_products": "grouped"}),
    "a shared expert": ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 128}, {}),
}
MATRICES = {
    "self_attention.linear_proj": "self_attn.o_proj", "mlp.linear_fc2": "mlp.down_proj",
}  # fmt: skip


@pytest.mark.parametrize("case", COMPUTED)
def test_it_computes_as_a_model_whose_weights_and_inputs_are_rounded(ranks, tmp_path, case):
    """In float32, where the order of a sum moves hardly a number to another of FP8."""
    kind, sizes, trainer = COMPUTED[case]
    path, batch = save_hf(tmp_path / "hf", kind, False, sizes=sizes), policy_batch(LENGTHS)
    expected, by_weight = reference(kind, sizes, batch, rounds=True)
    plain, plain_by_weight = reference(kind, sizes, batch, rounds=False)
    [(found, gradients)] = ranks.run(case_compute, 1, path, batch, settings(dtype="float32", **trainer))
    assert distance(found, expected) < 1e-2 < 0.1 < distance(plain, expected)
    compared = 0
    for ours, theirs in MATRICES.items():
        by_ours, name = gradients.get(f"decoder.layers.1.{ours}.weight"), f"model.layers.1.{theirs}.weight"
        if by_ours is not None and name in by_weight:
            assert relative(by_ours, by_weight[name]) < 2e-2 < 0.1 < relative(by_ours, plain_by_weight[name])
            compared += 1
    assert compared


def test_in_bfloat16_it_is_as_near_as_two_orders_of_sums_are(ranks, tmp_path):
    """A rounding of 2^-9 decides here and there between two numbers of FP8, whose steps are 2^-3."""
    path, batch = save_hf(tmp_path / "hf", "qwen3", False, sizes=SIZES), policy_batch(LENGTHS)
    expected, other = (
        reference("qwen3", SIZES, batch, rounds=True, dtype=torch.bfloat16, attention=name)[0]
        for name in ("sdpa", "eager")
    )
    [(found, _)] = ranks.run(case_compute, 1, path, batch, settings())
    [(plain, _)] = ranks.run(case_compute, 1, path, batch, settings(fake=False))
    noise = distance(other, expected)
    assert distance(found, expected) < 1.3 * noise < distance(plain, expected) / 1.3
