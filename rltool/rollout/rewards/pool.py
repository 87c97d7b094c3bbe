"""Runs any reward function: a plain one in processes of its own, an async one on the event loop.

A reward function is `f(sample: Sample, text: str) -> float`, plain or async; `text` is the decoded response. An async
one may take a third argument, `context`, by which it reaches other models. A plain
one that hangs, dies or holds the interpreter must not hold up the rollout manager, so it runs in worker processes. They
are started with the pool and import the function once; a group of samples travels in one message, and every sample is
answered as soon as it is scored. So a deadline is that of one sample, a worker that hangs or dies is known to have done
so at one sample, and after that one has failed the others of its group go on in a new worker.

Not here: what a failure means for the sample, its group and the run (rltool.rollout.rewards.scoring).
"""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import inspect
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rltool.config.import_path import load_callable
from rltool.config.reward import SHIPPED
from rltool.errors import RltoolError, UsageError
from rltool.processes.tasks import beside
from rltool.processes.worker_pool import START_SECONDS, WorkerLost, WorkerPool
from rltool.rollout.rewards.worker import CHANGED, describe, finite
from rltool.rollout.sample import Sample
from rltool.rollout.serving.model_clients import Models, RewardContext, ended_in_time, too_slow

RewardFunction = Callable[..., Any]
CONTEXT = "context"
"""The argument by which an async function asks for a RewardContext."""

LOST_GROUPS = 3
"""How many workers in a row may die before they have begun a group, which is no sample's fault."""


@dataclass(frozen=True)
class RewardFailure:
    """Why a sample has no reward."""

    reason: str


class RewardPool:
    """The reward function of a run. Construct it early: its workers warm up meanwhile. Owned by one event loop.

    function_path: a name of config.reward.SHIPPED or `package.module:function`; UsageError if it cannot be imported.
    options: keyword arguments of every call. workers: processes for a plain
    function, this many groups are scored at once; an async function needs none, and its samples run all side by side.
    timeout: seconds for each sample. refuse_changes: a function that changes its sample fails it (a worker's changes
    are lost, an async function's are not). models: what an async function that takes `context` reaches by it.
    """

    def __init__(
        self, function_path: str, *, workers: int, timeout: float, refuse_changes: bool = False,
        models: Models | None = None, options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._timeout, self._refuse_changes = timeout, refuse_changes
        self._options = dict(options or {})
        self._function = load_reward(function_path, self._options)
        self.is_async = is_async(self._function)
        asks = wants_context(self._function)
        self._models = (asks and models) or Models()
        self._keywords = self._options | ({CONTEXT: RewardContext(self._models)} if asks else {})
        self._workers = WorkerPool(
            "a reward worker", "rltool.rollout.rewards.worker:main",
            (import_path_of(function_path), self._options, refuse_changes),
            workers=0 if self.is_async else workers,
        )  # fmt: skip
        self._workers.start()

    async def ready(self) -> None:
        """Wait until every worker has imported the function. Raises RltoolError for one that cannot."""
        await self._workers.ready()

    async def score(self, samples: list[Sample], texts: list[str]) -> list[float | RewardFailure]:
        """The reward of each sample, of which a plain function gets a copy. Call it once per group.

        A function that raises, is too slow, kills its process or returns anything but a finite number fails that
        sample. RltoolError only if workers die without a sample's doing.
        """
        if len(samples) != len(texts):
            raise ValueError(f"{len(samples)} samples and {len(texts)} texts")
        if self._workers.closed:
            raise RltoolError("the reward pool is closed")
        if self.is_async:
            return await self._score_on_the_loop(samples, texts)
        packed, outcomes = _pack(samples, texts)
        lost = 0
        while left := [index for index in range(len(samples)) if index not in outcomes]:
            lost = 0 if await self._score_in_a_worker(left, packed, outcomes) else lost + 1
            if lost == LOST_GROUPS:
                raise RltoolError(
                    f"{lost} reward workers in a row died before they took up a group: is the host out of memory?"
                )
        return [outcomes[index] for index in range(len(samples))]

    async def close(self) -> None:
        """Kill the workers. May be called twice; a `score` that is in progress raises."""
        await self._workers.close()

    async def _score_in_a_worker(
        self, indices: list[int], packed: list[bytes], outcomes: dict[int, float | RewardFailure]
    ) -> bool:
        """Adds to `outcomes`, in order, until all are there or the worker is lost. False if it never took the group
        up."""
        group = pickle.dumps([packed[index] for index in indices])
        async with self._workers.job(group, answers=1 + len(indices)) as job:
            try:
                await job.answer(START_SECONDS)  # ACCEPTED
            except (TimeoutError, WorkerLost):
                return False
            for index in indices:
                try:
                    answer = await job.answer(self._timeout)
                except TimeoutError:
                    outcomes[index] = RewardFailure(too_slow(self._timeout))
                    break
                except WorkerLost as error:
                    if self._workers.closed:
                        raise RltoolError("the reward pool was closed while it scored") from error
                    outcomes[index] = RewardFailure(f"the reward function ended its process ({error})")
                    break
                outcomes[index] = RewardFailure(answer["failed"]) if isinstance(answer, dict) else float(answer)
            else:
                return True
        self._workers.start()  # the next group need not wait for an import
        return True

    async def _score_on_the_loop(self, samples: list[Sample], texts: list[str]) -> list[float | RewardFailure]:
        # Their end is not waited for: a function may ignore its cancellation.
        async with beside(*map(self._call, samples, texts), grace=0) as tasks:
            for task in tasks:
                task.add_done_callback(look_at)
            late = RewardFailure(await ended_in_time(tasks, self._timeout, self._models) or "")
            return [_outcome(task) if task.done() else late for task in tasks]

    async def _call(self, sample: Sample, text: str) -> float:
        before = copy.deepcopy(sample) if self._refuse_changes else sample
        try:
            reward = finite(await self._function(sample, text, **self._keywords))
        except SystemExit as error:  # of a task it would end the event loop
            raise RuntimeError(describe(error)) from error
        if before != sample:
            raise ValueError(CHANGED)
        return reward


def import_path_of(name: str) -> str:
    """Of a reward that ships with rltool; any other text is an import path already."""
    return SHIPPED[name].path if name in SHIPPED else name


def load_reward(
    name: str, options: Mapping[str, Any] | None = None, *, setting: str = "reward.function"
) -> RewardFunction:
    """A reward by name or import path as a function; UsageError for a path that leads nowhere, or to what is no reward,
    a package that is not installed, and options that the function does not take."""
    shipped = SHIPPED.get(name)
    if shipped is not None and shipped.package and importlib.util.find_spec(shipped.package) is None:
        raise UsageError(
            f"{setting} = {name!r} needs a package that is not installed here: pip install 'rltool[{shipped.extra}]'"
        )
    path = import_path_of(name)
    function = load_callable(path, setting=setting)
    takes = ("sample", "text")
    if wants_context(function):
        if not is_async(function):
            raise UsageError(
                f"{setting} = {path!r} takes a context, so it must be `async def`: plain functions run in processes of "
                "their own, from which no engine is reached"
            )
        takes = (*takes, CONTEXT)
    return load_callable(path, setting=setting, takes=takes, options=options or ())


def wants_context(function: Callable[..., Any]) -> bool:
    """Whether it has an argument of that name."""
    try:
        return CONTEXT in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False  # of some functions written in C nothing is known


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine; callable objects with an async __call__ count."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _pack(samples: list[Sample], texts: list[str]) -> tuple[list[bytes], dict[int, float | RewardFailure]]:
    """What travels of each sample, and the failures of those that cannot, by index: anything may be in a sample's
    metadata."""
    packed, failures = [], {}
    for index, pair in enumerate(zip(samples, texts, strict=True)):
        try:
            packed.append(pickle.dumps(pair))
        except Exception as error:
            packed.append(b"")
            failures[index] = RewardFailure(f"the sample cannot be sent to a reward worker: {describe(error)}")
    return packed, failures


def look_at(task: asyncio.Future[float]) -> None:
    """So that asyncio does not log the error of one that came too late."""
    if not task.cancelled():
        task.exception()


def _outcome(task: asyncio.Future[float]) -> float | RewardFailure:
    if task.cancelled():
        return RewardFailure("CancelledError: the reward function was cancelled from within")
    error = task.exception()
    return task.result() if error is None else RewardFailure(describe(error))
