"""From the record of a session to samples: one for each trajectory. Pure.

What the model was given (prompts, tools' answers, what the chat template writes) has no loss; what it sampled is taken
over token by token, with log-probabilities and weight versions, as the engines reported them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rltool.engines.types import VersionSpan
from rltool.rollout.sample import Sample, SampleStatus


def samples_of(record: Mapping[str, Any], sample: Sample, *, reward: float | None, max_tokens: int) -> list[Sample]:
    """record: as the gateway gives it at a session's end; sample: the pending one that the episode is for; reward: of
    the whole episode, None: left to [reward]. A trajectory of more than max_tokens is FAILED: no trainer could take it.

    Empty where the model has sampled nothing. Trajectories in which it has sampled nothing are left out.
    """
    sampled = [trajectory for trajectory in record["trajectories"] if any(trajectory["loss_mask"])]
    return [_sample(trajectory, sample, i, reward, max_tokens) for i, trajectory in enumerate(sampled)]


def _sample(
    trajectory: Mapping[str, Any], sample: Sample, number: int, reward: float | None, max_tokens: int
) -> Sample:
    ids: Sequence[int] = trajectory["token_ids"]
    first = trajectory["loss_mask"].index(1)
    made = replace(
        sample,
        trajectory=number,
        prompt_ids=list(ids[:first]),
        response_ids=list(ids[first:]),
        response_mask=list(trajectory["loss_mask"][first:]),
        response_logprobs=list(trajectory["logprobs"][first:]),
        versions=[VersionSpan(v["version"], v["start"] - first, v["end"] - first) for v in trajectory["versions"]],
        status=SampleStatus.TRUNCATED if trajectory["finish_reasons"][-1] == "length" else SampleStatus.COMPLETED,
        episode_reward=reward,
    )
    if len(ids) > max_tokens:
        made.fail(
            f"a trajectory of {len(ids)} tokens is longer than sampling.max_prompt_tokens + max_response_tokens = "
            f"{max_tokens}"
        )
    made.validate()
    return made
