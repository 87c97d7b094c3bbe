"""Rewards, filters, hooks and generate functions that test_rollout_service.py names by import path."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from uuid import uuid4

import aiohttp

from rltool.engines.types import GenerateRequest
from rltool.rollout.generate import GenerateContext, generate_group
from rltool.rollout.groups import Group
from rltool.rollout.own_rollout import RolloutContext
from rltool.rollout.sample import Sample
from rltool.rollout.serving.model_clients import RewardContext


async def long_is_good(sample: Sample, text: str) -> float:
    return float(len(sample.response_ids))


async def first_is_not_a_number(sample: Sample, text: str) -> float:
    return float("nan") if sample.index == 0 else 1.0


async def three_of_the_first_groups_fail(sample: Sample, text: str) -> float:
    if sample.index == 0 and sample.group_id < 3:
        raise KeyError("answer")
    return 1.0


async def always_fails(sample: Sample, text: str) -> float:
    raise KeyError("answer")


def no_odd_groups(group: list[Sample]) -> str | None:
    return "odd" if group[0].group_id % 2 else None


def all_are_bad(group: list[Sample]) -> str | None:
    return "bad"


def remove_the_first(group: list[Sample]) -> None:
    group[0].remove_sample = True


async def two_turns(group: list[Sample], context: GenerateContext) -> None:
    await generate_group(group, context)
    for sample in group:
        sample.append_environment_tokens([7, 7])


TOOL = {"url": ""}
SESSIONS: set[aiohttp.ClientSession] = set()


async def uses_a_tool(group: list[Sample], context: GenerateContext) -> None:
    """What the server at TOOL says, in tokens."""
    await generate_group(group, context)
    SESSIONS.add(context.http)
    for sample in group:
        async with context.http.get(TOOL["url"]) as reply:
            sample.append_environment_tokens(await reply.json())
        sample.tool_seconds = 0.5


async def hangs(group: list[Sample], context: GenerateContext) -> None:
    await asyncio.Event().wait()


async def judged(sample: Sample, text: str, context: RewardContext) -> float:
    [reply] = await context.model("judge").generate([5, 6, 7], max_tokens=4, temperature=0.0)
    return float(len(reply.token_ids))


def plain_with_context(sample: Sample, text: str, context: RewardContext) -> float:
    return 0.0


async def greedily(group: list[Sample], context: GenerateContext) -> None:
    await generate_group(group, replace(context, sampling=replace(context.sampling, temperature=0.0)))


def no_metrics(samples: list[Sample]) -> dict[str, float]:
    return {"share": 1 / 0}


async def tells_its_length(group: list[Sample], context: GenerateContext) -> None:
    await generate_group(group, context)
    for sample in group:
        sample.train_metadata["length"] = len(sample.response_ids)


def tells_the_mean_reward(group: list[Sample]) -> None:
    for sample in group:
        sample.train_metadata["mean"] = sum(one.reward or 0.0 for one in group) / len(group)


STALE: list[Sample] = []
"""What `puts_an_old_one_in` has kept."""


def without_the_first_and_the_last_twice(samples: list[Sample]) -> list[Sample]:
    for sample in samples:
        sample.reward = (sample.reward or 0.0) + 100.0
    return [*samples[:0:-1], samples[-1]]


def puts_an_old_one_in(samples: list[Sample]) -> list[Sample]:
    STALE.append(samples[0])
    return [STALE[0], *samples[1:]]


async def asks_by_itself(given: RolloutContext) -> list[Group]:
    """Without the run's generation: one request a sample, in a session."""
    groups = given.groups(given.count + 1)
    for group in groups:
        for sample in group.samples:
            prompt, sampling = tuple(sample.prompt_ids), given.generation.sampling
            request = GenerateRequest(prompt, sampling, uuid4().hex, seed=sample.seed, session=sample.session)
            [completion] = await given.generation.generate(request)
            sample.append_response_tokens(completion)
        await given.score(group)
    return groups[1:]


async def one_for_each_image(sample: Sample, text: str) -> float:
    return float(len(sample.multimodal_inputs.get("image", [])))


async def draws(group: list[Sample], context: GenerateContext) -> None:
    """Gives the policy an image that its row has not."""
    await generate_group(group, context)
    for sample in group:
        sample.multimodal_inputs["image"] = ["drawn.png"]
