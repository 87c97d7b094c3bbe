"""The evaluation sets of a run, each with its settings and its reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rltool.config.train import TrainConfig
from rltool.rollout.data import Prompt
from rltool.rollout.measure.eval_set import EvalSet, eval_settings
from rltool.rollout.rewards.parts import RewardParts, start_rewards
from rltool.rollout.rewards.pool import RewardPool
from rltool.rollout.rewards.scoring import Decode, Scorer
from rltool.rollout.serving.model_clients import Models


class EvalSets:
    """scorer: the run's, for the sets without a reward of their own. `close` ends the processes of the others."""

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
