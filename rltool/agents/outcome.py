"""What an agent's episode comes to: a reward, one for each of its turns, none, or a failure."""

from __future__ import annotations

from typing import Any

from rltool.errors import RltoolError
from rltool.rollout.reward_worker import finite

Reward = float | list[float] | None
"""A list has a number for each turn of the session, in order of time; its sum is the reward of the episode."""


class AgentFailed(RltoolError):
    """An episode in which the agent did not come to its end, or whose record cannot be trained on."""


def reward_of(value: Any) -> Reward:
    """What an agent returned. ValueError for what is no reward; errors of `finite`."""
    if value is None:
        return None
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return finite(value)
