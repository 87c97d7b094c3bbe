"""An agent episode's outcome: a reward, one for each of its turns, none, or a failure; and what it reports
training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rltool.errors import RltoolError
from rltool.rollout.rewards.worker import finite

Reward = float | list[float] | None
"""A list has a number for each turn of the session, in order of time; its sum is the reward of the episode."""
Result = float | list[float] | dict[str, Any] | None
"""What an agent returns, JSON: a Reward, or {"reward": Reward, "train_metadata": {...}}, either of which may be left
out."""
PARTS = ("reward", "train_metadata")


class AgentFailed(RltoolError):
    """An episode in which the agent did not come to its end, or whose record cannot be trained on."""


def reward_of(value: Any) -> Reward:
    """ValueError for what is no reward; errors of `finite`."""
    if value is None:
        return None
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return finite(value)


def result_of(value: Any) -> Result:
    """What an agent returned, as JSON. ValueError for what is no result; errors of `finite`."""
    if not isinstance(value, Mapping):
        return reward_of(value)
    unknown = [key for key in value if key not in PARTS]
    if unknown:
        raise ValueError(f"returned an object with {unknown[0]!r}; it may have {' and '.join(PARTS)}")
    metadata = value.get("train_metadata") or {}
    if not isinstance(metadata, Mapping) or not all(isinstance(key, str) for key in metadata):
        raise ValueError(f"returned train_metadata {metadata!r:.80}, expected an object")
    try:
        copied = json.loads(json.dumps(dict(metadata), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"returned train_metadata that cannot be written as JSON: {error}") from error
    return {"reward": reward_of(value.get("reward")), "train_metadata": copied}


def parted(result: Result) -> tuple[Reward, dict[str, Any]]:
    """(reward, train_metadata) of a result that `result_of` gave."""
    return (result["reward"], result["train_metadata"]) if isinstance(result, dict) else (result, {})
