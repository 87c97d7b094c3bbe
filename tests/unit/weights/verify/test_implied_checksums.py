"""What a checkpoint's tensors become on the ranks of an engine, and which engines that is known of."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor

from rltool.engines.dialects.checksums import BY_EXPERT, IN_FP32, ParameterLayout, compare, with_ranks
from rltool.engines.dialects.inspection import sglang_auto_dtype
from rltool.engines.types import EngineInfo
from rltool.megatron.export_plan import full_plan
from rltool.models.registry import family_for
from rltool.weights.verify.implied_checksums import implied_checksums, layout_of
from tests.ranks import plan_of
from tests.unit.models.test_models_families import hf_config, random_hf_state

QKV = "model.layers.1.self_attn.qkv_proj"
ATTENTION, MLP = "model.layers.1.self_attn.", "model.layers.1.mlp."


def digest(*parts: Tensor) -> str:
    return hashlib.sha256(torch.cat(parts).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def implied(ranks: int, architecture: str = "Qwen2ForCausalLM", dtype: str = "float32", **config):
    """(HF tensors, digests by parameter and rank) of a random model: 4 heads of 4, 2 of keys and values, vocabulary
    11."""
    family = family_for(hf_config(architecture, **config))
    state = random_hf_state(family)
    plan = full_plan(family, getattr(torch, dtype))
    return state, implied_checksums(plan, state.items(), ParameterLayout(dtype, ranks))


def test_each_rank_holds_its_rows_of_a_column_parallel_matrix_and_its_columns_of_a_row_parallel_one():
    state, found = implied(2)
    q, k, v = (state[f"{ATTENTION}{name}_proj.weight"].chunk(2) for name in "qkv")
    assert found[f"{QKV}.weight"] == tuple(digest(q[rank], k[rank], v[rank]) for rank in range(2))
    q, k, v = (state[f"{ATTENTION}{name}_proj.bias"].chunk(2) for name in "qkv")
    assert found[f"{QKV}.bias"] == tuple(digest(q[rank], k[rank], v[rank]) for rank in range(2))
    gate, up = (state[f"{MLP}{name}_proj.weight"].chunk(2) for name in ("gate", "up"))
    assert found[f"{MLP}gate_up_proj.weight"] == tuple(digest(gate[rank], up[rank]) for rank in range(2))
    for name in (f"{ATTENTION}o_proj.weight", f"{MLP}down_proj.weight"):
        assert found[name] == tuple(digest(part) for part in state[name].chunk(2, dim=1))
    norm = "model.layers.1.input_layernorm.weight"
    assert found[norm] == (digest(state[norm]),) * 2, "every rank has all of it"


def test_ranks_beyond_the_heads_of_keys_and_values_share_them():
    state, found = implied(4)
    q, (k, v) = state[f"{ATTENTION}q_proj.weight"].chunk(4), (
        state[f"{ATTENTION}{name}_proj.weight"].chunk(2) for name in "kv"
    )  # fmt: skip
    assert found[f"{QKV}.weight"] == tuple(digest(q[rank], k[rank // 2], v[rank // 2]) for rank in range(4))


@pytest.mark.parametrize(("vocabulary", "ranks", "rows"), [(11, 1, 64), (11, 2, 64), (128, 2, 128), (65, 3, 192)])
def test_a_vocabulary_is_padded_to_whole_64s_that_the_ranks_divide(vocabulary, ranks, rows):
    state, found = implied(ranks, vocab_size=vocabulary)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        whole = torch.cat([state[name], torch.zeros(rows - vocabulary, 16)])
        assert found[name] == tuple(digest(part) for part in whole.chunk(ranks))


def test_what_ranks_do_not_divide_is_passed_over_with_all_that_stands_beside_it():
    _, found = implied(3)
    assert f"{QKV}.weight" not in found and f"{ATTENTION}o_proj.weight" not in found, "4 heads"
    assert f"{MLP}gate_up_proj.weight" in found, "24 rows"


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True}


def test_experts_stand_below_each_other_with_a_part_of_each_or_some_of_them_on_each_rank():
    state, found = implied(2, "Qwen3MoeForCausalLM", head_dim=4, **EXPERTS)
    gate, up, down = (
        [state[f"{MLP}experts.{e}.{name}_proj.weight"] for e in range(4)] for name in ("gate", "up", "down")
    )
    rows = [[part.chunk(2)[rank] for pair in zip(gate, up, strict=True) for part in pair] for rank in range(2)]
    columns = [[part.chunk(2, dim=1)[rank] for part in down] for rank in range(2)]
    assert found[f"{MLP}experts.w13_weight"] == tuple(digest(*parts) for parts in rows)
    assert found[f"{MLP}experts.w2_weight"] == tuple(digest(*parts) for parts in columns)
    some = tuple(digest(gate[e], up[e], gate[e + 1], up[e + 1]) for e in (0, 2))
    assert found[f"{MLP}experts.w13_weight{BY_EXPERT}"] == some
    assert found[f"{MLP}experts.w2_weight{BY_EXPERT}"] == (digest(*down[:2]), digest(*down[2:]))
    assert f"{MLP}gate.weight" in found and len(set(found[f"{ATTENTION}q_norm.weight"])) == 1
    mixtral, found = implied(1, "MixtralForCausalLM", num_local_experts=2, num_experts_per_tok=2)
    block = "model.layers.0.block_sparse_moe.experts."
    parts = [mixtral[f"{block}{e}.{name}.weight"] for e in range(2) for name in ("w1", "w3")]
    assert found[f"{block}w13_weight"] == (digest(*parts),)


def test_experts_in_one_tensor_are_turned_as_engines_have_them():
    """gpt-oss: the columns of gate and up stay by turns, and one rank has the whole bias of what goes back."""
    config = dict(head_dim=4, num_local_experts=2, num_experts_per_tok=2, sliding_window=4, attention_bias=True)
    for ranks in (1, 2):
        state, found = implied(ranks, "GptOssForCausalLM", **config)
        up, down = (state[f"{MLP}experts.{name}_proj"].transpose(1, 2) for name in ("gate_up", "down"))
        of_ranks = tuple(digest(part) for part in up.chunk(ranks, dim=1))
        assert found[f"{MLP}experts.w13_weight"] == of_ranks
        assert found[f"{MLP}experts.w2_weight"] == tuple(digest(part) for part in down.chunk(ranks, dim=2))
        bias = state[f"{MLP}experts.gate_up_proj_bias"]
        assert found[f"{MLP}experts.w13_bias"] == tuple(digest(part) for part in bias.chunk(ranks, dim=1))
        assert (f"{MLP}experts.w2_bias" in found) == (ranks == 1)
    assert found[f"{MLP}experts.w13_weight{BY_EXPERT}"] == (digest(up[0]), digest(up[1]))
    assert found[f"{MLP}experts.w2_bias{BY_EXPERT}"] == tuple(map(digest, state[f"{MLP}experts.down_proj_bias"]))


def test_gate_and_up_of_experts_in_one_tensor_are_cut_apart_where_they_lie_so():
    """Qwen3-VL."""
    block = "model.language_model.layers.1.mlp.experts."
    for ranks in (1, 2, 4):
        state, found = implied(ranks, "Qwen3VLMoeForConditionalGeneration", head_dim=4, **EXPERTS)
        both, down = (state[f"{block}{name}_proj"].transpose(1, 2) for name in ("gate_up", "down"))
        gate, up = (half.chunk(ranks, dim=1) for half in both.chunk(2, dim=1))
        rows = tuple(digest(*(half[rank][e] for e in range(4) for half in (gate, up))) for rank in range(ranks))
        assert found[f"{block}w13_weight"] == rows
        assert found[f"{block}w2_weight"] == tuple(digest(part) for part in down.chunk(ranks, dim=2))
    assert found[f"{block}w13_weight{BY_EXPERT}"] == tuple(map(digest, both))
    assert f"{block}w13_weight" not in implied(3, "Qwen3VLMoeForConditionalGeneration", head_dim=4, **EXPERTS)[1]


def test_a_norm_over_all_heads_is_whole_on_each_rank_of_an_engine():
    state, found = implied(2, "Olmo2ForCausalLM")
    for name in (f"{ATTENTION}q_norm.weight", f"{ATTENTION}k_norm.weight"):
        assert found[name] == (digest(state[name]),) * 2
    assert f"{ATTENTION}q_norm.weight" in implied(3, "Olmo2ForCausalLM")[1]


def test_fused_tensors_stand_alone_and_are_passed_over_where_ranks_cut_their_parts():
    state, found = implied(1, "Phi3ForCausalLM")
    for name in (f"{QKV}.weight", f"{MLP}gate_up_proj.weight"):
        assert found[name] == (digest(state[name]),)
        assert name not in implied(2, "Phi3ForCausalLM")[1]


def test_a_routers_bias_keeps_fp32_and_latent_queries_stand_alone():
    experts = dict(n_routed_experts=4, num_experts_per_tok=2, n_group=1, first_k_dense_replace=1)
    sizes = dict(q_lora_rank=None, kv_lora_rank=4, qk_nope_head_dim=2, qk_rope_head_dim=2, v_head_dim=4)
    state, found = implied(1, "DeepseekV3ForCausalLM", "bfloat16", **experts, **sizes, moe_intermediate_size=8)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert found[bias] == (digest(state[bias]),)
    gate = "model.layers.1.mlp.gate.weight"
    assert (found[gate], found[gate + IN_FP32]) == ((digest(state[gate].bfloat16()),), (digest(state[gate]),))
    query = "model.layers.0.self_attn.q_proj.weight"
    assert found[query] == (digest(state[query].bfloat16()),)
    state, found = implied(2, "DeepseekV3ForCausalLM", **experts, **sizes | {"q_lora_rank": 4}, moe_intermediate_size=8)
    ranks = (state[f"{ATTENTION}{name}.weight"] for name in ("q_a_proj", "kv_a_proj_with_mqa"))
    assert found[f"{ATTENTION}fused_qkv_a_proj.weight"] == (digest(*ranks),) * 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_vllm_makes_of_latent_attentions_product_is_compared_where_it_has_it(ranks):
    """4 heads of a key of 2 and a value of 3, of a vector of 5."""
    sizes = dict(q_lora_rank=None, kv_lora_rank=5, qk_nope_head_dim=2, qk_rope_head_dim=2, v_head_dim=3)
    dense = dict(first_k_dense_replace=2, n_group=1, n_routed_experts=4, num_experts_per_tok=2)
    state, found = implied(ranks, "DeepseekV3ForCausalLM", "bfloat16", **sizes, **dense)
    heads = state[f"{ATTENTION}kv_b_proj.weight"].bfloat16().view(4, 5, 5)
    made = {"W_UK_T": heads[:, :2], "W_UV": torch.stack([head.T for head in heads[:, 2:]])}
    names = {name: f"{ATTENTION}mla_attn.mla_attn.{name}" for name in made}
    for name, whole in made.items():
        assert found[names[name]] == tuple(digest(part) for part in whole.chunk(ranks))

    engine = {f"dp0:pp0:tp{rank}:{name}": found[name][rank] for name in found for rank in range(ranks)}
    same = compare(engine, with_ranks(engine, found))
    assert (same.equal, same.differing, same.unknown) == (len(found), {}, ())
    key = f"dp0:pp0:tp{ranks - 1}:{names['W_UV']}"
    other = compare(engine | {key: "x"}, with_ranks(engine | {key: "x"}, found))
    assert list(other.differing) == [names["W_UV"]]
    sglangs = {key: value for key, value in engine.items() if "mla_attn" not in key}
    assert compare(sglangs, with_ranks(sglangs, found)).unknown == (), "it has none of these"


def test_parts_of_one_parameter_may_come_apart_and_the_stream_may_use_their_memory_again():
    state, expected = implied(2)
    plan, buffers = full_plan(family_for(hf_config()), torch.float32), {}

    def stream():
        for name in reversed(state):
            tensor = state[name]
            yield name, buffers.setdefault(tensor.shape, torch.empty_like(tensor)).copy_(tensor)

    assert implied_checksums(plan, stream(), ParameterLayout("float32", 2)) == expected


def test_bytes_are_those_of_the_engines_dtype_in_its_own_digest():
    tensor = torch.randn(8)
    expected = hashlib.sha256(tensor.bfloat16().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    layout = ParameterLayout("bfloat16", 2, "sha256_64")
    assert implied_checksums(plan_of({"norm": tensor}), [("norm", tensor)], layout) == {"norm": (expected, expected)}


# -- which engines


def info(**facts) -> EngineInfo:
    given = dict(
        dialect="sglang", engine_version="0.5.23", model_id="m", world_size=2, max_model_len=None, vocab_size=None,
        dtype="bfloat16", weight_backend=None, weight_version=None, boot_id=None, plugin=False, device="cuda",
    )  # fmt: skip
    return EngineInfo(**given | facts)


TWO = {"dp0:pp0:tp0:a": "1", "dp0:pp0:tp1:a": "2"}


@pytest.mark.parametrize(
    ("facts", "layout"),
    [
        ({}, ParameterLayout("bfloat16", 2, "sglang_cuda")),
        ({"device": "cpu", "dtype": "float32"}, ParameterLayout("float32", 2, "sha256_64")),
        ({"dtype": None, "model_config": {"torch_dtype": "bfloat16"}}, ParameterLayout("bfloat16", 2, "sglang_cuda")),
        ({"dialect": "vllm"}, ParameterLayout("bfloat16", 2, "sha256")),
        ({"dialect": "vllm", "dtype": None}, ParameterLayout("float32", 2, "sha256")),
    ],
)
def test_a_layout_follows_from_kind_device_dtype_and_ranks(facts, layout):
    assert layout_of(info(**facts), TWO, "float32") == layout


@pytest.mark.parametrize(
    ("facts", "checksums", "why"),
    [
        ({}, {}, "sglang 0.5.23 has none"),
        ({"dialect": "vllm", "engine_version": "0.31"}, {}, "vllm 0.31 has none"),
        ({}, {"http0:a": "1"}, "names its ranks in a way"),
        ({"dp_size": 2}, TWO, "data parallelism"),
        ({"device": "xpu"}, TWO, "on xpu"),
        ({"device": None}, TWO, "does not report its device"),
        ({"dtype": None}, TWO, "--dtype"),
        ({"device": "cpu"}, TWO, "matrices in bfloat16 for AMX"),
    ],
)
def test_what_cannot_be_compared_is_said_with_its_reason(facts, checksums, why):
    found = layout_of(info(**facts), checksums, "float32")
    assert isinstance(found, str) and "checksums were not compared" in found and why in found


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"), ({"torch_dtype": "float32"}, "float16"), ({}, None),
        ({"dtype": "float32", "model_type": "gemma3_text"}, "bfloat16"),
    ],
)  # fmt: skip
def test_an_sglang_that_chooses_its_dtype_serves_no_float32(config, dtype):
    assert sglang_auto_dtype(config) == dtype
