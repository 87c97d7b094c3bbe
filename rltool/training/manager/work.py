"""How the samples of one group, or of an evaluation, come about: generated through the data plane, then scored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from rltool.config.train import TrainConfig
from rltool.engines.types import Completion, GenerateRequest, SamplingParams
from rltool.errors import UsageError
from rltool.rollout.generate import GenerateContext, GenerateFunction, Http, fill_group
from rltool.rollout.groups import Group, new_samples
from rltool.rollout.measure.eval_set import EvalSet
from rltool.rollout.measure.evaluation import Evaluated, evaluate_set, version_metrics
from rltool.rollout.measure.own_evaluation import load_eval_function
from rltool.rollout.rewards.scoring import Scorer
from rltool.rollout.sample import Sample
from rltool.rollout.serving.data_plane import DataPlane
from rltool.rollout.serving.model_clients import Models
from rltool.rollout.serving.scores import add_teacher_logprobs
from rltool.rollout.stop_strings import cut_at_stop
from rltool.rollout.tokenizer import Tokenizer
from rltool.training.checks.routing_replay import wanted_routing

OF_NO_GROUP = -1
"""In the place of its number, of requests that rollout.function sends by itself."""


def check_trainable(asked: SamplingParams, configured: SamplingParams) -> None:
    """UsageError for a request of an own function whose tokens could not be trained on: the trainer computes
    log-probabilities of the whole distribution at sampling.temperature."""
    changed = [
        name
        for name in ("temperature", "top_p", "top_k", "min_tokens")
        if getattr(asked, name) != getattr(configured, name)
    ]
    if changed:
        name = changed[0]
        raise UsageError(
            f"an own function asks for {name} {getattr(asked, name)}, and the run trains on sampling.{name} "
            f"= {getattr(configured, name)}: engine and trainer would mean different log-probabilities; leave it as "
            "context.sampling has it"
        )


@dataclass(frozen=True)
class Planes:
    """Where requests go. evaluation: to the engines that evaluations have to themselves; None: where rollouts' go."""

    rollouts: DataPlane
    evaluation: DataPlane | None = None


@dataclass(frozen=True)
class PolicyModel:
    """The model that the engines serve. require_versions: whether a completion must have its weights' versions."""

    tokenizer: Tokenizer
    vocab_size: int
    require_versions: bool


class RolloutWork:
    """The collector's GroupWork. function: of rollout.generate_function, environment or agent, None for the built-in
    generation. models: beside the policy. http: of functions' own requests."""

    def __init__(
        self, config: TrainConfig, planes: Planes, scorer: Scorer, policy: PolicyModel,
        function: GenerateFunction | None, *, models: Models, http: Http | None = None,
    ) -> None:  # fmt: skip
        self._config, self._plane, self._scorer, self._function = config, planes.rollouts, scorer, function
        self._routing = wanted_routing(config)
        sampling, tokenizer = config.sampling, policy.tokenizer
        params = SamplingParams(
            max_tokens=sampling.max_response_tokens, temperature=sampling.temperature, top_p=sampling.top_p,
            top_k=sampling.top_k, stop_token_ids=tokenizer.stop_ids, stop=sampling.stop, min_tokens=sampling.min_tokens,
        )  # fmt: skip
        self._tokenizer, self._evaluate = tokenizer, load_eval_function(config.eval)
        self._keeps_masks = config.algorithm.loss == "policy" and sampling.truncates
        self._context = GenerateContext(
            partial(self._ask, planes.rollouts), params, policy.vocab_size, require_versions=policy.require_versions,
            models=models, tokenizer=tokenizer, http_session=http,
        )  # fmt: skip
        evaluation = planes.evaluation or planes.rollouts
        self._evaluation = replace(self._context, generate=partial(self._ask, evaluation))

    async def generate(self, group: Group, interrupted: Callable[[], bool]) -> None:
        generate = partial(self._ask_to_train, group.id)
        context = replace(self._context, generate=generate, interrupted=interrupted, prompt=group.prompt)
        await fill_group(group.samples, context, self._function)

    def context(self) -> GenerateContext:
        return replace(self._context, generate=partial(self._ask_to_train, OF_NO_GROUP))

    async def _ask_to_train(self, group: int, request: GenerateRequest) -> list[Completion]:
        check_trainable(request.sampling, self._context.sampling)
        if self._keeps_masks:
            request = replace(request, sampling=replace(request.sampling, return_sampling_mask=True))
        return await self._ask(self._plane, replace(request, routing=self._routing), group=group)

    async def _ask(self, plane: DataPlane, request: GenerateRequest, *, group: int | None = None) -> list[Completion]:
        completions = await plane.generate(request, group=group)
        if not request.sampling.stop:
            return completions
        decode = self._tokenizer.decode
        return await asyncio.to_thread(lambda: [cut_at_stop(one, request, decode) for one in completions])

    async def finish(self, group: Group) -> str | None:
        """Rewards and filters; what is left of the group gets its baseline and is scored by model.teacher, where the
        advantages need them."""
        reason, teacher = await self._scorer.finish(group.samples), self._config.model.teacher
        if reason is None and self._config.algorithm.needs_greedy_baseline:
            reason = await self._add_baseline(group)
        if reason is None and teacher is not None:
            topk = self._config.algorithm.distill_top_k if self._config.algorithm.uses_teacher_topk else 0
            await add_teacher_logprobs(
                group.samples, self._context.model(teacher), topk=topk, vocab_size=self._context.vocab_size
            )
        return reason

    async def _add_baseline(self, group: Group) -> str | None:
        """The reward of a greedy response to the group's prompt, in all of its samples. Returns why there is none."""
        generate = partial(self._ask, self._plane, group=group.id)
        sampling = replace(self._context.sampling, temperature=0.0)
        context = replace(self._context, generate=generate, sampling=sampling, prompt=group.prompt)
        [greedy] = new_samples(group.id, group.prompt, count=1, run_seed=self._config.seed)
        await fill_group([greedy], context, self._function)
        await self._scorer.rewards_of([greedy])
        if greedy.reward is None:
            return "reward_failed"
        for sample in group.samples:
            sample.baseline_reward = greedy.reward
        return None

    async def abort(self, groups: Collection[int]) -> None:
        await self._plane.abort(groups)

    def keeps_partial_groups(self) -> bool:
        return self._function is None and self._config.rollout.function is None

    async def evaluate(self, sets: Sequence[EvalSet]) -> Evaluated:
        """Every set, one after the other, with the same seeds each time."""
        metrics: dict[str, float] = {}
        samples: dict[str, list[Sample]] = {}
        seed = self._config.eval.seed
        for one in sets:
            found = await evaluate_set(
                one, self._evaluation, function=self._function, eval_seed=seed, evaluate=self._evaluate
            )
            metrics |= found.metrics
            samples |= found.samples
        return Evaluated(metrics | version_metrics(chain(*samples.values())), samples)
