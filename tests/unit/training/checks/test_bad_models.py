"""A model directory that cannot be used is refused before anything starts, as wrong usage, with what is wrong in it."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from rltool.config.loader import load_config
from rltool.config.train import TrainConfig
from rltool.errors import UsageError
from rltool.models.hf_directory import HFTensors, NonFiniteWeights, check_finite
from rltool.processes.run_directory import RunDirectory
from rltool.training.checks.validate import check_inputs, check_model, check_weights
from rltool.training.prepare import Replay, prepare
from tests.tiny_models import write_tiny_qwen2

NAME = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def model(tmp_path):
    return write_tiny_qwen2(tmp_path / "model", tied=False)


def config(model, *sets):
    return load_config(TrainConfig, [], [f"model.path={model}", *sets]).config


def change_weights(model, change):
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})


def cut_off(model):
    (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-1])


def describe(model, **changes):
    found = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(found | changes))


BROKEN = [
    (cut_off, "its header needs"),
    (lambda m: (m / "model.safetensors").unlink(), "has neither model.safetensors nor"),
    (lambda m: (m / "model.safetensors.index.json").write_text("[]"), "is no index of safetensors files"),
    (lambda m: change_weights(m, lambda t: t.pop(NAME)), f"missing tensors for Qwen2ForCausalLM: {NAME}"),
    (lambda m: change_weights(m, lambda t: t.update({NAME: t[NAME][:-1].clone()})), f"{NAME} has shape"),
    (lambda m: change_weights(m, lambda t: t.update(own=torch.ones(1))), "unknown tensors .*: own"),
]


@pytest.mark.parametrize(("break_it", "message"), BROKEN)
def test_broken_weights_are_refused_before_anything_starts(model, break_it, message):
    check_weights(config(model))
    break_it(model)
    with pytest.raises(UsageError, match=message) as error:
        check_weights(config(model))
    assert error.value.exit_code == 2


def test_train_and_debug_look_at_the_weights_before_they_start_anything(model, tmp_path):
    cut_off(model)
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "label": "b"}\n')
    sets = [f"model.path={model}", f'data.train=["{tmp_path}/p.jsonl"]', "algorithm.loss=sft"]
    for replay in (None, Replay(None)):
        loaded = load_config(TrainConfig, [], sets if replay is None else sets[:1])
        with pytest.raises(UsageError, match="its header needs"):
            prepare(loaded, RunDirectory(tmp_path / "run"), resume=False, replay=replay)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "changes",
    [{"architectures": "Qwen2ForCausalLM"}, {"num_attention_heads": 0}, {"hidden_size": "64"}, {"rope_scaling": 3}],
)
def test_a_config_json_that_describes_no_model_is_refused_in_one_line(model, changes):
    describe(model, **changes)
    with pytest.raises(UsageError, match="config.json"):
        check_model(config(model))


def test_a_model_that_cannot_be_cut_over_the_ranks_is_refused_before_anything_starts(model):
    describe(model, num_attention_heads=7, num_key_value_heads=7, head_dim=8)
    check_model(config(model))
    with pytest.raises(UsageError, match="tensor_parallel = 2 does not divide the model's num_attention_heads = 7"):
        check_model(config(model, "trainer.world_size=2", "trainer.tensor_parallel=2"))


def test_a_critic_that_cannot_be_cut_over_the_ranks_is_refused_as_well(model, tmp_path):
    critic = write_tiny_qwen2(tmp_path / "critic", tied=False)
    describe(critic, num_attention_heads=7, num_key_value_heads=7, head_dim=8)
    sets = ["trainer.world_size=2", "trainer.tensor_parallel=2", "algorithm.advantage=gae"]
    check_model(config(model, *sets))
    with pytest.raises(UsageError, match="num_attention_heads = 7"):
        check_model(config(model, *sets, f"critic.path={critic}"))


def test_grouped_products_that_a_model_cannot_have_are_refused_before_anything_starts(model):
    grouped = "trainer.expert_products=grouped"
    with pytest.raises(UsageError, match="the model has no experts"):
        check_model(config(model, grouped))
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    describe(model, architectures=["Qwen3MoeForCausalLM"], **experts)
    check_model(config(model, grouped))
    with pytest.raises(UsageError, match="bfloat16 needs multiples of 8, but the experts' size .* is 20"):
        check_model(config(model, grouped, "model.dtype=bfloat16"))
    cut = ["trainer.world_size=2", "trainer.tensor_parallel=2", "trainer.sequence_parallel=true"]
    with pytest.raises(UsageError, match="multiples of 4, but the experts' size .* is 10"):
        check_model(config(model, grouped, *cut))


def test_nan_and_infinite_weights_are_named_and_counted(model):
    def spoil(tensors):
        tensors[NAME][0, :2] = math.nan
        tensors[NAME][1, 1] = -math.inf

    change_weights(model, spoil)
    with (
        HFTensors(model) as tensors,
        pytest.raises(NonFiniteWeights, match=rf"{NAME} holds 2 NaN and 1 infinite values of \d+"),
    ):
        tensors.read(NAME)


@pytest.mark.parametrize("left", [(), ("tokenizer_config.json",)])
def test_a_model_without_a_tokenizer_is_refused_as_that_and_not_for_its_data(model, tmp_path, left):
    """transformers makes an empty tokenizer of config.json, with which every prompt is empty."""
    (tmp_path / "train.jsonl").write_text('{"prompt": "ab=", "label": "ba"}\n')
    given = config(model, f'data.train=["{tmp_path}/train.jsonl"]')
    check_inputs(given)
    for file in model.glob("tokenizer*"):
        if file.name not in left:
            file.unlink()
    if left:
        (model / left[0]).write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    with pytest.raises(UsageError, match=f"{model} has no tokenizer .*tokenizer.json.*: none of these is there"):
        check_inputs(given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_large_finite_weights_whose_sum_overflows_are_weights(dtype):
    check_finite("x", torch.full((4,), torch.finfo(dtype).max, dtype=dtype))
    check_finite("x", torch.tensor([1], dtype=torch.int64))
    for wrong in (math.nan, math.inf, -math.inf):
        with pytest.raises(NonFiniteWeights):
            check_finite("x", torch.tensor([0.0, wrong, -wrong], dtype=dtype))
