"""Tokens that top-p and top-k kept: found in an engine's reply, kept with the sample, used by the trainer."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace

import pytest
import torch

from rltool.engines import arrays
from rltool.engines.dialects.sampling_mask import SamplingMask, find_mask, logprobs_of
from rltool.engines.dialects.table import dialect
from rltool.engines.types import Completion, EngineInfo, GenerateRequest, SamplingParams, VersionSpan
from rltool.errors import EngineError, UsageError
from rltool.megatron.topk_head import head_logprobs_of, kept_distribution
from rltool.rollout.batching import samples_to_batch
from rltool.rollout.measure.dump import read_dump, write_dump
from rltool.rollout.sample import Sample, SampleStatus
from rltool.rollout.snapshot import _as_it_is
from rltool.rollout.stop_strings import cut_at_stop
from rltool.training.checks.preflight import _mask_problems

SAMPLING = SamplingParams(max_tokens=3, top_p=0.9, top_k=4, return_sampling_mask=True)
REQUEST = GenerateRequest((1, 2), SAMPLING, "a" * 32)
PLACES = [[(5, math.log(0.5)), (7, math.log(0.3)), (6, math.log(0.2)), (8, -9999.0)], [(9, 0.0), (4, -math.inf)]]
MASK = SamplingMask(array("i", [5, 7, 6, 9]), array("i", [3, 1]))


def completion(mask=MASK, tokens=(5, 9), reason="stop"):
    return Completion(tokens, (-0.5,) * len(tokens), reason, (VersionSpan("run:0:1", 0, len(tokens)),), mask)


def sample(**changes):
    values = {"group_id": 0, "index": 0, "prompt_index": 0, "prompt_ids": [1, 2], "reward": 1.0}
    return Sample(**(values | changes))


# What an engine says.


def test_kept_are_the_tokens_with_a_probability():
    found = find_mask(PLACES)
    assert found.mask == MASK and found.checked() is found.mask and found.mass == pytest.approx(1)


def test_the_sampled_token_that_is_listed_twice_counts_once():
    assert find_mask([[(7, math.log(0.3)), (5, math.log(0.7)), (7, math.log(0.3))]]).mask.ids.tolist() == [7, 5]


@pytest.mark.parametrize("places", [[[(5, math.log(0.5)), (7, math.log(0.3))], [(9, 0.0)]], [[(5, 0.0), (6, -1.0)]]])
def test_kept_tokens_whose_probabilities_do_not_sum_to_one_are_refused(places):
    """Some are missing, or the engine has not left any out: raw_logprobs."""
    with pytest.raises(EngineError, match="must be 1: was the engine started without --logprobs-mode processed_logpro"):
        find_mask(places).checked()


def test_more_than_top_k_tokens_are_asked_for_since_vllm_keeps_those_that_tie():
    assert [logprobs_of(top_k) for top_k in (1, 20, 200)] == [9, 28, 250]
    (sent,) = dialect("vllm").generate(REQUEST)
    assert sent.body["sampling_params"]["logprobs"] == logprobs_of(4)
    (plain,) = dialect("vllm").generate(replace(REQUEST, sampling=replace(SAMPLING, return_sampling_mask=False)))
    assert plain.body["sampling_params"]["logprobs"] == 0


def test_sglang_refuses_to_be_asked():
    with pytest.raises(UsageError, match="do not return the tokens that top_p and top_k leave"):
        dialect("sglang").generate(REQUEST)


def vllms_own():
    return [
        {
            "token_id": place[0][0], "logprob": place[0][1],
            "top_logprobs": [{"token_id": token, "logprob": max(value, -9999.0)} for token, value in place],
        }
        for place in PLACES
    ]  # fmt: skip


def choice(**changes):
    mask = {"ids": arrays.encode("i", MASK.ids), "counts": arrays.encode("i", MASK.counts), "mass": 1.0}
    return {
        "index": 0, "token_ids": arrays.encode("i", (5, 9)), "logprobs": arrays.encode("f", (-0.5, 0.0)),
        "finish_reason": "stop", "weight_versions": [], "sampling_mask": mask,
    } | changes  # fmt: skip


def test_both_routes_of_vllm_are_read():
    own = choice(token_ids=[5, 9], logprobs={"content": vllms_own()})
    (found,) = dialect("vllm").parse_generate(REQUEST, [{"choices": [own]}])
    assert found.sampling_mask == MASK
    (found,) = dialect("vllm", plugin=True).parse_generate(REQUEST, [{"choices": [choice()]}])
    assert found.sampling_mask == MASK


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (None, "no sampling mask: the server has an older rltool"),
        ({"ids": arrays.encode("i", [5]), "counts": arrays.encode("i", [3, 1]), "mass": 1.0}, "4 tokens with 1 ids"),
        ({"ids": "AQAA", "counts": "", "mass": 1.0}, "cannot be read"),
        ({"ids": "", "counts": "", "mass": 0.7}, "have the probability 0.7 in one place"),
    ],
)
def test_what_is_no_mask_is_never_taken_for_one(mask, message):
    with pytest.raises(EngineError, match=message):
        dialect("vllm", plugin=True).parse_generate(REQUEST, [{"choices": [choice(sampling_mask=mask)]}])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"max_logprobs": 256}, None),
        ({"max_logprobs": -1}, None),
        ({"max_logprobs": None}, None),
        ({"max_logprobs": 62}, None),
        ({"max_logprobs": 61}, "start it with --max-logprobs 62"),
        ({"dialect": "sglang"}, "use vLLM engines"),
    ],
)
def test_an_engine_that_could_not_tell_is_refused_before_anything_starts(changes, problem):
    info = EngineInfo("vllm", "0.32.0", "m", 1, 64, 100, "float32", "rltool", None, None, True)
    found = " ".join(_mask_problems(replace(info, **changes), top_k=50))
    assert (problem in found) if problem else not found


# A sample's life.


def test_a_response_in_pieces_has_a_place_for_each_token():
    one = sample()
    one.append_environment_tokens([3])
    one.append_response_tokens(completion(reason="abort"))
    one.append_environment_tokens([3, 3])
    one.append_response_tokens(completion(SamplingMask(array("i", [8]), array("i", [1])), (8,)))
    assert one.sampling_mask_counts.tolist() == [0, 3, 1, 0, 0, 1]
    assert one.sampling_mask_ids.tolist() == [5, 7, 6, 9, 8]
    one.clear()
    assert not one.sampling_mask_ids and not one.sampling_mask_counts


def test_a_piece_without_a_mask_behind_one_that_has_it_is_an_error():
    one = sample()
    one.append_response_tokens(completion(reason="abort"))
    with pytest.raises(ValueError, match="4 tokens, sampling masks for 2"):
        one.append_response_tokens(completion(None))


def test_what_is_cut_off_at_a_stop_string_has_no_place_left():
    whole = completion(SamplingMask(array("i", [5, 7, 6, 9, 1, 2]), array("i", [3, 1, 2])), (5, 9, 1))
    request = replace(REQUEST, sampling=replace(SAMPLING, stop=("59",)))
    cut = cut_at_stop(whole, request, lambda ids: "".join(map(str, ids)))
    assert cut.token_ids == (5, 9) and cut.sampling_mask == MASK


def test_a_dump_gives_it_back_and_a_snapshot_stays_as_it_was(tmp_path):
    one = sample()
    one.append_response_tokens(completion(reason="abort"))
    kept = _as_it_is(one)
    one.append_response_tokens(completion())
    write_dump(tmp_path, step=0, seed=1, samples=[one, kept, sample()])
    assert read_dump(tmp_path, 0).samples == [one, kept, sample()]
    assert kept.sampling_mask_counts.tolist() == [3, 1] and one.sampling_mask_counts.tolist() == [3, 1, 3, 1]


def finished(**changes):
    one = sample(**changes)
    one.append_environment_tokens([3])
    one.append_response_tokens(completion())
    return one


def test_a_batch_has_the_kept_tokens_in_their_places():
    batch = samples_to_batch([finished(), finished(index=1)])
    row = [[-1] * 3, [-1] * 3, [-1] * 3, [5, 7, 6], [9, -1, -1]]
    assert batch.sampling_mask is not None and batch.sampling_mask.tolist() == row + row
    second = batch.select([1]).sampling_mask
    assert second is not None and second.tolist() == row


def test_a_batch_without_truncation_has_none():
    plain = sample(status=SampleStatus.COMPLETED)
    plain.append_response_tokens(completion(None))
    assert samples_to_batch([plain]).sampling_mask is None


@pytest.mark.parametrize("mask", [None, SamplingMask(array("i", [5, 7, 6, 8]), array("i", [3, 1]))])
def test_a_sampled_token_that_nothing_says_was_kept_is_an_error(mask):
    other = sample(index=1)
    other.append_response_tokens(completion(mask))
    with pytest.raises(ValueError, match="sample 0/1: its token [01] is not among those that top-p and top-k left"):
        samples_to_batch([finished(), other])


# The trainer's side.

VOCAB, PADDED, HIDDEN, ROWS, K = 37, 40, 16, 23, 6


def inputs():
    """(hidden, weight, targets, kept), of which every fifth row names none and others 1 to K tokens."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator)
    weight = 0.7 * torch.randn(PADDED, HIDDEN, generator=generator)
    kept = torch.stack([torch.randperm(VOCAB, generator=generator)[:K] for _ in range(ROWS)])
    counts = 1 + torch.arange(ROWS) % K
    targets = kept[torch.arange(ROWS), torch.arange(ROWS) % counts]
    counts[::5] = 0
    return hidden, weight, targets, kept.masked_fill(torch.arange(K) >= counts[:, None], -1).int()


def plain(hidden, weight, targets, kept, temperature):
    """As the definition says, in fp64: the other logits are -inf."""
    logits = hidden.double() @ weight[:VOCAB].double().t() / temperature
    for row, tokens in enumerate(kept.tolist()):
        if tokens[0] >= 0:
            others = [token for token in range(VOCAB) if token not in tokens]
            logits = logits.index_put((torch.tensor(row), torch.tensor(others)), torch.tensor(-1e300).double())
    logp = logits.log_softmax(-1)
    return logp.gather(-1, targets[:, None]).squeeze(-1), -(logp.exp() * logp.clamp(min=-1e3)).sum(-1)


def fused(hidden, weight, targets, kept, temperature):
    found = head_logprobs_of(hidden, weight, targets, kept, temperature=temperature, vocab_size=VOCAB, chunk=5)
    return kept_distribution(found, kept)


@pytest.mark.parametrize("used", [(1.0, 0.0), (0.0, 1.0), (0.8, -0.3)], ids=["logprobs", "entropy", "both"])
def test_values_and_gradients_are_those_of_the_kept_tokens_alone(used):
    results = []
    for function in (fused, plain):
        hidden, weight, targets, kept = inputs()
        hidden.requires_grad_()
        weight.requires_grad_()
        found = function(hidden, weight, targets, kept, 0.7)
        by = torch.randn(2, ROWS, generator=torch.Generator().manual_seed(1))
        sum(use * (b * values).sum() for use, b, values in zip(used, by, found, strict=True)).backward()
        results.append((*found, hidden.grad, weight.grad))
    for mine, exact in zip(*results, strict=True):
        torch.testing.assert_close(mine, exact.float(), rtol=3e-5, atol=3e-5)


def test_a_token_that_alone_was_left_has_the_probability_one_and_no_gradient():
    hidden, weight, targets, _ = inputs()
    hidden.requires_grad_()
    logprobs, entropy = fused(hidden, weight, targets, targets[:, None].int(), 1.0)
    assert logprobs.abs().max() == 0 and entropy.abs().max() == 0
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad.abs().max() < 1e-6
