"""The training loop. It reads like the algorithm; everything that it calls does one thing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from rltool.algorithms.batch import TrainBatch
from rltool.algorithms.controllers import Coefficients, with_coefficients
from rltool.algorithms.mismatch import logprob_difference, off_policy_metrics
from rltool.algorithms.shaping import (
    needs_old_logprobs_pass,
    optimizer_step_samples,
    with_advantages,
    with_corrections,
    with_loss_weights,
    with_old_logprobs,
    with_stale_tokens_masked,
)
from rltool.algorithms.staleness import current_tokens, staleness_metrics
from rltool.algorithms.token_selection import with_selected_tokens
from rltool.config.train import TrainConfig
from rltool.errors import ExportFailed, OutputFailed, PartLost, RltoolError, SaveFailed, TrainingStopped
from rltool.training.checks import exact
from rltool.training.checks.exact import LayerSearch
from rltool.training.checks.modalities import check_each_sample
from rltool.training.checks.routing_replay import check_has_routing
from rltool.training.evaluations import Evaluations, Evaluator, Judged, is_due
from rltool.training.observe.metrics import MetricsWriter, step_line, step_speed
from rltool.training.observe.sample_log import SampleLog, Scored
from rltool.training.ranks.trainer_group import TrainerGroup
from rltool.training.sources import BatchSource, SourcedBatch
from rltool.training.stopping import StopRequested, StopSignal
from rltool.weights.verify.tolerances import difference_limit

SAVES = "what is in progress comes to its end first, then a checkpoint is written and the engines are freed"
"""What a signal does from the first finished step on."""

GIVES_UP = (
    "the training on this rollout is dropped after the optimizer step in progress; nothing else is lost, for what was "
    "done before is saved"
)
FINISHES = (
    "the optimizer steps on this rollout come to their end first, for steps before it are in no checkpoint; then one "
    "is written and the engines are freed"
)
"""While a rollout is trained on in several optimizer steps: weights between two of them belong to no step, and no
checkpoint holds them."""

ALL_DONE = (
    "all steps are done: what is in progress comes to its end first and the engines are freed; no checkpoint is "
    "written (checkpoint.save_at_end = false)"
)


class Engines(Evaluator, Protocol):
    """What the loop asks of the rollout side; absent in train-only and in supervised training without evaluation."""

    @property
    def weight_version(self) -> str:
        """Of the weights that the engines were given last."""
        ...

    def sync_weights(self, step: int) -> dict[str, float]:
        """Bring the engines to the trainer's weights, which have `step` training steps. Returns weights/*,
        time/sync_seconds and what else took time."""
        ...


@dataclass
class Progress:
    """What a checkpoint keeps of the loop. `step` counts finished training steps, and so names the weights.

    saved: a checkpoint of exactly this state exists, or is on its way. metrics: of the last finished step.
    coefficients: of the next step; None: as configured.
    """

    step: int
    saved: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    coefficients: Coefficients | None = None


class Checkpoints(Judged, Protocol):
    """What the loop asks of training.checkpointer."""

    def save(self, progress: Progress) -> None:
        """A checkpoint of this state, complete on return or written while training goes on."""

    def check(self) -> dict[str, float]:
        """At a step boundary: what has come of it, as checkpoint/* metrics, or SaveFailed."""
        ...

    def holds(self, step: int, *, wait: bool) -> bool:
        """Whether there is a checkpoint of this step; without `wait`, or is on its way."""
        ...

    def finish(self, progress: Progress) -> None:
        """On return there is a complete checkpoint of this state; else SaveFailed."""

    def wait(self) -> None:
        """On return nothing is being written any more."""


class Exports(Protocol):
    """What the loop asks of training.hf_exports."""

    def save(self, step: int) -> None:
        """A Hugging Face export of the present weights, which have `step` training steps."""

    def has(self, step: int) -> bool:
        """Whether there is one of that step."""
        ...


@dataclass(frozen=True)
class Parts:
    """What a run is made of. engines: None where no engine takes part; samples: None where none are kept; layers: None
    where none is looked for."""

    trainer: TrainerGroup
    source: BatchSource
    engines: Engines | None
    checkpoints: Checkpoints
    exports: Exports
    writer: MetricsWriter
    stop: StopSignal
    samples: SampleLog | None = None
    layers: LayerSearch | None = None


class Loop:
    """One run, from `progress` to its end.

    stops_on_difference False: compare log-probabilities of trainer and engines, but go on in any case
    (replays). around_step(step): a context around each step.
    """

    def __init__(
        self, config: TrainConfig, parts: Parts, progress: Progress, *, stops_on_difference: bool = True,
        around_step: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:  # fmt: skip
        self.config, self.progress = config, progress
        self.trainer, self.source, self.engines, self.checkpoints = (
            parts.trainer,
            parts.source,
            parts.engines,
            parts.checkpoints,
        )
        self.exports, self.writer, self.stop, self.samples = parts.exports, parts.writer, parts.stop, parts.samples
        self.layers = parts.layers
        self.stops_on_difference, self.around_step = stops_on_difference, around_step
        self.evaluations = Evaluations(config, parts.engines, parts.checkpoints, parts.writer, first=progress.step)
        self.coefficients = progress.coefficients or Coefficients.initial(config.algorithm)
        self.skipped_in_a_row = 0
        self.between_updates = False
        """The weights belong to no step: not to be saved or exported."""
        self.scored: Scored | None = None
        self.sourced: SourcedBatch | None = None

    def run(self) -> Progress:
        """Train to the last step, to eval.stop_at, or to a signal.

        A checkpoint is written in every case, also before an error is raised, with four exceptions: the last step
        without checkpoint.save_at_end, an error between the optimizer steps of one rollout (such weights belong to no
        step), a rank or rollout manager that was lost (the state is), and a signal before the first step of all. Then
        the last checkpoint stands. A signal between the optimizer steps of one rollout ends the training on it only
        where that costs nothing else: see `_may_give_up`.
        """
        try:
            self._run()
        except ExportFailed:
            self._save_before_raising()
            raise
        except (SaveFailed, PartLost):
            raise
        except (RltoolError, StopRequested) as error:
            if self.stop.requested is None:
                self._save_before_raising()
                raise
            if not isinstance(error, StopRequested):
                self.writer.log(f"after the signal: {error}")
            self._end()
        else:
            if self._saves_at(self.progress.step):
                self._end()
            else:
                self.checkpoints.wait()
        return self.progress

    def _run(self) -> None:
        config = self.config
        if self.engines is not None:
            self._evaluate_first(self.engines)
        self._export_if_missing()
        while self.progress.step < config.steps and not self.stop.requested:
            step = self.progress.step
            metrics = self.checkpoints.check()
            with self._recording(step, metrics), timed(metrics, "time/step_seconds"), self.around_step(step):
                self._train_on_next(step, metrics)
                self._after_update(self.progress.step, metrics)
            self._judge_skips(metrics)
            done = self.progress.step
            ends = done == config.steps and config.checkpoint.save_at_end  # which saves it
            if is_due(config.checkpoint.every_steps, done) and not ends:
                self._save()
            if is_due(config.checkpoint.save_hf_every, done):
                self.exports.save(done)
            if self.evaluations.reached:
                break

    def _train_on_next(self, step: int, metrics: dict[str, float]) -> None:
        """The next batch, and all optimizer steps on it; on return the step counts. Adds to `metrics`."""
        algorithm = self.config.algorithm
        with timed(metrics, "time/wait_seconds"):
            sourced = self.source.next_batch(step)
        self.sourced = replace(sourced, batch=sourced.batch.here())  # kept until the next batch is there
        check_has_routing(self.config, sourced.batch)
        metrics.update(sourced.metrics)
        with self._keeping_samples(step, sourced, metrics):
            metrics.update(self.trainer.take_gpus())
            with timed(metrics, "time/train_seconds"):
                metrics.update(self.train(sourced.batch))
            self.coefficients = self.coefficients.adapted(algorithm, metrics)
            adapted = self.coefficients if algorithm.adapts_kl or algorithm.adapts_entropy else None
            self.progress = Progress(step + 1, metrics=metrics, coefficients=adapted)
            self.stop.consequence = self._at_end(step + 1)

    def _after_update(self, done: int, metrics: dict[str, float]) -> None:
        """What follows from weights of `done` training steps: the reference's, the engines', an evaluation.

        The engines do not get them where they are not needed any more: after a signal, for a run that resumes begins
        with a sync; and after the last step if they end with the run. Engines of others keep the final weights.
        """
        algorithm = self.config.algorithm
        if is_due(algorithm.reference_update_steps, done):
            with timed(metrics, "time/reference_seconds"):
                self.trainer.update_reference()
        if self.stop.requested:
            return
        evaluates = self.evaluations.begins(done)
        is_read = done < self.config.steps or self.config.engines.mode == "external"
        if self.engines is not None and (evaluates or (algorithm.loss == "policy" and is_read)):
            metrics.update(self.engines.sync_weights(done))
        metrics.update(self.evaluations.begin(done))

    def train(self, batch: TrainBatch) -> dict[str, float]:
        """All optimizer steps of one rollout, in all epochs. Returns train/* metrics, averaged over these steps."""
        config, step = self.config, self.progress.step
        algorithm = self.coefficients.applied(config.algorithm)
        metrics: dict[str, float] = {}
        trains_policy = not (algorithm.uses_critic and step < config.critic.warmup_rollouts)
        if algorithm.loss == "policy":
            batch, metrics = with_stale_tokens_masked(batch, config, step)
            metrics |= staleness_metrics(batch, step)
            with timed(metrics, "time/logprobs_seconds"):
                batch, compared = self._with_logprobs(batch)
            if algorithm.uses_critic:
                with timed(metrics, "time/values_seconds"):
                    batch = batch.replace(values=self.trainer.values(batch))
            batch, shaped = with_advantages(batch, algorithm, max_response_tokens=config.sampling.max_response_tokens)
            batch, corrected = with_corrections(batch, algorithm)
            batch, selected = with_selected_tokens(batch, algorithm)
            batch, adapted = with_coefficients(batch, config.algorithm, algorithm)
            metrics |= compared | shaped | corrected | selected | adapted
        compares = algorithm.loss == "policy" and "train/logprob_compared_tokens" not in metrics
        self.stop.raise_if_requested()  # so far every weight is as it was
        self.between_updates = not compares
        collected: list[dict[str, float]] = []
        parts = optimizer_step_samples(batch, self._optimizer_steps(batch)) * config.epochs_per_rollout
        for number, samples in enumerate(parts):
            if self._may_give_up:
                self.stop.raise_if_requested()
            if number + 1 < len(parts):
                self.stop.consequence = GIVES_UP if self._may_give_up else FINISHES
            else:
                self.stop.consequence = self._at_end(step + 1)
            part = with_loss_weights(
                batch.select(samples), algorithm, max_response_tokens=config.sampling.max_response_tokens
            )
            measured: dict[str, float] = {}
            if trains_policy and compares and not collected:
                metrics |= (compared := self._first_optimizer_step(part, samples, measured))
            elif trains_policy:
                measured |= self.trainer.train_step(part)
            if algorithm.uses_critic:
                measured |= self._critic_steps(part)
            collected.append(measured)
        self.between_updates = False
        skipped = [
            any([result.pop(name, 0.0) for name in ("train/skipped", "train/critic_skipped")]) for result in collected
        ]
        metrics |= _mean(collected)
        metrics["train/skipped_steps"] = float(sum(skipped))
        for skip in skipped:
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if skip else 0
        return metrics

    def _optimizer_steps(self, batch: TrainBatch) -> int:
        """Of one epoch. As configured; of a batch that was trimmed because samples were dropped, as many as it has
        global batches. Never more: an episode may be several samples, so a whole batch may have more of them than
        prompts_per_step * samples_per_prompt, and the learning rate's schedule counts the configured steps."""
        config = self.config
        if config.algorithm.loss != "policy" or config.rollout.batch_size == "dynamic":
            return config.optimizer_steps_per_rollout
        return min(config.optimizer_steps_per_rollout, max(1, batch.num_samples // config.samples_per_optimizer_step))

    def _with_logprobs(self, batch: TrainBatch) -> tuple[TrainBatch, dict[str, float]]:
        """Log-probabilities of the old policy, where they need a forward pass of their own, and of frozen models."""
        algorithm, scored, metrics = self.config.algorithm, None, {}
        if needs_old_logprobs_pass(self.config, self.progress.step):
            if algorithm.selects_by_entropy:
                scored, entropies = self.trainer.logprobs_and_entropies(batch)
                batch = batch.replace(old_entropies=entropies)
            else:
                scored = self.trainer.logprobs(batch)
            self.scored = Scored(scored, batch.here(), range(batch.num_samples))
            metrics = self._check_logprobs(scored, batch)
        batch = with_old_logprobs(batch, algorithm, scored)
        reference = self.trainer.logprobs(batch, weights="reference") if algorithm.uses_reference else None
        return self._with_teacher(batch).replace(ref_logprobs=reference), metrics

    def _with_teacher(self, batch: TrainBatch) -> TrainBatch:
        """What the loss needs of a teacher in the trainer; the engines of model.teacher have scored it already."""
        algorithm = self.config.algorithm
        if self.config.model.teacher_path is None:
            return batch
        if algorithm.uses_teacher_logprobs:
            batch = batch.replace(teacher_logprobs=self.trainer.logprobs(batch, weights="teacher"))
        return self.trainer.with_teacher_fields(batch) if algorithm.uses_teacher_topk else batch

    def _critic_steps(self, batch: TrainBatch) -> dict[str, float]:
        """The critic's updates beside one optimizer step of the policy; their targets were fixed before it."""
        return _mean([self.trainer.critic_step(batch) for _ in range(self.config.critic.updates_per_optimizer_step)])

    def _first_optimizer_step(
        self, batch: TrainBatch, samples: list[int], measured: dict[str, float]
    ) -> dict[str, float]:
        """Forward and backward, the log-probability check, and only then the optimizer: where they disagree, every
        weight is as it was.

        samples: rows of the rollout that `batch` consists of. Adds the step's metrics to `measured`; returns those of
        the check.
        """
        logprobs, found = self.trainer.forward_backward(batch, on_policy=batch.old_logprobs is None)
        self.scored = Scored(logprobs, batch.here(), samples)
        try:
            compared = self._check_logprobs(logprobs, batch)
        except TrainingStopped:
            self.trainer.discard_gradients()
            raise
        self.between_updates = True
        measured |= {**found, **self.trainer.optimizer_step()}
        return compared

    def _check_logprobs(self, logprobs: Tensor, batch: TrainBatch) -> dict[str, float]:
        """Before any optimizer step the trainer's log-probabilities [T] must agree with the engines', on tokens of the
        current policy.

        A batch without such a token is not compared, as its record shows; each sync has compared the engines by
        then. Replays compare what they have, and never stop.
        """
        assert batch.rollout_logprobs is not None
        selection = current_tokens(batch, self.progress.step) if self.stops_on_difference else batch.loss_mask
        found = logprob_difference(logprobs, batch.rollout_logprobs, selection)
        if self.config.algorithm.exact and self.stops_on_difference and found.tokens and found.abs_max != 0.0:
            assert self.scored is not None
            exact.stop(self.progress.step, logprobs, batch, selection, self.scored.rows, self.layers)
        limit = difference_limit(self.config.monitor.logprob_difference_limit, self.config.model.dtype, ())
        if self.stops_on_difference and found.tokens and not found.abs_mean <= limit:
            raise TrainingStopped(
                f"trainer and engines disagree: mean |log-probability difference| {found.abs_mean:.2e} (max "
                f"{found.abs_max:.2e}) is above monitor.logprob_difference_limit = {limit:g}; no optimizer step was "
                "made on this rollout. Either the engines do not hold the trainer's weights, or they compute in "
                "another precision or at another temperature."
            )
        if self.stops_on_difference and batch.picture_places is not None:
            check_each_sample(batch, logprobs, selection, limit)
        return found.metrics | off_policy_metrics(logprobs, batch.rollout_logprobs, batch.loss_mask)

    # -- bookkeeping

    @property
    def _may_give_up(self) -> bool:
        """Whether a signal may end the training on a rollout between two optimizer steps: nothing is lost but what was
        done on this rollout, for the state before it is saved, or nothing was done before. Else the steps since the
        last checkpoint would go with it, for the weights that they ended with are no more."""
        step = self.progress.step
        return step == 0 or self.checkpoints.holds(step, wait=self.stop.requested is not None)

    def _at_end(self, done: int) -> str:
        return SAVES if self._saves_at(done) else ALL_DONE

    def _saves_at(self, done: int) -> bool:
        """Whether a run that ends after `done` steps writes a checkpoint."""
        return done < self.config.steps or self.config.checkpoint.save_at_end

    @contextmanager
    def _keeping_samples(self, step: int, sourced: SourcedBatch, metrics: dict[str, float]) -> Iterator[None]:
        """Also where the block fails: samples of the step on which trainer and engines disagreed are those to look
        at. The step counts before they are written: where they cannot be, its weights are saved under its number."""
        self.scored = None
        with self._afterwards(lambda: self._keep_samples(step, sourced, metrics)):
            yield

    def _keep_samples(self, step: int, sourced: SourcedBatch, metrics: dict[str, float]) -> None:
        if self.samples is not None:
            with timed(metrics, "time/samples_seconds"):
                self.samples.write(step, sourced.kept, of=sourced.batch.num_samples, scored=self.scored)

    @contextmanager
    def _recording(self, step: int, metrics: dict[str, float]) -> Iterator[None]:
        """Writes the record of a step that counts once the block has ended, in any way: a signal that ends its
        evaluation, or engines that cannot be synced, leave the step in the checkpoint, and a run that resumes does not
        do it again."""
        with self._afterwards(lambda: self._record(step, metrics)):
            yield

    def _record(self, step: int, metrics: dict[str, float]) -> None:
        config, sourced = self.config, self.sourced
        if self.progress.step == step or sourced is None:
            return
        metrics |= step_speed(metrics, tokens=len(sourced.batch.tokens), ranks=config.trainer.world_size)
        version = self.engines.weight_version if self.engines else ""
        self.writer.write(step, version, metrics, weight_versions=list(sourced.weight_versions))
        self.writer.log(step_line(step, config.steps, metrics))

    @contextmanager
    def _afterwards(self, write: Callable[[], None]) -> Iterator[None]:
        """Writes once the block has ended, in any way. A failed write is logged; the block's error is raised."""
        try:
            yield
        except BaseException:
            try:
                write()
            except OutputFailed as failure:
                self.writer.log(str(failure))
            raise
        write()

    def _export_if_missing(self) -> None:
        """The export of the step that the run resumes from, if the run before it ended between the step and its
        export."""
        done = self.progress.step
        due = done > 0 and is_due(self.config.checkpoint.save_hf_every, done) and not self.stop.requested
        if due and not self.exports.has(done):
            self.exports.save(done)

    def _evaluate_first(self, engines: Engines) -> None:
        """The engines get the weights, and evaluations begin: with the accuracy that training starts from. Recorded as
        step -1, or the last step done."""
        done = self.progress.step
        metrics = {**engines.sync_weights(done), **self.evaluations.begin(done)}
        if not self.config.eval.sets:
            return
        self.writer.write(done - 1, engines.weight_version, metrics)
        self.writer.log(
            step_line(done - 1, self.config.steps, metrics).replace(
                f"step {done}/", "before step 1 of " if done == 0 else f"resumed after step {done}/"
            )
        )

    def _judge_skips(self, metrics: dict[str, float]) -> None:
        limit = self.config.optimizer.max_skipped_steps
        if self.skipped_in_a_row >= limit:
            raise TrainingStopped(
                f"{self.skipped_in_a_row} optimizer steps in a row had a non-finite loss or gradient and were skipped "
                f"(optimizer.max_skipped_steps = {limit}); lower optimizer.lr, or look at the rewards and "
                "log-probabilities of the last rollout"
            )

    def _save(self) -> None:
        if not self.progress.saved:
            self.checkpoints.save(self.progress)
            self.progress.saved = True

    def _end(self) -> None:
        untouched = self.stop.requested is not None and self.progress.step == 0
        if self.between_updates or untouched:
            self.checkpoints.wait()
        else:
            self.checkpoints.finish(self.progress)

    def _save_before_raising(self) -> None:
        """An error is on its way to the user; that the checkpoint failed as well is logged beside it, not in its
        place."""
        try:
            self._end()
        except RltoolError as failure:
            self.writer.log(f"no checkpoint of this state: {failure}")


def _mean(results: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(result[name] for result in results) / len(results) for name in results[0]}


@contextmanager
def timed(metrics: dict[str, float], name: str) -> Iterator[None]:
    """Wall-clock seconds of the block into metrics[name]."""
    started = time.perf_counter()
    try:
        yield
    finally:
        metrics[name] = time.perf_counter() - started
