"""Stop strings on token ids."""

import pytest

from rltool.engines.dialects.sglang import SglangDialect
from rltool.engines.dialects.vllm import VllmDialect
from rltool.engines.types import Completion, GenerateRequest, SamplingParams, VersionSpan
from rltool.errors import UsageError
from rltool.rollout.stop_strings import cut_at_stop
from rltool.training.manager.work import check_trainable

WORDS = ["", "a", "b", "</", "ans", ">\n\nQ", "x</ans> y", "</ans>"]


def decode(ids):
    return "".join(WORDS[i] for i in ids)


def cut(ids, *stops, prompt=(9,), continues=0, min_tokens=0, reason="length"):
    made = Completion(tuple(ids), tuple(-float(i) for i in ids), reason, (VersionSpan("r:0:1", 0, len(ids)),))
    sampling = SamplingParams(8, stop=stops, min_tokens=min_tokens)
    return cut_at_stop(made, GenerateRequest(tuple(prompt), sampling, "id", continues=continues), decode)


@pytest.mark.parametrize(
    ("ids", "stops", "end"),
    [
        ((1, 2, 7, 1), ("</ans>",), 3),
        ((1, 3, 4, 5, 1, 1), ("</ans>",), 4),
        ((1, 6, 2), ("</ans>",), 2),
        ((1, 5, 2), ("\n\n",), 2),
        ((1, 2, 1, 2), ("ab", "x"), 2),
        ((1, 2, 1, 2), ("ba", "b"), 2),
    ],
)
def test_a_response_ends_with_the_token_that_completes_a_stop_string(ids, stops, end):
    found = cut(ids, *stops)
    assert found.token_ids == ids[:end] and found.finish_reason == "stop"
    assert found.logprobs == tuple(-float(i) for i in ids[:end]), "of the tokens that were sampled"
    assert found.versions == (VersionSpan("r:0:1", 0, end),)


def test_a_response_without_one_stays_what_it_is():
    assert cut((1, 2, 3), "</ans>").finish_reason == "length"
    assert cut((1, 2, 3)).token_ids == (1, 2, 3)
    assert cut((), "a").token_ids == ()


def test_versions_are_cut_with_the_tokens():
    made = Completion((1, 2, 1, 1), (-1.0,) * 4, "length", (VersionSpan("r:0:1", 0, 2), VersionSpan("r:0:2", 2, 4)))
    found = cut_at_stop(made, GenerateRequest((9,), SamplingParams(8, stop=("b",)), "id"), decode)
    assert found.versions == (VersionSpan("r:0:1", 0, 2),)


def test_a_stop_string_may_begin_before_an_abort_but_not_in_the_prompt():
    assert cut((4, 5, 1), "</ans>", prompt=(9, 1, 3), continues=2).token_ids == (4, 5)
    assert cut((4, 5, 1), "</ans>", prompt=(1, 3)).token_ids == (4, 5, 1)


def test_no_stop_string_ends_within_the_first_tokens():
    assert cut((7, 1, 7, 2), "</ans>", min_tokens=2).token_ids == (7, 1, 7)
    assert cut((7, 1, 1, 2), "</ans>", min_tokens=2).token_ids == (7, 1, 1, 2)


def test_engines_are_told_only_what_is_asked_for():
    sampling = SamplingParams(8, stop=("x",), min_tokens=3)
    for dialect, least in ((VllmDialect(), "min_tokens"), (SglangDialect(), "min_new_tokens")):
        [plain] = dialect.generate(GenerateRequest((1,), SamplingParams(8), "a" * 32))
        assert not {"stop", least} & plain.body["sampling_params"].keys()
        [asked] = dialect.generate(GenerateRequest((1,), sampling, "a" * 32))
        assert asked.body["sampling_params"]["stop"] == ["x"] and asked.body["sampling_params"][least] == 3
    [asked] = VllmDialect().generate(GenerateRequest((1,), sampling, "a" * 32))
    assert asked.body["sampling_params"]["detokenize"] is True, "vLLM refuses stop strings without"


@pytest.mark.parametrize("change", [{"top_p": 0.9}, {"top_k": 5}, {"min_tokens": 2}, {"temperature": 0.5}])
def test_a_generate_function_cannot_sample_what_cannot_be_trained_on(change):
    configured = SamplingParams(8)
    check_trainable(SamplingParams(4, stop_token_ids=(1,), stop=("x",)), configured)
    with pytest.raises(UsageError, match=f"asks for {next(iter(change))}"):
        check_trainable(SamplingParams(8, **change), configured)
