"""From prompts to samples: groups of requests over the data plane, with seeds that make a step reproducible.

This module knows neither HTTP nor dialects. A `Target` is anything that turns a GenerateRequest into completions: one
engine, or a router in front of many. All samples of a prompt go to one target, so that the engine computes the prompt once.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rltool.engines.types import Completion, GenerateRequest, SamplingParams
from rltool.errors import EngineError, EngineRejected, RltoolError, UsageError
from rltool.rollout.data import Prompt
from rltool.rollout.sample import Sample, SampleStatus

MAX_CONTINUATIONS = 16
"""How often an aborted response is taken up again. Aborts come from weight syncs, a few per response at the very most."""


class Target(Protocol):
    """Where generation requests go. `name` (a URL) appears in errors."""

    name: str

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """Exactly request.n completions, or a subclass of EngineError."""


class DataPlane:
    """The targets of one model and how many requests each has in flight. Owned by one event loop.

    max_in_flight bounds the requests over all targets; the least loaded target gets the next one, the first of equals.
    """

    def __init__(self, targets: Sequence[Target], *, max_in_flight: int) -> None:
        self._slots = asyncio.Semaphore(max_in_flight)
        self._in_flight: Counter[str] = Counter()
        self.set_targets(targets)

    def set_targets(self, targets: Sequence[Target]) -> None:
        """Requests that are in flight stay where they are; the next ones see the new targets."""
        if not targets:
            raise EngineError("no engine serves: there is nowhere to send generation requests")
        self._targets = list(targets)

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """Waits for a slot, then asks the least loaded target."""
        async with self._slots:
            target = min(self._targets, key=lambda candidate: self._in_flight[candidate.name])
            self._in_flight[target.name] += 1
            try:
                return await target.generate(request)
            finally:
                self._in_flight[target.name] -= 1


@dataclass(frozen=True)
class GenerateContext:
    """What a custom generate function gets beside its samples.

    generate: sends one request to the data plane; sampling: of this rollout; vocab_size: ids below it are valid;
    require_versions: whether a completion without weight-version spans is an error.
    """

    generate: Callable[[GenerateRequest], Awaitable[list[Completion]]]
    sampling: SamplingParams
    vocab_size: int
    require_versions: bool = True


GenerateFunction = Callable[[list[Sample], GenerateContext], Awaitable[None]]
"""`async def f(group: list[Sample], context: GenerateContext) -> None`: fills the samples of one prompt in place, through
`append_response_tokens` and `append_environment_tokens`, and leaves each COMPLETED, TRUNCATED, ABORTED or FAILED."""


def sample_seed(run_seed: int, step: int, prompt_index: int, occurrence: int = 0) -> int:
    """Seed of the first sample of a prompt, in [0, 2**31); sample i has this plus i (mod 2**31).

    occurrence counts repetitions of a prompt within one step (a data set smaller than the step): without it they would
    be the same samples again. The same on every machine and in every process, unlike hash().
    """
    return _hash31("sample", run_seed, step, prompt_index, occurrence)


def _hash31(*parts: object) -> int:
    digest = hashlib.blake2b(":".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 2**31


def make_groups(prompts: Sequence[Prompt], *, samples_per_prompt: int, run_seed: int, step: int) -> list[list[Sample]]:
    """Pending samples, one list per prompt; group ids are unique over steps: step * number of prompts + position."""
    seen: Counter[int] = Counter()
    groups = []
    for position, prompt in enumerate(prompts):
        seed = sample_seed(run_seed, step, prompt.index, seen[prompt.index])
        seen[prompt.index] += 1
        group = [
            Sample(
                group_id=step * len(prompts) + position,
                index=i,
                prompt_index=prompt.index,
                prompt_ids=list(prompt.prompt_ids),
                prompt_text=prompt.text,
                label=prompt.label,
                metadata=copy.deepcopy(prompt.metadata),
                seed=(seed + i) % 2**31,
            )
            for i in range(samples_per_prompt)
        ]
        groups.append(group)
    return groups


async def generate_groups(
    groups: Sequence[list[Sample]],
    context: GenerateContext,
    *,
    function: GenerateFunction | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Fill all samples in place. on_progress(groups done, groups in all) is called after each group.

    The first error cancels the rest and is raised, with the prompt named in its text.
    """
    fill = function or generate_group
    done = 0

    async def run(group: list[Sample]) -> None:
        nonlocal done
        await fill(group, context)
        for sample in group:
            sample.validate()
            if sample.status is SampleStatus.PENDING:
                raise RltoolError(f"the generate function left sample {sample.index} of prompt {sample.prompt_index} without a response")
        done += 1
        if on_progress:
            on_progress(done, len(groups))

    tasks = [asyncio.create_task(run(group)) for group in groups]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def generate_group(group: list[Sample], context: GenerateContext) -> None:
    """One single-turn response for each sample of a prompt: one request, and further ones for responses that were aborted."""
    first = group[0]
    _check_prompt(first, context.vocab_size)
    request = GenerateRequest(
        prompt_ids=tuple(first.prompt_ids), sampling=context.sampling, request_id=uuid.uuid4().hex, n=len(group), seed=first.seed
    )
    completions = await _ask(first, request, context)
    for sample, completion in zip(group, completions, strict=True):
        sample.append_response_tokens(completion)
    await asyncio.gather(*(continue_aborted(sample, context) for sample in group if sample.status is SampleStatus.ABORTED))


async def continue_aborted(sample: Sample, context: GenerateContext) -> None:
    """Take an aborted response up where it was cut, at most MAX_CONTINUATIONS times; then it stays ABORTED.

    Tokens and log-probabilities that were sampled before the abort are kept, each with the weight version it came from.
    """
    for attempt in range(1, MAX_CONTINUATIONS + 1):
        left = context.sampling.max_tokens - len(sample.response_ids)
        if left <= 0:
            sample.status = SampleStatus.TRUNCATED
            return
        request = GenerateRequest(
            prompt_ids=(*sample.prompt_ids, *sample.response_ids),
            sampling=replace(context.sampling, max_tokens=left),
            request_id=uuid.uuid4().hex,
            # a fresh seed: with the first one the engine would draw the numbers of the first tokens again
            seed=_hash31("continue", sample.seed, attempt),
        )
        [completion] = await _ask(sample, request, context)
        sample.append_response_tokens(completion)
        if sample.status is not SampleStatus.ABORTED:
            return


async def _ask(sample: Sample, request: GenerateRequest, context: GenerateContext) -> list[Completion]:
    try:
        completions = await context.generate(request)
    except EngineRejected as error:
        # the type and status are kept: callers tell "the request is wrong" from "the engine is gone" by them
        raise EngineRejected(f"{_name(sample)} was refused: {error}", error.status) from error
    except EngineError as error:
        raise type(error)(f"{_name(sample)}: {error}") from error
    if len(completions) != request.n:
        raise EngineError(f"{_name(sample)}: asked for {request.n} samples, the engine returned {len(completions)}")
    if context.require_versions:
        for completion in completions:
            _check_versions(sample, completion)
    return completions


def _check_prompt(sample: Sample, vocab_size: int) -> None:
    bad = next((token for token in sample.prompt_ids if not 0 <= token < vocab_size), None)
    if bad is not None:  # SGLang's CPU server dies of such an id
        raise UsageError(f"{_name(sample)}: token id {bad} is outside the model's vocabulary of {vocab_size}; do tokenizer and model belong together?")


def _check_versions(sample: Sample, completion: Completion) -> None:
    reached = 0
    for span in completion.versions:
        if span.start != reached:
            break
        reached = span.end
    if reached != len(completion.token_ids):
        found = "no weight version at all" if not completion.versions else f"versions for {reached} of {len(completion.token_ids)} tokens: {completion.versions}"
        raise EngineError(f"{_name(sample)}: the engine reports {found}; without it nobody can tell which weights sampled a token")


def _name(sample: Sample) -> str:
    return f"prompt {sample.prompt_index} ({len(sample.prompt_ids)} tokens, {sample.prompt_text[:60]!r})"
