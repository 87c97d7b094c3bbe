"""The value check of a weight sync: an engine samples, the trainer scores the same tokens, the log-probabilities must agree.

A version number that an engine echoes is bookkeeping. A communicator that disabled itself (NCCL below 2.29), a head that kept
its prepacked matrix (tied embeddings on a CPU): both reported success at every call, and only values showed it.
"""

from __future__ import annotations

import random
import uuid

import torch

from rltool.algorithms.batch import TrainBatch
from rltool.algorithms.mismatch import LogprobDifference, logprob_difference
from rltool.engines.types import Completion, GenerateRequest, SamplingParams
from rltool.errors import EngineError

PROMPT_TOKENS = 8
RESPONSE_TOKENS = 16


class WeightsNotApplied(EngineError):
    """An engine acknowledged a sync, but does not compute what the trainer computes."""


def probe_request(vocab_size: int, temperature: float, max_model_len: int | None = None) -> GenerateRequest:
    """A prompt of fixed pseudo-random ids; sampled like the rollouts, but over the whole vocabulary (no top-p, no top-k)."""
    rng = random.Random(20260)
    room = (max_model_len or PROMPT_TOKENS + RESPONSE_TOKENS) - PROMPT_TOKENS
    prompt = tuple(rng.randrange(vocab_size) for _ in range(PROMPT_TOKENS))
    sampling = SamplingParams(max_tokens=min(RESPONSE_TOKENS, room), temperature=temperature, ignore_eos=True)
    return GenerateRequest(prompt, sampling, uuid.uuid4().hex, n=1, seed=1)


def probe_batch(request: GenerateRequest, completions: list[Completion]) -> TrainBatch:
    """The engines' samples as a batch for the trainer's log-probability pass."""
    prompt = len(request.prompt_ids)
    lengths = torch.tensor([prompt + len(c.token_ids) for c in completions])
    zeros = [0.0] * prompt
    mask = torch.tensor([value for c in completions for value in zeros + [1.0] * len(c.token_ids)])
    return TrainBatch(
        tokens=torch.tensor([token for c in completions for token in (*request.prompt_ids, *c.token_ids)]),
        lengths=lengths,
        loss_mask=mask,
        rewards=torch.zeros(len(completions)),
        group_ids=torch.zeros(len(completions), dtype=torch.int64),
        loss_weights=mask,
        rollout_logprobs=torch.tensor([value for c in completions for value in (*zeros, *c.logprobs)]),
    )


def check_values(urls: list[str], batch: TrainBatch, trainer_logprobs: torch.Tensor, tolerance: float) -> LogprobDifference:
    """Compare per engine; sample i of the batch is engine i's. Returns the difference over all. Raises WeightsNotApplied."""
    assert batch.rollout_logprobs is not None
    ends = batch.lengths.cumsum(0).tolist()
    for i, url in enumerate(urls):
        part = slice(ends[i] - int(batch.lengths[i]), ends[i])
        found = logprob_difference(trainer_logprobs[part], batch.rollout_logprobs[part], batch.loss_mask[part])
        if not found.abs_mean <= tolerance:
            raise WeightsNotApplied(
                f"{url} acknowledged the weights, but its log-probabilities differ from the trainer's by {found.abs_mean:.2e} on average "
                f"(max {found.abs_max:.2e}; weights.verify_tolerance is {tolerance:g}). Either the tensors did not arrive, or the engine "
                f"computes in another precision than the trainer: compare --dtype of serve-engines with model.dtype."
            )
    return logprob_difference(trainer_logprobs, batch.rollout_logprobs, batch.loss_mask)
