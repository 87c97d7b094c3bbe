"""Weights rounded as engines in FP8 have them, without a trainer; tests/e2e has that."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from rltool.config.loader import load_config
from rltool.config.train import TrainConfig
from rltool.engines.transfer import fp8
from rltool.errors import UsageError
from rltool.megatron.fp8 import fp8_plan, linears_of, round_shard, rounded_matrix, rounded_parameters
from rltool.training.checks.validate import check_model
from tests.e2e.megatron_models import architecture_of, hf_config
from tests.unit.megatron.test_fp8 import WIDE, family_of

CUT = WIDE | {"num_key_value_heads": 4}


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).bfloat16()


def same_bytes(one, other):
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (130, 60), (1, 300), (384, 256)])
@pytest.mark.parametrize("size", [1e-6, 0.02, 1.0, 1e4])
def test_what_an_engine_is_sent_of_rounded_weights_is_what_it_is_sent_of_the_others(shape, size):
    matrix = (randn(*shape) * torch.logspace(-3, 3, shape[1]) * size).bfloat16()
    matrix[:, -2:] = 0
    rounded = rounded_matrix(matrix)
    assert rounded.dtype is torch.bfloat16 and not torch.equal(rounded, matrix)
    assert torch.equal(rounded_matrix(rounded), rounded)
    assert same_bytes(fp8.quantized(rounded), fp8.quantized(matrix))


def test_every_number_of_bfloat16_in_a_block_with_any_other_at_its_top_keeps_its_bytes():
    """All mantissas of 20 binades below the top, and all mantissas of the top."""
    numbers = torch.arange(0x4000 - 20 * 128, 0x4000, dtype=torch.int16).view(torch.bfloat16)  # below 2
    blocks = numbers.view(20, 128).repeat(1, 128).unflatten(1, (128, 128))
    for top in torch.arange(0x4000, 0x4000 + 128, dtype=torch.int16).view(torch.bfloat16):
        whole = blocks.flatten(0, 1).clone()
        whole[::128, 0] = -top
        assert same_bytes(fp8.quantized(rounded_matrix(whole)), fp8.quantized(whole))


@pytest.mark.parametrize("rows", [640, 600])
@pytest.mark.parametrize("at_once", [1, 2 * 128 * 256 + 1])
def test_a_large_matrix_is_quantised_and_rounded_in_parts(rows, at_once, monkeypatch):
    matrix = randn(rows, 256)
    whole, rounded = fp8.quantized(matrix), rounded_matrix(matrix)
    monkeypatch.setattr(fp8, "AT_ONCE", at_once)
    assert len(fp8.parts(matrix)) == (5 if at_once == 1 else 3)
    assert same_bytes(fp8.quantized(matrix), whole) and torch.equal(rounded_matrix(matrix), rounded)


@pytest.mark.parametrize(
    ("kind", "tp", "head"),
    [
        *((kind, 1, 64) for kind in ("deepseek_v3", "glm4_moe_lite")),
        *((kind, tp, 64) for kind in ("qwen3", "phi3", "glm4", "gemma3", "olmo2", "qwen3_moe") for tp in (1, 2)),
        ("glm4", 1, 96),  # blocks that end inside of a head, whose rows lie in another order in Megatron
    ],
)
def test_the_shards_of_every_parameter_are_rounded_as_the_whole_is(kind, tp, head):
    sizes = CUT | {"head_dim": head, "moe_intermediate_size": 256, "intermediate_size": 512}
    family = family_of(kind, **sizes)
    rounded_parameters(family, tp)
    generator = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in family.hf_tensors()}
    rounded = {}
    for parameter in family.parameters:
        merged = parameter.merge([drawn[name] for name, _ in parameter.hf])
        shards = [parameter.shard(merged, rank, tp).clone() for rank in range(tp)]
        if parameter.name in linears_of(family):
            for shard in shards:
                round_shard(parameter, shard, tp)
        rounded[parameter.name] = parameter.unshard(shards)

    def sent(tensor_of):
        return {meta.name: tensor for meta, tensor in fp8_plan(family).made(tensor_of)}

    of_rounded = sent(lambda parameter: rounded[parameter.name])
    whole = sent(lambda parameter: parameter.merge([drawn[name] for name, _ in parameter.hf]))
    assert of_rounded.keys() == whole.keys() and same_bytes(of_rounded.values(), whole.values())
    for parameter in family.parameters:
        for (name, _), tensor in zip(parameter.hf, parameter.split(rounded[parameter.name]), strict=True):
            if parameter.name in linears_of(family):
                assert torch.equal(tensor, rounded_matrix(drawn[name])), name
            else:
                assert torch.equal(tensor, drawn[name]), name


@pytest.mark.parametrize(
    ("kind", "sizes", "tp", "message"),
    [
        ("qwen3", WIDE, 2, "trainer.tensor_parallel = 2 .*k_proj.*64 of 128 rows"),
        ("qwen3", CUT | {"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 384}, 2,
         "192 of 384 rows"),
        ("phi3", WIDE, 2, "qkv_proj.*64 of 128 rows"),
        ("gpt_oss", WIDE, 1, "one tensor of all experts"),
        ("qwen3", WIDE | {"intermediate_size": 200}, 1, "200 rows are no multiple of 128"),
        ("qwen3_5", WIDE, 1, "gated delta nets"),
    ],
)  # fmt: skip
def test_what_a_rank_cannot_round_by_itself_is_refused(kind, sizes, tp, message):
    with pytest.raises(UsageError, match=message):
        rounded_parameters(family_of(kind, **sizes), tp)


def test_columns_that_a_rank_has_are_whole_blocks():
    family = family_of("qwen3", **CUT)
    [down] = [p for p in family.parameters if p.name == "decoder.layers.0.mlp.linear_fc2.weight"]
    narrow = replace(down, hf=((down.hf[0][0], (256, 384)),))
    with pytest.raises(UsageError, match="192 of 384 columns"):
        rounded_parameters(replace(family, parameters=(narrow,)), 2)


FAKE = ["model.path=/m", "trainer.fake_quantization=true", 'model.dtype="bfloat16"', 'engines.quantization="fp8"']


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (['engines.quantization="none"'], 'trainer.fake_quantization.*engines.quantization is "none"'),
        (['model.dtype="float32"'], 'trainer.fake_quantization.*model.dtype = "float32" has not'),
        (["lora.rank=4"], "trainer.fake_quantization.*lora.rank"),
        (["model.teacher_path=/t", 'algorithm.advantage="distill"'], "trainer.fake_quantization.*model.teacher_path"),
        (["algorithm.exact=true"], "algorithm.exact.*engines.quantization"),
    ],
)
def test_what_contradicts_it_is_refused(sets, message):
    with pytest.raises(UsageError, match=message):
        load_config(TrainConfig, [], [*FAKE, *sets])


def test_a_run_without_engines_may_round_for_later_ones():
    sets = [*FAKE[:3], 'algorithm.loss="sft"']
    assert load_config(TrainConfig, [], sets).config.trainer.fake_quantization
    assert load_config(TrainConfig, [], FAKE).config.trainer.fake_quantization


def test_a_model_that_cannot_be_rounded_so_is_refused_before_a_run_starts(tmp_path):
    config = {**hf_config("qwen3", False, **WIDE).to_dict(), "architectures": [architecture_of("qwen3")]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    sets = [*FAKE, f"model.path={tmp_path}", "trainer.tensor_parallel=2", "trainer.world_size=2"]
    with pytest.raises(UsageError, match="64 of 128 rows"):
        check_model(load_config(TrainConfig, [], sets).config)
