"""From samples or supervised rows to the typed batch that training consumes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rltool.algorithms.batch import Put, Rows, TrainBatch, Wide, joined
from rltool.algorithms.fields import CODES, Field, Held, fields_of, held_fields
from rltool.engines.weight_version import BadWeightVersion, WeightVersion
from rltool.errors import TrainingStopped, UsageError
from rltool.rollout.data import Prompt
from rltool.rollout.pictures import files_of
from rltool.rollout.sample import Sample, SampleStatus, TurnReward
from rltool.rollout.tokenizer import Tokenizer

LARGEST = torch.finfo(torch.float32).max
"""What training computes in; NaN is not below it either."""


def samples_to_batch(
    samples: Sequence[Sample], *, mask_truncated: bool = False, part_weights: Mapping[str, float] | None = None,
    put: Put | None = None,
) -> TrainBatch:  # fmt: skip
    """One global batch, samples in the given order, groups of any size. loss_weights are 1: the configured ones belong
    to an optimizer step, and are set when the batch is split for these.

    Samples with remove_sample, and truncated ones with mask_truncated (overlong filtering; Yu et al. 2025, "DAPO",
    section 3.4), get no loss; their rewards, lengths and penalties count in the batch as before, so in their group's
    baseline. token_versions is None if any span's version is no RUN:ATTEMPT:N, such as a stock engine's "default".

    ValueError for an empty list, a sample that generation or its reward left unfinished, for a field that some samples
    have and others lack, and for a sampled token without a version among versions; TrainingStopped if no token has a
    loss, if an episode has no parts, or if samples lack a number that others have in train_metadata. part_weights: of
    the rewards that the batch holds one by one, by name; None: it holds their sum alone. put: takes the values of wide
    fields; None: they are in the batch.
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
    response_mask = torch.tensor(
        [m for s in samples for m in [0] * len(s.prompt_ids) + s.response_mask], dtype=torch.float32
    )
    in_loss = torch.tensor([not _masked(s, mask_truncated) for s in samples], dtype=torch.float32)
    loss_mask = response_mask * in_loss.repeat_interleave(lengths)
    if not bool(loss_mask.any()):
        raise TrainingStopped(_why_no_loss(samples, mask_truncated=mask_truncated))
    versions = _token_versions(samples)
    turns, turn_rewards = turn_tensors(samples)
    logprobs = [v for s in samples for v in [0.0] * len(s.prompt_ids) + s.response_logprobs]
    parts, weights = _reward_parts(samples, part_weights) if part_weights is not None else (None, None)
    return TrainBatch(
        tokens=torch.tensor([token for s in samples for token in s.prompt_ids + s.response_ids]),
        lengths=lengths,
        loss_mask=loss_mask,
        rewards=torch.tensor([s.reward for s in samples], dtype=torch.float32),
        group_ids=torch.tensor([s.group_id for s in samples]),
        baselines=_baselines(samples),
        reward_parts=parts,
        part_weights=weights,
        episode_ids=_episode_ids(samples),
        turns=turns,
        turn_rewards=turn_rewards,
        loss_weights=loss_mask.clone(),
        response_mask=response_mask,
        rollout_logprobs=torch.tensor(logprobs, dtype=torch.float32) * response_mask,
        token_versions=None if versions is None else versions.masked_fill(loss_mask == 0, -1),
        metadata=_metadata(samples),
        **_columns(samples, put),
    )


def mask_metrics(samples: Sequence[Sample], *, mask_truncated: bool) -> dict[str, float]:
    """How many samples of a batch got no loss: rollout/samples_removed by remove_sample,
    rollout/samples_masked_truncated of the others for their length."""
    return {
        "rollout/samples_removed": float(sum(s.remove_sample for s in samples)),
        "rollout/samples_masked_truncated": float(
            sum(_masked(s, mask_truncated) and not s.remove_sample for s in samples)
        ),
    }


def trim(groups: Sequence[list[Sample]], global_batch_size: int) -> tuple[list[list[Sample]], int]:
    """(the groups cut to a multiple of global_batch_size samples, how many samples were cut off:
    rollout/dropped_trimmed).

    Groups stay in order; samples are cut off the end, so the last group that is left may be smaller than it was.
    TrainingStopped if there is not even one global batch.
    """
    count = sum(len(group) for group in groups)
    left = count - count % global_batch_size
    if left == 0:
        raise TrainingStopped(
            f"{count} samples are left of this rollout, less than one global batch of {global_batch_size}, and "
            f"rollout.batch_size = "
            f'"trim" keeps whole ones: find out why samples were dropped (rollout/dropped_...), or set '
            f'rollout.batch_size = "dynamic"'
        )
    kept: list[list[Sample]] = []
    for group in groups:
        if left == 0:
            break
        kept.append(group[:left])
        left -= len(kept[-1])
    return kept, count % global_batch_size


def _masked(sample: Sample, mask_truncated: bool) -> bool:
    return sample.remove_sample or (mask_truncated and sample.status is SampleStatus.TRUNCATED)


def _why_no_loss(samples: Sequence[Sample], *, mask_truncated: bool) -> str:
    counts = mask_metrics(samples, mask_truncated=mask_truncated)
    removed, truncated = (int(counts[f"rollout/samples_{name}"]) for name in ("removed", "masked_truncated"))
    empty = len(samples) - removed - truncated
    return (
        f"no token of this batch has a loss: of {len(samples)} samples {removed} were removed by a hook "
        f"(remove_sample), {truncated} masked because they were cut at sampling.max_response_tokens "
        f"(rollout.mask_truncated), {empty} have no token that the policy sampled; raise sampling.max_response_tokens, "
        "or mask less"
    )


def _episode_ids(samples: Sequence[Sample]) -> torch.Tensor | None:
    """[N] int64: a number for each (group, index); None where every episode is one sample."""
    if not any(sample.trajectory for sample in samples):
        return None
    numbers: dict[tuple[int, int], int] = {}
    return torch.tensor([numbers.setdefault((s.group_id, s.index), len(numbers)) for s in samples])


def _baselines(samples: Sequence[Sample]) -> torch.Tensor | None:
    _all_or_none(samples, "baseline reward", [sample.baseline_reward is not None for sample in samples])
    if samples[0].baseline_reward is None:
        return None
    return torch.tensor([sample.baseline_reward for sample in samples], dtype=torch.float32)


def _columns(samples: Sequence[Sample], put: Put | None) -> dict[str, Any]:
    """What samples hold of the table in algorithms/fields.py, as the batch has it: without what none of them has."""
    lengths = [sample.num_tokens for sample in samples]
    found: dict[str, Any] = {}
    wide: dict[str, list[Rows]] = {}
    for name, (item, held) in held_fields().items():
        of = _ragged if item.of == "ragged" else _counted if held.counted else _uncounted
        if (rows := of(samples, name, item, held)) is None:
            continue
        if item.wide and put is not None:
            wide[name] = rows
        else:
            found[name] = joined(rows, lengths, item)
    if any(sample.picture_places for sample in samples):
        found |= picture_files([sample.multimodal_inputs for sample in samples], lengths, wide if put else None)
    return found | {"wide": (Wide.of(wide, put),)} if wide and put is not None else found


def picture_files(
    inputs: Sequence[Mapping[str, list[str]]], lengths: Sequence[int], wide: dict[str, list[Rows]] | None = None
) -> dict[str, Any]:
    """TrainBatch.picture_files of samples with these multimodal_inputs, by name; wide: where they are put instead."""
    name = "picture_files"
    rows = [np.frombuffer(files_of(own), np.uint8) for own in inputs]
    if wide is None:
        return {name: joined(rows, lengths, fields_of(TrainBatch)[name])}
    wide[name] = rows
    return {}


def _ragged(samples: Sequence[Sample], name: str, item: Field, _held: Held) -> list[Rows] | None:
    found = [getattr(sample, name) for sample in samples]
    return [np.asarray(own, item.dtypes[0]) for own in found] if any(found) else None


def _uncounted(samples: Sequence[Sample], name: str, item: Field, held: Held) -> list[Rows] | None:
    """[tokens], or [tokens, numbers of a row] each."""
    values = [getattr(sample, name) for sample in samples]
    if not any(values):
        return None
    tokens = [sample.num_tokens if held.over == "sequence" else len(sample.response_ids) for sample in samples]
    _all_or_none(samples, held.what, [bool(own) or not count for own, count in zip(values, tokens, strict=True)])
    kinds = {
        (getattr(own, "typecode", "d"), len(own) // count) for own, count in zip(values, tokens, strict=True) if own
    }
    if len({code for code, _ in kinds}) > 1:
        raise ValueError(f"{held.what}: samples differ in type and number {sorted(kinds)}")
    if len(kinds) > 1:
        raise ValueError(f"{held.what}: samples have {sorted(size for _, size in kinds)} of them a token")
    ((code, size),) = kinds
    dtype, shape = item.dtype_of(CODES[code]), (-1, size) if item.row else (-1,)
    return [np.asarray(own or [], dtype).reshape(shape) for own in values]


def _counted(samples: Sequence[Sample], name: str, item: Field, held: Held) -> list[Rows] | None:
    """[tokens, K] each, K the most that one token of the sample has."""
    numbers, sizes = ([getattr(sample, column.name) for sample in samples] for column in held.columns(name))
    if not any(sizes):
        return None
    dtype, rows = item.dtypes[0], []
    for sample, ids, counts in zip(samples, numbers, sizes, strict=True):
        found = np.asarray(counts or [0] * len(sample.response_ids), np.int64)
        k = int(found.max(initial=0))
        own = np.full((len(found), k), item.filler(dtype), dtype)
        own[np.arange(k) < found[:, None]] = ids
        sampled = np.asarray(sample.response_mask, np.bool_)
        lacks = sampled & (own != np.asarray(sample.response_ids, dtype)[:, None]).all(1)
        if lacks.any():
            raise ValueError(
                f"sample {sample.group_id}/{sample.index}: its token {int(lacks.argmax())} is not among {item.row}"
            )
        rows.append(own)
    return rows


def _reward_parts(samples: Sequence[Sample], weights: Mapping[str, float]) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, P] each: values and weights, 0 of parts that did not score the sample. An agent's episode is scored by its
    last sample."""
    scored = {(sample.group_id, sample.index): sample.reward_parts for sample in samples if sample.reward_parts}
    rows = [scored.get((sample.group_id, sample.index)) for sample in samples]
    if None in rows:
        lacking = samples[rows.index(None)]
        raise TrainingStopped(
            f'algorithm.advantage = "gdpo" is made of [[reward.parts]], and sample {lacking.group_id}/{lacking.index} '
            "has none: its environment, agent or recording gave one reward for all; use another algorithm.advantage"
        )
    values = [[row.get(name, 0.0) for name in weights] for row in rows if row is not None]
    counted = [[weight * (name in row) for name, weight in weights.items()] for row in rows if row is not None]
    return torch.tensor(values, dtype=torch.float32), torch.tensor(counted, dtype=torch.float32)


def _metadata(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """The numbers of train_metadata by name, [N] float32 each; without names under which no sample has a number."""
    values = [item for sample in samples for item in sample.train_metadata.items()]
    names = sorted({name for name, value in values if isinstance(value, int | float)})  # a bool is an int
    return {name: torch.tensor([_number(one, name) for one in samples], dtype=torch.float32) for name in names}


def _number(sample: Sample, name: str) -> float:
    value = sample.train_metadata.get(name)
    if not isinstance(value, int | float) or not abs(value) <= LARGEST:
        found = f"{value!r:.80}" if name in sample.train_metadata else "nothing"
        raise TrainingStopped(
            f"train_metadata[{name!r}] is a number in some samples of this batch, and {found} in sample "
            f"{sample.group_id}/{sample.index}: training needs a finite number in each; set it in all samples "
            "(rollout.group_hook sees every one), or write text where training is not to see it"
        )
    return float(value)


def _token_versions(samples: Sequence[Sample]) -> torch.Tensor | None:
    """[T] int64: N of the RUN:ATTEMPT:N of the span that each token lies in, -1 outside; None if one cannot be read."""
    texts = {span.version for sample in samples for span in sample.versions}
    try:
        numbers = {text: WeightVersion.parse(text).number for text in texts}
    except BadWeightVersion:
        return None
    if not numbers:
        return None
    versions: list[int] = []
    for sample in samples:
        own = [-1] * len(sample.response_ids)
        for span in sample.versions:
            own[span.start : span.end] = [numbers[span.version]] * (span.end - span.start)
        if any(sampled and number < 0 for number, sampled in zip(own, sample.response_mask, strict=True)):
            raise ValueError(
                f"sample {sample.group_id}/{sample.index}: its version spans {sample.versions} do not cover every "
                "token that the policy sampled; each needs the version of the weights that it came from"
            )
        versions += [-1] * len(sample.prompt_ids) + own
    return torch.tensor(versions)


def _all_or_none(samples: Sequence[Sample], what: str, present: list[bool]) -> None:
    if any(present) and not all(present):
        lacking = samples[present.index(False)]
        raise ValueError(
            f"{what}: {sum(present)} of {len(present)} samples have it, sample {lacking.group_id}/{lacking.index} does "
            "not"
        )


@dataclass(frozen=True)
class SupervisedSet:
    """Rows to imitate. targets: prompt index -> response ids with EOS; num_too_long: rows left out for their target's
    length."""

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
        raise UsageError(
            f"supervised data: {sum(with_response)} of {len(prompts)} rows have a `response`, row {lacking} does not"
        )
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
        raise UsageError(
            f"supervised data: all {len(prompts)} targets are longer than sampling.max_response_tokens = "
            f"{max_response_tokens}"
        )
    return SupervisedSet(kept, targets, len(prompts) - len(kept))


def supervised_batch(prompts: Sequence[Prompt], targets: Mapping[int, list[int]]) -> TrainBatch:
    """One global batch: the loss is on the targets (of `supervised_set`) alone, rewards are 0, each row is its own
    group."""
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
        **_pictures(prompts, lengths.tolist()),
    )


def _pictures(prompts: Sequence[Prompt], lengths: list[int]) -> dict[str, Any]:
    if not any(prompt.picture_places for prompt in prompts):
        return {}
    places = [np.asarray(prompt.picture_places, np.int64) for prompt in prompts]
    found = {"picture_places": joined(places, lengths, fields_of(TrainBatch)["picture_places"])}
    return found | picture_files([prompt.multimodal_inputs for prompt in prompts], lengths)


def turn_tensors(samples: Sequence[Sample]) -> tuple[Tensor | None, Tensor | None]:
    """(turns [T] int64, turn_rewards [T] float32) as TrainBatch has them; None where each sample is one turn without a
    reward of its own.

    Where a sample has no turns recorded, they are the stretches of tokens that the policy has sampled, and have
    earned nothing by themselves; those of several trajectories follow each other in the order of these.
    """
    if not any(sample.turn_rewards or sample.turns > 1 or sample.trajectory for sample in samples):
        return None, None
    turns: list[int] = []
    rewards: list[float] = []
    following: defaultdict[tuple[int, int], int] = defaultdict(int)
    for sample in samples:
        episode = (sample.group_id, sample.index)
        own = sample.turn_rewards or _stretches(sample.response_mask, following[episode])
        numbers, earned = [-1] * len(sample.response_ids), [0.0] * len(sample.response_ids)
        for turn in own:
            numbers[turn.start : turn.end] = [turn.turn] * (turn.end - turn.start)
            earned[turn.end - 1] = turn.reward
            following[episode] = turn.turn + 1
        _check(sample, numbers)
        turns += [-1] * len(sample.prompt_ids) + numbers
        rewards += [0.0] * len(sample.prompt_ids) + earned
    return torch.tensor(turns), torch.tensor(rewards, dtype=torch.float32)


def _stretches(mask: Sequence[int], first: int) -> list[TurnReward]:
    """The turns of a response: stretches of mask 1, numbered from `first`."""
    found: list[TurnReward] = []
    for sampled, tokens in groupby(range(len(mask)), key=mask.__getitem__):
        places = list(tokens)
        if sampled:
            found.append(TurnReward(first + len(found), places[0], places[-1] + 1, 0.0))
    return found


def _check(sample: Sample, numbers: Sequence[int]) -> None:
    if any((number >= 0) != bool(sampled) for number, sampled in zip(numbers, sample.response_mask, strict=True)):
        raise ValueError(
            f"sample {sample.group_id}/{sample.index}: its turn_rewards {sample.turn_rewards} do not cover the tokens "
            "that the policy sampled, each once"
        )
