"""Families: what config.json becomes, what is refused, and merge/split/shard/unshard being inverses."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from rltool.errors import UsageError
from rltool.megatron.layers import RotaryPositions
from rltool.megatron.packing import pack
from rltool.models.base import (
    EMBEDDING,
    HEAD,
    Interleaved,
    Parameter,
    Pictures,
    ShapeMismatch,
    padded_vocabulary,
)
from rltool.models.decoder import Variant, decoder
from rltool.models.memory import parameters_of
from rltool.models.pictures import Place, check_places, places_of, token_axes
from rltool.models.registry import FAMILIES, family_for, read_hf_config, supported_architectures
from rltool.models.rope import inverse_frequencies, rope_settings
from tests.e2e import test_sglang_experts, test_vllm_families
from tests.e2e.megatron_models import KINDS, WITH_TOWER, architecture_of, definition_of


def hf_config(architecture: str = "Qwen2ForCausalLM", **changes):
    config = {
        "architectures": [architecture],
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 11,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000.0,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    return {**config, **changes}


def random_hf_state(family):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in family.hf_tensors()}


@pytest.mark.parametrize("architecture", supported_architectures())
@pytest.mark.parametrize("tp", [1, 2])
def test_every_hf_tensor_survives_merge_shard_unshard_split(architecture, tp):
    experts = dict(num_experts=4, n_routed_experts=4, first_k_dense_replace=1, num_experts_per_tok=2, n_group=1)
    experts |= dict(num_local_experts=4)
    family = family_for(hf_config(architecture, moe_intermediate_size=8, **experts))
    assert len({parameter.name for parameter in family.parameters}) == len(family.parameters)
    state = random_hf_state(family)
    for parameter in family.parameters:
        own = {name: state[name][parameter.expert] if parameter.experts else state[name] for name, _ in parameter.hf}
        merged = parameter.merge(list(own.values()))
        assert merged.shape == parameter.merged_shape
        shards = [parameter.shard(merged, rank, tp) for rank in range(tp)]
        assert len({shard.shape for shard in shards}) == 1
        for (name, _), tensor in zip(parameter.hf, parameter.split(parameter.unshard(shards)), strict=True):
            assert torch.equal(tensor, own[name]), name


def test_gate_and_up_are_cut_separately():
    parameter = family_for(hf_config()).parameter("decoder.layers.0.mlp.linear_fc1.weight")
    gate, up = torch.zeros(24, 16), torch.ones(24, 16)
    shard = parameter.shard(parameter.merge([gate, up]), 1, 2)
    assert torch.equal(shard, torch.cat([torch.zeros(12, 16), torch.ones(12, 16)]))


def test_qkv_is_grouped_queries_then_key_then_value():
    parameter = family_for(hf_config()).parameter("decoder.layers.0.self_attention.linear_qkv.bias")
    merged = parameter.merge([torch.arange(16.0), torch.full((8,), 100.0), torch.full((8,), 200.0)])
    assert merged[:16].tolist() == [*range(8), *[100.0] * 4, *[200.0] * 4]
    assert merged[16:24].tolist() == list(range(8, 16))


def test_vocabulary_is_padded_with_zeros_and_stripped_again():
    parameter = family_for(hf_config()).parameter(EMBEDDING)
    full = torch.randn(11, 16)
    last = parameter.shard(full, 1, 2)
    assert last.shape == (6, 16) and not last[-1].any()
    assert torch.equal(parameter.unshard([parameter.shard(full, 0, 2), last]), full)
    assert padded_vocabulary(12, 2) == 12


def test_tied_model_has_no_head_tensor_and_its_head_is_the_embedding():
    family = family_for(hf_config(tie_word_embeddings=True))
    assert "lm_head.weight" not in dict(family.hf_tensors())
    assert family.parameter(HEAD).name == EMBEDDING
    assert "lm_head.weight" in dict(family_for(hf_config()).hf_tensors())


def test_wrong_shape_names_the_tensor():
    parameter = family_for(hf_config()).parameter("decoder.final_layernorm.weight")
    with pytest.raises(ShapeMismatch, match=r"model\.norm\.weight has shape \(3,\).*implies \(16,\)"):
        parameter.merge([torch.zeros(3)])


def test_page_that_a_refusal_names_exists():
    page = (Path(__file__).parents[3] / "docs/extending.md").read_text(encoding="utf-8")
    assert "## Adding a model family" in page


def test_biases_of_a_dense_mlp_that_a_family_does_not_name_are_an_error():
    with pytest.raises(ValueError, match="names no biases of a dense MLP"):
        decoder(hf_config(), Variant(bias=True))


def test_longrope_divides_by_the_short_factors_and_scales_for_the_whole_context():
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0, 2.0, 4.0, 5.0]}
    config = hf_config("Phi3ForCausalLM", rope_parameters=rope, original_max_position_embeddings=16, head_dim=8)
    found = family_for(config | {"max_position_embeddings": 64}).rotary
    assert found.longest == 16 and found.scale == pytest.approx((1 + math.log(4) / math.log(16)) ** 0.5)
    plain = [100.0 ** (-2 * i / 8) for i in range(4)]
    expected = [x / short for x, short in zip(plain, (1, 2, 4, 5), strict=True)]
    assert found.inverse_frequencies.tolist() == pytest.approx(expected)
    assert family_for(config | {"rope_parameters": rope | {"attention_factor": 1.5}}).rotary.scale == 1.5
    positions = RotaryPositions(found, torch.device("cpu"))
    positions.get_rotary_seq_len(packed_seq_params=pack(torch.tensor([16, 2]), torch.device("cpu")))
    with pytest.raises(UsageError, match="a sequence of 17 tokens.*at most 16"):
        positions.get_rotary_seq_len(packed_seq_params=pack(torch.tensor([2, 17]), torch.device("cpu")))


@pytest.mark.parametrize(
    ("architecture", "nearest"),
    [
        ("Qwen2VLForConditionalGeneration", "Qwen3VLForConditionalGeneration"),
        ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
        ("MambaForCausalLM", None),
        ("For", None),
    ],
)
def test_unknown_architecture_is_refused_with_the_nearest_the_verb_and_the_page(architecture, nearest):
    with pytest.raises(UsageError) as caught:
        family_for(hf_config(architecture))
    for said in (architecture, "`rltool models`", "docs/extending.md", "Adding a model family"):
        assert said in str(caught.value)
    assert ("nearest" in str(caught.value)) == (nearest is not None)
    assert nearest is None or f"the nearest that is built is {nearest} (" in str(caught.value)


def test_a_config_without_an_architecture_is_refused():
    with pytest.raises(UsageError, match="none named"):
        family_for({})


def test_every_family_says_what_it_opens_and_whether_it_has_experts():
    for family in FAMILIES:
        assert family.opens and family.layouts and family.architectures
        sizes = dict(moe_intermediate_size=8, num_experts=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1)
        for architecture in family.architectures:
            built = family_for(hf_config(architecture, first_k_dense_replace=1, **sizes))
            assert ("ep" in family.layouts) == (built.num_experts > 0), architecture
    named = [architecture for family in FAMILIES for architecture in family.architectures]
    assert sorted(named) == supported_architectures(), "none is built twice"


def test_every_architecture_and_engine_that_is_named_is_one_that_tests_compare_with_transformers():
    """Those with a tower are tested as their text models are; conversion has them whole."""
    towers = {f"{name}ForConditionalGeneration" for name in WITH_TOWER.values()}
    assert {architecture_of(kind) for kind in KINDS} | towers == set(supported_architectures())
    assert list(test_vllm_families.KINDS) == list(KINDS) and all("vllm" in family.engines for family in FAMILIES)
    in_sglang = {definition_of(kind).architectures for kind in (*test_sglang_experts.SERVED, "qwen2")}
    said = {family.architectures for family in FAMILIES if "sglang" in family.engines}
    partly = {family.architectures for family in FAMILIES if family.no_sglang}
    assert said <= in_sglang <= said | partly and not said & partly


@pytest.mark.parametrize(
    ("architecture", "changes", "named"),
    [
        ("Qwen2ForCausalLM", {"use_sliding_window": True}, "sliding-window"),
        ("Qwen2ForCausalLM", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ("Qwen2ForCausalLM", {"attention_bias": False}, "attention_bias"),
        ("LlamaForCausalLM", {"attention_bias": True}, "attention_bias"),
        ("LlamaForCausalLM", {"mlp_bias": True}, "mlp_bias"),
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, "hidden_act"),
        ("LlamaForCausalLM", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("LlamaForCausalLM", {"attention_dropout": 0.1}, "attention_dropout"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "dynamic", "factor": 4}}, "dynamic"),
        ("Qwen2ForCausalLM", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "dynamic"),
        ("LlamaForCausalLM", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("LlamaForCausalLM", {"hidden_size": None}, "hidden_size"),
        ("LlamaForCausalLM", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("Qwen3ForCausalLM", {"use_sliding_window": True}, "sliding-window"),
        ("Qwen3ForCausalLM", {"attention_bias": True}, "attention_bias"),
        (
            "MistralForCausalLM",
            {"sliding_window": 63},
            "sliding_window = 63 is shorter than max_position_embeddings = 64",
        ),
        ("MistralForCausalLM", {"max_position_embeddings": 8192}, "sliding_window = 4096"),
        ("MixtralForCausalLM", {"sliding_window": 32}, "sliding_window = 32"),
        ("MixtralForCausalLM", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ("MixtralForCausalLM", {"num_experts_per_tok": 9}, "num_experts_per_tok 9"),
        ("MixtralForCausalLM", {"num_experts_per_tok": 1}, "one expert per token"),
        ("Qwen3MoeForCausalLM", {"moe_intermediate_size": 8, "mlp_only_layers": [0]}, "mlp_only_layers"),
        ("Qwen3MoeForCausalLM", {"moe_intermediate_size": 8, "decoder_sparse_step": 2}, "decoder_sparse_step"),
        ("Qwen3MoeForCausalLM", {}, "moe_intermediate_size"),
        ("Gemma3ForCausalLM", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Gemma3ForCausalLM", {"hidden_activation": "gelu"}, "hidden_activation"),
        ("Gemma3ForCausalLM", {"layer_types": ["full_attention"]}, "layer_types"),
        ("Gemma2ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Gemma2ForCausalLM", {"sliding_window": None}, "sliding_window"),
        ("Glm4ForCausalLM", {"hidden_act": "gelu"}, "hidden_act"),
        ("Olmo2ForCausalLM", {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
        ("Olmo3ForCausalLM", {"attention_bias": True}, "attention_bias"),
        ("Olmo3ForCausalLM", {"layer_types": ["full_attention"]}, "layer_types"),
        ("OlmoeForCausalLM", {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
        ("OlmoeForCausalLM", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, "no_rope_layers names 1 layers"),
        ("SmolLM3ForCausalLM", {"use_sliding_window": True}, "sliding-window"),
        ("SmolLM3ForCausalLM", {"mlp_bias": True}, "mlp_bias"),
        ("Phi3ForCausalLM", {"sliding_window": 32}, "sliding_window = 32"),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "longrope"}}, "needs original_max_position_embeddings"),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 16},
            "needs a short_factor of",
        ),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn' is not implemented for this"),
        ("Phi3ForCausalLM", {"resid_pdrop": 0.1}, "resid_pdrop"),
        ("Qwen2MoeForCausalLM", {"qkv_bias": False}, "qkv_bias"),
        ("Qwen2MoeForCausalLM", {"use_sliding_window": True}, "sliding-window"),
        ("DeepseekV3ForCausalLM", {"n_group": 8, "topk_group": 2}, "n_group 8, topk_group 2"),
        ("DeepseekV3ForCausalLM", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("DeepseekV3ForCausalLM", {"topk_method": "group_limited_greedy"}, "topk_method"),
        ("DeepseekV3ForCausalLM", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("Glm4MoeForCausalLM", {"scoring_func": "softmax"}, "scoring_func"),
        ("Qwen3NextForCausalLM", {"layer_types": ["linear_attention"]}, "layer_types"),
        ("Qwen3NextForCausalLM", {"linear_num_value_heads": 24}, "linear_num_value_heads 24"),
        ("Qwen3_5ForCausalLM", {"attention_bias": True}, "attention_bias"),
        ("Qwen3VLForConditionalGeneration", {"attention_bias": True}, "attention_bias"),
        ("Qwen3VLMoeForConditionalGeneration", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("Qwen3VLMoeForConditionalGeneration", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("Qwen3_5ForConditionalGeneration", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_feature_that_is_not_implemented_is_refused_by_name(architecture, changes, named):
    with pytest.raises(UsageError, match=named):
        family_for(hf_config(architecture, **changes))


def test_mistral_without_a_window_or_with_one_as_long_as_the_context_is_accepted():
    family_for(hf_config("MistralForCausalLM", sliding_window=None, max_position_embeddings=32768))
    family_for(hf_config("MistralForCausalLM", sliding_window=64))


def test_what_qwen3_leaves_out_of_its_config_is_transformers_default():
    family = family_for(hf_config("Qwen3ForCausalLM"))
    assert family.transformer["kv_channels"] == 128


def test_gemma3_reads_both_spellings_of_layers_and_ropes():
    sizes = dict(num_hidden_layers=8, head_dim=32, sliding_window=16)
    old = hf_config("Gemma3ForCausalLM", **sizes, rope_theta=1e6, rope_local_base_freq=5e3, sliding_window_pattern=4)
    old["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    new = hf_config("Gemma3ForCausalLM", **sizes)
    new["layer_types"] = (["sliding_attention"] * 3 + ["full_attention"]) * 2
    new["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
    }
    families = [family_for(old), family_for(new)]
    assert {family.attention.windows for family in families} == {(16, 16, 16, None, 16, 16, 16, None)}
    assert torch.equal(families[0].rotary.inverse_frequencies, families[1].rotary.inverse_frequencies)
    assert torch.equal(*(family.rotary.sliding.inverse_frequencies for family in families))
    plain = inverse_frequencies(32, rope_settings({"rope_theta": 1e6}))
    assert torch.allclose(families[0].rotary.inverse_frequencies, plain / 8)


def test_what_small_families_leave_out_of_their_config_is_transformers_default():
    sizes = dict(num_hidden_layers=8, rope_theta=None, rms_norm_eps=None, tie_word_embeddings=None)
    left_out = ("rope_theta", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings")

    def family(architecture: str, **changes):
        config = hf_config(architecture, **sizes)
        return family_for({name: value for name, value in config.items() if name not in left_out} | changes)

    gemma = family("Gemma2ForCausalLM")
    assert gemma.tied_embeddings and (gemma.logit_softcap, gemma.attention.softcap) == (30.0, 50.0)
    assert gemma.attention.windows == (4096, None) * 4
    assert family("Gemma2ForCausalLM", final_logit_softcapping=None).logit_softcap is None
    olmo = family("Olmo3ForCausalLM")
    assert olmo.attention.windows == (4096, 4096, 4096, None) * 2 and olmo.norms == "post"
    assert olmo.transformer["layernorm_epsilon"] == 1e-5
    assert olmo.rotary.sliding.inverse_frequencies[1] == pytest.approx(5e5**-0.5)
    glm = family("Glm4ForCausalLM")
    assert glm.transformer["add_qkv_bias"] and glm.transformer["layernorm_epsilon"] == 1.5625e-7
    assert len(glm.rotary.inverse_frequencies) == 128 // 4 and glm.norms == "sandwich"
    smol = family("SmolLM3ForCausalLM")
    assert smol.transformer["no_rope_freq"] == [0, 0, 0, 1] * 2 and smol.tied_embeddings
    assert smol.rotary.inverse_frequencies[1] == pytest.approx(2e6**-0.5)
    moe = family("Qwen2MoeForCausalLM", decoder_sparse_step=2, mlp_only_layers=[3])
    assert moe.expert_layers == [False, True, False, False, False, True, False, True]
    assert moe.num_experts == 60 and moe.transformer["moe_shared_expert_intermediate_size"] == 5632
    assert family("Phi3ForCausalLM").max_position_embeddings == 4096
    assert family("OlmoeForCausalLM").transformer["moe_router_topk"] == 8


def test_a_model_with_a_tower_is_its_text_model_under_other_names():
    plain = hf_config("Qwen3_5ForCausalLM", num_hidden_layers=8, layer_types=None)
    text = {key: value for key, value in plain.items() if key not in ("architectures", "tie_word_embeddings")}
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "tie_word_embeddings": True, "text_config": text}
    alone, beside = family_for(plain | {"tie_word_embeddings": True}), family_for(whole)
    assert beside.tied_embeddings and beside.num_layers == 8
    assert beside.attention == alone.attention and beside.attention.delta.layers == (True, True, True, False) * 2
    assert beside.carried == ("mtp.", "model.visual.") and alone.carried == ("mtp.",)
    names = [name.replace("model.", "model.language_model.", 1) for name, _ in alone.hf_tensors()]
    assert [name for name, _ in beside.hf_tensors()] == names
    assert len(alone.rotary.inverse_frequencies) == 256 // 4 // 2


def test_qwen3_vl_as_text_is_qwen3_with_its_own_default_of_rope_and_carries_the_tower():
    text = {key: value for key, value in hf_config(rope_theta=None).items() if key != "architectures"}
    rope = {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    architecture = {"architectures": ["Qwen3VLForConditionalGeneration"]}
    found = family_for(architecture | {"text_config": {key: x for key, x in text.items() if x is not None}})
    assert found.rotary.inverse_frequencies[1] == pytest.approx(5e5 ** (-2 / 128))
    found = family_for(architecture | {"text_config": text | {"rope_theta": 5e6, "rope_scaling": rope}})
    alone = family_for(hf_config("Qwen3ForCausalLM", rope_theta=5e6))
    assert torch.equal(found.rotary.inverse_frequencies, alone.rotary.inverse_frequencies)
    assert found.transformer == alone.transformer and not found.modalities
    assert found.carried == ("model.visual.",) and alone.carried == ()
    names = [name.replace("model.", "model.language_model.", 1) for name, _ in alone.hf_tensors()]
    assert [name for name, _ in found.hf_tensors()] == names
    sees = {"text_config": text | {"rope_scaling": rope}, "vision_config": {"patch_size": 8}, "image_token_id": 9}
    found = family_for(architecture | sees | {"video_token_id": 8})
    assert found.pictures == Pictures(token=9, patch=8, merge=2, deep=3, video=8) and found.modalities == {"image"}
    assert found.rotary.axes.bincount().tolist() == [24, 20, 20]
    assert found.rotary.axes[:4].tolist() == [0, 1, 2, 0] and not found.rotary.axes[60:].any()
    for name, value in {"mrope_section": [24, 20, 21], "mrope_interleaved": False}.items():
        sees["text_config"] = text | {"rope_scaling": rope | {name: value}}
        if name == "mrope_interleaved":
            assert not family_for(architecture | sees).modalities
        else:
            with pytest.raises(UsageError, match="mrope_section"):
                family_for(architecture | sees)


def test_qwen3_vl_with_experts_is_qwen3_moe_with_normalised_weights_and_the_same_pictures():
    sizes = dict(moe_intermediate_size=8, num_experts_per_tok=2, norm_topk_prob=True, head_dim=128)
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    text = {key: value for key, value in hf_config(**sizes, num_local_experts=4).items() if key != "architectures"}
    whole = {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "text_config": text | {"rope_parameters": rope}}
    found = family_for(whole | {"vision_config": {"patch_size": 16}, "image_token_id": 9})
    alone = family_for(hf_config("Qwen3MoeForCausalLM", **sizes, num_experts=4, rope_theta=5e6))
    assert found.transformer == alone.transformer and found.carried == ("model.visual.",)
    assert found.pictures == Pictures(token=9, patch=16, merge=2, deep=3) and found.rotary.sections == (24, 20, 20)
    shapes, block = dict(found.hf_tensors()), "model.language_model.layers.1.mlp."
    assert shapes[f"{block}experts.gate_up_proj"] == (4, 16, 16) and shapes[f"{block}experts.down_proj"] == (4, 8, 16)
    first = found.parameter("decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.weight")
    of_one = torch.arange(256.0).view(16, 16)  # [inputs, outputs]: eight columns of gate, then of up
    assert torch.equal(first.shard(first.merge([of_one]), 1, 2), of_one.T[[4, 5, 6, 7, 12, 13, 14, 15]])
    assert parameters_of(found) == parameters_of(alone)


def test_each_picture_has_its_placeholders_and_no_other():
    pictures, tokens = Pictures(token=9, patch=8, merge=2, deep=0), [1, 9, 9, 2, 9, 9, 9, 9, 3, 9]
    first, second = Place(1, 1, 2, 10), Place(4, 2, 2, 20)
    check_places(tokens, [first, second], pictures)  # the last is no picture's: the policy sampled it
    assert places_of([*first, *second]) == [first, second]
    for wrong in ([second, first], [first._replace(columns=3)], [first._replace(columns=1)], [first._replace(at=2)],
                  [first, first], [second._replace(at=7)]):  # fmt: skip
        with pytest.raises(ValueError, match="placeholders"):
            check_places(tokens, wrong, pictures)
    axes = token_axes([len(tokens), 2], [[first, second], []])
    assert axes[:, 0].tolist() == [0, 1, 1, 3, 4, 4, 4, 4, 6, 7, 0, 1]
    assert axes[:, 1].tolist() == [0, 1, 1, 3, 4, 4, 5, 5, 6, 7, 0, 1]
    assert axes[:, 2].tolist() == [0, 1, 2, 3, 4, 5, 4, 5, 6, 7, 0, 1]


def test_rows_of_a_delta_nets_products_are_sorted_by_key_heads():
    sizes = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=2, linear_value_head_dim=3)
    family = family_for(hf_config("Qwen3_5ForCausalLM", **sizes))
    at = "decoder.layers.0.self_attention."
    product, both, conv = (family.parameter(f"{at}{name}.weight") for name in ("in_proj_qkvz", "in_proj_ba", "conv1d"))
    # q: 0 to 3, k: 4 to 7, v: 8 to 19; z from 20 on. Of a key head two, two, six and six.
    by_head = [[0, 1], [2, 3]], [[4, 5], [6, 7]], [[*range(8, 14)], [*range(14, 20)]]
    gates = [[*range(20, 26)], [*range(26, 32)]]
    expected = [row for head in range(2) for part in (*by_head, gates) for row in part[head]]
    rows = torch.arange(32.0)[:, None].expand(32, 16)
    assert product.merge([rows[:20], rows[20:]])[:, 0].tolist() == expected
    assert both.merge([rows[:4], rows[4:8]])[:, 0].tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    short = torch.arange(20.0)[:, None, None].expand(20, 1, 4)
    assert conv.merge([short])[:, 0, 0].tolist() == [row for h in range(2) for part in by_head for row in part[h]]
    assert both.shard_dim == product.shard_dim == conv.shard_dim == 0


def test_router_weights_are_normalised_as_the_family_says():
    def pre_softmax(architecture: str, **changes) -> bool:
        sizes = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
        return family_for(hf_config(architecture, **sizes, **changes)).transformer["moe_router_pre_softmax"]

    assert not pre_softmax("MixtralForCausalLM")
    assert pre_softmax("Qwen3MoeForCausalLM")
    assert not pre_softmax("Qwen3MoeForCausalLM", norm_topk_prob=True)


def test_sliding_window_size_that_is_not_in_use_is_accepted():
    family_for(hf_config(sliding_window=4096, use_sliding_window=False, layer_types=["full_attention"] * 2))


def test_both_spellings_of_rope_mean_the_same():
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    old = rope_settings({"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}})
    new = rope_settings({"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **scaling}})
    assert torch.equal(inverse_frequencies(32, old), inverse_frequencies(32, new))
    plain = inverse_frequencies(32, rope_settings({"rope_theta": 5e5}))
    assert torch.equal(inverse_frequencies(32, new)[:1], plain[:1])
    assert torch.allclose(inverse_frequencies(32, new)[-1], plain[-1] / 8)


def test_directory_without_config_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"has no config\.json"):
        read_hf_config(tmp_path)
    with pytest.raises(UsageError, match="not a directory"):
        read_hf_config(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match="not valid JSON"):
        read_hf_config(tmp_path)


def latent_config(**changes):
    sizes = dict(q_lora_rank=6, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8)
    experts = dict(n_routed_experts=8, num_experts_per_tok=4, n_group=4, topk_group=2, moe_intermediate_size=8)
    return hf_config("DeepseekV3ForCausalLM", **sizes, **experts, first_k_dense_replace=1, **changes)


DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16",
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "transformers_version": "4.33.1",
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1,
    "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "use_cache": True, "v_head_dim": 128,
    "vocab_size": 129280,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
}  # fmt: skip
KIMI_K2 = DEEPSEEK_V3 | {
    "model_type": "kimi_k2", "aux_loss_alpha": 0.001, "bos_token_id": 163584, "eos_token_id": 163585,
    "first_k_dense_replace": 1, "max_position_embeddings": 131072, "n_group": 1, "n_routed_experts": 384,
    "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "pretraining_tp": 1,
    "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "seq_aux": True, "topk_group": 1, "vocab_size": 163840,
    "rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
}  # fmt: skip
"""The keys of the published files."""


@pytest.mark.parametrize(
    ("config", "total", "active", "carried"),
    [(DEEPSEEK_V3, 671.0e9, 37.6e9, ("model.layers.61.",)), (KIMI_K2, 1026.4e9, 32.9e9, ())],
)
def test_a_config_in_fp8_as_it_is_published_describes_the_model_that_its_makers_count(config, total, active, carried):
    """671 and 37 billion parameters in DeepSeek-V3's report (arXiv 2412.19437), 1 trillion and 32 billion on Kimi K2's
    page. A token meets both matrices of the vocabulary here."""
    family = family_for(config)
    found = parameters_of(family)
    assert (found.total, found.active) == (pytest.approx(total, rel=1e-3), pytest.approx(active, rel=3e-3))
    assert family.carried == carried


def test_rows_that_are_turned_in_neighbouring_pairs_become_halves_and_back():
    of = Interleaved(period=6, start=2, size=4)
    rows = torch.arange(12)[:, None]
    assert of.halves(rows).flatten().tolist() == [0, 1, 2, 4, 3, 5, 6, 7, 8, 10, 9, 11]
    assert torch.equal(of.neighbours(of.halves(rows)), rows)
    interleaved = family_for(latent_config()).parameter("decoder.layers.0.self_attention.linear_kv_down_proj.weight")
    assert interleaved.interleaved == (Interleaved(14, 10, 4),)
    assert not family_for(latent_config(rope_interleave=False)).parameter(interleaved.name).interleaved


def test_fused_tensors_are_merged_and_split_as_separate_ones():
    parts = dict(query_groups=2, head_dim=4, parts=(16, 8, 8))
    turned = (Interleaved(4, 0, 2), None, None)
    fused = Parameter("qkv", (("fused", (32, 3)),), 0, 0, "qkv", **parts, interleaved=turned)
    apart = Parameter(
        "qkv", tuple((x, (rows, 3)) for x, rows in zip("qkv", (16, 8, 8), strict=True)), 0, 0, "qkv", 2, 4,
        interleaved=turned,
    )  # fmt: skip
    tensor = torch.randn(32, 3)
    assert torch.equal(fused.merge([tensor]), apart.merge(list(tensor.split((16, 8, 8)))))
    assert torch.equal(fused.split(fused.merge([tensor]))[0], tensor)
    gate_up = Parameter("fc1", (("fused", (8, 3)),), 0, 0, "stack", parts=(4, 4))
    assert torch.equal(gate_up.shard(tensor[:8], 1, 2), torch.cat([tensor[2:4], tensor[6:8]]))
    assert torch.equal(gate_up.unshard([gate_up.shard(tensor[:8], rank, 2) for rank in range(2)]), tensor[:8])


def test_a_mixture_after_dense_layers_has_its_experts_bias_and_shared_expert_where_they_belong():
    family = family_for(latent_config(num_nextn_predict_layers=1))
    names = {parameter.name: parameter for parameter in family.parameters}
    assert family.expert_layers == [False, True]
    assert family.carried == ("model.layers.2.",)
    bias = names["decoder.layers.1.mlp.router.expert_bias"]
    assert bias.hf == (("model.layers.1.mlp.gate.e_score_correction_bias", (8,)),)
    assert bias.dtype(torch.bfloat16) is torch.float32
    assert family.parameters[0] is bias  # one dtype after the other
    assert "decoder.layers.0.mlp.linear_fc1.weight" in names
    assert "decoder.layers.1.mlp.shared_experts.linear_fc2.weight" in names
    assert {name.split(".")[2] for name in names if "experts.local_experts" in name} == {"1"}


def test_latent_attention_costs_its_own_sizes_and_the_bias_is_no_work():
    cost = family_for(latent_config()).cost()
    assert cost.attention_width == 2 * 4 * (10 + 8) // 2
    hidden, heads = 16, 4
    attention = hidden * 6 + 6 + heads * 10 * 6 + 14 * hidden + 10 + heads * 14 * 10 + hidden * heads * 8
    dense, sparse = 3 * hidden * 24, hidden * 8 + (4 + 1) * 3 * hidden * 8
    assert cost.products == 2 * (attention - 6 - 10) + dense + sparse + 11 * hidden
