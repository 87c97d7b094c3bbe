"""Rollouts out of thin air: lengths like those of real ones, everything else random.
For measuring and testing the trainer alone."""

from __future__ import annotations

import numpy as np

from rltool.rollout.sample import Sample, SampleStatus

PROMPT_MEDIAN, PROMPT_SIGMA = 1 / 6, 0.6
RESPONSE_MEDIAN, RESPONSE_SIGMA = 1 / 6, 1.0
"""Medians are fractions of the limits. Responses of reasoning models are near log-normal with sigma 1:
here 4 % reach the limit."""


def synthetic_samples(
    step: int,
    *,
    seed: int,
    num_prompts: int,
    samples_per_prompt: int,
    max_prompt_tokens: int,
    max_response_tokens: int,
    vocab_size: int,
) -> list[Sample]:
    """The samples of one step, a function of the arguments alone: the same on every machine and after a resume.

    Lengths are log-normal, clipped to [1, limit]; a prompt's are shared by its group. Token ids are uniform over the
    vocabulary, rewards 0 or 1 with a probability of the group's own, behaviour log-probabilities those of a policy that
    is sure of most tokens (minus an exponential of mean 0.5). No weight version: no policy sampled this.
    """
    random = np.random.default_rng([seed, step])
    samples = []
    for group in range(num_prompts):
        prompt_length = _length(random, max_prompt_tokens, PROMPT_MEDIAN, PROMPT_SIGMA)
        prompt = random.integers(vocab_size, size=prompt_length).tolist()
        solved = random.uniform()
        for index in range(samples_per_prompt):
            length = _length(random, max_response_tokens, RESPONSE_MEDIAN, RESPONSE_SIGMA)
            sample = Sample(
                group_id=step * num_prompts + group,
                index=index,
                prompt_index=group,
                prompt_ids=list(prompt),
                response_ids=random.integers(vocab_size, size=length).tolist(),
                response_mask=[1] * length,
                response_logprobs=(-random.exponential(0.5, size=length)).tolist(),
                status=SampleStatus.TRUNCATED if length == max_response_tokens else SampleStatus.COMPLETED,
                reward=float(random.uniform() < solved),
            )
            samples.append(sample)
    return samples


def _length(random: np.random.Generator, limit: int, median: float, sigma: float) -> int:
    return int(np.clip(np.rint(median * limit * random.lognormal(0.0, sigma)), 1, limit))
