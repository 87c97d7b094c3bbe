"""Evaluation on held-out prompts: sampled with seeds of its own, the same ones each time, outside of the collector's
books."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rltool.config.train import TrainConfig
from rltool.engines.weight_version import BadWeightVersion, WeightVersion
from rltool.processes.tasks import all_of
from rltool.rollout.generate import GenerateContext, GenerateFunction, fill_group
from rltool.rollout.groups import new_samples
from rltool.rollout.measure.dump import about_model, write_dump
from rltool.rollout.measure.eval_set import EvalSet
from rltool.rollout.measure.metrics import eval_metrics
from rltool.rollout.measure.own_evaluation import EvalContext, EvalFunction, call
from rltool.rollout.rewards.scoring import Scorer
from rltool.rollout.sample import Sample
from rltool.rollout.seeds import hash31


@dataclass(frozen=True)
class Evaluated:
    """Metrics eval/NAME/* of all sets, with the weight versions that their tokens came from, and the samples of each:
    those whose reward failed have none."""

    metrics: dict[str, float]
    samples: dict[str, list[Sample]]


async def evaluate_set(
    found: EvalSet, context: GenerateContext, *, function: GenerateFunction | None, eval_seed: int,
    evaluate: EvalFunction | None = None,
) -> Evaluated:  # fmt: skip
    """eval/NAME/* of one set: of its samples, and what `evaluate` (eval.function) finds where there is one.

    A sample whose reward failed counts 0. Seeds depend on the set's name and eval.seed alone, so before and after, and
    two runs, draw the same numbers.
    """
    started = time.perf_counter()
    settings, seed = found.settings, hash31("evaluate", found.name, eval_seed)
    context = replace(context, sampling=settings.applied(context.sampling))
    own = EvalContext(context, seed, lambda: _sample_set(found, context, function, seed))
    if evaluate is None:
        await own.samples()
    measured = {} if evaluate is None else await call(evaluate, found, own)
    metrics = await asyncio.to_thread(
        eval_metrics, found.name, own.drawn, pass_at=settings.pass_at, pass_reward=settings.pass_reward
    ) if own.drawn else {}  # fmt: skip
    metrics |= {f"eval/{found.name}/{name}": value for name, value in measured.items()}
    metrics[f"eval/{found.name}/seconds"] = time.perf_counter() - started
    return Evaluated(metrics, {found.name: own.drawn})


async def _sample_set(
    found: EvalSet, context: GenerateContext, function: GenerateFunction | None, seed: int
) -> list[Sample]:
    """Prompts are generated and scored side by side; the first error cancels the rest and is raised."""
    groups = [
        new_samples(number, prompt, count=found.settings.samples_per_prompt, run_seed=seed)
        for number, prompt in enumerate(found.prompts)
    ]
    await all_of(
        _one(group, replace(context, prompt=prompt), found.scorer, function)
        for group, prompt in zip(groups, found.prompts, strict=True)
    )
    return [sample for group in groups for sample in group]


def version_metrics(samples: Iterable[Sample]) -> dict[str, float]:
    """eval/version_min and eval/version_max: training steps of the oldest and newest weights that tokens of these
    samples came from. Nothing where an engine names its weights otherwise."""
    steps = set()
    for version in {span.version for sample in samples for span in sample.versions}:
        with suppress(BadWeightVersion):
            steps.add(WeightVersion.parse(version).number)
    return {"eval/version_min": float(min(steps)), "eval/version_max": float(max(steps))} if steps else {}


def write_evaluated(directory: Path, found: Evaluated, config: TrainConfig, *, step: int) -> None:
    """The samples of each set as a dump in a subdirectory of its name. step: training steps of the weights."""
    info = {"metrics": found.metrics, **about_model(config)}
    for name, samples in found.samples.items():
        write_dump(directory / name, step=step, seed=config.eval.seed, samples=samples, info=info)


async def _one(
    group: list[Sample], context: GenerateContext, scorer: Scorer, function: GenerateFunction | None
) -> None:
    await fill_group(group, context, function)
    await scorer.rewards_of(group)
