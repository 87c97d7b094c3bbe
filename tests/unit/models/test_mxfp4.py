"""Weights in MXFP4 against transformers' own reading of them, through files, whole and expert by expert."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from rltool.config.loader import load_config
from rltool.config.train import TrainConfig
from rltool.errors import UsageError
from rltool.models.hf_directory import HFTensors
from rltool.models.mxfp4 import dequantized, is_mxfp4, unquantized
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


def test_only_mxfp4_is_taken_out_of_a_config():
    fp8 = {"quantization_config": {"quant_method": "fp8"}}
    assert unquantized(QUANTIZED | {"vocab_size": 3}) == {"vocab_size": 3} and unquantized(fp8) == fp8
    assert is_mxfp4(QUANTIZED) and not is_mxfp4(fp8) and not is_mxfp4({})


@pytest.mark.parametrize(("mode", "refused"), [("managed", True), ("colocate", True), ("external", False)])
def test_a_run_does_not_serve_files_in_mxfp4_to_which_it_would_send_weights(tmp_path, mode, refused):
    sizes = dict(
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=11,
        num_hidden_layers=2,
    )
    described = {"architectures": ["GptOssForCausalLM"], "num_local_experts": 2, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(sizes | described | QUANTIZED))
    engines = [f"engines.mode={mode}", *([] if mode == "external" else ["engines.groups=[{}]"])]
    config = load_config(TrainConfig, [], [f"model.path={tmp_path}", *engines]).config
    if refused:
        with pytest.raises(UsageError, match="MXFP4.*convert-ckpt"):
            check_model(config)
    else:
        check_model(config)
