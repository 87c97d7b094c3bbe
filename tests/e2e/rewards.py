"""The share of lower-case letters: a random model earns a part of it, so that a few steps have something to learn."""

from __future__ import annotations

import asyncio

from rltool.rollout.sample import Sample
from rltool.rollout.serving.model_clients import RewardContext


def lower_case_share(sample: Sample, text: str) -> float:
    return sum(c.islower() for c in text) / max(1, len(text))


async def after_a_moment(sample: Sample, text: str) -> float:
    """The same, half a second later."""
    await asyncio.sleep(0.5)
    return lower_case_share(sample, text)


def raises_on_most(sample: Sample, text: str) -> float:
    if sample.index % 4:
        raise RuntimeError("this reward is broken")
    return 1.0


async def judged(sample: Sample, text: str, context: RewardContext) -> float:
    """How sure the judge is of the first token that it would go on with, and the share of lower-case letters."""
    [reply] = await context.model("judge").generate(sample.prompt_ids, max_tokens=1)
    return lower_case_share(sample, text) + 0.01 * reply.logprobs[0]
