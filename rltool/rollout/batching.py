"""From samples or supervised rows to the typed batch that training consumes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rltool.algorithms.batch import TrainBatch
from rltool.errors import UsageError
from rltool.rollout.data import Prompt
from rltool.rollout.sample import Sample, SampleStatus
from rltool.rollout.tokenizer import Tokenizer


def samples_to_batch(samples: Sequence[Sample]) -> TrainBatch:
    """One global batch, samples in the given order, groups of any size. loss_weights are 1: the configured ones belong to an
    optimizer step, and are set when the batch is split for these.

    ValueError for an empty list, a sample that generation or its reward left unfinished, and for a field that some
    samples have and others lack.
    """
    if not samples:
        raise ValueError("a batch needs at least one sample")
    for sample in samples:
        sample.validate()
        if sample.status not in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED):
            raise ValueError(f"sample {sample.group_id}/{sample.index} is {sample.status}; drop it before training")
    _all_or_none(samples, "reward", [sample.reward is not None for sample in samples])
    if samples[0].reward is None:
        raise ValueError("no sample has a reward; score them first")
    _all_or_none(samples, "weight versions", [bool(sample.versions) or not sample.response_ids for sample in samples])

    lengths = torch.tensor([len(s.prompt_ids) + len(s.response_ids) for s in samples])
    loss_mask = torch.tensor([m for s in samples for m in [0] * len(s.prompt_ids) + s.response_mask], dtype=torch.float32)
    logprobs = [v for s in samples for v in [0.0] * len(s.prompt_ids) + s.response_logprobs]
    return TrainBatch(
        tokens=torch.tensor([token for s in samples for token in s.prompt_ids + s.response_ids]),
        lengths=lengths,
        loss_mask=loss_mask,
        rewards=torch.tensor([s.reward for s in samples], dtype=torch.float32),
        group_ids=torch.tensor([s.group_id for s in samples]),
        loss_weights=loss_mask.clone(),
        rollout_logprobs=torch.tensor(logprobs, dtype=torch.float32) * loss_mask,
    )


def _all_or_none(samples: Sequence[Sample], what: str, present: list[bool]) -> None:
    if any(present) and not all(present):
        lacking = samples[present.index(False)]
        raise ValueError(f"{what}: {sum(present)} of {len(present)} samples have it, sample {lacking.group_id}/{lacking.index} does not")


@dataclass(frozen=True)
class SupervisedSet:
    """Rows to imitate. targets: prompt index -> response ids with EOS; num_too_long: rows left out for their target's length."""

    prompts: list[Prompt]
    targets: dict[int, list[int]]
    num_too_long: int


def supervised_set(prompts: Sequence[Prompt], tokenizer: Tokenizer, *, max_response_tokens: int) -> SupervisedSet:
    """Tokenise the targets of a data set, once, before training.

    The target is `response`, or `label` where no row has a response, with EOS behind it; the limit counts the EOS.
    UsageError if some rows have a response and others do not, if a row has neither, or if nothing is left.
    """
    with_response = [prompt.response is not None for prompt in prompts]
    if any(with_response) and not all(with_response):
        lacking = prompts[with_response.index(False)].index
        raise UsageError(f"supervised data: {sum(with_response)} of {len(prompts)} rows have a `response`, row {lacking} does not")
    kept: list[Prompt] = []
    targets: dict[int, list[int]] = {}
    for prompt in prompts:
        text = prompt.response if any(with_response) else prompt.label
        if text is None:
            raise UsageError(f"supervised data: row {prompt.index} has neither `response` nor `label`")
        target = tokenizer.encode_target(text)
        if len(target) <= max_response_tokens:
            kept.append(prompt)
            targets[prompt.index] = target
    if not kept:
        raise UsageError(f"supervised data: all {len(prompts)} targets are longer than sampling.max_response_tokens = {max_response_tokens}")
    return SupervisedSet(kept, targets, len(prompts) - len(kept))


def supervised_batch(prompts: Sequence[Prompt], targets: Mapping[int, list[int]]) -> TrainBatch:
    """One global batch: the loss is on the targets (of `supervised_set`) alone, rewards are 0, each row is its own group."""
    if not prompts:
        raise ValueError("a batch needs at least one row")
    rows = [(list(prompt.prompt_ids), targets[prompt.index]) for prompt in prompts]
    lengths = torch.tensor([len(ids) + len(target) for ids, target in rows])
    loss_mask = torch.tensor([m for ids, target in rows for m in [0.0] * len(ids) + [1.0] * len(target)])
    return TrainBatch(
        tokens=torch.tensor([token for ids, target in rows for token in ids + target]),
        lengths=lengths,
        loss_mask=loss_mask,
        rewards=torch.zeros(len(rows)),
        group_ids=torch.arange(len(rows)),
        loss_weights=loss_mask.clone(),
    )
