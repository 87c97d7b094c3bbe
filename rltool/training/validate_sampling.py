"""[sampling] of a run: what the trainer could not compute the log-probabilities of. Pure."""

from __future__ import annotations

from rltool.config.train import TrainConfig
from rltool.errors import UsageError


def check_sampling(config: TrainConfig) -> None:
    """UsageError for a distribution that the policy could not be trained on."""
    if config.algorithm.loss != "policy":
        return
    sampling = config.sampling
    if sampling.truncates:
        _check_truncated(config)
    if sampling.min_tokens:
        raise UsageError(
            f"sampling.min_tokens {sampling.min_tokens}: engines give stop tokens the probability 0 until then and "
            "renormalise the others, the trainer does not, so log-probabilities would differ; train without it, and "
            "let the reward or rollout.group_hook judge what is too short"
        )


def _check_truncated(config: TrainConfig) -> None:
    """The engines tell which tokens were left to choose from, and everything is about these."""
    sampling = config.sampling
    said = f"sampling.top_p = {sampling.top_p:g} and sampling.top_k = {sampling.top_k}"
    if sampling.top_k < 0:
        raise UsageError(
            f"{said}: the trainer must know which tokens top_p left to choose from, and without sampling.top_k there "
            "may be as many as the vocabulary has; set sampling.top_k as well, such as 50, or leave top_p at 1"
        )
    if config.rollout.agent is not None:
        raise UsageError(
            f"{said} with rollout.agent: the gateway does not record which tokens were left to choose from; train with "
            "top_p = 1 and top_k = -1"
        )
    engines = config.engines
    if engines.router is not None or engines.start_router:
        setting = "--router" if engines.router is not None else "engines.start_router = true"
        raise UsageError(
            f"{said} with {setting}: sglang-router does not pass on which tokens were left to choose from; leave it "
            "out (train then asks the engines directly), or set top_p = 1 and top_k = -1"
        )
    if config.model.teacher is not None or config.algorithm.uses_teacher_topk:
        setting = "model.teacher" if config.model.teacher is not None else "algorithm.distill_kl_coef"
        raise UsageError(
            f"{said} with {setting}: the teacher's log-probabilities are over the whole vocabulary, the policy's over "
            "what was left to choose from; train with top_p = 1 and top_k = -1, or distill from model.teacher_path by "
            'algorithm.advantage = "distill" or algorithm.distill_coef'
        )
