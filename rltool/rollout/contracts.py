"""Contract tests that users run on their own functions, in their own test suites.

from rltool.rollout.contracts import check_reward_function
def test_my_reward():
    check_reward_function("my_package.rewards:brevity")
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from rltool.config.data import DataConfig
from rltool.config.import_path import load_callable
from rltool.config.reward import RewardConfig
from rltool.config.rollout import DeadlinesConfig, RolloutConfig
from rltool.engines.types import Completion, GenerateRequest, SamplingParams, VersionSpan
from rltool.engines.weight_version import Lineage
from rltool.errors import ContractViolation
from rltool.rollout.admission import AdmissionPolicy
from rltool.rollout.collector import CollectorConfig
from rltool.rollout.data import Prompt, PromptSource
from rltool.rollout.data.own import OwnSource, load_own_source
from rltool.rollout.generate import GenerateContext, fill_group, open_http
from rltool.rollout.groups import Group
from rltool.rollout.json_fields import unwritable
from rltool.rollout.measure.eval_set import EvalSet, EvalSettings
from rltool.rollout.measure.evaluation import evaluate_set
from rltool.rollout.measure.own_metrics import checked_metrics
from rltool.rollout.own_batch import SampleJudge, changed_batch
from rltool.rollout.own_rollout import OwnCollector, load_rollout
from rltool.rollout.rewards.group import GroupReward
from rltool.rollout.rewards.pool import RewardFailure, RewardPool
from rltool.rollout.rewards.scoring import Scorer
from rltool.rollout.sample import Sample, SampleStatus
from rltool.rollout.serving.model_clients import Models
from rltool.rollout.serving.versions import VersionBook
from rltool.rollout.tokenizer import Tokenizer

T = TypeVar("T")

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
    context = _context(problems, tokenizer, models)
    try:
        asyncio.run(_with_http(context, lambda given: fill_group(group, given, function)))
    except Exception as error:  # reported as a violation, with its cause
        raise ContractViolation(f"{path}: raised {type(error).__name__}: {error}") from error
    for sample in group:
        if len(sample.prompt_ids) != 3:
            problems.append(f"sample {sample.index}: the prompt was changed; append to the response instead")
        if not any(sample.response_mask):
            problems.append(f"sample {sample.index}: no token of the response was sampled by the policy")
        if any(not math.isfinite(value) for value in sample.response_logprobs):
            problems.append(f"sample {sample.index}: a log-probability is not finite")
    problems += filter(None, (unwritable(sample, ("train_metadata",)) for sample in group))
    _raise_if_any(path, problems)


def _context(problems: list[str], tokenizer: Tokenizer | None, models: Models | None) -> GenerateContext:
    """With an engine that answers every request, and adds to `problems` what is wrong with it."""

    async def engine(request: GenerateRequest) -> list[Completion]:
        if request.seed is None:
            problems.append("a request without a seed: the rollout cannot be repeated")
        if any(not 0 <= token < 100 for token in request.prompt_ids):
            problems.append("a prompt id outside the vocabulary")
        return [
            Completion((5, 6, 7), (-0.5, -0.25, -0.125), "stop", (VersionSpan("run:0:1", 0, 3),))
            for _ in range(request.n)
        ]

    return GenerateContext(
        generate=engine, sampling=SamplingParams(max_tokens=16), vocab_size=100, models=models or Models(),
        tokenizer=tokenizer,
    )  # fmt: skip


async def _with_http(context: GenerateContext, work: Callable[[GenerateContext], Awaitable[T]]) -> T:
    async with open_http(DeadlinesConfig()) as session:
        return await work(replace(context, http_session=session))


class _EveryOtherIsRight:
    """Rewards of the example set."""

    async def score(self, samples: list[Sample], texts: list[str]) -> list[float | RewardFailure]:
        return [float(sample.index % 2) for sample in samples]


def example_eval_set() -> EvalSet:
    """Two prompts, four samples of each, of which every other one is right."""
    prompts = [Prompt(i, (1, 2, 3 + i), f"{i} x 7 = ", label=str(7 * i)) for i in range(2)]
    settings = EvalSettings(samples_per_prompt=4, temperature=1.0, top_p=1.0, top_k=-1, max_response_tokens=16)
    return EvalSet("contract", prompts, settings, Scorer(_EveryOtherIsRight(), lambda ids: " ".join(map(str, ids))))


def check_eval_function(
    path: str, *, eval_set: EvalSet | None = None, tokenizer: Tokenizer | None = None, models: Models | None = None
) -> None:
    """ContractViolation unless eval.function = path gives names and finite numbers, and the same ones again, against an
    engine that answers every request. eval_set: your own; None: `example_eval_set`. tokenizer, models: as for
    check_generate_function."""
    function = load_callable(path, setting="eval.function", takes=("eval_set", "context"))
    problems: list[str] = []
    found = []
    for _ in range(2):
        one = eval_set or example_eval_set()
        work = partial(evaluate_set, one, function=None, eval_seed=0, evaluate=function)
        try:
            metrics = asyncio.run(_with_http(_context(problems, tokenizer, models), work)).metrics
        except Exception as error:
            raise ContractViolation(f"{path}: {type(error).__name__}: {error}") from error
        found.append({name: value for name, value in metrics.items() if not name.endswith("/seconds")})
    if found[0] != found[1]:
        problems.append("another result the second time: let what it chooses at random follow from context.seed")
    _raise_if_any(path, problems)


def example_group(size: int = 4) -> list[Sample]:
    """Scored samples of one prompt, with rewards 0, 1/3, 2/3, 1 for a size of 4."""
    return [
        Sample(
            group_id=0, index=i, prompt_index=0, prompt_ids=[1, 2, 3], prompt_text="6 x 7 = ", label="42", seed=i,
            response_ids=[5] * (i + 1), response_mask=[1] * (i + 1), response_logprobs=[-0.5] * (i + 1),
            status=SampleStatus.COMPLETED, reward=i / max(size - 1, 1),
        )
        for i in range(size)
    ]  # fmt: skip


def check_group_filter(path: str, *, groups: Sequence[list[Sample]] = ()) -> None:
    """ContractViolation unless rollout.group_filter = path gives a reason or None for every group, changes nothing, and
    decides the same for the same group again. groups: your own; without any, groups of 4, 2 and 1 are used."""
    function = load_callable(path, setting="rollout.group_filter", takes=("group",))
    problems = []
    for group in list(groups) or [example_group(size) for size in (4, 2, 1)]:
        before, first = copy.deepcopy(group), _called(path, function, group)
        if first is not None and not isinstance(first, str):
            problems.append(f"a group of {len(group)}: returned {type(first).__name__}, expected a reason or None")
        if group != before:
            problems.append(f"a group of {len(group)}: the filter changed its samples")
        elif _called(path, function, group) != first:
            problems.append(f"a group of {len(group)}: another answer the second time")
    _raise_if_any(path, problems)


def check_group_hook(path: str, *, groups: Sequence[list[Sample]] = ()) -> None:
    """ContractViolation unless rollout.group_hook = path leaves every sample valid, with a finite reward and the tokens
    that were sampled. groups: as for check_group_filter."""
    function = load_callable(path, setting="rollout.group_hook", takes=("group",))
    problems = []
    for group in list(groups) or [example_group(size) for size in (4, 2, 1)]:
        before = copy.deepcopy(group)
        if _called(path, function, group) is not None:
            problems.append("returned something: what it changes, it changes in the samples")
        if len(group) != len(before):
            problems.append("added or removed samples: set remove_sample in place of that")
        for sample, old in zip(group, before, strict=False):
            sampled = (sample.prompt_ids, sample.response_ids, sample.response_logprobs, sample.versions)
            if sampled != (old.prompt_ids, old.response_ids, old.response_logprobs, old.versions):
                problems.append(f"sample {sample.index}: tokens or log-probabilities were changed")
            if sample.reward is None or not math.isfinite(sample.reward):
                problems.append(f"sample {sample.index}: its reward is {sample.reward}")
        problems += filter(None, (unwritable(sample, ("train_metadata",)) for sample in group))
    _raise_if_any(path, problems)


class _ExampleWork:
    """OwnWork with an engine that answers every request, and rewards of 0 and 1."""

    def __init__(self, context: GenerateContext) -> None:
        self._context, self._scorer = context, Scorer(_EveryOtherIsRight(), lambda ids: " ".join(map(str, ids)))

    async def generate(self, group: Group, interrupted: Callable[[], bool]) -> None:
        await fill_group(group.samples, replace(self._context, prompt=group.prompt))

    async def finish(self, group: Group) -> str | None:
        return await self._scorer.finish(group.samples)

    async def abort(self, groups: Collection[int]) -> None:
        pass

    def keeps_partial_groups(self) -> bool:
        return False

    def context(self) -> GenerateContext:
        return self._context


def check_rollout_function(path: str, *, tokenizer: Tokenizer | None = None, models: Models | None = None) -> None:
    """ContractViolation unless rollout.function = path gives two batches of two groups that can be trained on, against
    an engine that answers every request. tokenizer, models: as for check_generate_function."""
    problems: list[str] = []
    prompts = [Prompt(i, (1, 2, 3 + i), f"{i} x 7 = ", label=str(7 * i)) for i in range(8)]
    policy, book = AdmissionPolicy(batch=2), VersionBook(Lineage("run", 0), published=0)
    function = load_rollout(RolloutConfig(function=path))
    assert function is not None

    async def batches(context: GenerateContext) -> None:
        collector = OwnCollector(
            function, SampleJudge(100, policy, None), PromptSource(prompts, seed=0), policy, _ExampleWork(context),
            book,
            CollectorConfig(
                samples_per_prompt=4, run_seed=0, group_deadline=60, batch_deadline=60, max_filtered=100,
                judges_age=False,
            ),
        )  # fmt: skip
        try:
            for step in range(2):
                book.publish(step)
                await collector.next(step)
                collector.ledger.check()
        finally:
            await collector.interrupt()

    try:
        asyncio.run(_with_http(_context(problems, tokenizer, models), batches))
    except Exception as error:
        raise ContractViolation(f"{path}: {type(error).__name__}: {error}") from error
    _raise_if_any(path, problems)


def check_batch_hook(path: str, *, samples: Sequence[Sample] = ()) -> None:
    """ContractViolation unless rollout.batch_hook = path returns samples that can be trained on, and the same ones
    again. samples: your own batch; without any, groups of 4 and 2."""
    hook = load_callable(path, setting="rollout.batch_hook", takes=("samples",))
    batch = list(samples) or [*example_group(4), *(replace(sample, group_id=1) for sample in example_group(2))]
    judge = SampleJudge(2**31, AdmissionPolicy(batch=2), refusal=None)
    try:
        first, again = (changed_batch(hook, batch, judge, 0).samples for _ in range(2))
    except Exception as error:
        raise ContractViolation(f"{path}: {type(error).__name__}: {error}") from error
    if first != again:
        raise ContractViolation(f"{path}: other samples the second time: a run that resumes would train on others")


def check_group_reward(path: str, *, options: Mapping[str, Any] | None = None, models: Models | None = None) -> None:
    """ContractViolation unless reward.group = path gives one finite number for each sample of groups of 4, 2 and 1."""
    config = RewardConfig(group=path, group_options=dict(options or {}))
    together = GroupReward(config, timeout=60.0, models=models or Models())
    for size in (4, 2, 1):
        try:
            asyncio.run(together.apply(example_group(size), list(EXAMPLE_TEXTS[:size])))
        except Exception as error:
            raise ContractViolation(f"{path}: a group of {size}: {type(error).__name__}: {error}") from error


def check_metrics_function(path: str, *, samples: Sequence[Sample] = ()) -> None:
    """ContractViolation unless monitor.metrics = path gives names and finite numbers. samples: your own batch."""
    function = load_callable(path, setting="monitor.metrics", takes=("samples",))
    found = _called(path, function, list(samples) or [*example_group(4), *example_group(2)])
    try:
        checked_metrics(found)
    except ValueError as error:
        raise ContractViolation(f"{path}: {error}") from error


def check_data_source(path: str, *, tokenizer: Tokenizer, config: DataConfig | None = None, rows: int = 50) -> None:
    """ContractViolation unless data.source = path gives rows that become prompts, does not stop, and goes on exactly
    from a state that it saved. tokenizer: of the model, or a stand-in. config: further settings of [data]."""
    made = (config or DataConfig()).model_copy(update={"source": path})

    def fresh() -> OwnSource:
        return load_own_source(made, tokenizer, seed=0, max_prompt_tokens=2**31)

    try:
        source, resumed = fresh(), fresh()
        source.next(rows // 2)
        state = json.loads(json.dumps(source.state_dict()))
        expected = source.next(rows)
        resumed.load_state_dict(state)
        found = resumed.next(rows)
        again = fresh().next(rows // 2 + rows)[rows // 2 :]
    except Exception as error:
        raise ContractViolation(f"{path}: {type(error).__name__}: {error}") from error
    if found != expected:
        raise ContractViolation(f"{path}: a source that resumed gives other rows than the one that saved the state")
    if again != expected:
        raise ContractViolation(f"{path}: two sources of one seed give different rows: a run could not be repeated")


def _called(path: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:
        raise ContractViolation(f"{path}: raised {type(error).__name__}: {error}") from error


def _raise_if_any(path: str, problems: list[str]) -> None:
    if problems:
        raise ContractViolation(f"{path} breaks its contract:\n" + "\n".join(f"  - {problem}" for problem in problems))
