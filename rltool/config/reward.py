"""What a sample is worth: one reward or several, by name or import path."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field, field_validator, model_validator

from rltool.config.base import Config, OwnFunction
from rltool.config.serve import Task


class Shipped(NamedTuple):
    """path: what the name stands for; package, extra: what it needs beside the base installation, or ""; asks: what
    the model is for that its option `model` names, None where it has no such option."""

    path: str
    package: str = ""
    extra: str = ""
    asks: Task | None = None


SHIPPED = {
    "exact": Shipped("rltool.rollout.rewards.shipped:exact_match"),
    "final-answer": Shipped("rltool.rollout.rewards.shipped:math_answer"),
    "numeric": Shipped("rltool.rollout.rewards.shipped:numeric"),
    "math": Shipped("rltool.rollout.rewards.shipped:math_verified", "math_verify", "math"),
    "choice": Shipped("rltool.rollout.rewards.shipped:multiple_choice"),
    "f1": Shipped("rltool.rollout.rewards.shipped:f1"),
    "regex": Shipped("rltool.rollout.rewards.shipped:regex"),
    "instructions": Shipped("rltool.rollout.rewards.instructions:instructions_followed"),
    "reasoning-gym": Shipped("rltool.rollout.rewards.shipped:reasoning_gym_score", "reasoning_gym", "quickstart"),
    "remote": Shipped("rltool.rollout.rewards.remote:remote"),
    "judge": Shipped("rltool.rollout.rewards.judges:graded", asks="generate"),
    "judge-probability": Shipped("rltool.rollout.rewards.judges:probability_of_yes", asks="generate"),
    "reward-model": Shipped("rltool.rollout.rewards.reward_model:reward_model", asks="classify"),
    "slime": Shipped("rltool.rollout.rewards.slime:custom_rm"),
}
"""Rewards by name (docs/rewards.md)."""

SHIPPED_FOR_GROUPS = {
    "rank": Shipped("rltool.rollout.rewards.group:rank"),
    "pairwise-judge": Shipped("rltool.rollout.rewards.judges:pairwise", asks="generate"),
}
"""What reward.group may name beside a function of the user's own."""


def _known(name: str) -> str:
    if ":" in name or name in SHIPPED:
        return name
    near = difflib.get_close_matches(name, SHIPPED, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"the names are {', '.join(SHIPPED)}"
    raise ValueError(f"{name!r} is neither `package.module:function` nor a reward that ships with rltool; {hint}")


RewardName = Annotated[str, AfterValidator(_known)]


class RewardPart(Config):
    """One of several rewards: `[[reward.parts]]`. They take the place of reward.function."""

    name: str = Field(pattern=r"^[A-Za-z][\w-]*$")
    """In the metric rollout/reward_part_NAME, and what reward.select_by chooses by."""
    function: RewardName = "exact"
    """As reward.function."""
    weight: float = 1.0
    """What it is multiplied by; the metric and the sample's record hold it without."""
    options: dict[str, Any] = Field(default_factory=dict)
    """As reward.options."""


class RewardConfig(Config):
    """What a sample is worth (docs/rewards.md)."""

    function: RewardName = "exact"
    """A reward that ships with rltool, by name, or `package.module:function`, called as f(sample: Sample, text: str) ->
    float, plain or async. `text` is the decoded response."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments that it is called with besides, such as `pattern` of regex."""
    parts: tuple[RewardPart, ...] = ()
    """In place of one function: their values times their weights are added up."""
    select_by: str | None = None
    """Field of a sample's metadata that names the one of parts which scores it, such as rm_type; None: all of them."""
    group: Literal["none", "rank", "pairwise-judge"] | OwnFunction = "none"
    """What is done with the scored samples of one prompt, in training alone. rank: each gets its rank among them, 0 to
    1. pairwise-judge: the share of comparisons that it wins. Or `package.module:function`: f(group: list[Sample],
    texts: list[str]) -> list[float], the rewards that take the place of theirs."""
    group_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of reward.group."""
    max_failure_fraction: float = Field(default=0.1, ge=0, le=1)
    """Share of a batch's samples whose reward may raise or be non-finite; above it the run stops with a checkpoint."""
    workers: int = Field(default=2, ge=1)
    """Processes for each plain reward function; async ones run on the rollout manager's event loop, all side by
    side."""

    @field_validator("parts")
    @classmethod
    def _names(cls, parts: tuple[RewardPart, ...]) -> tuple[RewardPart, ...]:
        names = [part.name for part in parts]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"several parts are called {', '.join(twice)}: give each a name of its own")
        return parts

    @model_validator(mode="after")
    def _one_way(self) -> RewardConfig:
        if self.parts and {"function", "options"} & self.model_fields_set:
            raise ValueError("parts take the place of function and options: give one or the other")
        if self.select_by is not None and not self.parts:
            raise ValueError("select_by chooses among parts, and there are none: add [[reward.parts]]")
        if self.group == "none" and self.group_options:
            raise ValueError("group_options has no effect without group")
        return self

    def described(self) -> str:
        """For messages: what scores the samples."""
        return ", ".join(part.function for part in self.parts) or self.function
