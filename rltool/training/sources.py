"""Where the loop's data comes from. The loop knows `next(step, max_staleness)` and no more."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rltool.algorithms.batch import TrainBatch
from rltool.config.train import TrainConfig
from rltool.errors import UsageError
from rltool.models.registry import family_for, read_hf_config
from rltool.rollout.batching import SupervisedSet, samples_to_batch, supervised_batch, supervised_set
from rltool.rollout.data import PromptSource, load_prompts
from rltool.rollout.dump import dumped_steps, read_dump, write_dump
from rltool.rollout.manager import RolloutResult
from rltool.rollout.metrics import rollout_metrics
from rltool.rollout.synthetic import synthetic_samples
from rltool.rollout.tokenizer import load_tokenizer


@dataclass(frozen=True)
class SourcedBatch:
    """One step's global batch and what is known of its making. weight_versions: all that its tokens were sampled from."""

    batch: TrainBatch
    metrics: dict[str, float] = field(default_factory=dict)
    weight_versions: tuple[str, ...] = ()


class BatchSource(Protocol):
    """Synchronous rollouts, recorded ones and supervised data are all this; so will be asynchronous ones."""

    def next(self, step: int, max_staleness: int) -> SourcedBatch:
        """The batch of `step`, sampled from weights at most max_staleness versions old."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Rollouts:
    """Fresh rollouts: generates when asked, so staleness is 0. `generate(step)` runs the rollout manager wherever it lives."""

    def __init__(self, config: TrainConfig, generate: Callable[[int], RolloutResult], get_state: Callable[[], dict[str, Any]], set_state: Callable[[dict[str, Any]], None], dump_dir: Path | None) -> None:
        self._config = config
        self._generate = generate
        self._get_state = get_state
        self._set_state = set_state
        self._dump_dir = dump_dir

    def next(self, step: int, max_staleness: int) -> SourcedBatch:
        result = self._generate(step)
        if self._dump_dir is not None:
            write_dump(self._dump_dir, step=step, seed=self._config.seed, samples=result.samples, info={"metrics": result.metrics})
        versions = sorted({span.version for sample in result.samples for span in sample.versions})
        batch = samples_to_batch(result.samples)
        return SourcedBatch(batch, result.metrics, tuple(versions))

    def state_dict(self) -> dict[str, Any]:
        return self._get_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._set_state(state)


class RecordedRollouts:
    """Replays dumps, step by step. No engine takes part."""

    def __init__(self, config: TrainConfig, directory: Path) -> None:
        self._config = config
        self.directory = directory
        self.steps = dumped_steps(directory) if directory.is_dir() else []
        if not self.steps:
            raise UsageError(f"{directory} holds no recorded rollout (step_*.json); `rltool debug rollout-only` or rollout.dump = true writes them")

    def next(self, step: int, max_staleness: int) -> SourcedBatch:
        dump = read_dump(self.directory, step)
        batch = samples_to_batch(dump.samples)
        return SourcedBatch(batch, rollout_metrics(dump.samples, seconds=None, dropped={}), tuple(dump.weight_versions))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class FakeRollouts:
    """Synthetic samples, a function of seed and step. No engine takes part, and nothing is learned from them.

    record: directory that gets them as a dump as well.
    """

    def __init__(self, config: TrainConfig, record: Path | None) -> None:
        self._config = config
        self._record = record
        self._vocab_size = family_for(read_hf_config(config.model.path)).vocab_size

    def next(self, step: int, max_staleness: int) -> SourcedBatch:
        rollout, sampling = self._config.rollout, self._config.sampling
        samples = synthetic_samples(
            step, seed=self._config.seed, num_prompts=rollout.prompts_per_step, samples_per_prompt=rollout.samples_per_prompt,
            max_prompt_tokens=sampling.max_prompt_tokens, max_response_tokens=sampling.max_response_tokens, vocab_size=self._vocab_size,
        )  # fmt: skip
        if self._record is not None:
            write_dump(self._record, step=step, seed=self._config.seed, samples=samples, info={"synthetic": True})
        return SourcedBatch(samples_to_batch(samples), rollout_metrics(samples, seconds=None, dropped={}))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class SupervisedData:
    """Rows of the data set with their targets, for algorithm.loss = "sft"."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        tokenizer = load_tokenizer(config.model.path, stop_token_ids=config.sampling.stop_token_ids, trust_remote_code=config.model.trust_remote_code)
        loaded = load_prompts(config.data.train, tokenizer, config.data, max_prompt_tokens=config.sampling.max_prompt_tokens)
        self.rows: SupervisedSet = supervised_set(loaded.prompts, tokenizer, max_response_tokens=config.sampling.max_response_tokens)
        self._source = PromptSource(self.rows.prompts, seed=config.seed, shuffle=config.data.shuffle)

    def next(self, step: int, max_staleness: int) -> SourcedBatch:
        started = time.perf_counter()
        prompts = self._source.next(self._config.rollout.prompts_per_step)
        batch = supervised_batch(prompts, self.rows.targets)
        return SourcedBatch(batch, {"time/generate_seconds": time.perf_counter() - started})

    def state_dict(self) -> dict[str, Any]:
        return self._source.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._source.load_state_dict(state)
