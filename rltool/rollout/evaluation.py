"""Accuracy on held-out prompts: sampled with the same seeds each time, outside of the collector's books."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from rltool.rollout.data import Prompt
from rltool.rollout.generate import GenerateContext, GenerateFunction, fill_group
from rltool.rollout.groups import new_samples
from rltool.rollout.metrics import eval_metrics
from rltool.rollout.scoring import Scorer
from rltool.rollout.seeds import hash31


async def evaluate_set(
    name: str,
    prompts: Sequence[Prompt],
    context: GenerateContext,
    scorer: Scorer,
    *,
    function: GenerateFunction | None,
    samples_per_prompt: int,
    run_seed: int,
) -> dict[str, float]:
    """eval/NAME/* of one set. Prompts are generated and scored side by side; the first error cancels the rest and is
    raised.

    A sample whose reward failed counts 0. Seeds do not depend on the step, so that before and after draw the same
    numbers.
    """
    started = time.perf_counter()
    seed = hash31("evaluate", name, run_seed)
    groups = [
        new_samples(number, prompt, count=samples_per_prompt, run_seed=seed) for number, prompt in enumerate(prompts)
    ]
    try:
        async with asyncio.TaskGroup() as tasks:
            for group, prompt in zip(groups, prompts, strict=True):
                tasks.create_task(_one(group, replace(context, prompt=prompt), scorer, function))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    metrics = eval_metrics(name, [sample for group in groups for sample in group])
    return metrics | {f"eval/{name}/seconds": time.perf_counter() - started}


async def _one(group: list, context: GenerateContext, scorer: Scorer, function: GenerateFunction | None) -> None:
    await fill_group(group, context, function)
    await scorer.rewards_of(group)
