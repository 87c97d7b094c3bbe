"""From the record of a session to samples: one for each trajectory. Pure.

What the model was given (prompts, tools' answers, what the chat template writes) has no loss; what it sampled is taken
over token by token, with log-probabilities and weight versions, as the engines reported them.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rltool.agents.outcome import AgentFailed, Result, parted
from rltool.engines.types import VersionSpan
from rltool.rollout.sample import Sample, SampleStatus, TurnReward


def samples_of(record: Mapping[str, Any], sample: Sample, *, result: Result, max_tokens: int) -> list[Sample]:
    """record: as the gateway gives it at a session's end; sample: the pending one that the episode is for; result: the
    agent's, whose reward is of the whole episode, or of each turn, None: left to [reward]. AgentFailed where turns were
    given another number of rewards than there are turns. A trajectory of more than max_tokens is FAILED: no trainer
    could take it.

    Empty where the model has sampled nothing. Trajectories in which it has sampled nothing are left out.
    """
    reward, train_metadata = parted(result)
    sampled = [(i, trajectory) for i, trajectory in enumerate(record["trajectories"]) if any(trajectory["loss_mask"])]
    final = 0.0 if isinstance(reward, list) else reward
    turns = turns_of(record, reward) if isinstance(reward, list) else {}
    own = replace(sample, train_metadata=train_metadata)
    samples = [
        _sample(trajectory, own, number, final, turns.get(i, ()), max_tokens)
        for number, (i, trajectory) in enumerate(sampled)
    ]
    for first in samples[:1]:  # of the whole episode
        first.tool_seconds = seconds_between_turns(record.get("turns", ()))
    return samples


def seconds_between_turns(turns: Sequence[Mapping[str, Any]]) -> float | None:
    """For which an agent had asked for nothing, from its first turn to its last: its tools', and its own. None where
    there is no turn, or one without its duration."""
    spans = sorted((turn["time"] - turn["seconds"], turn["time"]) for turn in turns if turn.get("seconds") is not None)
    if not turns or len(spans) < len(turns):
        return None
    between, reached = 0.0, spans[0][1]
    for start, end in spans[1:]:
        between, reached = between + max(0.0, start - reached), max(reached, end)
    return between


def turns_of(record: Mapping[str, Any], rewards: Sequence[float]) -> dict[int, list[TurnReward]]:
    """Number of a trajectory -> its turns, at their tokens of the whole trajectory. AgentFailed as in `samples_of`."""
    if len(record["turns"]) != len(rewards):
        raise AgentFailed(
            f"it returned {len(rewards)} rewards, one for each turn, but its session has {len(record['turns'])} turns"
        )
    found: defaultdict[int, list[TurnReward]] = defaultdict(list)
    for number, (turn, reward) in enumerate(zip(record["turns"], rewards, strict=True)):
        own, end = found[turn["trajectory"]], turn["end"]
        mask = record["trajectories"][turn["trajectory"]]["loss_mask"]
        # What was sampled right before it, with nothing between, is the turn before.
        start, earliest = end, own[-1].end if own else 0
        while start > earliest and mask[start - 1]:
            start -= 1
        if start < end:
            own.append(TurnReward(number, start, end, reward))
    return found


def _sample(
    trajectory: Mapping[str, Any], sample: Sample, number: int, reward: float | None, turns: Sequence[TurnReward],
    max_tokens: int,
) -> Sample:  # fmt: skip
    ids: Sequence[int] = trajectory["token_ids"]
    first = trajectory["loss_mask"].index(1)
    made = replace(
        sample,
        trajectory=number,
        train_metadata=copy.deepcopy(sample.train_metadata),
        prompt_ids=list(ids[:first]),
        response_ids=list(ids[first:]),
        response_mask=list(trajectory["loss_mask"][first:]),
        response_logprobs=list(trajectory["logprobs"][first:]),
        versions=[VersionSpan(v["version"], v["start"] - first, v["end"] - first) for v in trajectory["versions"]],
        status=SampleStatus.TRUNCATED if trajectory["finish_reasons"][-1] == "length" else SampleStatus.COMPLETED,
        episode_reward=reward,
        turn_rewards=[replace(turn, start=turn.start - first, end=turn.end - first) for turn in turns],
    )
    if len(ids) > max_tokens:
        made.fail(
            f"a trajectory of {len(ids)} tokens is longer than sampling.max_prompt_tokens + max_response_tokens = "
            f"{max_tokens}"
        )
    made.validate()
    return made
