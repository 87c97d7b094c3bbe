"""A set of held-out prompts, and how it is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rltool.config.rollout import EvalConfig, SamplingConfig
from rltool.engines.types import SamplingParams
from rltool.rollout.data import Prompt
from rltool.rollout.rewards.scoring import Scorer


@dataclass(frozen=True)
class EvalSettings:
    """How one set is sampled; pass_at: the k of pass@k; pass_reward: a sample has passed from this reward on."""

    samples_per_prompt: int
    temperature: float
    top_p: float
    top_k: int
    max_response_tokens: int
    stop: tuple[str, ...] = ()
    pass_at: tuple[int, ...] = ()
    pass_reward: float = 1.0

    def applied(self, sampling: SamplingParams) -> SamplingParams:
        """The same with this temperature, cut, length and stops."""
        return replace(
            sampling, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k,
            max_tokens=self.max_response_tokens, stop=self.stop,
        )  # fmt: skip


@dataclass(frozen=True)
class EvalSet:
    name: str
    prompts: Sequence[Prompt]
    settings: EvalSettings
    scorer: Scorer


def eval_settings(config: EvalConfig, sampling: SamplingConfig, name: str, *, pass_reward: float) -> EvalSettings:
    """Of the set called `name`: its own where it has some, else those of [eval.sampling], else of [sampling]."""
    common = config.sampling
    settings = EvalSettings(
        samples_per_prompt=config.samples_per_prompt,
        temperature=common.temperature,
        top_p=common.top_p,
        top_k=common.top_k,
        max_response_tokens=common.max_response_tokens or sampling.max_response_tokens,
        stop=sampling.stop if common.stop is None else common.stop,
        pass_at=config.pass_at,
        pass_reward=pass_reward,
    )
    own = config.overrides.get(name)
    if own is None:
        return settings
    given = own.model_dump(exclude_none=True, exclude={"reward", "reward_options", "max_prompts"})
    return replace(settings, **given)
