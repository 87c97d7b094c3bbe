"""What is exported, as a value: the full plan, and others that are read by the same code."""

from __future__ import annotations

import json
import pickle

import torch
from safetensors.torch import load_file

from rltool.checkpoints.hf_export import write_hf_directory
from rltool.engines.dialects.checksums import ParameterLayout
from rltool.megatron.export_plan import full_plan
from rltool.models.registry import family_for
from rltool.weights.verify.implied_checksums import implied_checksums
from tests.export_plans import adapter, quantised
from tests.unit.models.test_models_families import hf_config, random_hf_state

MIXTURE = hf_config("Qwen3MoeForCausalLM", moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2)
BYTES_A_TENSOR = 300


def reader(family, state):
    return lambda parameter: parameter.merge([state[name] for name, _ in parameter.hf])


def test_the_full_plan_is_the_checkpoint_of_the_family_in_order():
    for config in (hf_config(), hf_config(tie_word_embeddings=True), MIXTURE):
        family = family_for(config)
        plan, state = full_plan(family, torch.float32), random_hf_state(family)
        assert [(meta.name, meta.shape) for meta in plan.tensors] == family.hf_tensors()
        assert plan.bytes == sum(tensor.nbytes for tensor in state.values())
        made = list(plan.made(reader(family, state)))
        assert [meta for meta, _ in made] == plan.tensors
        assert all(torch.equal(tensor, state[meta.name]) for meta, tensor in made)
        assert [meta for bucket in plan.buckets(1000) for meta in bucket] == plan.tensors


def test_plans_travel_between_processes_and_are_small():
    full = full_plan(family_for(MIXTURE), torch.bfloat16)
    for plan in (full, quantised(full), adapter()):
        pickled = pickle.dumps(plan)
        there = pickle.loads(pickled)
        assert there.tensors == plan.tensors and len(pickled) < BYTES_A_TENSOR * len(plan.tensors) + 1000
    assert pickle.loads(pickle.dumps(full)) == full


def test_a_quantised_model_is_written_for_hugging_face_by_its_plan(tmp_path):
    family = family_for(hf_config())
    plan, state = quantised(full_plan(family, torch.bfloat16)), random_hf_state(family)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(hf_config()))
    in_bf16 = {name: tensor.bfloat16() for name, tensor in state.items()}
    write_hf_directory(tmp_path / "out", plan.made(reader(family, in_bf16)), plan, tmp_path / "model")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == {meta.name for meta in plan.tensors}
    for name, tensor in in_bf16.items():
        if tensor.dim() == 1:
            assert torch.equal(written[name], tensor)
            continue
        assert written[name].dtype == torch.uint8
        scale, exact = written[f"{name}_scale"], tensor.float()
        assert (((written[name].float() - 128) * scale - exact).abs() <= 0.51 * scale + 0.01 * exact.abs()).all()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16", "it computes in that"


def test_checksums_of_a_quantised_model_are_those_of_what_is_not():
    family = family_for(hf_config())
    full, state = full_plan(family, torch.float32), random_hf_state(family)
    plan, layout = quantised(full), ParameterLayout("float32", 2)
    made = ((meta.name, tensor) for meta, tensor in plan.made(reader(family, state)))
    found = implied_checksums(plan, made, layout)
    whole = implied_checksums(full, state.items(), layout)
    assert "model.norm.weight" in found and "model.layers.1.self_attn.qkv_proj.bias" in found
    assert not any(name.endswith("proj.weight") for name in found)
    assert found == {name: whole[name] for name in found}
