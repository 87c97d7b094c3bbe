"""The rollout side of a run in one object: data, generation, rewards, evaluation. Plain Python, no Ray.

The loop (or a Ray actor around this class) calls it from one thread; HTTP runs on an asyncio loop in a thread of its own.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rltool.config.import_path import load_callable
from rltool.config.train import TrainConfig
from rltool.engines.client import EngineClient
from rltool.engines.endpoints import EngineEndpoint, ModelEndpoints
from rltool.engines.types import Completion, GenerateRequest, SamplingParams
from rltool.errors import TrainingStopped
from rltool.rollout.data import Prompt, PromptSource, load_prompts
from rltool.rollout.generate import DataPlane, GenerateContext, GenerateFunction, generate_groups, make_groups
from rltool.rollout.metrics import eval_metrics, rollout_metrics
from rltool.rollout.rewards import RewardStats, score_samples
from rltool.rollout.sample import Sample, SampleStatus
from rltool.rollout.tokenizer import Tokenizer, load_tokenizer

T = TypeVar("T")

EVAL_STEP = -1
"""Stands for the step in the seeds of evaluation: always the same, so that before and after draw the same numbers."""


@dataclass(frozen=True)
class RolloutResult:
    """samples: scored, in prompt order, dropped ones taken out; metrics: stable names; seconds: generation and scoring."""

    samples: list[Sample]
    metrics: dict[str, float]
    seconds: float


@dataclass(frozen=True)
class EndpointTarget:
    """An engine or router as generate.py sees it."""

    client: EngineClient
    endpoint: EngineEndpoint
    timeout: float

    @property
    def name(self) -> str:
        return self.endpoint.url

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        return await self.client.generate(self.endpoint, request, timeout=self.timeout)


def data_targets(model: ModelEndpoints, router: str | None = None) -> tuple[EngineEndpoint, ...]:
    """Where generation goes: the router given, else the one that endpoints.json names, else every engine itself."""
    if router is not None:
        model = model.model_copy(update={"data_url": router.rstrip("/")})
    data = model.data_endpoint()
    return (data,) if data is not None else model.engines


class RolloutManager:
    """Owns the data source, the reward function and the data plane.

    targets: from `data_targets`, dialects known. num_engines: engines behind them (a router is one target for many).
    vocab_size: of the trainer's model; None takes the tokenizer directory's config.json.
    require_versions: refuse completions that do not say which weights sampled them.
    on_progress(done, total): groups of the rollout in progress; called on the HTTP thread.
    Construction reads all data files and imports the reward: UsageError for whatever is wrong there.
    """

    def __init__(
        self,
        config: TrainConfig,
        targets: Sequence[EngineEndpoint],
        *,
        num_engines: int | None = None,
        vocab_size: int | None = None,
        require_versions: bool = True,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._config = config
        self._require_versions = require_versions
        self._on_progress = on_progress
        rollout, sampling = config.rollout, config.sampling
        self.tokenizer: Tokenizer = load_tokenizer(
            config.model.path, stop_token_ids=sampling.stop_token_ids, trust_remote_code=config.model.trust_remote_code
        )
        self._vocab_size = vocab_size or self.tokenizer.vocab_size
        self._reward = load_callable(config.reward.function, setting="reward.function")
        self._generate: GenerateFunction | None = None
        if rollout.generate_function is not None:
            self._generate = load_callable(rollout.generate_function, setting="rollout.generate_function")
        train = load_prompts(config.data.train, self.tokenizer, config.data, max_prompt_tokens=sampling.max_prompt_tokens)
        self.num_prompts = len(train.prompts)
        self.num_prompts_too_long = train.num_too_long
        self._source = PromptSource(train.prompts, seed=config.seed, shuffle=config.data.shuffle)
        self._eval_sets: dict[str, list[Prompt]] = {
            name: load_prompts(
                [path], self.tokenizer, config.data, max_prompt_tokens=sampling.max_prompt_tokens, limit=config.eval.max_prompts
            ).prompts
            for name, path in config.eval.sets.items()
        }
        self._thread = _LoopThread()
        try:
            self._client: EngineClient = self._thread.run(EngineClient().__aenter__())
            self._plane: DataPlane = self._thread.run(self._make_plane(targets, num_engines or len(targets)))
        except BaseException:
            self.close()
            raise

    @property
    def client(self) -> EngineClient:
        """The one HTTP client of the run; its coroutines go through `run`."""
        return self._client

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the HTTP thread's loop and wait for it: how the control plane shares the client."""
        return self._thread.run(coroutine)

    def set_targets(self, targets: Sequence[EngineEndpoint], *, num_engines: int | None = None) -> None:
        """The fleet changed: requests of the next rollout go to `targets`."""
        self._plane = self._thread.run(self._make_plane(targets, num_engines or len(targets)))

    def generate(self, step: int) -> RolloutResult:
        """One rollout: the next prompts, samples_per_prompt samples each, scored.

        Samples whose reward failed, and responses still aborted after all continuations, are dropped and counted.
        TrainingStopped if rewards fail for more than reward.max_failure_fraction, or no sample is left. After any error
        the data source stands where it was before, so a checkpoint taken then does not skip the prompts.
        """
        position = self._source.state_dict()
        try:
            return self._generate_step(step)
        except BaseException:
            self._source.load_state_dict(position)
            raise

    def _generate_step(self, step: int) -> RolloutResult:
        rollout = self._config.rollout
        start = time.perf_counter()
        groups = make_groups(
            self._source.next(rollout.prompts_per_step), samples_per_prompt=rollout.samples_per_prompt, run_seed=self._config.seed, step=step
        )
        self._thread.run(generate_groups(groups, self._context(self._config.sampling.temperature), function=self._generate, on_progress=self._on_progress))
        generated = time.perf_counter()
        finished, aborted = _split([sample for group in groups for sample in group], SampleStatus.ABORTED)
        rewards = self._score(finished)
        kept, failed = _split(finished, SampleStatus.FAILED)
        # group filters (drop, or keep for a later step) have their place here
        dropped = {"reward_failed": len(failed), "aborted": len(aborted)}
        if not kept:
            raise TrainingStopped(f"step {step}: no sample is left of {len(failed) + len(aborted)} ({dropped}). {rewards.describe()}")
        metrics = rollout_metrics(kept, seconds=generated - start, dropped=dropped)
        metrics["rollout/epoch"] = float(self._source.epoch)
        metrics["time/generate_seconds"] = generated - start
        metrics["time/reward_seconds"] = time.perf_counter() - generated
        return RolloutResult(kept, metrics, time.perf_counter() - start)

    def evaluate(self) -> dict[str, float]:
        """Metrics of every evaluation set, sampled at eval.temperature with the same seeds each time."""
        metrics: dict[str, float] = {}
        config = self._config.eval
        for name, prompts in self._eval_sets.items():
            start = time.perf_counter()
            groups = make_groups(prompts, samples_per_prompt=config.samples_per_prompt, run_seed=self._config.seed, step=EVAL_STEP)
            self._thread.run(generate_groups(groups, self._context(config.temperature), function=self._generate))
            samples = [sample for group in groups for sample in group]
            self._score(samples)
            metrics.update(eval_metrics(name, samples))
            metrics[f"eval/{name}/seconds"] = time.perf_counter() - start
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """JSON-serialisable; what a checkpoint keeps of the rollout side. The synchronous source has no surplus groups to keep."""
        return {"version": 1, "train": self._source.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._source.load_state_dict(state["train"])

    def close(self) -> None:
        """Close connections and end the HTTP thread. May be called twice."""
        client = getattr(self, "_client", None)
        if client is not None and self._thread.alive:
            self._thread.run(client.__aexit__(None, None, None))
        self._thread.stop()

    def _context(self, temperature: float) -> GenerateContext:
        sampling = self._config.sampling
        params = SamplingParams(
            max_tokens=sampling.max_response_tokens,
            temperature=temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=self.tokenizer.stop_ids,
        )
        return GenerateContext(self._plane.generate, params, self._vocab_size, self._require_versions)

    def _score(self, samples: Sequence[Sample]) -> RewardStats:
        config = self._config.reward
        stats = self._thread.run(score_samples(samples, self._reward, self.tokenizer.decode, workers=config.workers, timeout=self._config.deadlines.reward))
        if stats.failed_fraction > config.max_failure_fraction:
            raise TrainingStopped(
                f"{stats.describe()}. That is above reward.max_failure_fraction = {config.max_failure_fraction:g}: "
                f"check {config.function} with rltool.rollout.contracts.check_reward_function"
            )
        return stats

    async def _make_plane(self, targets: Sequence[EngineEndpoint], num_engines: int) -> DataPlane:
        rollout = self._config.rollout
        reached = [EndpointTarget(self._client, endpoint, self._config.deadlines.generate) for endpoint in targets]
        return DataPlane(reached, max_in_flight=rollout.requests_per_engine * num_engines)


def _split(samples: Sequence[Sample], status: SampleStatus) -> tuple[list[Sample], list[Sample]]:
    """(samples of any other status, samples of this status)."""
    return [s for s in samples if s.status is not status], [s for s in samples if s.status is status]


class _LoopThread:
    """An asyncio loop in a daemon thread. `run` blocks until the coroutine is done; an interrupt cancels it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-http", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
