"""A prompt's samples through a router to vLLM servers: one request, the plugin's translation of it, and one reply with
all of them."""

import pytest

from rltool.engines.dialects.table import dialect
from rltool.engines.plugin.sglang_api import from_vllm, to_vllm
from rltool.engines.types import GenerateRequest, SamplingParams
from rltool.errors import EngineError

SPEAKS = dialect("sglang", plugin=True)
RID = "0" * 32


def request(n, seed=7):
    return GenerateRequest((5, 6), SamplingParams(4), RID, n=n, seed=seed)


def vllm_reply(body, first=0):
    """What vLLM's route answers: choice i has the token first + i."""
    choices = [
        {
            "index": index,
            "token_ids": [first + index],
            "finish_reason": "length",
            "logprobs": {"content": [{"token_id": first + index, "logprob": -0.5}]},
            "weight_versions": [{"version": "v", "start": 0, "end": 1}],
        }
        for index in reversed(range(body["sampling_params"].get("n", 1)))
    ]
    return {"request_id": RID, "choices": choices}


def answered(asked):
    """Each HTTP request's reply, through the plugin."""
    bodies = [to_vllm(http.body) for http in SPEAKS.generate(asked)]
    firsts = [0]
    for body in bodies:
        firsts.append(firsts[-1] + body["sampling_params"].get("n", 1))
    return bodies, [from_vllm(body, vllm_reply(body, first)) for body, first in zip(bodies, firsts, strict=False)]


@pytest.mark.parametrize("n", [1, 2, 8, 64, 65, 130])
def test_all_samples_come_back_in_order(n):
    bodies, replies = answered(request(n))
    assert len(bodies) == -(-n // 64)
    assert [completion.token_ids for completion in SPEAKS.parse_generate(request(n), replies)] == [
        (index,) for index in range(n)
    ]


@pytest.mark.parametrize("engine_dialect", [SPEAKS, dialect("vllm")])
def test_greedy_samples_are_asked_for_one_by_one(engine_dialect):
    """vLLM refuses n above 1 at temperature 0, which evaluation may ask for."""
    sent = engine_dialect.generate(GenerateRequest((5, 6), SamplingParams(4, temperature=0.0), RID, n=3, seed=7))
    assert [http.body["sampling_params"].get("n", 1) for http in sent] == [1, 1, 1]


def test_every_request_carries_the_seed_of_its_first_sample():
    bodies, _ = answered(request(130, seed=2**31 - 1))
    assert [(body["sampling_params"]["seed"], body["sampling_params"].get("n", 1)) for body in bodies] == [
        (2**31 - 1, 1),
        (0, 64),
        (64, 64),
        (128, 1),
    ]


def test_no_two_requests_of_a_prompt_share_an_id_or_a_prefix_of_one():
    ids = [http.body["rid"] for http in SPEAKS.generate(request(130))]
    assert not any(a != b and b.startswith(a) for a in ids for b in ids) and len(set(ids)) == len(ids)


@pytest.mark.parametrize("n", [1, 2, 64, 130])
def test_the_ids_to_abort_are_those_that_the_engine_behind_the_router_sees(n):
    bodies, _ = answered(request(n))
    assert SPEAKS.request_ids(request(n)) == [body["request_id"] for body in bodies]


def test_a_reply_with_fewer_samples_is_an_error():
    _, [reply] = answered(request(4))
    with pytest.raises(EngineError, match="returned 3 samples where 4"):
        SPEAKS.parse_generate(request(4), [reply[:3]])


def test_an_engine_itself_is_spoken_to_in_its_own_dialect():
    assert dialect("sglang").name == "sglang" and dialect("vllm", plugin=True).name == "vllm"
