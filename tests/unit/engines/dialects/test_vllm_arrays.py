"""Samples as arrays: the codec, the dialect's reading of them, and SGLang's reply made from them."""

import math

import pytest

from rltool.engines import arrays
from rltool.engines.dialects.table import dialect
from rltool.engines.plugin import sglang_api
from rltool.engines.types import GenerateRequest, SamplingParams, VersionSpan
from rltool.errors import EngineError, MissingLogprobs

SPEAKS = dialect("vllm", plugin=True)
REQUEST = GenerateRequest(prompt_ids=(1, 2), sampling=SamplingParams(max_tokens=3), request_id="a" * 32, n=2, seed=3)


def choice(index=0, tokens=(5, 151935), logprobs=(-0.5, -1.25), reason="length", **changed):
    return {
        "index": index,
        "token_ids": arrays.encode(arrays.TOKEN, tokens),
        "logprobs": None if logprobs is None else arrays.encode(arrays.LOGPROB, logprobs),
        "finish_reason": reason,
        "stop_reason": None,
        "weight_versions": [{"version": "7", "start": 0, "end": len(tokens)}],
    } | changed


def test_arrays_travel_as_little_endian_bytes_in_base64():
    assert arrays.encode(arrays.TOKEN, [1, 258]) == "AQAAAAIBAAA="
    assert arrays.decode(arrays.TOKEN, "AQAAAAIBAAA=") == (1, 258)
    assert arrays.decode(arrays.LOGPROB, arrays.encode(arrays.LOGPROB, [-0.5, -1.25])) == (-0.5, -1.25)
    assert arrays.decode(arrays.TOKEN, "") == ()


def test_the_request_is_vllms_own_on_the_plugins_route():
    (plain,), (sent,) = dialect("vllm").generate(REQUEST), SPEAKS.generate(REQUEST)
    assert sent.path == "/rltool/generate" and sent.body == plain.body


def test_samples_are_read_in_order_of_their_index():
    first, second = SPEAKS.parse_generate(REQUEST, [{"choices": [choice(1, (9,), (-2.0,), "stop"), choice()]}])
    assert (first.token_ids, first.logprobs, first.finish_reason) == ((5, 151935), (-0.5, -1.25), "length")
    assert first.versions == (VersionSpan("7", 0, 2),)
    assert (second.token_ids, second.finish_reason) == ((9,), "stop")


@pytest.mark.parametrize(
    ("broken", "error", "text"),
    [
        (choice(logprobs=None), MissingLogprobs, "without log-probabilities"),
        (choice(logprobs=(-0.5, math.nan)), MissingLogprobs, "log-probability 1 of 2"),
        (choice(logprobs=(-0.5, -math.inf)), MissingLogprobs, "log-probability 1 of 2"),
        (choice(logprobs=(-0.5,)), MissingLogprobs, "2 tokens and 1 log-prob"),
        (choice(token_ids="AQAAAAIBA"), EngineError, "cannot be read"),
        (choice(token_ids="AQAA"), EngineError, "cannot be read"),
        (choice(reason="error"), EngineError, "'error'"),
    ],
)
def test_what_is_missing_or_broken_is_never_taken_for_a_sample(broken, error, text):
    with pytest.raises(error, match=text):
        SPEAKS.parse_generate(REQUEST, [{"choices": [broken, choice(1)]}])


def test_sglangs_reply_from_arrays_is_that_from_vllms_own():
    request = {"token_ids": [1, 2], "sampling_params": {"n": 1}, "request_id": "r"}
    own = choice() | {
        "token_ids": [5, 151935],
        "logprobs": {"content": [{"token_id": 5, "logprob": -0.5}, {"token_id": 151935, "logprob": -9999.0}]},
    }
    packed = choice(logprobs=(-0.5, math.nan))
    made = [sglang_api.from_vllm(request, {"choices": [reply], "usage": {}}) for reply in (own, packed)]
    assert made[0] == made[1]
    assert made[0]["meta_info"]["output_token_logprobs"] == [[-0.5, 5, None], [None, 151935, None]]
    assert (
        "output_token_logprobs"
        not in sglang_api.from_vllm(request, {"choices": [choice(logprobs=None)], "usage": {}})["meta_info"]
    )
