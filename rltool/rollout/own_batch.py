"""What a function of the user's makes of a batch's samples (rollout.batch_hook), and whether samples that users'
functions return can be trained on."""

from __future__ import annotations

import copy
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from rltool.config.import_path import load_callable
from rltool.config.own_functions import named
from rltool.config.rollout import RolloutConfig
from rltool.engines.weight_version import WeightVersion
from rltool.errors import ContractViolation
from rltool.rollout.admission import AdmissionPolicy
from rltool.rollout.json_fields import unwritable
from rltool.rollout.sample import Sample, SampleStatus

BatchHook = Callable[[list[Sample]], list[Sample]]


@dataclass(frozen=True)
class SampleJudge:
    """vocab_size: the trainer's, None without one. refusal: why tokens of a weight version are not trained on, or None;
    None where no versions are judged, for the weights are not this run's."""

    vocab_size: int | None
    policy: AdmissionPolicy
    refusal: Callable[[str], str | None] | None

    def problem(self, sample: Any, step: int) -> str | None:
        """Why a sample cannot be trained on at `step`, or None: what generation and scoring make sure of elsewhere."""
        if not isinstance(sample, Sample):
            return f"{type(sample).__name__} is no Sample"
        found = self._values(sample) or self._versions(sample, step) or unwritable(sample)
        return found and f"sample {sample.group_id}/{sample.index}: {found}"

    def _values(self, sample: Sample) -> str | None:
        try:
            sample.validate()
        except ValueError as error:
            return str(error)
        if sample.status not in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED):
            return f"it is {sample.status.value}; only completed and truncated ones are trained on"
        if sample.reward is None or not math.isfinite(sample.reward):
            return f"its reward is {sample.reward}, expected a finite number"
        if not sample.prompt_ids:
            return "it has no prompt"
        if not {*sample.response_mask} <= {0, 1}:
            return "response_mask has other values than 0 and 1"
        if not all(map(math.isfinite, sample.response_logprobs)):
            return "a log-probability is not finite"
        ids = (*sample.prompt_ids, *sample.response_ids)
        if min(ids) < 0 or (self.vocab_size is not None and max(ids) >= self.vocab_size):
            return f"a token id is outside the model's vocabulary of {self.vocab_size}"
        return None

    def _versions(self, sample: Sample, step: int) -> str | None:
        if self.refusal is None:
            return None
        sampled_from = [False] * len(sample.response_ids)
        for span in sample.versions:
            reason = self.refusal(span.version)
            if reason is not None:
                return f"weights {span.version!r} are {reason}"
            sampled_from[span.start : span.end] = [True] * (span.end - span.start)
        if any(mask and not known for mask, known in zip(sample.response_mask, sampled_from, strict=True)):
            return "response_mask is 1 for a token of no weight version, which the policy did not sample"
        oldest = min((WeightVersion.parse(span.version).number for span in sample.versions), default=None)
        if self.policy.is_too_old(oldest, step):
            return (
                f"its oldest weights are of step {oldest}, and step {step} takes none older than "
                f"rollout.max_staleness = {self.policy.max_staleness}"
            )
        return None


@dataclass(frozen=True)
class ChangedBatch:
    """samples: what is trained on; dropped: how many of the batch's are not among them; added: how many of them are not
    the batch's, or are there once more."""

    samples: list[Sample]
    dropped: int
    added: int


def load_batch_hook(config: RolloutConfig) -> BatchHook | None:
    """rollout.batch_hook as a function; UsageError for an import path that leads nowhere. FunctionFailed for what it
    raises."""
    if config.batch_hook is None:
        return None
    function = load_callable(config.batch_hook, setting="rollout.batch_hook", takes=("samples",))
    return named(function, f"rollout.batch_hook = {config.batch_hook!r}")


def changed_batch(hook: BatchHook, samples: Sequence[Sample], judge: SampleJudge, step: int) -> ChangedBatch:
    """The hook gets copies: until the batch is trained a checkpoint keeps the samples as they were, and a run that
    resumes calls the hook again. ContractViolation for what it may not return."""
    given = list(map(copied, samples))
    found = hook(list(given))
    if not isinstance(found, list) or not found:
        what = "an empty list" if isinstance(found, list) else type(found).__name__
        raise ContractViolation(f"rollout.batch_hook returned {what}, expected the list of samples to train on")
    for sample in found:
        problem = judge.problem(sample, step)
        if problem is not None:
            raise ContractViolation(f"rollout.batch_hook returned what cannot be trained on: {problem}")
    own = {id(sample) for sample in given}
    kept = own & {id(sample) for sample in found}
    return ChangedBatch(found, dropped=len(own) - len(kept), added=len(found) - len(kept))


def copied(sample: Sample) -> Sample:
    """One that shares nothing with it that can be changed."""
    made = copy.copy(sample)
    for item in fields(sample):
        value = getattr(sample, item.name)
        if isinstance(value, list | array):  # of values that do not change
            setattr(made, item.name, value[:])
        elif isinstance(value, dict):
            setattr(made, item.name, copy.deepcopy(value))
    return made
