"""The value check: an engine that acknowledged a sync is believed only if it computes what the trainer computes."""

from __future__ import annotations

import math

import pytest
import torch

from rltool.engines.types import Completion, EngineInfo
from rltool.weights.verify.values import PROMPT_TOKENS, RESPONSE_TOKENS, ValueCheck, probe_request

URLS = ["http://a:1", "http://b:2"]
CHECK = ValueCheck(vocab_size=100, temperature=1.0, tolerance=1e-3)


def engine_info(dtype: str) -> EngineInfo:
    return EngineInfo("vllm", "0.32.0", "policy", 1, 256, 100, dtype, "rltool", None, None, True, device="cpu")


ENGINES = {url: engine_info("float32") for url in URLS}


def sampled(*logprobs: float) -> Completion:
    return Completion(tuple(range(len(logprobs))), logprobs, "length")


def batch():
    return CHECK.batch(CHECK.request(), [sampled(-1.0, -2.0), sampled(-0.5, -0.25, -3.0)])


def test_engines_that_agree_pass_and_prompts_do_not_count():
    probed = batch()
    ours = probed.rollout_logprobs + 1e-5
    ours[:PROMPT_TOKENS] = -50.0
    found = CHECK.compare(ENGINES, probed, ours)
    assert found.failed == {} and found.mean == pytest.approx(1e-5, rel=1e-2)


@pytest.mark.parametrize(("position", "url"), [(-1, URLS[1]), (PROMPT_TOKENS, URLS[0])])
def test_the_engine_that_differs_is_named_and_not_the_other(position, url):
    probed = batch()
    ours = probed.rollout_logprobs.clone()
    ours[position] -= 1.0
    found = CHECK.compare(ENGINES, probed, ours)
    assert found.failed.keys() == {url}
    assert "acknowledged the weights" in found.failed[url] and "weights.verify_tolerance is 0.001" in found.failed[url]
    for cause in ("did not arrive", "another precision", "prepacked or derived copy"):
        assert cause in found.failed[url]


def test_log_probabilities_of_the_trainer_that_are_not_finite_are_no_difference():
    probed = batch()
    ours = probed.rollout_logprobs.clone()
    ours[0] = ours[-1] = math.nan  # the first is a prompt's
    failed = CHECK.compare(ENGINES, probed, ours).failed
    assert failed.keys() == {URLS[1]}
    assert "1 of the trainer's own 3 log-probabilities are not finite" in failed[URLS[1]]


def test_one_engine_that_is_far_off_is_not_averaged_away():
    check = ValueCheck(vocab_size=100, temperature=1.0, tolerance=0.1)
    probed = check.batch(
        check.request(), [sampled(*[-1.0] * RESPONSE_TOKENS)] * 9 + [sampled(*[-1.5] * RESPONSE_TOKENS)]
    )
    ours = torch.where(probed.loss_mask > 0, -1.0, 0.0)
    engines = {f"http://e:{i}": engine_info("float32") for i in range(10)}
    found = check.compare(engines, probed, ours)
    assert found.failed.keys() == {"http://e:9"} and found.mean == pytest.approx(0.05)


def test_without_a_configured_tolerance_each_engine_has_that_of_its_dtype():
    infos = {url: engine_info(dtype) for url, dtype in zip(URLS, ("float32", "bfloat16"), strict=True)}
    check = ValueCheck(vocab_size=100, temperature=1.0, tolerance=None)
    probed = batch()
    found = check.compare(infos, probed, probed.rollout_logprobs - 0.05)
    assert found.failed.keys() == {URLS[0]} and "weights.verify_tolerance is 0.001" in found.failed[URLS[0]]
    rounding = ValueCheck(vocab_size=100, temperature=1.0, tolerance=None, trainer_dtype="bfloat16")
    assert rounding.compare(infos, probed, probed.rollout_logprobs - 0.05).failed == {}
    assert rounding.compare(infos, probed, probed.rollout_logprobs - 0.5).failed.keys() == set(URLS)


def test_the_probe_fits_vocabulary_and_context_and_is_tempered():
    request = probe_request(5, 0.7, max_model_len=12)
    assert len(request.prompt_ids) == PROMPT_TOKENS and max(request.prompt_ids) < 5
    assert request.sampling.max_tokens == 12 - PROMPT_TOKENS and request.sampling.temperature == 0.7
    assert request.sampling.ignore_eos and (request.sampling.top_p, request.sampling.top_k) == (1.0, -1)
    assert torch.equal(batch().lengths, torch.tensor([PROMPT_TOKENS + 2, PROMPT_TOKENS + 3]))
