"""The value check: an engine that acknowledged a sync is believed only if it computes what the trainer computes."""

import pytest
import torch

from rltool.engines.types import Completion
from rltool.weights.verify import PROMPT_TOKENS, WeightsNotApplied, check_values, probe_batch, probe_request

URLS = ["http://a:1", "http://b:2"]


def sampled(*logprobs: float) -> Completion:
    return Completion(tuple(range(len(logprobs))), logprobs, "length")


def batch():
    return probe_batch(probe_request(100, 1.0), [sampled(-1.0, -2.0), sampled(-0.5, -0.25, -3.0)])


def test_engines_that_agree_pass_and_prompts_do_not_count():
    probed = batch()
    ours = probed.rollout_logprobs + 1e-5
    ours[:PROMPT_TOKENS] = -50.0
    assert check_values(URLS, probed, ours, tolerance=1e-3).abs_mean == pytest.approx(1e-5, rel=1e-2)


@pytest.mark.parametrize("wrong", [-2.0, float("nan")])
def test_the_engine_that_differs_is_named_and_not_the_other(wrong):
    probed = batch()
    ours = probed.rollout_logprobs.clone()
    ours[-1] = wrong
    with pytest.raises(WeightsNotApplied, match="http://b:2 acknowledged the weights") as error:
        check_values(URLS, probed, ours, tolerance=1e-3)
    assert "http://a:1" not in str(error.value)


def test_the_probe_fits_vocabulary_and_context_and_is_tempered():
    request = probe_request(5, 0.7, max_model_len=12)
    assert len(request.prompt_ids) == PROMPT_TOKENS and max(request.prompt_ids) < 5
    assert request.sampling.max_tokens == 12 - PROMPT_TOKENS and request.sampling.temperature == 0.7
    assert torch.equal(batch().lengths, torch.tensor([PROMPT_TOKENS + 2, PROMPT_TOKENS + 3]))
