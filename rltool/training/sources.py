"""Where the loop's data comes from. The loop knows `next_batch(step)` and no more."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch

from rltool.algorithms.batch import Put, TrainBatch
from rltool.config.train import TrainConfig
from rltool.errors import UsageError
from rltool.models.registry import family_for, read_hf_config
from rltool.report.samples import SampleRecord
from rltool.rollout.batching import SupervisedSet, samples_to_batch, supervised_batch, supervised_set
from rltool.rollout.data import PromptSet, PromptSource, data_summary, load_prompts
from rltool.rollout.measure.dump import dumped_steps, read_dump, write_dump
from rltool.rollout.measure.metrics import rollout_metrics
from rltool.rollout.measure.replay_choice import subsample
from rltool.rollout.measure.sample_metrics import all_sample_metrics
from rltool.rollout.measure.sample_records import records_to_keep
from rltool.rollout.sample import Sample
from rltool.rollout.snapshot import SourceState
from rltool.rollout.synthetic import synthetic_samples
from rltool.rollout.tokenizer import Tokenizer, load_tokenizer
from rltool.training.checks.modalities import check_samples, run_tokenizer, training_refusal


@dataclass(frozen=True)
class SourcedBatch:
    """One step's global batch and what is known of its making. weight_versions: all that its tokens were sampled
    from; kept: row of the batch -> record, of the samples that are kept for people to look at."""

    batch: TrainBatch
    metrics: dict[str, float] = field(default_factory=dict)
    weight_versions: tuple[str, ...] = ()
    kept: Mapping[int, SampleRecord] = field(default_factory=dict)


class BatchSource(Protocol):
    """Rollouts (training/manager/rollouts.py), recorded and synthetic ones and supervised data are all this."""

    def next_batch(self, step: int) -> SourcedBatch:
        """The batch of training step `step`; steps are asked for in their order."""
        ...

    def state_dict(self, done: int) -> SourceState:
        """What a checkpoint after `done` training steps keeps: a batch that was given out for a later step is not
        trained."""
        ...

    def load_state_dict(self, state: dict[str, Any], directory: Path | None) -> None:
        """directory: of the checkpoint that `state` comes from."""


class Stateless:
    """A source whose batches are a function of the step."""

    def state_dict(self, done: int) -> SourceState:
        return SourceState({})

    def load_state_dict(self, state: dict[str, Any], directory: Path | None) -> None:
        pass


def _dated(batch: TrainBatch, step: int) -> TrainBatch:
    """Samples without weight versions count as on-policy."""
    if batch.token_versions is not None:
        return batch
    return batch.replace(token_versions=torch.where(batch.loss_mask > 0, step, -1))


class RecordedRollouts(Stateless):
    """Replays dumps, step by step. No engine takes part.

    steps: the recorded one of each training step, None: that of the same number. share: of each step's prompt groups.
    put: as of samples_to_batch.
    """

    def __init__(
        self, config: TrainConfig, directory: Path, *, steps: tuple[int, ...] | None = None, share: float = 1.0,
        put: Put | None = None,
    ) -> None:  # fmt: skip
        self._config, self._chosen, self._share, self._put = config, steps, share, put
        self.directory = directory
        self.steps = dumped_steps(directory) if directory.is_dir() else []
        if not self.steps:
            raise UsageError(
                f"{directory} holds no recorded rollout (step_*.json); `rltool debug rollout-only` or rollout.dump = "
                "true writes them"
            )

    def next_batch(self, step: int) -> SourcedBatch:
        dump = read_dump(self.directory, step if self._chosen is None else self._chosen[step])
        samples = subsample(dump.samples, self._share, seed=self._config.seed)
        config = self._config
        check_samples(config, samples)
        batch = samples_to_batch(
            samples, mask_truncated=config.rollout.mask_truncated, part_weights=config.part_weights, put=self._put
        )
        if config.sampling.truncates and not batch.has("sampling_mask"):
            raise UsageError(
                f"the samples of step {step} in {self.directory} do not record which tokens were left to choose from, "
                f"and sampling.top_p = {config.sampling.top_p:g}, sampling.top_k = {config.sampling.top_k}: set both "
                "as they were when these were sampled"
            )
        batch = _dated(batch, step)
        metrics = rollout_metrics(samples, seconds=None, dropped={})
        monitor = self._config.monitor
        metrics |= all_sample_metrics(
            samples, pass_reward=monitor.pass_reward, category_key=monitor.category_key
        )
        return SourcedBatch(batch, metrics, tuple(dump.weight_versions), self._kept(samples))

    def _kept(self, samples: list[Sample]) -> Mapping[int, SampleRecord]:
        count = self._config.monitor.samples_per_step
        return records_to_keep(samples, count, self._tokenizer) if count else {}

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        """None where the model's directory has none, which training does not need: tokens are shown as their ids."""
        model = self._config.model
        try:
            return load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
        except UsageError:
            return None


class FakeRollouts(Stateless):
    """Synthetic samples, a function of seed and step. No engine takes part, and nothing is learned from them.

    record: directory that gets them as a dump as well.
    """

    def __init__(self, config: TrainConfig, record: Path | None) -> None:
        self._config = config
        self._record = record
        self._vocab_size = family_for(read_hf_config(config.model.path), config.model.family).vocab_size

    def next_batch(self, step: int) -> SourcedBatch:
        rollout, sampling = self._config.rollout, self._config.sampling
        samples = synthetic_samples(
            step, seed=self._config.seed, num_prompts=rollout.prompts_per_step,
            samples_per_prompt=rollout.samples_per_prompt, max_prompt_tokens=sampling.max_prompt_tokens,
            max_response_tokens=sampling.max_response_tokens, vocab_size=self._vocab_size,
        )  # fmt: skip
        if self._record is not None:
            write_dump(self._record, step=step, seed=self._config.seed, samples=samples, info={"synthetic": True})
        batch = samples_to_batch(samples, part_weights=self._config.part_weights)
        return SourcedBatch(_dated(batch, step), rollout_metrics(samples, seconds=None, dropped={}))


def _kept_of_each(loaded: PromptSet, rows: SupervisedSet) -> tuple[int, ...]:
    """How many rows of each set of data.train are left once those with too long a response are out."""
    indices = (prompt.index for prompt in loaded.prompts)
    return tuple(sum(index in rows.targets for index in islice(indices, size)) for size in loaded.parts)


class SupervisedData:
    """Rows of the data set with their targets, for algorithm.loss = "sft"."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        tokenizer = run_tokenizer(config)
        loaded = load_prompts(
            config.data.train, tokenizer, config.data, max_prompt_tokens=config.sampling.max_prompt_tokens,
            refusal=partial(training_refusal, config),
        )  # fmt: skip
        self.rows: SupervisedSet = supervised_set(
            loaded.prompts, tokenizer, max_response_tokens=config.sampling.max_response_tokens
        )
        self.summary = data_summary(loaded, {}, targets_too_long=self.rows.num_too_long)
        """One line on the rows that were read, and those that were left out for their length."""
        self._source = PromptSource(
            self.rows.prompts, seed=config.seed, shuffle=config.data.shuffle, parts=_kept_of_each(loaded, self.rows),
            weights=config.data.weights,
        )  # fmt: skip
        self._before = (-1, self._source.state_dict())

    def next_batch(self, step: int) -> SourcedBatch:
        started = time.perf_counter()
        self._before = (step, self._source.state_dict())
        prompts = self._source.next(self._config.rollout.prompts_per_step)
        batch = supervised_batch(prompts, self.rows.targets)
        return SourcedBatch(batch, {"time/generate_seconds": time.perf_counter() - started})

    def state_dict(self, done: int) -> SourceState:
        asked, before = self._before
        return SourceState(before if done == asked else self._source.state_dict())

    def load_state_dict(self, state: dict[str, Any], directory: Path | None) -> None:
        self._source.load_state_dict(state)
        self._before = (-1, state)
