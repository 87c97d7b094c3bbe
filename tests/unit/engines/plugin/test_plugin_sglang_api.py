"""SGLang's /generate in terms of vLLM's route: both directions."""

import json

import pytest

from rltool.engines.dialects.routed_vllm import RoutedVllmDialect
from rltool.engines.dialects.sglang import SglangDialect
from rltool.engines.plugin.sglang_api import BadRequest, Events, from_vllm, to_vllm
from rltool.engines.types import Completion, GenerateRequest, SamplingParams, TokenStream, VersionSpan


def body(**changes):
    return {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4}, "return_logprob": True, "rid": "r"} | changes


def sampled(index=0, tokens=(7, 8), **changes):
    content = [{"token_id": t, "logprob": -0.5 - i} for i, t in enumerate(tokens)]
    spans = [{"version": "old", "start": 0, "end": 1}, {"version": "new", "start": 1, "end": 2}]
    made = {"index": index, "token_ids": list(tokens), "finish_reason": "length", "stop_reason": None}
    return made | {"logprobs": {"content": content}, "weight_versions": spans} | changes


def answer(*choices, **request_changes):
    return from_vllm(
        to_vllm(body(**request_changes)),
        {"choices": list(choices), "usage": {"prompt_tokens_details": {"cached_tokens": 1}}},
    )


def test_sampling_parameters_get_vllms_names():
    given = {
        "max_new_tokens": 4, "temperature": 0.7, "top_p": 0.9, "top_k": -1, "stop_token_ids": [1], "n": 2,
        "sampling_seed": 3, "ignore_eos": True, "min_new_tokens": 1,
    }  # fmt: skip
    request = to_vllm(body(sampling_params=given))
    assert request == {
        "token_ids": [5, 6],
        "request_id": "r",
        "sampling_params": {
            "max_tokens": 4, "temperature": 0.7, "top_p": 0.9, "top_k": -1, "stop_token_ids": [1], "n": 2, "seed": 3,
            "ignore_eos": True, "min_tokens": 1, "detokenize": False, "logprobs": 0,
        },
    }  # fmt: skip


def test_without_return_logprob_none_are_asked_for():
    assert "logprobs" not in to_vllm(body(return_logprob=False))["sampling_params"]


def test_the_length_defaults_to_sglangs():
    assert to_vllm({"input_ids": [5]})["sampling_params"]["max_tokens"] == 128


@pytest.mark.parametrize("name", ["frobnicate", "json_schema", "regex", "logit_bias", "custom_params"])
def test_a_sampling_parameter_that_cannot_be_honoured_is_refused_by_name(name):
    with pytest.raises(BadRequest, match=f"'{name}'"):
        to_vllm(body(sampling_params={"max_new_tokens": 4, name: "x"}))


@pytest.mark.parametrize("value", [None, [], "", {}, False])
def test_defaults_that_a_router_writes_out_are_accepted(value):
    to_vllm(
        body(
            sampling_params={"max_new_tokens": 4, "stop": value, "skip_special_tokens": True},
            image_data=value,
            stream=False,
        )
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"text": "hello"}, "'text'"),
        ({"stream": True, "sampling_params": {"n": 2}}, "'stream'"),
        ({"top_logprobs_num": 3}, "'top_logprobs_num'"),
        ({"return_hidden_states": True}, "'return_hidden_states'"),
        ({"input_ids": None}, "'input_ids'"),
        ({"input_ids": []}, "'input_ids'"),
        ({"input_ids": [[5], [6]]}, "'input_ids'"),
        ({"input_ids": [5, True]}, "'input_ids'"),
        ({"input_ids": [5, 1.5]}, "'input_ids'"),
        ({"sampling_params": [{}, {}]}, "'sampling_params'"),
        ({"rid": ["a"]}, "'rid'"),
    ],
)
def test_what_is_not_one_prompt_of_token_ids_is_refused(changes, reason):
    with pytest.raises(BadRequest, match=reason):
        to_vllm(body(**changes))


def test_one_sample_is_an_object_several_are_a_list_in_order():
    assert answer(sampled())["output_ids"] == [7, 8]
    several = answer(sampled(1, (9, 9)), sampled(0), sampling_params={"n": 2})
    assert [sample["output_ids"] for sample in several] == [[7, 8], [9, 9]]
    assert [sample["meta_info"]["id"] for sample in several] == ["r_0", "r_1"]


def test_logprobs_and_weight_versions_are_intact():
    meta = answer(sampled())["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, 7, None], [-1.5, 8, None]]
    assert meta["weight_versions"] == [
        {"version": "old", "start": 0, "end": 1},
        {"version": "new", "start": 1, "end": 2},
    ]
    assert meta["weight_version"] == "new"
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == ("r", 2, 2, 1)


def test_what_vllm_does_not_report_of_one_sample_is_left_out():
    drafts = {"num_spec_steps": 4, "num_accepted_draft_tokens": 6}
    one, two = answer(sampled(0), sampled(1, speculative_decoding=drafts), sampling_params={"n": 2})
    assert not {"cached_tokens", "spec_verify_ct"} & {*one["meta_info"]} and "cached_tokens" not in two["meta_info"]
    assert (two["meta_info"]["spec_verify_ct"], two["meta_info"]["spec_num_correct_drafts"]) == (4, 6)


def test_a_logprob_that_vllm_does_not_have_is_null():
    choice = sampled()
    choice["logprobs"]["content"][1]["logprob"] = -9999.0
    assert answer(choice)["meta_info"]["output_token_logprobs"][1] == [None, 8, None]


@pytest.mark.parametrize(
    ("reason", "stop_reason", "expected"),
    [
        ("length", None, {"type": "length", "length": 2}),
        ("stop", None, {"type": "stop", "matched": 8}),  # the model's own end token
        ("stop", 3, {"type": "stop", "matched": 3}),
    ],
)
def test_finish_reasons_have_sglangs_form(reason, stop_reason, expected):
    assert answer(sampled(finish_reason=reason, stop_reason=stop_reason))["meta_info"]["finish_reason"] == expected


def test_anything_else_than_stop_and_length_is_an_abort():
    assert answer(sampled(finish_reason="abort"))["meta_info"]["finish_reason"]["type"] == "abort"


def test_what_the_sglang_dialect_sends_is_accepted_and_what_comes_back_is_understood():
    dialect = SglangDialect()
    request = GenerateRequest((5, 6), SamplingParams(2, temperature=0.5, stop_token_ids=(1,)), "a" * 32, seed=4)
    (http,) = dialect.generate(request)
    (completion,) = dialect.parse_generate(request, [from_vllm(to_vllm(http.body), {"choices": [sampled()]})])
    assert (completion.token_ids, completion.logprobs) == ((7, 8), (-0.5, -1.5))
    assert [(span.version, span.start, span.end) for span in completion.versions] == [("old", 0, 1), ("new", 1, 2)]


@pytest.mark.parametrize("piece", [1, 7, 10_000])
def test_events_of_vllm_are_read_as_those_of_an_sglang(piece):
    request = GenerateRequest((5, 6), SamplingParams(4), "a" * 32)
    dialect = RoutedVllmDialect()
    events = Events(to_vllm(dialect.stream(request).body))
    first = sampled(tokens=(7,), finish_reason=None, weight_versions=[{"version": "old", "start": 0, "end": 1}])
    last = sampled(tokens=(8,))
    sent = b"".join(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n" for choice in (first, last))
    sent += b"data: [DONE]\n\n"
    said = b"".join(events.feed(sent[at : at + piece]) for at in range(0, len(sent), piece))
    *found, done = said.removesuffix(b"\n\n").split(b"\n\n")
    stream = TokenStream(lambda piece: None)
    for event in found:
        stream.take(dialect.parse_event(request, json.loads(event.removeprefix(b"data: ")), stream))
    whole = Completion((7, 8), (-0.5, -0.5), "length", (VersionSpan("old", 0, 1), VersionSpan("new", 1, 2)))
    assert (stream.completion(), done) == (whole, b"data: [DONE]")
    assert json.loads(found[1].removeprefix(b"data: "))["meta_info"]["finish_reason"] == {"type": "length", "length": 2}


def test_a_failure_within_vllms_stream_is_handed_on():
    failure = b'data: {"error": {"message": "RuntimeError: broken", "code": 500}}\n\n'
    assert Events(to_vllm(body(stream=True))).feed(failure) == failure
