"""Contract tests that users run on their own functions, in their own test suites.

from rltool.rollout.contracts import check_reward_function
def test_my_reward():
    check_reward_function("my_package.rewards:brevity")
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rltool.config.import_path import load_callable
from rltool.engines.types import Completion, GenerateRequest, SamplingParams, VersionSpan
from rltool.errors import ContractViolation
from rltool.rollout.generate import GenerateContext, fill_group
from rltool.rollout.model_clients import Models
from rltool.rollout.reward_pool import RewardFailure, RewardPool
from rltool.rollout.sample import Sample, SampleStatus
from rltool.rollout.tokenizer import Tokenizer

EXAMPLE_TEXTS = ("", "42", "  42\n", "the answer is 42", "#### 42", r"\boxed{42}", "ünï¢ødé 漢字 🙂", "x" * 5000)


def check_reward_function(
    path: str, *, samples: Sequence[tuple[Sample, str]] = (), timeout: float = 60.0, models: Models | None = None,
    options: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """ContractViolation unless the function at `package.module:function` (or of a shipped name) gives a finite number
    for every sample.

    samples: your own (sample, text) pairs, for functions that need particular labels or metadata; without any, eight
    texts with the label "42" are used, among them an empty and a very long one. The function must not change the
    sample. models: what a function with a `context` reaches; stand-ins with an async `generate` will do. options: as
    reward.options.
    """
    pairs = list(samples) or [
        (
            Sample(
                group_id=0,
                index=i,
                prompt_index=0,
                prompt_ids=[1],
                prompt_text="6 x 7 = ",
                label="42",
                status=SampleStatus.COMPLETED,
            ),
            text,
        )
        for i, text in enumerate(EXAMPLE_TEXTS)
    ]
    problems = []
    outcomes = asyncio.run(_score(path, pairs, timeout, models, options))
    for number, ((_, text), outcome) in enumerate(zip(pairs, outcomes, strict=True)):
        if isinstance(outcome, RewardFailure):
            problems.append(f"sample {number} (text {text[:40]!r}): {outcome.reason}")
    _raise_if_any(path, problems)


async def _score(
    path: str, pairs: Sequence[tuple[Sample, str]], timeout: float, models: Models | None,
    options: Mapping[str, Any] | None,
) -> list[float | RewardFailure]:  # fmt: skip
    """As a run would, but for the changes, which a run does not look for."""
    pool = RewardPool(path, workers=1, timeout=timeout, refuse_changes=True, models=models, options=options)
    try:
        return await pool.score([sample for sample, _ in pairs], [text for _, text in pairs])
    finally:
        await pool.close()


def check_generate_function(path: str, *, tokenizer: Tokenizer | None = None, models: Models | None = None) -> None:
    """ContractViolation unless the generate function fills a group correctly against an engine that answers every
    request. tokenizer, models: what the function finds in its context, where it looks for them."""
    function = load_callable(path, setting="path")
    group = [
        Sample(group_id=0, index=i, prompt_index=0, prompt_ids=[1, 2, 3], prompt_text="hello", label="x", seed=i)
        for i in range(4)
    ]
    problems: list[str] = []

    async def engine(request: GenerateRequest) -> list[Completion]:
        if request.seed is None:
            problems.append("a request without a seed: the rollout cannot be repeated")
        if any(not 0 <= token < 100 for token in request.prompt_ids):
            problems.append("a prompt id outside the vocabulary")
        return [
            Completion((5, 6, 7), (-0.5, -0.25, -0.125), "stop", (VersionSpan("run:0:1", 0, 3),))
            for _ in range(request.n)
        ]

    context = GenerateContext(
        generate=engine, sampling=SamplingParams(max_tokens=16), vocab_size=100, models=models or Models(),
        tokenizer=tokenizer,
    )  # fmt: skip
    try:
        asyncio.run(fill_group(group, context, function))
    except Exception as error:  # reported as a violation, with its cause
        raise ContractViolation(f"{path}: raised {type(error).__name__}: {error}") from error
    for sample in group:
        if len(sample.prompt_ids) != 3:
            problems.append(f"sample {sample.index}: the prompt was changed; append to the response instead")
        if not any(sample.response_mask):
            problems.append(f"sample {sample.index}: no token of the response was sampled by the policy")
        if any(not math.isfinite(value) for value in sample.response_logprobs):
            problems.append(f"sample {sample.index}: a log-probability is not finite")
    _raise_if_any(path, problems)


def _raise_if_any(path: str, problems: list[str]) -> None:
    if problems:
        raise ContractViolation(f"{path} breaks its contract:\n" + "\n".join(f"  - {problem}" for problem in problems))
