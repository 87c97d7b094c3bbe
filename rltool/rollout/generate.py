"""From prompts to samples: the requests of one group, and what a custom generate function gets.

This module knows no engines and no dialects. `GenerateContext.generate` is anything that turns a GenerateRequest into
completions: the data plane, one engine, or a test. All samples of a prompt go into one request, so that the engine
computes the prompt once.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import aiohttp

from rltool.config.import_path import load_callable
from rltool.config.own_functions import named_async
from rltool.config.rollout import DeadlinesConfig, RolloutConfig
from rltool.engines.types import Completion, GenerateRequest, Picture, SamplingParams
from rltool.errors import ContractViolation, EngineError, RltoolError, UsageError
from rltool.processes.tasks import all_of
from rltool.rollout import pictures
from rltool.rollout.data import Prompt
from rltool.rollout.sample import Sample, SampleStatus
from rltool.rollout.seeds import hash31
from rltool.rollout.serving.model_clients import ModelClient, Models
from rltool.rollout.tokenizer import Tokenizer

Http: TypeAlias = aiohttp.ClientSession
MAX_CONTINUATIONS = 16
"""How often an aborted response is taken up again. Aborts come from weight syncs,
a few per response at the very most."""


def _never() -> bool:
    return False


@dataclass(frozen=True)
class GenerateContext:
    """What a custom generate function gets beside its samples.

    generate: sends one request to the data plane, and cuts what comes at the stop strings of its sampling; sampling: of
    this rollout; vocab_size: ids below it are valid; tokenizer: the policy's, None only in tests; require_versions:
    whether a completion without weight-version spans is an error. interrupted: True once this group is to be put aside
    (rollout.partial_rollout, so never in a function of rollout.generate_function): what was aborted is then left
    ABORTED and not taken up again. models: those beside the policy. prompt: the row of the data set that the samples
    are of. http_session: what `http` gives.
    """

    generate: Callable[[GenerateRequest], Awaitable[list[Completion]]]
    sampling: SamplingParams
    vocab_size: int
    require_versions: bool = True
    interrupted: Callable[[], bool] = _never
    prompt: Prompt | None = None
    models: Models = field(default_factory=Models)
    tokenizer: Tokenizer | None = None
    http_session: Http | None = None

    @property
    def http(self) -> Http:
        """For the function's own requests, such as to a tool's server: one session with its connections for the whole
        run, which closes it. A request has deadlines.call, unless it names a timeout."""
        if self.http_session is None:
            raise RltoolError("this context has no HTTP session: give one to GenerateContext(http_session=...)")
        return self.http_session

    def model(self, name: str) -> ModelClient:
        """A client of a model beside the policy ([models.NAME]). Raises UsageError for one that the run does not
        have."""
        return self.models.model(name)


def open_http(config: DeadlinesConfig) -> Http:
    """For GenerateContext.http, to be closed by the owner; within a running event loop. None of the run's keys is on
    it. No limit of connections: as many episodes run at once as the run allows."""
    limit = aiohttp.ClientTimeout(total=config.call)
    return Http(connector=aiohttp.TCPConnector(limit=0), timeout=limit)


GenerateFunction = Callable[[list[Sample], GenerateContext], Awaitable[None]]
"""`async def f(group: list[Sample], context: GenerateContext) -> None`: fills the samples of one prompt in place,
through `append_response_tokens` and `append_environment_tokens`, and leaves each COMPLETED, TRUNCATED, ABORTED or
FAILED."""


def load_generate(config: RolloutConfig) -> GenerateFunction | None:
    """rollout.generate_function as a function; None: the built-in generation. UsageError for what is none. Called, it
    raises what the data plane does, and FunctionFailed for anything else."""
    if config.generate_function is None:
        return None
    function = load_callable(config.generate_function, setting="rollout.generate_function", takes=("group", "context"))
    return named_async(function, f"rollout.generate_function = {config.generate_function!r}")


async def fill_group(group: list[Sample], context: GenerateContext, function: GenerateFunction | None = None) -> None:
    """Fill all samples of a prompt in place and check what came: the built-in generation, or `function`.

    Whatever the data plane or the function raises is raised, with the prompt named in a note; ContractViolation for
    samples that the function left inconsistent.
    """
    try:
        await (function or generate_group)(group, context)
    except RltoolError as error:
        error.add_note(_name(group[0]))
        raise
    for sample in group:
        try:
            sample.validate()
        except ValueError as error:
            found = f"the generate function left what is no sample: {error}"
            raise ContractViolation(f"{_name(sample)}: {found}") from error
        if sample.status is SampleStatus.PENDING and not context.interrupted():
            raise RltoolError(
                f"the generate function left sample {sample.index} of prompt {sample.prompt_index} without a response"
            )


async def generate_group(group: list[Sample], context: GenerateContext) -> None:
    """One single-turn response for each sample of a prompt: one request, and further ones for responses that were
    aborted.

    A group that was interrupted is taken up where it stands: finished responses stay, aborted ones go on.
    """
    first = group[0]
    check_prompt(first, context.vocab_size)
    pending = [sample for sample in group if sample.status is SampleStatus.PENDING]
    if len(pending) == len(group):
        request = GenerateRequest(
            prompt_ids=tuple(first.prompt_ids),
            sampling=context.sampling,
            request_id=uuid.uuid4().hex,
            n=len(group),
            seed=first.seed,
            pictures=await _pictures(first),
        )
        for sample, completion in zip(group, await _ask(first, request, context), strict=True):
            sample.append_response_tokens(completion)
    else:
        await all_of(_generate_one(sample, context) for sample in pending)
    await all_of(continue_response(sample, context) for sample in group if sample.status is SampleStatus.ABORTED)


async def _generate_one(sample: Sample, context: GenerateContext) -> None:
    request = GenerateRequest(
        tuple(sample.prompt_ids), context.sampling, uuid.uuid4().hex, seed=sample.seed, pictures=await _pictures(sample)
    )
    [completion] = await _ask(sample, request, context)
    sample.append_response_tokens(completion)


async def continue_response(sample: Sample, context: GenerateContext) -> None:
    """Sample on from where the response stands: after an abort, or after what an environment has added. What is aborted
    is taken up again, in at most MAX_CONTINUATIONS requests; then it stays ABORTED.

    sampling.max_tokens bounds the whole response. What was sampled before is kept, with the weight version that it
    came from.
    """
    for attempt in range(1, MAX_CONTINUATIONS + 1):
        if context.interrupted():
            sample.status = SampleStatus.ABORTED
            return
        left = context.sampling.max_tokens - len(sample.response_ids)
        if left <= 0:
            sample.status = SampleStatus.TRUNCATED
            return
        request = GenerateRequest(
            prompt_ids=(*sample.prompt_ids, *sample.response_ids),
            sampling=replace(
                context.sampling, max_tokens=left,
                min_tokens=max(0, context.sampling.min_tokens - len(sample.response_ids)),
            ),
            request_id=uuid.uuid4().hex,
            # a new seed: with the first one the engine would draw the numbers of the first tokens again
            seed=hash31("continue", sample.seed, len(sample.response_ids), attempt),
            continues=len(sample.response_ids),
            session=sample.session,
            pictures=await _pictures(sample),
        )
        [completion] = await _ask(sample, request, context)
        sample.append_response_tokens(completion)
        if sample.status is not SampleStatus.ABORTED:
            return


async def _ask(sample: Sample, request: GenerateRequest, context: GenerateContext) -> list[Completion]:
    completions = await context.generate(request)
    if len(completions) != request.n:
        raise EngineError(f"asked for {request.n} samples, the engine returned {len(completions)}")
    if context.require_versions:
        for completion in completions:
            _check_versions(sample, completion)
    return completions


async def _pictures(sample: Sample) -> tuple[Picture, ...]:
    if not sample.picture_places:
        return ()
    return await asyncio.to_thread(pictures.for_engine, sample.multimodal_inputs, sample.picture_places)


def check_prompt(sample: Sample, vocab_size: int) -> None:
    """Raises UsageError for a token id that the model does not have."""
    bad = next((token for token in sample.prompt_ids if not 0 <= token < vocab_size), None)
    if bad is not None:  # SGLang's CPU server dies of such an id
        raise UsageError(
            f"token id {bad} is outside the model's vocabulary of {vocab_size}; do tokenizer and model belong together?"
        )


def _check_versions(sample: Sample, completion: Completion) -> None:
    reached = 0
    for span in completion.versions:
        if span.start != reached:
            break
        reached = span.end
    if reached != len(completion.token_ids):
        found = (
            "no weight version at all"
            if not completion.versions
            else f"versions for {reached} of {len(completion.token_ids)} tokens: {completion.versions}"
        )
        raise EngineError(
            f"{_name(sample)}: the engine reports {found}; without it the weights that sampled a token are unknown"
        )


def _name(sample: Sample) -> str:
    return f"prompt {sample.prompt_index} ({len(sample.prompt_ids)} tokens, {sample.prompt_text[:60]!r})"
