"""Digests of parameters: what is compared, and what a checkpoint's tensors are called in an engine."""

from __future__ import annotations

import hashlib
import math

import pytest

from rltool.engines.dialects.checksums import (
    BY_EXPERT,
    EMPTY,
    IN_FP32,
    compare,
    parts_of_parameters,
    tensor_parallel_size,
    with_ranks,
)
from rltool.engines.dialects.inspection import max_logprobs
from rltool.engines.dialects.table import dialect
from rltool.errors import MissingLogprobs, UsageError


def test_differences_come_in_the_engines_order_and_what_cannot_be_compared_is_named():
    engine = {"embed": "1", "layer.0": "2", "layer.1": "3", "packed": EMPTY, "own": "5"}
    found = compare(engine, {"layer.1": "x", "layer.0": "x", "embed": "1", "packed": "4", "theirs": "6"})
    assert (found.equal, list(found.differing)) == (1, ["layer.0", "layer.1"])
    assert set(found.unknown) == {"packed", "own", "theirs"}


def test_an_empty_digest_is_no_agreement():
    assert compare({"a": EMPTY}, {"a": EMPTY}).equal == 0
    assert hashlib.sha256(b"").hexdigest() == EMPTY


def test_projections_are_parts_of_the_matrix_that_engines_keep_them_in():
    names = [f"layers.0.self_attn.{part}_proj.{kind}" for kind in ("weight", "bias") for part in "vqk"]
    names += ["layers.0.mlp.up_proj.weight", "layers.0.mlp.gate_proj.weight", "layers.0.mlp.down_proj.weight", "norm"]
    parts = parts_of_parameters(names)
    for kind in ("weight", "bias"):
        expected = [f"layers.0.self_attn.{part}_proj.{kind}" for part in "qkv"]
        assert parts[f"layers.0.self_attn.qkv_proj.{kind}"] == expected
    assert parts["layers.0.mlp.gate_up_proj.weight"] == ["layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight"]
    assert parts["layers.0.mlp.down_proj.weight"] == ["layers.0.mlp.down_proj.weight"] and parts["norm"] == ["norm"]


def test_a_parameter_is_equal_where_all_ranks_are_and_the_first_that_differs_is_the_models_not_a_ranks():
    stages = {"pp0": "ab", "pp1": "cd"}
    engine = {f"{pp}:tp{tp}:{name}": "1" for pp, names in stages.items() for tp in range(2) for name in names}
    other = engine | {"pp0:tp0:b": "x", "pp0:tp1:a": "x", "pp1:tp0:d": "x", "pp1:tp1:d": "x"}
    found = compare(engine, other)
    assert list(found.differing) == ["a", "b", "d"], "not b first, which the first rank has first"
    assert found.differing == {"a": ("pp0:tp1",), "b": ("pp0:tp0",), "d": ("pp1:tp0", "pp1:tp1")}
    assert (found.equal, found.unknown, found.ranks) == (1, (), 4)


def test_a_parameter_that_one_rank_has_packed_is_unknown():
    found = compare({"tp0:a": "1", "tp1:a": EMPTY}, {"tp0:a": "1", "tp1:a": "1"})
    assert (found.equal, found.differing, found.unknown) == (0, {}, ("a",))


def test_what_a_checkpoint_implies_is_compared_rank_by_rank_and_with_every_replica():
    engine = {f"dp{dp}:pp0:pcp0:tp{tp}:a": str(tp) for dp in range(2) for tp in range(2)}
    engine["dp0:pp0:pcp0:tp0:own"] = "5"
    implied = {"a": ("0", "1"), "theirs": ("7", "8")}
    found = compare(engine, with_ranks(engine, implied))
    assert (found.equal, found.differing, set(found.unknown)) == (1, {}, {"own", "theirs"})
    found = compare(engine | {"dp1:pp0:pcp0:tp1:a": "x"}, with_ranks(engine, implied))
    assert found.differing == {"a": ("dp1:pp0:pcp0:tp1",)}


def test_parameters_that_vllm_names_otherwise_in_gpt_oss_are_compared():
    implied = {"model.embed_tokens.weight": ("1",), "model.layers.0.self_attn.sinks": ("2",)}
    engine = {"tp0:model.embedding.weight": "1", "tp0:model.layers.0.attn.sinks": "x"}
    found = compare(engine, with_ranks(engine, implied))
    assert (found.equal, list(found.differing), found.unknown) == (1, ["model.layers.0.attn.sinks"], ())


def test_parameters_beside_a_vision_tower_are_compared_under_vllms_names():
    block = "model.language_model.layers.0."
    implied = {f"{block}mlp.experts.w2_weight": ("1",), f"{block}input_layernorm.weight": ("2",)}
    implied |= {"model.language_model.norm.weight": ("3",), "lm_head.weight": ("4",)}
    theirs = "language_model.model.layers.0."
    engine = {f"{theirs}mlp.experts.routed_experts.w2_weight": "1", f"{theirs}input_layernorm.weight": "x"}
    engine |= {"language_model.model.norm.weight": "3", "language_model.lm_head.weight": "4", "visual.norm": "5"}
    engine = {f"tp0:{name}": digest for name, digest in engine.items()}
    found = compare(engine, with_ranks(engine, implied))
    assert (found.equal, list(found.differing)) == (3, [f"{theirs}input_layernorm.weight"])
    assert found.unknown == ("visual.norm",)


def test_experts_are_compared_where_one_layer_agrees_for_engines_arrange_them_for_their_kernels():
    names = [f"layers.{layer}.mlp.experts.w13_weight" for layer in range(3)]
    implied = {name: (f"{name}0", f"{name}1") for name in names}
    implied |= {f"{name}{BY_EXPERT}": (f"{name}e0", f"{name}e1") for name in names}
    vllms = [name.replace("experts.", "experts.routed_experts.") for name in names]
    for kind in ("", "e"):
        engine = {f"tp{tp}:{own}": f"{name}{kind}{tp}" for own, name in zip(vllms, names, strict=True) for tp in (0, 1)}
        found = compare(engine, with_ranks(engine, implied))
        assert (found.equal, found.differing, found.unknown) == (3, {}, ())
        found = compare(engine | {f"tp1:{vllms[1]}": "x"}, with_ranks(engine, implied))
        assert (found.equal, found.differing, found.unknown) == (2, {vllms[1]: ("tp1",)}, ())
    shuffled = {key: "shuffled" for key in engine}
    found = compare(shuffled, with_ranks(shuffled, implied))
    assert (found.equal, found.differing, set(found.unknown)) == (0, {}, set(vllms))


def test_a_router_is_compared_in_the_dtype_that_the_engine_keeps_it_in():
    implied = {"gate.weight": ("1", "1"), f"gate.weight{IN_FP32}": ("2", "2")}
    for ranks, equal in {("1", "1"): 1, ("2", "2"): 1, ("2", "x"): 0}.items():
        engine = {f"tp{rank}:gate.weight": digest for rank, digest in enumerate(ranks)}
        found = compare(engine, with_ranks(engine, implied))
        assert (found.equal, found.unknown) == (equal, ())
    assert found.differing == {"gate.weight": ("tp1",)}


def test_tensor_parallel_ranks_are_counted_and_other_ranks_have_no_such_number():
    assert tensor_parallel_size({"dp0:pp0:tp0:a": "", "dp0:pp0:tp3:a": "", "dp1:pp1:tp2:b": ""}) == 4
    assert tensor_parallel_size({"dp0:pp0:tp0:a": "", "http0:a": ""}) is None


def test_vllm_is_asked_by_its_own_route_and_with_the_plugin_by_one_that_only_reads():
    stock, ours = dialect("vllm").checksums(), dialect("vllm", plugin=True).checksums()
    assert (stock.method, stock.path, stock.body) == ("POST", "/weight_checker", {"action": "checksum"})
    assert (ours.method, ours.path) == ("GET", "/rltool/checksums")
    for engine_dialect in (dialect("vllm"), dialect("vllm", plugin=True)):
        assert engine_dialect.parse_checksums({"checksums": {"tp0:a": "1"}}) == {"tp0:a": "1"}
        assert engine_dialect.parse_checksums(404) is None, "before 0.32"


@pytest.mark.parametrize("shape", [lambda at: [at], lambda at: at], ids=["0.5.23", "0.5.17"])
def test_sglangs_ranks_are_told_apart(shape):
    where = [{"tp_rank": rank, "dp_rank": 0, "pp_rank": 0} for rank in range(2)]
    ranks = [{"checksums": {"a": str(at["tp_rank"])}, "parallelism_info": shape(at)} for at in where]
    engine_dialect = dialect("sglang")
    assert engine_dialect.parse_checksums({"ranks": ranks}) == {"dp0:pp0:tp0:a": "0", "dp0:pp0:tp1:a": "1"}
    assert engine_dialect.parse_checksums(404) is None


def test_given_tokens_are_scored_by_both():
    tokens = (5, 6, 7)
    vllm = [None, {"6": {"logprob": -0.5}}, {"7": {"logprob": -2.0}}]
    assert dialect("vllm").parse_score(tokens, {"prompt_logprobs": vllm}) == (-0.5, -2.0)
    sglang = [[None, 5, None], [-0.5, 6, None], [-2.0, 7, None]]
    assert dialect("sglang").parse_score(tokens, {"meta_info": {"input_token_logprobs": sglang}}) == (-0.5, -2.0)
    sglang[2][1] = 0  # how SGLang reports the last token of the vocabulary
    assert dialect("sglang").parse_score(tokens, {"meta_info": {"input_token_logprobs": sglang}}) == (-0.5, -2.0)
    sglang[2][1] = 8
    with pytest.raises(MissingLogprobs, match="3 prompt tokens"):
        dialect("sglang").parse_score(tokens, {"meta_info": {"input_token_logprobs": sglang}})


TOKENS = (5, 6, 7)
VLLM = [
    None,
    {"9": {"logprob": -0.25, "rank": 1}, "8": {"logprob": -2.0, "rank": 2}, "6": {"logprob": -2.5, "rank": 9}},
    {"7": {"logprob": -0.5, "rank": 1}},
]
SGLANG = {
    "input_token_logprobs": [[None, 5, None], [-2.5, 6, None], [-0.5, 7, None]],
    "input_top_logprobs": [None, [[-0.25, 9, None], [-2.0, 8, None]], [[-0.5, 7, None]]],
}


@pytest.mark.parametrize(
    ("engine", "reply"), [("vllm", {"prompt_logprobs": VLLM}), ("sglang", {"meta_info": SGLANG})]
)
def test_the_most_probable_tokens_are_read_in_order_without_the_token_itself_and_filled_up(engine, reply):
    found = dialect(engine).parse_topk(TOKENS, reply, 2)
    assert found.logprobs == (-2.5, -0.5)
    assert found.topk_ids.tolist() == [9, 8, 7, -1]
    assert found.topk_logprobs.tolist() == [-0.25, -2.0, -0.5, -math.inf]


def test_the_most_probable_tokens_are_asked_for_only_where_they_are_wanted():
    assert dialect("vllm").score(TOKENS, 7).body["sampling_params"]["prompt_logprobs"] == 7
    assert dialect("vllm").score(TOKENS).body["sampling_params"]["prompt_logprobs"] == 0
    assert dialect("sglang").score(TOKENS, 7).body["top_logprobs_num"] == 7
    assert "top_logprobs_num" not in dialect("sglang").score(TOKENS).body
    lacking = {"input_token_logprobs": SGLANG["input_token_logprobs"]}
    with pytest.raises(MissingLogprobs, match="3 prompt tokens"):
        dialect("sglang").parse_topk(TOKENS, {"meta_info": lacking}, 2)


@pytest.mark.parametrize(
    ("flags", "limit"),
    [
        ([], 256), (["--max-logprobs", "64"], 64), (["--max_logprobs=7", "--x"], 7),
        (["--max-logprobs", "-1"], math.inf), (["--max-logprobs", "64", "--max-logprobs=8"], 8),
    ],
)  # fmt: skip
def test_how_many_a_vllm_server_gives_stands_in_its_flags(flags, limit):
    assert max_logprobs(flags) == limit


def test_a_limit_that_is_no_number_is_refused():
    with pytest.raises(UsageError, match="--max-logprobs 'many': expected a number"):
        max_logprobs(["--max-logprobs", "many"])


@pytest.mark.parametrize("reply", [{}, {"prompt_logprobs": None}, {"prompt_logprobs": [None]}])
def test_a_token_that_was_not_scored_is_an_error(reply):
    with pytest.raises(MissingLogprobs, match="3 prompt tokens"):
        dialect("vllm").parse_score((5, 6, 7), reply)
    with pytest.raises(MissingLogprobs, match="3 prompt tokens"):
        dialect("sglang").parse_score((5, 6, 7), {"meta_info": {"input_token_logprobs": [[None, 5, None]]}})
