"""The value check of a weight sync: an engine samples, the trainer scores the same tokens, the log-probabilities must
agree.

A version number that an engine echoes is bookkeeping. A communicator that disabled itself (NCCL below 2.29), a head
that kept its prepacked matrix (tied embeddings on a CPU), experts whose packed matrices were overwritten with plain
ones (mixtures on a CPU): all reported success at every call, and only values showed it.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rltool.algorithms.batch import TrainBatch
from rltool.algorithms.mismatch import logprob_difference
from rltool.engines.types import Completion, EngineInfo, GenerateRequest, SamplingParams
from rltool.weights.verify.tolerances import check_tolerance

PROMPT_TOKENS = 8
RESPONSE_TOKENS = 16


def probe_request(vocab_size: int, temperature: float, max_model_len: int | None = None) -> GenerateRequest:
    """A prompt of fixed pseudo-random ids; sampled like the rollouts,
    but over the whole vocabulary (no top-p, no top-k)."""
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


@dataclass(frozen=True)
class Compared:
    """mean: |log-probability difference| over all engines that were compared;
    failed: engine -> what is wrong with it."""

    mean: float
    failed: dict[str, str]


@dataclass(frozen=True)
class ValueCheck:
    """vocab_size, temperature: of the rollouts; max_model_len: shortest of the engines; tolerance:
    weights.verify_tolerance, None for one by what trainer and engine compute in."""

    vocab_size: int
    temperature: float
    tolerance: float | None
    max_model_len: int | None = None
    trainer_dtype: str = "float32"

    def request(self) -> GenerateRequest:
        return probe_request(self.vocab_size, self.temperature, self.max_model_len)

    def batch(self, request: GenerateRequest, completions: list[Completion]) -> TrainBatch:
        return probe_batch(request, completions)

    def allowed(self, info: EngineInfo) -> float:
        """Mean |log-probability difference| that this engine may have."""
        return check_tolerance(self.tolerance, self.trainer_dtype, info.dtype, info.device)

    def compare(self, engines: Mapping[str, EngineInfo], batch: TrainBatch, trainer_logprobs: Tensor) -> Compared:
        """engines: by URL; sample i of the batch is the i-th one's. trainer_logprobs: [T] float32."""
        assert batch.rollout_logprobs is not None
        ends = batch.lengths.cumsum(0).tolist()
        failed = {}
        for i, (url, info) in enumerate(engines.items()):
            part = slice(ends[i] - int(batch.lengths[i]), ends[i])
            response = trainer_logprobs[part][batch.loss_mask[part] > 0]
            unusable = int((~torch.isfinite(response)).sum())
            if unusable:
                failed[url] = (
                    f"cannot be checked: {unusable} of the trainer's own {len(response)} log-probabilities are not "
                    "finite, so its weights hold NaN or infinities"
                )
                continue
            found = logprob_difference(trainer_logprobs[part], batch.rollout_logprobs[part], batch.loss_mask[part])
            tolerance = self.allowed(info)
            if not found.abs_mean <= tolerance:
                failed[url] = (
                    "acknowledged the weights, but its log-probabilities differ from the trainer's by "
                    f"{found.abs_mean:.2e} on average (max {found.abs_max:.2e}; "
                    f"weights.verify_tolerance is {tolerance:g}). "
                    "Either the tensors did not arrive; or the engine computes in another precision than the trainer: "
                    "compare --dtype of serve-engines with model.dtype; or the engine may hold a prepacked or derived "
                    "copy of a weight that the load did not refresh: see docs/troubleshooting.md."
                )
        return Compared(logprob_difference(trainer_logprobs, batch.rollout_logprobs, batch.loss_mask).abs_mean, failed)
