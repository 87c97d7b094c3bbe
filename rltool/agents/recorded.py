"""From the record of a session to samples: one for each trajectory that is trained. Pure.

What the model was given (prompts, tools' answers, what the chat template writes) has no loss; what it sampled is taken
over token by token, with log-probabilities and weight versions, as the engines reported them. Replies that do not count
(the gateway's `left_out`) are context, and are cut off where nothing follows them.
"""

from __future__ import annotations

import copy
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rltool.agents.outcome import AgentFailed, Result, parted
from rltool.engines.types import VersionSpan
from rltool.models.pictures import places_of
from rltool.rollout.sample import Sample, SampleStatus, TurnReward

Selection = Literal["all", "longest", "last", "rewarded"] | Callable[[Mapping[str, Any]], Sequence[int]]
"""Which trajectories are trained; a function gets the session's record, and gives their numbers."""


@dataclass(frozen=True)
class Rules:
    """train_discarded: whether replies are trained that the agent threw away."""

    selection: Selection = "all"
    train_discarded: bool = False


DEFAULT = Rules()


@dataclass
class _Turn:
    """number: within the session; trajectory: whose row it is trained in; source: where it was sampled."""

    number: int
    trajectory: int
    source: int
    start: int
    end: int
    finish_reason: str
    left_out: str
    reward: float | None


@dataclass
class Counted:
    """rows: trajectory -> its turns that are trained, in order; left_out: reason -> tokens that are not; repeated:
    tokens that a row shares with another one of the episode, and that are computed once more."""

    rows: dict[int, list[_Turn]] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    repeated: int = 0

    def tokens(self) -> int:
        return sum(turns[-1].end for turns in self.rows.values())


def samples_of(
    record: Mapping[str, Any], sample: Sample, *, result: Result, max_tokens: int, counted: Counted | None = None
) -> list[Sample]:
    """record: as the gateway gives it at a session's end; sample: the pending one that the episode is for; result: the
    agent's, whose reward is of the whole episode, or of each turn that the agent has received, None: left to [reward].
    AgentFailed where turns were given another number of rewards than there are turns. A trajectory of more than
    max_tokens is FAILED: no trainer could take it. counted: what `count_turns` gave; None: by the default rules.

    Empty where the model has sampled nothing that counts.
    """
    reward, train_metadata = parted(result)
    final = 0.0 if isinstance(reward, list) else reward
    own = replace(sample, train_metadata=train_metadata)
    counted = counted or count_turns(record, result)
    samples = [
        _sample(record, i, turns, own, number, final, max_tokens)
        for number, (i, turns) in enumerate(sorted(counted.rows.items()))
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


def count_turns(record: Mapping[str, Any], result: Result, rules: Rules = DEFAULT) -> Counted:
    """Which turns are trained, and in which row. AgentFailed as in `samples_of`."""
    trajectories, turns = record["trajectories"], _turns(record)
    reward, _ = parted(result)
    if isinstance(reward, list):
        received = [turn for turn in turns if turn.left_out != "unreceived"]
        if len(received) != len(reward):
            raise AgentFailed(
                f"it returned {len(reward)} rewards, one for each turn, but its session has {len(received)} turns"
            )
        for turn, value in zip(received, reward, strict=True):
            turn.reward = value + (turn.reward or 0.0)
    counted = Counted()
    counting: list[_Turn] = []
    for turn in turns:
        if turn.left_out and not (turn.left_out == "discarded" and rules.train_discarded):
            counted.left_out[turn.left_out] += turn.end - turn.start
        elif turn.start < turn.end:
            counting.append(turn)
    chosen = _chosen(record, counting, rules.selection)
    _hand_over(trajectories, counting, chosen)
    for turn in counting:
        if turn.trajectory in chosen:
            counted.rows.setdefault(turn.trajectory, []).append(turn)
        else:
            counted.left_out["selection"] += turn.end - turn.start
    for index in counted.rows:
        counted.rows[index].sort(key=lambda turn: turn.start)
        counted.repeated += _shared_with_rows(trajectories, index, counted.rows)
    return counted


def _turns(record: Mapping[str, Any]) -> list[_Turn]:
    """In order of time. Records of an earlier rltool do not say where a turn begins: right behind what was given."""
    trajectories = record["trajectories"]
    if not record.get("turns"):
        found: list[_Turn] = []
        for i, trajectory in enumerate(trajectories):
            mask, at = trajectory["loss_mask"], 0
            while 1 in mask[at:]:
                start = mask.index(1, at)
                at = mask.index(0, start) if 0 in mask[start:] else len(mask)
                found.append(_Turn(len(found), i, i, start, at, trajectory["finish_reasons"][-1], "", None))
        return found
    ends: defaultdict[int, int] = defaultdict(int)
    turns: list[_Turn] = []
    for number, turn in enumerate(record["turns"]):
        index, end = turn["trajectory"], turn["end"]
        mask, start = trajectories[index]["loss_mask"], turn.get("start")
        if start is None:
            start = end
            while start > ends[index] and mask[start - 1]:
                start -= 1
        ends[index] = end
        finish = turn.get("finish_reason") or trajectories[index]["finish_reasons"][-1]
        left_out, reward = turn.get("left_out", ""), turn.get("reward")
        turns.append(_Turn(number, index, index, start, end, finish, left_out, reward))
    return turns


def _chosen(record: Mapping[str, Any], counting: Sequence[_Turn], selection: Selection) -> set[int]:
    trajectories = record["trajectories"]
    having = {turn.trajectory for turn in counting}
    if callable(selection):
        return {int(index) for index in selection(record)}
    match selection:
        case "longest":
            return {max(sorted(having), key=lambda index: len(trajectories[index]["token_ids"]))} if having else set()
        case "last":
            return {turn.trajectory for turn in counting[-1:]}
        case "rewarded":
            return {turn.trajectory for turn in counting if turn.reward} or having
        case _:
            return having


def _hand_over(trajectories: Sequence[Mapping[str, Any]], counting: Sequence[_Turn], chosen: set[int]) -> None:
    """A turn of a trajectory that is not trained, in what a trained one shares with it, is trained there. So it is
    where nothing else of its trajectory counts: one row less. A child's number is above its parent's."""
    for index, trajectory in enumerate(trajectories):
        parent, shared = trajectory.get("parent"), trajectory.get("shared", 0)
        if parent is None:
            continue
        own = [turn for turn in counting if turn.trajectory == parent]
        within = [turn for turn in own if turn.end <= shared]
        wanted = index in chosen or _has_chosen_heir(trajectories, index, chosen)
        if wanted and within and (parent not in chosen or len(within) == len(own)):
            for turn in within:
                turn.trajectory = index


def _has_chosen_heir(trajectories: Sequence[Mapping[str, Any]], index: int, chosen: set[int]) -> bool:
    """Whether what this trajectory gets may go on to one that is trained."""
    children = [i for i, other in enumerate(trajectories) if other.get("parent") == index]
    return any(child in chosen or _has_chosen_heir(trajectories, child, chosen) for child in children)


def _shared_with_rows(
    trajectories: Sequence[Mapping[str, Any]], index: int, rows: Mapping[int, Sequence[_Turn]]
) -> int:
    """Leading tokens of a row that an ancestor's row has too."""
    shared = rows[index][-1].end
    while (parent := trajectories[index].get("parent")) is not None:
        shared = min(shared, trajectories[index].get("shared", 0))
        if parent in rows:
            return min(shared, rows[parent][-1].end)
        index = parent
    return 0


def _sample(
    record: Mapping[str, Any], index: int, turns: Sequence[_Turn], sample: Sample, number: int,
    reward: float | None, max_tokens: int,
) -> Sample:  # fmt: skip
    trajectories: Sequence[Mapping[str, Any]] = record["trajectories"]
    end = turns[-1].end
    ids: Sequence[int] = trajectories[index]["token_ids"][:end]
    mask, logprobs, versions = [0] * end, [0.0] * end, list[VersionSpan]()
    for turn in turns:
        source = trajectories[turn.source]
        mask[turn.start : turn.end] = [1] * (turn.end - turn.start)
        logprobs[turn.start : turn.end] = source["logprobs"][turn.start : turn.end]
        spans = [(max(v["start"], turn.start), min(v["end"], turn.end), v["version"]) for v in source["versions"]]
        versions.extend(VersionSpan(version, start, stop) for start, stop, version in spans if start < stop)
    first = turns[0].start
    made = replace(
        sample,
        trajectory=number,
        train_metadata=copy.deepcopy(sample.train_metadata),
        prompt_ids=list(ids[:first]),
        response_ids=list(ids[first:]),
        response_mask=mask[first:],
        response_logprobs=logprobs[first:],
        versions=[VersionSpan(v.version, v.start - first, v.end - first) for v in versions],
        status=SampleStatus.TRUNCATED if turns[-1].finish_reason == "length" else SampleStatus.COMPLETED,
        episode_reward=reward,
        turn_rewards=[
            TurnReward(turn.number, turn.start - first, turn.end - first, turn.reward)
            for turn in turns
            if turn.reward is not None
        ],
    )
    if len(ids) > max_tokens:
        made.fail(
            f"a trajectory of {len(ids)} tokens is longer than sampling.max_prompt_tokens + max_response_tokens = "
            f"{max_tokens}"
        )
    # What the row has of pictures the policy has seen only where the agent has sent it.
    made.multimodal_inputs = {kind: found for kind, found in sample.multimodal_inputs.items() if kind != "image"}
    made.picture_places = array("q")
    digests = trajectories[index].get("pictures", ())
    for digest, place in zip(digests, places_of(trajectories[index].get("picture_places", ())), strict=True):
        if place.at < end:
            made.multimodal_inputs.setdefault("image", []).append(record["pictures"][digest])
            made.picture_places.extend(place)
    made.validate()
    return made
