"""How the samples of one group, or of an evaluation, come about: generated through the data plane, then scored."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rltool.config.train import TrainConfig
from rltool.engines.types import SamplingParams
from rltool.rollout.data import Prompt
from rltool.rollout.data_plane import DataPlane
from rltool.rollout.evaluation import evaluate_set
from rltool.rollout.generate import GenerateContext, GenerateFunction, fill_group
from rltool.rollout.groups import Group
from rltool.rollout.model_clients import Models
from rltool.rollout.scoring import Scorer
from rltool.rollout.tokenizer import Tokenizer


class RolloutWork:
    """The collector's GroupWork. function: of rollout.generate_function, environment or
    agent, None for the built-in generation. vocab_size: of the model.
    require_versions: whether a completion must tell its weights' versions. models: beside the policy."""

    def __init__(
        self, config: TrainConfig, plane: DataPlane, scorer: Scorer, tokenizer: Tokenizer,
        function: GenerateFunction | None, *, vocab_size: int, require_versions: bool, models: Models,
    ) -> None:  # fmt: skip
        self._config, self._plane, self._scorer, self._function = config, plane, scorer, function
        sampling = config.sampling
        params = SamplingParams(
            max_tokens=sampling.max_response_tokens, temperature=sampling.temperature, top_p=sampling.top_p,
            top_k=sampling.top_k, stop_token_ids=tokenizer.stop_ids,
        )  # fmt: skip
        self._context = GenerateContext(
            plane.generate, params, vocab_size, require_versions=require_versions, models=models
        )

    async def generate(self, group: Group, interrupted: Callable[[], bool]) -> None:
        async def generate(request: Any) -> Any:
            return await self._plane.generate(request, group=group.id)

        context = replace(self._context, generate=generate, interrupted=interrupted, prompt=group.prompt)
        await fill_group(group.samples, context, self._function)

    async def finish(self, group: Group) -> str | None:
        return await self._scorer.finish(group.samples)

    async def abort(self, groups: Collection[int]) -> None:
        await self._plane.abort(groups)

    def keeps_partial_groups(self) -> bool:
        return self._function is None

    async def evaluate(self, sets: Mapping[str, Sequence[Prompt]]) -> dict[str, float]:
        """Metrics of every set, sampled at eval.temperature with the same seeds each time."""
        config = self._config
        metrics: dict[str, float] = {}
        sampling = replace(self._context.sampling, temperature=config.eval.temperature)
        for name, prompts in sets.items():
            metrics |= await evaluate_set(
                name, prompts, replace(self._context, sampling=sampling), self._scorer, function=self._function,
                samples_per_prompt=config.eval.samples_per_prompt, run_seed=config.seed,
            )  # fmt: skip
        return metrics
