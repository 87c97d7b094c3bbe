"""convert-ckpt on the real Megatron-core and transformers, both ways."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from typer.testing import CliRunner

from rltool.checkpoints import convert, manifest, verify
from rltool.checkpoints import directory as directories
from rltool.checkpoints.convert import hf_to_torch_dist, torch_dist_to_hf
from rltool.checkpoints.manifest import CheckpointDamaged
from rltool.checkpoints.verify import ConversionMismatch
from rltool.engines.transfer import fp8
from rltool.errors import UsageError
from rltool.models.registry import family_for, read_hf_config
from tests.e2e.megatron_models import DELTA, KINDS, hf_model, save_hf, save_with_tower

pytestmark = pytest.mark.e2e

ONE = torch.ones(7)
BEHIND = {"model.layers.4.eh_proj.weight": torch.ones(3, 5).bfloat16(), "model.layers.4.enorm.weight": ONE}
APART = {"mtp.fc.weight": torch.ones(3, 5).bfloat16(), "mtp.layers.0.input_layernorm.weight": ONE}
PREDICTING = dict.fromkeys(("glm4_moe", "deepseek_v3", "glm4_moe_lite"), BEHIND) | dict.fromkeys(DELTA, APART)
"""Families with layers of multi-token prediction, and some of their tensors."""


def weights(directory) -> dict[str, torch.Tensor]:
    return {name: t for path in sorted(directory.glob("*.safetensors")) for name, t in load_file(path).items()}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """An untied Qwen2 with the small files that belong to a model."""
    directory = save_hf(tmp_path_factory.mktemp("source"), "qwen2", tied=False)
    (directory / "tokenizer.json").write_text('{"made": "up"}')
    (directory / "generation_config.json").write_text('{"eos_token_id": 3}')
    return directory


TYPICAL = ("qwen2", "gemma3", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next")
"""Dense, norms about zero, experts, latent attention, biased experts, delta nets: for what of a conversion is not the
family's own."""


def in_time(kind: str, *more: bool, long: bool):
    return pytest.param(kind, *more, marks=[pytest.mark.long] * (long and kind not in TYPICAL))


@pytest.mark.parametrize(("kind", "tied"), [in_time(kind, tied, long=tied) for kind in KINDS for tied in (True, False)])
def test_round_trip_gives_the_same_tensors_and_logits(tmp_path, kind, tied):
    original = save_hf(tmp_path / "hf", kind, tied)
    file, carried = original / "model.safetensors", 0
    if kind in PREDICTING:  # layers beyond the model's, which keep their bits whatever the model's dtype
        save_file(load_file(file) | PREDICTING[kind], file, {"format": "pt"})
        carried = len(PREDICTING[kind])
    carried += sum(name.startswith("model.visual.") for name in weights(original))
    done = hf_to_torch_dist(original, tmp_path / "dist")
    assert done.tensors_equal == done.tensors == len(weights(original)) - carried
    assert done.carried_tensors == carried
    assert done.logit_difference < 1e-4
    back = torch_dist_to_hf(tmp_path / "dist", tmp_path / "back")
    assert back.tensors_equal == done.tensors and back.logit_difference < 1e-4
    before, after = weights(original), weights(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_a_checkpoint_with_a_vision_tower_is_converted_as_text_and_keeps_the_tower(tmp_path, kind):
    """In bfloat16, with the experts of a layer in one tensor, as on the hub."""
    original = save_with_tower(tmp_path / "hf", kind)
    (original / "preprocessor_config.json").write_text("{}")
    file, apart = original / "model.safetensors", weights(original)
    one = {name: t for name, t in apart.items() if ".experts." not in name}
    for block in sorted({name.split(".experts.")[0] for name in apart.keys() - one.keys()}):
        parts = [[apart[f"{block}.experts.{e}.{x}_proj.weight"] for e in range(4)] for x in ("gate", "up", "down")]
        gate, up, down = (torch.stack(part) for part in parts)
        one |= {f"{block}.experts.gate_up_proj": torch.cat([gate, up], 1), f"{block}.experts.down_proj": down}
    assert (len(one) < len(apart)) == (kind == "qwen3_5_moe")
    save_file(one, file, {"format": "pt"})
    done = hf_to_torch_dist(original, tmp_path / "dist")
    tower = [name for name in apart if name.startswith("model.visual.")]
    assert done.dtype == "bfloat16" and done.carried_tensors == len(tower) > 10
    assert done.tensors_equal == done.tensors == len(apart) - len(tower) and done.logit_difference < 1e-4
    back = torch_dist_to_hf(tmp_path / "dist", tmp_path / "back")
    assert back.carried_tensors == len(tower) and back.logit_difference < 1e-4
    after = weights(tmp_path / "back")
    assert after.keys() == apart.keys() and all(torch.equal(after[name], apart[name]) for name in apart)
    assert (tmp_path / "back" / "preprocessor_config.json").is_file()
    assert read_hf_config(tmp_path / "back") == read_hf_config(original)


def test_a_source_in_mxfp4_is_converted_and_written_as_bfloat16(tmp_path):
    """Its config.json as on the hub. Numbers at the edges of the format, some experts' scale apart from others'."""
    original, target = save_hf(tmp_path / "hf", "gpt_oss", tied=False), tmp_path / "back"
    file, generator = original / "model.safetensors", torch.Generator().manual_seed(0)
    tensors, expected = load_file(file), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 125, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
        expected[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    others = {name: t if t.dtype is torch.uint8 else t.bfloat16() for name, t in tensors.items()}
    save_file(others, file, {"format": "pt"})
    config = json.loads((original / "config.json").read_text())
    quantized = {"dtype": "bfloat16", "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []}}
    (original / "config.json").write_text(json.dumps(config | quantized))

    done = hf_to_torch_dist(original, tmp_path / "dist")
    assert done.dtype == "bfloat16" and done.tensors_equal == done.tensors and done.logit_difference < 1e-4
    assert torch_dist_to_hf(tmp_path / "dist", target).logit_difference < 1e-4
    found = weights(target)
    expected |= {name: t for name, t in others.items() if t.dtype is torch.bfloat16}
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert "quantization_config" not in json.loads((target / "config.json").read_text())


PUBLISHED = {
    "deepseek_v3": {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}},
    "kimi_k2": {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "n_group": 1, "topk_group": 1},
}
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_a_source_in_fp8_is_converted_and_written_as_bfloat16_with_its_predicting_layer(tmp_path, model_type):
    """Under a config.json as DeepSeek V3's and Kimi K2's are published, which transformers knows by name or not. Of 144
    rows and 64 columns, so blocks are not whole; scales lie apart."""
    original = save_hf(tmp_path / "hf", "deepseek_v3", False, sizes={"intermediate_size": 144})
    target = tmp_path / "back"
    file, generator = original / "model.safetensors", torch.Generator().manual_seed(0)
    tensors = {name: t if "correction_bias" in name else t.bfloat16() for name, t in load_file(file).items()}
    tensors |= {name: torch.randn(t.shape, generator=generator).to(t.dtype) for name, t in BEHIND.items()}
    stored, expected = dict(tensors), dict(tensors)
    for name in [name for name, t in tensors.items() if t.dim() == 2 and "_proj" in name]:
        values, scale = fp8.quantized(tensors[name])
        scale *= torch.linspace(0.5, 2, scale.numel()).view_as(scale)
        stored |= {name: values, f"{name}_scale_inv": scale}
        wide = scale.repeat_interleave(128, 0)[: len(values)].repeat_interleave(128, 1)[:, : values.shape[1]]
        expected[name] = (values.float() * wide).bfloat16()
    assert sum(name.endswith("_scale_inv") for name in stored) > 50
    save_file(stored, file, {"format": "pt"})
    config = json.loads((original / "config.json").read_text())
    config = {key: value for key, value in config.items() if key != "rope_interleave"}
    named = {"model_type": model_type, "torch_dtype": "bfloat16", "ep_size": 1, "seq_aux": True, "aux_loss_alpha": 1e-3}
    rope = {key: value for key, value in config.pop("rope_parameters").items() if key != "rope_type"}
    named |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope | {"type": "yarn"}, "pretraining_tp": 1}
    config.pop("dtype")
    config |= PUBLISHED[model_type] | named | {"quantization_config": FP8}
    (original / "config.json").write_text(json.dumps(config))

    done = hf_to_torch_dist(original, tmp_path / "dist")
    assert done.dtype == "bfloat16" and done.tensors_equal == done.tensors and done.logit_difference < 1e-4
    assert torch_dist_to_hf(tmp_path / "dist", target).logit_difference < 1e-4
    found = weights(target)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    after = json.loads((target / "config.json").read_text())
    assert "quantization_config" not in after and after["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("kind", [in_time(kind, long=True) for kind in KINDS])
def test_wrong_value_in_what_was_written_is_caught(tmp_path, kind, monkeypatch):
    """In one expert, one norm, one projection: whatever comes last in the file order of the family."""
    original = save_hf(tmp_path / "hf", kind, tied=True)
    right = convert.HFTensors.merged

    def wrong(self, parameter):
        tensor = right(self, parameter)
        if parameter.layer == 3 and "linear_fc2.weight" in parameter.name:
            tensor[-1, -1] += 1e-3
        return tensor

    monkeypatch.setattr(convert.HFTensors, "merged", wrong)
    with pytest.raises(ConversionMismatch, match="differs after the round trip"):
        hf_to_torch_dist(original, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_weights_that_are_not_finite_are_named_as_wrong_usage_and_nothing_is_left(tmp_path):
    original = save_hf(tmp_path / "hf", "qwen2", tied=False)
    tensors = load_file(original / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][0, :3] = float("nan")
    save_file(tensors, original / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match=f"{name} holds 3 NaN and 0 infinite values") as error:
        hf_to_torch_dist(original, tmp_path / "out")
    assert error.value.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_sharded_source_and_sharded_target(tmp_path, source):
    original = save_hf(tmp_path / "hf", "qwen2", tied=False, max_shard_size="100KB")
    assert len(list(original.glob("*.safetensors"))) > 2
    hf_to_torch_dist(original, tmp_path / "dist")
    torch_dist_to_hf(tmp_path / "dist", tmp_path / "back", max_shard_bytes=100_000)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    files = {path.name for path in (tmp_path / "back").glob("*.safetensors")}
    assert set(index["weight_map"].values()) == files and len(files) > 2
    before, after = weights(source), weights(tmp_path / "back")
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in after.values())
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_bfloat16_rounds_once_and_says_so_in_config(tmp_path, source):
    hf_to_torch_dist(source, tmp_path / "dist", dtype="bfloat16")
    torch_dist_to_hf(tmp_path / "dist", tmp_path / "back")
    before, after = weights(source), weights(tmp_path / "back")
    assert all(torch.equal(before[name].bfloat16(), after[name]) for name in before)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("code", [False, True])
def test_both_directories_are_complete_models(tmp_path, source, code):
    """Also of a model with code of its own; a script that happens to lie there is not copied."""
    model = tmp_path / "model"
    shutil.copytree(source, model)
    (model / "modeling_own.py").write_text("")
    if code:
        config = json.loads((model / "config.json").read_text()) | {"auto_map": {"AutoConfig": "modeling_own.Own"}}
        (model / "config.json").write_text(json.dumps(config))
    hf_to_torch_dist(model, tmp_path / "dist", verify=False)
    torch_dist_to_hf(tmp_path / "dist", tmp_path / "back", verify=False)
    for directory in (tmp_path / "dist", tmp_path / "back"):
        for name in ("config.json", "tokenizer.json", "generation_config.json"):
            assert (directory / name).is_file(), f"{directory.name} lacks {name}"
        assert (directory / "modeling_own.py").is_file() == code
    described = manifest.read(tmp_path / "dist")
    assert (described.kind, described.architecture, described.dtype) == ("weights", "Qwen2ForCausalLM", "float32")
    assert {path.name for path in tmp_path.iterdir()} == {"model", "dist", "back"}


def test_command_prints_what_was_verified(tmp_path, source):
    import typer

    from rltool.commands.convert_ckpt import convert_ckpt

    app = typer.Typer()
    app.command()(convert_ckpt)
    result = CliRunner().invoke(app, [str(source), str(tmp_path / "dist")])
    assert result.exit_code == 0, result.output
    count = len(hf_model("qwen2", tied=False).state_dict())
    assert f"verified: {count} of {count} tensors bit-equal" in result.output
    assert "largest logit difference" in result.output and "tokenizer.json" in result.output


def test_existing_target_is_refused_and_untouched(tmp_path, source):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(UsageError, match="exists already"):
        hf_to_torch_dist(source, tmp_path / "out")
    assert (tmp_path / "out" / "precious").read_text() == "x"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM; `rltool models` lists all"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "dynamic"),
        ({"dtype": "float16"}, "float16"),
        ({"num_hidden_layers": 3}, r"unknown tensors.*model\.layers\.3"),
        ({"num_hidden_layers": 5}, r"missing tensors.*model\.layers\.4"),
        ({"vocab_size": 140}, r"embed_tokens\.weight has shape \(131, 64\)"),
    ],
)
def test_what_is_not_known_is_refused_by_name_and_nothing_is_left(tmp_path, change, named):
    original = save_hf(tmp_path / "hf", "qwen2", tied=True)
    config = json.loads((original / "config.json").read_text())
    (original / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(Exception, match=named) as caught:
        hf_to_torch_dist(original, tmp_path / "out")
    assert caught.value.exit_code in (1, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_directory_without_config_or_weights_is_refused(tmp_path, source):
    with pytest.raises(UsageError, match=r"has no config\.json"):
        hf_to_torch_dist(tmp_path, tmp_path / "out")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(UsageError, match=r"neither model\.safetensors nor"):
        hf_to_torch_dist(tmp_path, tmp_path / "out")


def test_stored_head_that_contradicts_the_tie_is_refused(tmp_path):
    original = save_hf(tmp_path / "hf", "qwen2", tied=True)
    state = load_file(original / "model.safetensors")
    save_file({**state, "lm_head.weight": state["model.embed_tokens.weight"] + 1}, original / "model.safetensors")
    with pytest.raises(UsageError, match=r"lm_head\.weight differs"):
        hf_to_torch_dist(original, tmp_path / "out")


def test_wrong_mapping_is_caught_by_the_logits_although_tensors_agree(tmp_path, source, monkeypatch):
    right = convert.family_for

    def wrong(config, own=None):
        family = right(config, own)
        family.rotary.inverse_frequencies[1:] *= 1.5
        return family

    monkeypatch.setattr(convert, "family_for", wrong)
    with pytest.raises(ConversionMismatch, match="logits differ"):
        hf_to_torch_dist(source, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_damaged_torch_dist_directory_is_refused_before_it_is_loaded(tmp_path, source, monkeypatch):
    hf_to_torch_dist(source, tmp_path / "dist", verify=False)
    shard = max((tmp_path / "dist" / "torch_dist").glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    monkeypatch.setattr(convert, "TorchDistReader", lambda *_: pytest.fail("opened a damaged checkpoint"))
    with pytest.raises(CheckpointDamaged, match="its sha256 differs"):
        torch_dist_to_hf(tmp_path / "dist", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("largest", "difference", "passes"),
    [(0.5, 9e-5, True), (0.5, 2e-4, False), (30.0, 9e-5, True), (30.0, 2e-4, False)],
)
def test_logits_agree_within_the_same_bound_whatever_their_size(source, monkeypatch, largest, difference, passes):
    logits = torch.zeros(4, 8)
    logits[0, 0] = largest
    monkeypatch.setattr(verify, "transformers_logits", lambda *_: logits)
    monkeypatch.setattr(verify, "megatron_logits", lambda *_: logits + difference)
    compare = lambda: verify.compare_logits(family_for(read_hf_config(source)), None, None, source, torch.float32)  # noqa: E731
    if passes:
        assert compare() == pytest.approx(difference, rel=5e-2)
    else:
        with pytest.raises(ConversionMismatch, match="logits differ"):
            compare()


def test_a_checkpoint_is_not_deleted_while_it_is_converted(tmp_path, source, monkeypatch):
    hf_to_torch_dist(source, tmp_path / "dist", verify=False)
    kept = []
    right = convert.write_hf_directory

    def write(*arguments, **options):
        kept.append(not directories.remove_unread(tmp_path / "dist"))
        return right(*arguments, **options)

    monkeypatch.setattr(convert, "write_hf_directory", write)
    torch_dist_to_hf(tmp_path / "dist", tmp_path / "back", verify=False)
    assert kept == [True]
    assert directories.remove_unread(tmp_path / "dist"), "the lock outlived the conversion"
