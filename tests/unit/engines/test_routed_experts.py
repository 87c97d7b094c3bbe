"""The experts that engines chose: as replies have them, in a sample's life, in dumps and batches; settings that
contradict them."""

import base64
import io
import json
from array import array
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rltool.algorithms.batch import TrainBatch
from rltool.config.loader import ConfigError, load_config
from rltool.config.serve import EngineGroup, ServeConfig
from rltool.config.train import TrainConfig
from rltool.engines import arrays
from rltool.engines.dialects.routed_experts import from_int32, from_npy
from rltool.engines.dialects.table import dialect
from rltool.engines.launch.plan import Host, Model, Settings, engine_slots, plan_engines, seat_slots
from rltool.engines.launch.start import order_of_file
from rltool.engines.types import (
    Completion,
    EngineInfo,
    GenerateRequest,
    RoutedExperts,
    Routing,
    SamplingParams,
    VersionSpan,
)
from rltool.errors import EngineError, TrainingStopped, UsageError
from rltool.rollout.batching import samples_to_batch
from rltool.rollout.measure.dump import read_dump, write_dump
from rltool.rollout.sample import Sample
from rltool.rollout.stop_strings import cut_at_stop
from rltool.training.checks.routing_replay import check_has_routing, check_rollout_engines, routing_of, wanted_routing
from rltool.training.checks.validate import check_model
from tests.contract.fakes.experts import chosen, to_npy
from tests.e2e.megatron_models import hf_config

ROUTING = Routing(layers=3, top_k=2, experts=8)
PROMPT, ANSWER = (5, 6), (7, 8, 9)
REQUEST = GenerateRequest(PROMPT, SamplingParams(8), "a" * 32, routing=ROUTING)


def int32(found) -> str:
    return base64.b64encode(np.ascontiguousarray(found, "<i4").tobytes()).decode()


def sglang_reply(routed, reason="stop"):
    meta = {
        "finish_reason": {"type": reason},
        "output_token_logprobs": [[-0.5, token, None] for token in ANSWER],
        "weight_version": "v",
    }
    return {"output_ids": list(ANSWER), "meta_info": meta | ({} if routed is None else {"routed_experts": routed})}


def vllm_reply(routed, reason="stop"):
    content = [{"token_id": token, "logprob": -0.5} for token in ANSWER]
    choice = {"index": 0, "token_ids": list(ANSWER), "logprobs": {"content": content}, "finish_reason": reason}
    return {"choices": [choice | {"routed_experts": routed}]}


def arrays_reply(routed, reason="stop"):
    choice = {
        "index": 0, "token_ids": arrays.encode("i", ANSWER), "logprobs": arrays.encode("f", [-0.5] * 3),
        "finish_reason": reason,
    }  # fmt: skip
    return {"choices": [choice | ({} if routed is None else {"routed_experts": routed})]}


KINDS = {
    "vllm": (dialect("vllm"), vllm_reply, to_npy),
    "vllm with the plugin": (dialect("vllm", plugin=True), arrays_reply, to_npy),
    "sglang": (dialect("sglang"), sglang_reply, int32),
}
FOUND = chosen([*PROMPT, *ANSWER], ROUTING)


def parsed(kind, found, *, reason="stop", request=REQUEST):
    engine_dialect, reply, pack = KINDS[kind]
    [completion] = engine_dialect.parse_generate(request, [reply(None if found is None else pack(found), reason)])
    return completion


# -- replies


@pytest.mark.parametrize("kind", KINDS)
def test_every_dialect_gives_the_same_experts_in_the_smallest_integers(kind):
    routed = parsed(kind, FOUND).routed_experts
    assert (routed.choices.typecode, routed.per_token, routed.tokens) == ("B", 6, 4)
    assert routed.choices.tolist() == FOUND.ravel().tolist()


@pytest.mark.parametrize(("experts", "code"), [(255, "B"), (256, "h"), (512, "h")])
def test_integers_are_as_large_as_experts_and_the_mark_for_none_need(experts, code):
    routing = Routing(1, 1, experts)
    found = np.array([[[experts - 1]], [[0]]])
    for routed in (from_npy(to_npy(found), routing, tokens=2), from_int32(int32(found), routing, tokens=2)):
        assert routed.choices == array(code, [experts - 1, 0]) and routed.choices.typecode == code


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64"])
def test_npy_files_of_any_integers_are_read(dtype):
    assert from_npy(to_npy(FOUND.astype(dtype)), ROUTING, tokens=4).choices.tolist() == FOUND.ravel().tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("found", "text"),
    [
        (None, "--enable-return-routed-experts"),
        (FOUND[:-1], "4 forwarded tokens x 3 layers x 2 experts"),
        (FOUND[:, :2], "4 forwarded tokens x 3 layers x 2 experts"),
        (FOUND + 8, "the model has 8 a layer"),
        (FOUND.astype(np.int32) - 8, "the model has 8 a layer"),
        (np.zeros_like(FOUND), "an expert twice"),
    ],
    ids=["missing", "a token too few", "a layer too few", "too large", "negative", "an expert twice"],
)
def test_what_is_missing_or_does_not_fit_is_an_error(kind, found, text):
    with pytest.raises(EngineError, match=text):
        parsed(kind, found)


FIRST_DENSE = replace(ROUTING, dense=(0,))


def with_places(layer, choices):
    """FOUND but for what it has for the third token in this layer; the first is dense."""
    found = chosen([*PROMPT, *ANSWER], FIRST_DENSE)
    found[2, layer] = choices
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("choices", [(0, 0), (5, 5), (77, 200)])
def test_what_engines_leave_in_the_places_of_dense_layers_means_nothing(kind, choices):
    found = with_places(0, choices)
    routed = parsed(kind, found, request=replace(REQUEST, routing=FIRST_DENSE)).routed_experts
    kept = np.array(routed.choices).reshape(4, 3, 2)
    assert (kept[:, 0] == 255).all() and (kept[:, 1:] == FOUND[:, 1:]).all()
    assert (routed.choices.typecode, routed.per_token, routed.tokens) == ("B", 6, 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("choices", "text"), [((3, 3), "an expert twice"), ((1, 8), "the model has 8 a layer")])
def test_layers_with_experts_are_checked_beside_dense_ones(kind, choices, text):
    for layer in (1, 2):
        with pytest.raises(EngineError, match=text):
            parsed(kind, with_places(layer, choices), request=replace(REQUEST, routing=FIRST_DENSE))


def pickled() -> str:
    file = io.BytesIO()
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("%%%", "no base64"),
        (7, "no base64"),
        ("AAAA", "no .npy file"),
        (pickled(), "no .npy file"),
        (to_npy(FOUND)[:40], "no .npy file"),
        (to_npy(FOUND.astype("float32")), "no array of integers"),
    ],
)
def test_no_other_file_is_taken_for_an_array_and_nothing_is_unpickled(text, words):
    with pytest.raises(EngineError, match=words):
        from_npy(text, ROUTING, tokens=4)


@pytest.mark.parametrize("kind", KINDS)
def test_an_aborted_response_has_none_whatever_the_engine_says(kind):
    assert parsed(kind, FOUND[:2], reason="abort").routed_experts is None
    assert parsed(kind, None, reason="abort").routed_experts is None


@pytest.mark.parametrize("kind", KINDS)
def test_engines_are_asked_for_experts_only_where_they_are_wanted(kind):
    assert parsed(kind, FOUND, request=replace(REQUEST, routing=None)).routed_experts is None
    engine_dialect = KINDS[kind][0]
    (asked,), (plain,) = engine_dialect.generate(REQUEST), engine_dialect.generate(replace(REQUEST, routing=None))
    added = {"return_routed_experts": True} if kind == "sglang" else {}  # vLLM's server returns them, or does not
    assert asked.body == plain.body | added


def test_the_plugins_route_hands_on_what_vllm_has():
    from rltool.engines.plugin.arrays import array_choice

    output = SimpleNamespace(
        index=0, token_ids=list(ANSWER), logprobs=None, finish_reason="stop", stop_reason=None, weight_versions=None,
        routed_experts=FOUND.astype("uint8"),
    )  # fmt: skip
    assert from_npy(array_choice(output)["routed_experts"], ROUTING, tokens=4).tokens == 4
    output.routed_experts = None
    assert "routed_experts" not in array_choice(output)


# -- a sample's life


def completion(prompt, tokens, reason="stop", routing=ROUTING, version="r:0:1"):
    routed = from_int32(int32(chosen([*prompt, *tokens], routing)), routing, tokens=len(prompt) + len(tokens) - 1)
    span = (VersionSpan(version, 0, len(tokens)),)
    experts = None if reason == "abort" else routed
    return Completion(tuple(tokens), (-0.5,) * len(tokens), reason, span, routed_experts=experts)


def rows(sample) -> torch.Tensor:
    return torch.frombuffer(sample.routed_experts, dtype=torch.uint8).view(sample.num_tokens, 6)


def answered(prompt=PROMPT, tokens=ANSWER, **changes) -> Sample:
    sample = Sample(0, 0, 0, list(prompt), reward=1.0)
    sample.append_response_tokens(completion(prompt, tokens, **changes))
    return sample


def test_the_last_token_was_never_forwarded():
    found = rows(answered())
    assert found[:4].tolist() == FOUND.reshape(4, 6).tolist() and found[4].tolist() == [255] * 6


def test_what_an_environment_appends_has_none_until_the_next_reply_brings_it():
    sample = answered()
    sample.append_environment_tokens([30, 31])
    assert (rows(sample)[4:] == 255).all() and len(rows(sample)) == 7
    whole = (*PROMPT, *ANSWER, 30, 31)
    sample.append_response_tokens(completion(whole, (40, 41)))
    assert rows(sample)[:-1].tolist() == chosen([*whole, 40, 41], ROUTING).reshape(-1, 6).tolist()
    assert (rows(sample)[-1] == 255).all()


def test_the_newest_reply_counts_for_the_whole_sequence():
    sample = answered()
    whole = [*PROMPT, *ANSWER]
    other = (chosen([*whole, 40], ROUTING) + 1) % 8
    routed = from_int32(int32(other), ROUTING, tokens=5)
    span = (VersionSpan("r:0:2", 0, 1),)
    sample.append_response_tokens(Completion((40,), (-0.5,), "stop", span, routed_experts=routed))
    assert rows(sample)[:-1].tolist() == other.reshape(-1, 6).tolist()


def test_an_aborted_response_has_experts_once_it_was_continued():
    sample = Sample(0, 0, 0, list(PROMPT))
    sample.append_response_tokens(completion(PROMPT, (7,), "abort"))
    assert not sample.routed_experts
    sample.append_response_tokens(completion((*PROMPT, 7), (8, 9)))
    assert rows(sample)[:-1].tolist() == FOUND.reshape(4, 6).tolist()


def test_a_stop_string_cuts_the_experts_with_the_tokens():
    made = completion(PROMPT, ANSWER, "length")
    request = GenerateRequest(PROMPT, SamplingParams(8, stop=("b",)), "id", routing=ROUTING)
    cut = cut_at_stop(made, request, lambda ids: "".join({7: "a", 8: "b", 9: "c"}.get(i, "") for i in ids))
    assert cut.token_ids == (7, 8)
    assert cut.routed_experts.choices.tolist() == FOUND[:3].ravel().tolist()
    sample = Sample(0, 0, 0, list(PROMPT))
    sample.append_response_tokens(cut)
    assert len(rows(sample)) == 4


def test_a_cleared_sample_has_forgotten_them():
    sample = answered()
    sample.clear()
    assert not sample.routed_experts
    sample.validate()


def test_experts_that_do_not_belong_to_the_tokens_are_refused():
    sample = answered()
    sample.response_ids, sample.response_mask, sample.response_logprobs = [7], [1], [-0.5]
    sample.versions = [VersionSpan("r:0:1", 0, 1)]
    sample.routed_experts = sample.routed_experts[:-1]
    with pytest.raises(ValueError, match="3 tokens of prompt and response, 29 experts"):
        sample.validate()
    with pytest.raises(ValueError, match="experts of 4 tokens, and the sample has 3"):
        RoutedExperts(array("B", [0] * 24), 6).padded(3)


def test_growing_leaves_a_copy_that_a_checkpoint_has_taken_as_it_is():
    sample = answered()
    before, copy = sample.routed_experts, list(sample.routed_experts)
    sample.append_environment_tokens([1])
    assert list(before) == copy


# -- dumps and batches


WIDE = Routing(2, 2, 300)


@pytest.mark.parametrize("routing", [ROUTING, WIDE])
def test_dumps_keep_them_in_their_type(tmp_path, routing):
    samples = [answered(routing=routing), Sample(1, 0, 0, [1]), answered((9,), (1, 2), routing=routing)]
    write_dump(tmp_path, step=0, seed=0, samples=samples)
    again = read_dump(tmp_path, 0).samples
    assert again == samples
    assert [s.routed_experts.typecode for s in again if s.routed_experts] == [routing.code] * 2


@pytest.mark.parametrize(("routing", "dtype"), [(ROUTING, torch.uint8), (WIDE, torch.int16)])
def test_a_batch_has_them_token_by_token(routing, dtype):
    first, second = answered(routing=routing), answered((9,), (1, 2), routing=routing)
    batch = samples_to_batch([first, second])
    assert batch.routed_experts.dtype == dtype and batch.routed_experts.shape == (8, routing.per_token)
    none = torch.iinfo(dtype).max
    assert (batch.routed_experts == none).all(1).tolist() == [False] * 4 + [True] + [False] * 2 + [True]
    assert batch.routed_experts[5:7].flatten().tolist() == chosen([9, 1, 2], routing).ravel().tolist()
    assert torch.equal(batch.select([1]).routed_experts, batch.routed_experts[5:])
    assert samples_to_batch([replace_routing(first), replace_routing(second)]).routed_experts is None


def replace_routing(sample, routed=None):
    return replace(sample, routed_experts=array("B") if routed is None else routed)


def test_samples_of_which_one_lacks_them_are_no_batch():
    with pytest.raises(ValueError, match="1 of 2 samples have it, sample 0/0 does not"):
        samples_to_batch([answered(), replace_routing(answered())])
    with pytest.raises(ValueError, match="differ in type and number"):
        samples_to_batch([answered(), answered(routing=WIDE)])


def test_a_batch_takes_no_other_integers():
    batch = samples_to_batch([answered()])
    assert isinstance(batch, TrainBatch)
    with pytest.raises(ValueError, match=r"routed_experts is torch.int64, expected torch.uint8"):
        batch.replace(routed_experts=batch.routed_experts.long())
    with pytest.raises(ValueError, match="routed_experts has shape"):
        batch.replace(routed_experts=batch.routed_experts[:-1])


# -- settings


def config(*sets: str) -> TrainConfig:
    return load_config(TrainConfig, [], ["model.path=model", "algorithm.routing_replay=true", *sets]).config


@pytest.mark.parametrize(
    ("sets", "text"),
    [
        (["algorithm.loss=sft"], 'no meaning with algorithm.loss = "sft"'),
        (["rollout.agent=a.b:c"], "rollout.agent contradict"),
        (["engines.router=http://127.0.0.1:1"], r"engines.router \(--router\) contradict"),
        (["engines.mode=managed", "engines.start_router=true"], "engines.start_router = true contradict"),
    ],
)
def test_what_contradicts_replay_is_refused_by_name(sets, text):
    config()
    with pytest.raises(UsageError, match=text):
        config(*sets)


def info(**facts) -> EngineInfo:
    known = dict.fromkeys(("max_model_len", "vocab_size", "dtype", "weight_backend", "weight_version", "boot_id"))
    return EngineInfo("vllm", "0.32.0", "policy", 1, plugin=True, **known | facts)


@pytest.mark.parametrize(
    ("facts", "router", "text"),
    [
        ({"routed_experts": False}, None, "http://e; start them with `rltool serve-engines"),
        ({"role": "decode"}, None, "http://e prefill or decode alone"),
        ({}, "http://r", "generation goes through http://r"),
    ],
)
def test_engines_that_cannot_bring_them_are_refused_before_the_run(facts, router, text):
    for fine in ({"routed_experts": True}, {"routed_experts": None}):
        check_rollout_engines(config(), {"http://e": info(**fine)}, router=None)
    with pytest.raises(UsageError, match=text):
        check_rollout_engines(config(), {"http://e": info(**facts)}, router=router)
    plain = load_config(TrainConfig, [], ["model.path=model"]).config
    check_rollout_engines(plain, {"http://e": info(**facts)}, router=router)


def test_a_model_without_experts_is_refused_and_one_with_them_gives_the_numbers():
    dense = SimpleNamespace(num_experts=0)
    with pytest.raises(UsageError, match="the model has no experts"):
        routing_of(dense)
    layers = [False] * 3 + [True] * 45
    mixture = SimpleNamespace(
        num_experts=128, num_layers=48, transformer={"moe_router_topk": 8}, expert_layers=layers
    )  # fmt: skip
    assert routing_of(mixture) == Routing(48, 8, 128, dense=(0, 1, 2))


@pytest.mark.parametrize(
    ("kind", "dense"), [("qwen2", None), ("qwen3_moe", ()), ("glm4_moe", (0,)), ("deepseek_v3", (0,))]
)
def test_the_model_of_a_run_is_looked_at_before_it_starts(tmp_path, kind, dense):
    hf_config(kind, True).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads((tmp_path / "config.json").read_text()) | {"architectures": [ARCHITECTURES[kind]]})
    )
    run = config(f"model.path={tmp_path}")
    if dense is not None:
        check_model(run)
        top_k, experts = (4, 8) if kind == "deepseek_v3" else (2, 4)
        assert wanted_routing(run) == Routing(4, top_k, experts, dense)
        assert wanted_routing(config(f"model.path={tmp_path}", "algorithm.routing_replay=false")) is None
        return
    with pytest.raises(UsageError, match="the model has no experts"):
        check_model(run)


ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "glm4_moe": "Glm4MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}  # fmt: skip


def test_samples_without_experts_stop_a_run_that_replays():
    batch = samples_to_batch([answered()])
    check_has_routing(config(), batch)
    check_has_routing(load_config(TrainConfig, [], ["model.path=model"]).config, batch.replace(routed_experts=None))
    with pytest.raises(TrainingStopped, match="came without the experts"):
        check_has_routing(config(), batch.replace(routed_experts=None))


def launches(model=None, device="cuda", **group):
    slots = engine_slots([EngineGroup(**group)], device=device, gpus_per_host=1)
    settings = Settings({"policy": model or Model(Path("/m"))}, Path("/k"), Path("/s"), device=device)
    return plan_engines(slots, seat_slots(slots, [Host("h", gpus=(0,))]), settings, lambda *_: 20_000).launches


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_servers_flag_is_set_by_the_group_or_by_the_run(engine):
    def has_flag(**options):
        return ["--enable-return-routed-experts" in dialect(engine).argv(x) for x in launches(**options)]

    assert has_flag(engine=engine) == [False]
    assert has_flag(engine=engine, return_routed_experts=True) == [True]
    assert has_flag(engine=engine, model=Model(Path("/m"), return_routed_experts=True)) == [True]
    assert has_flag(engine="sglang", device="cpu", return_routed_experts=True) == [True]


def test_the_command_line_of_serve_engines_has_it_for_its_group():
    assert ServeConfig(model=Path("/m"), return_routed_experts=True).group.return_routed_experts
    assert not ServeConfig(model=Path("/m")).group.return_routed_experts


def test_a_run_that_replays_starts_the_policys_engines_with_the_flag():
    order = order_of_file(config('engines.groups=[{engine="sglang"}]'))
    assert order.models["policy"].return_routed_experts
    plain = load_config(TrainConfig, [], ["model.path=model", 'engines.groups=[{engine="sglang"}]']).config
    assert not order_of_file(plain).models["policy"].return_routed_experts


def test_servers_that_cannot_return_them_are_not_started():
    with pytest.raises(UsageError, match="on GPUs alone, with its Model Runner V2"):
        launches(device="cpu", return_routed_experts=True)
    with pytest.raises(UsageError, match="regular engines that generate"):
        launches(model=Model(Path("/m"), task="classify"), return_routed_experts=True)
    with pytest.raises(ConfigError, match="return_routed_experts with role"):
        config('engines.groups=[{role="prefill", return_routed_experts=true}]')


