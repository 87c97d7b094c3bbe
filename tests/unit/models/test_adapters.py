"""Which products have adapters, and the two orders of their rows."""

from __future__ import annotations

import json

import pytest
import torch
from pydantic import ValidationError

from rltool.checkpoints.peft_format import write_peft
from rltool.config.sections import LoraConfig
from rltool.errors import UsageError
from rltool.models.adapters import Adapted, adapters_of, merged
from rltool.models.base import Parameter
from rltool.models.registry import family_for
from rltool.training.checks.validate import check_adapters

MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 16, "num_experts": 2,
    "num_experts_per_tok": 1, "moe_intermediate_size": 6, "norm_topk_prob": False,
}  # fmt: skip


def modules(targets) -> set[str]:
    family = family_for(MIXTURE)
    tensors = [name for each in adapters_of(family, 2, targets) for p in each.a for name, _ in p.hf]
    assert len(tensors) == len(set(tensors))
    return {name.removeprefix("base_model.model.model.layers.0.").removesuffix(".lora_A.weight") for name in tensors}


def test_targets_name_products_and_all_linear_names_all_but_the_router():
    attention = {f"self_attn.{x}_proj" for x in "qkv"}
    experts = {f"mlp.experts.{e}.{x}_proj" for e in range(2) for x in ("gate", "up", "down")}
    assert modules(["qkv"]) == attention
    assert modules(["experts", "proj"]) == experts | {"self_attn.o_proj"}
    assert modules("all-linear") == attention | experts | {"self_attn.o_proj"}


def test_a_target_that_the_model_lacks_is_refused():
    with pytest.raises(UsageError, match="gate_up, which Qwen3MoeForCausalLM does not have"):
        adapters_of(family_for(MIXTURE), 2, ["gate_up", "qkv"])


def test_a_delta_nets_products_have_adapters_that_merge_as_their_tensors_do():
    sizes = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=2, linear_value_head_dim=3)
    family = family_for({**MIXTURE, "architectures": ["Qwen3_5ForCausalLM"], **sizes})
    found = [each for each in adapters_of(family, 2, ["qkv", "proj"]) if each.base.layer == 0]
    names = [[hf.removeprefix("model.layers.0.linear_attn.") for hf, _ in each.base.hf] for each in found]
    assert names == [
        ["in_proj_qkv.weight", "in_proj_z.weight"], ["in_proj_b.weight", "in_proj_a.weight"], ["out_proj.weight"],
    ]  # fmt: skip
    for each in found:
        merging_is_the_same(each)


@pytest.mark.parametrize("index", range(4))
def test_merging_the_megatron_tensor_is_merging_each_hf_tensor(index):
    merging_is_the_same(adapters_of(family_for(MIXTURE), 2, "all-linear")[index])


def merging_is_the_same(each: Adapted) -> None:
    torch.manual_seed(0)
    hf = [torch.randn(shape) for _, shape in each.base.hf]
    a, b = ([torch.randn(p.merged_shape) for p in parts] for parts in (each.a, each.b))
    found = merged(each, each.base.merge(hf), a, b, scale=0.5, groups=each.base.query_groups)
    in_hf_order = [p.split(up)[0] for p, up in zip(each.b, b, strict=True)]
    expected = [w + 0.5 * up @ down for w, down, up in zip(hf, a, in_hf_order, strict=True)]
    torch.testing.assert_close(found, each.base.merge(expected))
    x = torch.randn(3, hf[0].size(1))
    added = each.put_together([x @ down.T @ up.T for down, up in zip(a, b, strict=True)], each.base.query_groups)
    torch.testing.assert_close(x @ found.T, x @ each.base.merge(hf).T + 0.5 * added)


def test_merging_rounds_once():
    base = Parameter("decoder.layers.0.mlp.linear_fc2.weight", (("w.weight", (1, 1)),), 0, 1)
    each = Adapted(base, (base,), (base,))
    weight, small = torch.ones(1, 1, dtype=torch.bfloat16), torch.full((1, 1), 2.0**-5)
    # 1 + 2^-8 + 2^-10 rounds up; 2^-8 alone, the tie, would round to even, which is down.
    found = merged(each, weight, [small], [small], scale=4 + 1, groups=0)
    assert found.dtype is torch.bfloat16
    assert float(found) == 1 + 2**-7


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 4, "targets": ["qkv", "lm_head"]}, "'lm_head': the embedding and the output head have no adapters"),
        ({"rank": 4, "targets": []}, "names no product"),
        ({"rank": 4, "targets": ["qkv", "qkv"]}, "names no product, or one twice"),
        ({"alpha": 8}, "alpha would have no effect: rank is 0"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings, message):
    with pytest.raises(ValidationError, match=message):
        LoraConfig(**settings)


def test_adapters_to_begin_with_are_checked_before_a_run_starts(tmp_path):
    family, lora = family_for(MIXTURE), LoraConfig(rank=2, targets=("qkv",), init=tmp_path / "adapter")
    with pytest.raises(UsageError, match="neither an adapter of peft's nor a checkpoint"):
        check_adapters(family, lora)
    write_peft(tmp_path / "adapter", family, lora, "base", lambda parameter: torch.zeros(parameter.merged_shape))
    check_adapters(family, lora)
    with pytest.raises(UsageError, match=r"has alpha = 32, but lora\.alpha is 8"):
        check_adapters(family, lora.model_copy(update={"alpha": 8.0}))
    with pytest.raises(UsageError, match=r"lacks .*o_proj.*set lora\.targets"):
        check_adapters(family, lora.model_copy(update={"targets": ("qkv", "proj")}))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(UsageError, match="use_dora = True is not implemented"):
        check_adapters(family, lora)
