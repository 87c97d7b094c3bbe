"""What evaluation sets are sampled and scored by, where that is not what training does."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from rltool.config.base import Config
from rltool.config.reward import RewardConfig, RewardName


def all_or_some(top_k: int) -> int:
    if top_k == -1 or top_k >= 1:
        return top_k
    raise ValueError("-1 keeps all tokens, 1 or more the most likely ones; nothing else has a meaning")


class EvalSamplingConfig(Config):
    """How evaluation samples. No trainer looks at these log-probabilities, so top_p and top_k are free."""

    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Share of the probability that tokens are drawn from."""
    top_k: Annotated[int, AfterValidator(all_or_some)] = -1
    """-1 keeps all tokens."""
    max_response_tokens: int | None = Field(default=None, ge=1)
    """None: sampling.max_response_tokens."""
    stop: tuple[str, ...] | None = None
    """None: sampling.stop."""


class EvalSetConfig(Config):
    """What differs for one set; what is not given is as in [eval] and [eval.sampling]."""

    samples_per_prompt: int | None = Field(default=None, ge=1)
    """In place of eval.samples_per_prompt."""
    max_prompts: int | None = Field(default=None, ge=1)
    """Take only this many prompts, the first; eval.max_prompts at most."""
    reward: RewardName | None = None
    """A reward of its own, as reward.function."""
    reward_options: dict[str, Any] = Field(default_factory=dict)
    """As reward.options."""
    temperature: float | None = Field(default=None, ge=0)
    """In place of eval.sampling.temperature; and so the next three."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """See temperature."""
    top_k: Annotated[int, AfterValidator(all_or_some)] | None = None
    """See temperature."""
    max_response_tokens: int | None = Field(default=None, ge=1)
    """See temperature."""

    @model_validator(mode="after")
    def _options(self) -> EvalSetConfig:
        if self.reward is None and self.reward_options:
            raise ValueError("reward_options has no effect without reward")
        return self

    def rewards(self) -> RewardConfig:
        """What scores this set, where `reward` names it."""
        assert self.reward is not None
        return RewardConfig(function=self.reward, options=self.reward_options)
