"""What a run's rollouts are made from, read and imported before the first request: prompts, rewards, own functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from rltool.config.train import TrainConfig
from rltool.rollout.data import Prompt, PromptSet, PromptSource, PromptSupply, data_summary, load_prompts
from rltool.rollout.data.own import load_own_source
from rltool.rollout.data.rows import Refusal, takes_all
from rltool.rollout.measure.eval_set import EvalSet, eval_settings
from rltool.rollout.rewards.group import GroupReward
from rltool.rollout.rewards.parts import RewardParts, start_rewards
from rltool.rollout.rewards.pool import RewardPool
from rltool.rollout.rewards.scoring import Decode, FailureLimit, Scorer, load_filter, load_hook
from rltool.rollout.serving.model_clients import Models
from rltool.rollout.tokenizer import Tokenizer
from rltool.training.checks.modalities import generation_refusal, run_tokenizer, training_refusal


@dataclass(frozen=True)
class RolloutInputs:
    """rewards: to be closed by the owner; summary: one line on the data."""

    tokenizer: Tokenizer
    prompts: PromptSupply
    eval_sets: Mapping[str, Sequence[Prompt]]
    rewards: RewardPool | RewardParts
    scorer: Scorer
    summary: str


def load_inputs(config: TrainConfig, models: Models, *, trains: bool) -> RolloutInputs:
    """Read all data, import what the configuration names, start the reward's processes. models: those beside the
    policy, which rewards reach. trains: whether a trainer is to read the samples. Raises UsageError for what is
    wrong there."""
    tokenizer = run_tokenizer(config)
    refusal = partial(training_refusal if trains else generation_refusal, config)
    train, prompts = load_train_prompts(config, tokenizer, refusal)
    evals = {
        name: load_prompts(
            [held_out], tokenizer, config.data, max_prompt_tokens=config.sampling.max_prompt_tokens,
            limit=config.eval.max_prompts, refusal=refusal,
        )
        for name, held_out in config.eval.sets.items()
    }  # fmt: skip
    rewards, scorer = _rewards(config, tokenizer, models)
    eval_sets = {name: found.prompts for name, found in evals.items()}
    return RolloutInputs(tokenizer, prompts, eval_sets, rewards, scorer, data_summary(train, evals))


def load_train_prompts(
    config: TrainConfig, tokenizer: Tokenizer, refusal: Refusal = takes_all
) -> tuple[PromptSet | None, PromptSupply]:
    """What data.train or data.source gives: what was read (None of a source of the user's own), and its order."""
    data, limit = config.data, config.sampling.max_prompt_tokens
    if data.source is not None:
        return None, load_own_source(data, tokenizer, seed=config.seed, max_prompt_tokens=limit, refusal=refusal)
    train = load_prompts(data.train, tokenizer, data, max_prompt_tokens=limit, refusal=refusal)
    source = PromptSource(
        train.prompts, seed=config.seed, shuffle=data.shuffle, parts=train.parts, weights=data.weights,
        num_too_long=train.num_too_long,
    )  # fmt: skip
    return train, source


def _rewards(config: TrainConfig, tokenizer: Tokenizer, models: Models) -> tuple[RewardPool | RewardParts, Scorer]:
    reward, rollout, timeout = config.reward, config.rollout, config.deadlines.call
    together = GroupReward(reward, timeout=timeout, models=models) if reward.group != "none" else None
    group_filter, group_hook = load_filter(rollout), load_hook(rollout)
    rewards = start_rewards(reward, timeout=timeout, models=models)
    scorer = Scorer(
        rewards, tokenizer.decode, group_filter=group_filter, group_hook=group_hook, group_reward=together,
        may_fail=FailureLimit(reward.max_failure_fraction, rollout.prompts_per_step * rollout.samples_per_prompt),
        function=reward.described(),
    )  # fmt: skip
    return rewards, scorer


class EvalSets:
    """The evaluation sets of a run, each with its settings and its reward.

    scorer: the run's, for the sets without a reward of their own. `close` ends the processes of the others."""

    def __init__(
        self, config: TrainConfig, prompts: Mapping[str, Sequence[Prompt]], scorer: Scorer, decode: Decode,
        models: Models,
    ) -> None:  # fmt: skip
        self._pools: list[RewardPool | RewardParts] = []
        self.sets: list[EvalSet] = []
        for name, rows in prompts.items():
            own = config.eval.overrides.get(name)
            if own is not None and own.reward is not None:
                rewards = own.rewards().model_copy(update={"workers": config.reward.workers})
                pool = start_rewards(rewards, timeout=config.deadlines.call, models=models)
                self._pools.append(pool)
                used = Scorer(pool, decode, function=own.reward)
            else:
                used = scorer
            chosen = rows if own is None or own.max_prompts is None else rows[: own.max_prompts]
            settings = eval_settings(config.eval, config.sampling, name, pass_reward=config.monitor.pass_reward)
            self.sets.append(EvalSet(name, chosen, settings, used))

    async def close(self) -> None:
        for pool in self._pools:
            await pool.close()
