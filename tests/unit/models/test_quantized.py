"""Weights in MXFP4 and FP8 against transformers' own reading of them, through files; MXFP4 also expert by expert."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from rltool.config.loader import load_config
from rltool.config.train import TrainConfig
from rltool.engines.transfer import fp8
from rltool.errors import UsageError
from rltool.models.hf_directory import HFTensors
from rltool.models.quantized import dequantized, dequantized_fp8, format_of, unquantized
from rltool.models.tensor_files import TensorFileDamaged
from rltool.training.checks.validate import check_model

NAME = "model.layers.0.mlp.experts.down_proj"
QUANTIZED = {"quantization_config": {"quant_method": "mxfp4"}}


def packed(experts=3, outputs=5, blocks=2):
    """All of the 16 numbers occur, and scales from 2^-120 to 2^120."""
    generator = torch.Generator().manual_seed(0)
    shape = (experts, outputs, blocks)
    numbers = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return numbers, torch.randint(7, 248, shape, generator=generator, dtype=torch.uint8)


def test_every_number_is_the_one_that_transformers_reads():
    blocks, scales = packed()
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    found = dequantized(blocks, scales)
    assert found.shape == (3, 64, 5) and found.dtype is torch.bfloat16
    assert torch.equal(found, expected)


def test_the_first_of_two_numbers_is_in_the_low_half_and_the_scale_is_a_power_of_two():
    blocks = torch.full((1, 1, 16), 0x71, dtype=torch.uint8)  # 0.5, then 6
    found = dequantized(blocks, torch.full((1, 1), 126, dtype=torch.uint8))
    assert found[:4, 0].tolist() == [0.25, 3.0, 0.25, 3.0]


def test_a_directory_shows_the_tensor_in_place_of_its_two_parts_also_where_they_are_in_two_files(tmp_path):
    blocks, scales = packed()
    save_file({f"{NAME}_blocks": blocks}, tmp_path / "a.safetensors")
    save_file({f"{NAME}_scales": scales, "other": torch.ones(2)}, tmp_path / "b.safetensors")
    files = {f"{NAME}_blocks": "a.safetensors", f"{NAME}_scales": "b.safetensors", "other": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with HFTensors(tmp_path) as tensors:
        assert tensors.names == {NAME, "other"}
        assert (tensors.shape(NAME), tensors.dtype(NAME)) == ((3, 64, 5), torch.bfloat16)
        whole = tensors.read(NAME)
        assert torch.equal(whole, dequantized(blocks, scales))
        assert all(torch.equal(tensors.read(NAME, expert), whole[expert]) for expert in range(3))


def test_parts_that_do_not_belong_together_are_named(tmp_path):
    blocks, scales = packed()
    save_file({f"{NAME}_blocks": blocks, f"{NAME}_scales": scales[:, :-1].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(TensorFileDamaged, match=f"{NAME} is no tensor in MXFP4"):
        HFTensors(tmp_path)


def in_fp8(rows, columns):
    """Every number of the format but NaN, and scales from 2^-12 to 1 that are no powers of two."""
    generator = torch.Generator().manual_seed(rows)
    numbers = torch.randint(0, 254, (rows, columns), generator=generator, dtype=torch.uint8)
    values = (numbers + (numbers >= 127)).view(torch.float8_e4m3fn)
    return values, torch.rand(-(-rows // 128), -(-columns // 128), generator=generator) * 2**-6 + 2**-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_in_fp8_is_the_one_that_transformers_reads(dtype):
    values, scale = in_fp8(256, 384)
    expected = Fp8Dequantize(None)._dequantize_one(values, scale.to(dtype), torch.bfloat16)
    found = dequantized_fp8(values, scale.to(dtype)).bfloat16()
    assert torch.equal(found, expected) and found.isfinite().all() and len(values.float().unique()) == 253


@pytest.mark.parametrize("shape", [(130, 300), (1, 128), (257, 5)])
def test_blocks_at_the_edges_of_a_matrix_in_fp8_are_smaller(tmp_path, shape):
    """transformers reads no such matrix. A directory shows it in place of its two parts, also in two files."""
    values, scale = in_fp8(*shape)
    expected = values.float()
    for row in range(shape[0]):
        for column in range(shape[1]):
            expected[row, column] *= scale[row // 128, column // 128]
    name = "model.layers.0.self_attn.o_proj.weight"
    save_file({name: values, "model.norm.weight": torch.ones(2)}, tmp_path / "a.safetensors")
    save_file({f"{name}_scale_inv": scale}, tmp_path / "b.safetensors")
    files = {name: "a.safetensors", "model.norm.weight": "a.safetensors", f"{name}_scale_inv": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with HFTensors(tmp_path) as tensors:
        assert tensors.names == {name, "model.norm.weight"}
        assert (tensors.shape(name), tensors.dtype(name)) == (shape, torch.bfloat16)
        assert torch.equal(tensors.read(name), expected.bfloat16())
    with HFTensors(tmp_path, fp8=True) as tensors:
        assert tensors.names == set(files) and tensors.dtype(name) is torch.float8_e4m3fn


def test_what_is_sent_in_fp8_is_read_so():
    matrix = torch.randn(130, 300, generator=torch.Generator().manual_seed(0))
    assert (dequantized_fp8(*fp8.quantized(matrix)) - matrix).abs().max() < matrix.abs().max() / 16


@pytest.mark.parametrize("scale", [torch.ones(2, 2), torch.ones(3), torch.ones(1, 3)])
def test_scales_of_other_blocks_are_named(tmp_path, scale):
    save_file({"x.weight": in_fp8(257, 5)[0], "x.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    with pytest.raises(TensorFileDamaged, match="x.weight is no matrix in FP8 with blocks of 128 x 128"):
        HFTensors(tmp_path)


FP8 = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}


def test_only_what_is_read_is_taken_out_of_a_config():
    assert (format_of(QUANTIZED), format_of(FP8), format_of({})) == ("MXFP4", "FP8", None)
    for known in (QUANTIZED, FP8):
        assert unquantized(known | {"vocab_size": 3}) == {"vocab_size": 3}
    for change in ({"weight_block_size": None}, {"weight_block_size": [64, 64]}, {"fmt": "e5m2"}):
        other = {"quantization_config": FP8["quantization_config"] | change}
        assert unquantized(other) == other and format_of(other) is None


@pytest.mark.parametrize(("mode", "refused"), [("managed", True), ("colocate", True), ("external", False)])
@pytest.mark.parametrize(("quantized", "name"), [(QUANTIZED, "MXFP4"), (FP8, "FP8")])
def test_a_run_does_not_serve_quantised_files_to_which_it_would_send_weights(tmp_path, mode, refused, quantized, name):
    sizes = dict(
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=11,
        num_hidden_layers=2,
    )
    architecture = {"MXFP4": "GptOssForCausalLM", "FP8": "Qwen3MoeForCausalLM"}[name]
    experts = {"num_local_experts": 2, "num_experts": 2, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
    described = {"architectures": [architecture], "norm_topk_prob": True} | experts
    (tmp_path / "config.json").write_text(json.dumps(sizes | described | quantized))
    engines = [f"engines.mode={mode}", *([] if mode == "external" else ["engines.groups=[{}]"])]
    config = load_config(TrainConfig, [], [f"model.path={tmp_path}", *engines]).config
    if refused:
        with pytest.raises(UsageError, match=f"{name}.*convert-ckpt"):
            check_model(config)
    else:
        check_model(config)
