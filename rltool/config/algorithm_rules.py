"""Rules between the keys of [algorithm] and [critic], and those beside them; see rltool/config/rules.py. A setting that
would be accepted and then do nothing is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rltool.config.algorithm import AlgorithmConfig, CriticConfig
from rltool.config.base import Config, is_list
from rltool.config.sections import Sections


@dataclass(frozen=True)
class Needs:
    """When a setting has an effect: `holds` of the algorithm, and the same in words that name the settings to
    change."""

    holds: Callable[[AlgorithmConfig], bool]
    words: str


_REWARDS = Needs(
    lambda a: a.advantage.kind not in ("distill", "gdpo", "none"),
    "an algorithm.advantage that is made from one reward a sample",
)
_RECOMPUTED = Needs(
    lambda a: a.old_logprobs == "trainer",
    'algorithm.old_logprobs = "trainer": it compares the old policy with the engines, and with "rollout" the two are '
    "the same",
)

EFFECTIVE: dict[str, Needs] = {
    "reward_clip": _REWARDS,
    "distill_coef": Needs(
        lambda a: a.advantage.kind != "distill",
        'another algorithm.advantage than "distill", which is nothing but that term',
    ),
    "distill_top_k": Needs(lambda a: a.distill_kl_coef > 0, "algorithm.distill_kl_coef above 0"),
    "overlong_buffer": Needs(
        lambda a: a.advantage.kind not in ("distill", "gdpo", "remax", "none"),
        "an algorithm.advantage that is made from one reward a sample, and of sampled responses alone",
    ),
    "overlong_penalty": Needs(lambda a: a.overlong_buffer > 0, "algorithm.overlong_buffer above 0"),
    "entropy": Needs(
        lambda a: a.old_logprobs == "trainer" or not a.selects_by_entropy,
        'algorithm.old_logprobs = "trainer": the engines do not report entropies',
    ),
    "loss_length": Needs(lambda a: a.loss_reduction == "constant", 'algorithm.loss_reduction = "constant"'),
    "is_weights": _RECOMPUTED,
    "is_mask": _RECOMPUTED,
    "is_veto": _RECOMPUTED,
}
"""Settings of the policy loss that need another one; those not named here always count."""

OF_THE_POLICY_GRADIENT = (
    "whiten_advantages", "distill_coef", "objective", "off_policy_mask_threshold", "is_weights", "is_mask", "is_veto",
)  # fmt: skip
"""Settings that do nothing where all advantages are 0; so does every entropy control but the bonus."""
IN_GROUPS = ("grpo", "gdpo", "rloo", "reinforce_pp_baseline")
"""Estimators that compare the samples of a prompt with each other."""
ROUTER_DROPS_EXPERTS = (
    "sglang-router does not pass on which experts were chosen; leave the router out, and the run asks the engines"
)
SUPERVISED = ("loss", "loss_reduction", "loss_length")
"""All that counts with algorithm.loss = "sft"."""


def check_algorithm(config: Sections) -> None:
    """ValueError for the first combination that makes no sense."""
    algorithm = config.algorithm
    for name in changed(algorithm):
        value = getattr(algorithm, name)
        if algorithm.loss == "sft" and name not in SUPERVISED:
            raise ValueError(
                f'algorithm.{name} = {_toml(value)} has no meaning with algorithm.loss = "sft"; leave it out'
            )
        needs = EFFECTIVE.get(name)
        if needs is not None and not needs.holds(algorithm):
            raise ValueError(
                f"algorithm.{name} = {_toml(value)} would have no effect: it needs {needs.words}; set that, or leave "
                f"algorithm.{name} out"
            )
    _check_critic(config)
    if config.algorithm.loss == "policy":
        _check_policy(config)
    elif config.epochs_per_rollout > 1:
        raise ValueError(
            f'epochs_per_rollout = {config.epochs_per_rollout} has no meaning with algorithm.loss = "sft": nothing is '
            "rolled out, and steps above the length of the data already go through it again; leave it out"
        )
    for name in ("teacher_path", "teacher"):
        if getattr(config.model, name) is not None:
            _check_teacher_used(algorithm, f"model.{name}")


def changed(algorithm: AlgorithmConfig) -> list[str]:
    """Settings that are not at their default."""
    return [name for name, field in AlgorithmConfig.model_fields.items() if getattr(algorithm, name) != field.default]


def _check_policy(config: Sections) -> None:
    algorithm, rollout, sampling = config.algorithm, config.rollout, config.sampling
    _check_distillation(config)
    if algorithm.routing_replay and config.trainer.shared_prefixes:
        raise ValueError(
            "algorithm.routing_replay replays the experts of each sample, and trainer.shared_prefixes computes what "
            "samples share once, with one choice of experts; leave one of them out"
        )
    if algorithm.routing_replay:
        _check_routing_replay(config)
    if algorithm.exact:
        _check_exact(config)
    if algorithm.uses_reward_parts:
        _check_reward_parts(config)
    if algorithm.needs_greedy_baseline:
        _check_greedy_baseline(config)
    if algorithm.overlong_buffer > sampling.max_response_tokens:
        raise ValueError(
            f"algorithm.overlong_buffer = {algorithm.overlong_buffer} is longer than sampling.max_response_tokens = "
            f"{sampling.max_response_tokens}; it is the last part of these: lower it"
        )
    if algorithm.advantage.kind in IN_GROUPS and rollout.samples_per_prompt < 2:
        raise ValueError(
            f'rollout.samples_per_prompt = 1 with algorithm.advantage = "{algorithm.advantage.kind}" makes every group '
            'advantage 0: nothing would be learned; use 2 or more, or algorithm.advantage = "reinforce_pp"'
        )
    if algorithm.entropy.kind == "kl_cov" and config.updates_per_rollout == 1 and algorithm.old_logprobs == "trainer":
        raise ValueError(
            'algorithm.entropy = "kl_cov" would have no effect: with one optimizer step a rollout the policy is still '
            "the old one, and the penalty is 0; raise optimizer_steps_per_rollout or epochs_per_rollout"
        )
    _check_credit(config)
    _check_mask_of_stale_tokens(config)


def _check_distillation(config: Sections) -> None:
    """The teacher is there, and what is asked of rewards has some to act on."""
    algorithm = config.algorithm
    asking = [name for name in ("distill_coef", "distill_kl_coef") if getattr(algorithm, name) > 0]
    if algorithm.advantage.kind == "distill":
        asking.insert(0, "advantage")
    if config.model.teacher is not None:
        _check_served_teacher(config)
    elif config.model.teacher_path is None and asking:
        raise ValueError(
            f"algorithm.{asking[0]} = {_toml(getattr(algorithm, asking[0]))} needs model.teacher_path: weights of the "
            "same architecture and shape as the model; or model.teacher: the name of a model that engines serve"
        )
    if algorithm.advantage.kind in ("distill", "none") and algorithm.kl.kind == "reward":
        raise ValueError(
            f'algorithm.kl.kind = "reward" would have no effect: algorithm.advantage = "{algorithm.advantage.kind}" '
            'uses no rewards; use algorithm.kl.kind = "loss"'
        )
    if algorithm.advantage.kind == "none" and not algorithm.own_objective:
        _check_no_policy_gradient(algorithm)


def _check_no_policy_gradient(algorithm: AlgorithmConfig) -> None:
    """Something is trained on, and nothing is set that acts on the policy gradient alone."""
    if algorithm.distill_kl_coef == 0:
        raise ValueError(
            'algorithm.advantage = "none" leaves nothing to learn from: it is for algorithm.distill_kl_coef alone; set '
            "that, or another algorithm.advantage"
        )
    for name in changed(algorithm):
        if name in OF_THE_POLICY_GRADIENT or (name == "entropy" and algorithm.entropy.kind != "bonus"):
            raise ValueError(
                f"algorithm.{name} = {_toml(getattr(algorithm, name))} would have no effect: algorithm.advantage = "
                '"none" has no policy gradient; leave one of the two out'
            )


def _check_greedy_baseline(config: Sections) -> None:
    """A greedy response can be sampled, and its reward is of the same kind as the samples'."""
    if config.rollout.agent is not None:
        raise ValueError(
            'algorithm.advantage = "remax" needs a greedy episode of each prompt, and with rollout.agent the gateway '
            'samples every turn by [sampling]; use algorithm.advantage = "rloo"'
        )
    if config.reward.group != "none":
        raise ValueError(
            f'algorithm.advantage = "remax" and reward.group = "{config.reward.group}" contradict each other: the '
            "greedy response is in no group, so its reward would be of another kind; leave one of the two out"
        )


def _check_served_teacher(config: Sections) -> None:
    """The teacher is a model of the run, and its log-probabilities mean what the trainer's do."""
    name, temperature = config.model.teacher, config.sampling.temperature
    if config.model.teacher_path is not None:
        raise ValueError("model.teacher and model.teacher_path are each a whole teacher: keep one of them")
    if name not in config.models:
        known = ", ".join(config.models) or "none"
        raise ValueError(f'model.teacher = "{name}" is no model of the run ({known}): name its path in [models.{name}]')
    if config.models[name].path is None:
        raise ValueError(f"model.teacher needs models.{name}.path: its tokenizer is compared with the model's")
    if temperature != 1:
        raise ValueError(
            f"model.teacher scores at temperature 1, and sampling.temperature is {temperature:g}: the trainer's "
            "log-probabilities would be those of another distribution; set it to 1, or use model.teacher_path"
        )


def _check_reward_parts(config: Sections) -> None:
    """Several rewards, which reach the advantages as they were scored."""
    if not config.reward.parts:
        raise ValueError(
            'algorithm.advantage = "gdpo" needs [[reward.parts]]: it normalises each of several rewards by itself; '
            'with one reward use algorithm.advantage = "grpo"'
        )
    if config.reward.group != "none":
        raise ValueError(
            f'reward.group = "{config.reward.group}" would have no effect: algorithm.advantage = "gdpo" is made of '
            "[[reward.parts]] as they were scored; leave one of the two out"
        )
    if config.algorithm.kl.kind == "reward":
        raise ValueError(
            'algorithm.kl.kind = "reward" would have no effect: algorithm.advantage = "gdpo" is made of '
            '[[reward.parts]] alone; use algorithm.kl.kind = "loss"'
        )


def _check_routing_replay(config: Sections) -> None:
    """The experts that engines choose can reach the samples."""
    setting = "algorithm.routing_replay = true"
    if config.rollout.agent is not None:
        raise ValueError(
            f"{setting} and rollout.agent contradict each other: the gateway does not record which experts were "
            "chosen; use rollout.environment, or leave one of the two out"
        )
    if config.engines.router is not None or config.engines.start_router:
        named = "engines.start_router = true" if config.engines.start_router else "engines.router (--router)"
        raise ValueError(f"{setting} and {named} contradict each other: {ROUTER_DROPS_EXPERTS}")


def _check_exact(config: Sections) -> None:
    """Trainer and engines can compute the same bits: one GPU holds the model, and each batch is of its weights."""
    trainer, layout = config.trainer, config.trainer.layout
    contradictions = {
        "trainer.device": trainer.device == "cpu",
        "model.dtype": config.model.dtype != "bfloat16",
        "trainer.tensor_parallel": layout.tp > 1,
        "trainer.pipeline_parallel": layout.pp > 1,
        "trainer.context_parallel": layout.cp > 1,
        "trainer.shared_prefixes": trainer.shared_prefixes,
        "trainer.residual": trainer.residual != "model",
        "trainer.attention": trainer.attention != "auto",
        "lora.rank": config.lora.rank > 0,
        "engines.quantization": config.engines.quantization != "none",
        "rollout.max_staleness": config.rollout.max_staleness > 0,
        "rollout.partial_rollout": config.rollout.partial_rollout,
        "sampling.top_p, sampling.top_k": config.sampling.truncates,
        "algorithm.old_logprobs": config.algorithm.old_logprobs != "trainer",
        "algorithm.distill_kl_coef": config.algorithm.uses_teacher_topk,
        "critic": config.algorithm.uses_critic,
    }
    found = [name for name, contradicts in contradictions.items() if contradicts]
    if found:
        raise ValueError(
            f"algorithm.exact = true is implemented for one GPU a model, bfloat16, and batches of the weights at hand; "
            f"leave out: {', '.join(found)}"
        )


def _check_credit(config: Sections) -> None:
    """Something may give a sample several turns."""
    rollout = config.rollout
    if config.algorithm.credits_turns and not (rollout.environment or rollout.agent or rollout.generate_function):
        raise ValueError(
            'algorithm.advantage.credit = "turn" would have no effect: built-in generation has one turn; set '
            "rollout.environment, rollout.agent or rollout.generate_function, or leave it out"
        )


def _check_mask_of_stale_tokens(config: Sections) -> None:
    """Partial rollouts alone bring tokens that are older than the batches that admission lets start."""
    limit, bound = config.algorithm.mask_tokens_older_than, config.rollout.max_staleness
    if limit is None or limit < bound or (limit == bound and config.rollout.partial_rollout):
        return
    raise ValueError(
        f"algorithm.mask_tokens_older_than = {limit} would have no effect: rollout.max_staleness = {bound} lets no "
        "token be trained on that is older; set algorithm.mask_tokens_older_than below rollout.max_staleness, or "
        "leave it out"
    )


def _check_critic(config: Sections) -> None:
    """[critic] is there for gae alone, and leaves the policy a step to train in."""
    if not config.algorithm.uses_critic:
        for name, field in CriticConfig.model_fields.items():
            if (value := getattr(config.critic, name)) != field.default:
                raise ValueError(
                    f'critic.{name} = {_toml(value)} would have no effect: it needs algorithm.advantage = "gae"; set '
                    "that, or leave [critic] out"
                )
    elif config.critic.warmup_rollouts >= config.steps:
        raise ValueError(
            f"critic.warmup_rollouts = {config.critic.warmup_rollouts} leaves the policy no step to train in: the run "
            f"has steps = {config.steps}; lower the one or raise the other"
        )


def _check_teacher_used(algorithm: AlgorithmConfig, setting: str) -> None:
    if not (algorithm.uses_teacher_logprobs or algorithm.uses_teacher_topk):
        raise ValueError(
            f'{setting} would have no effect: set algorithm.advantage = "distill" (or to your own function), '
            "algorithm.distill_coef or algorithm.distill_kl_coef, or leave it out"
        )


def _toml(value: object) -> str:
    if isinstance(value, str | Path):
        return f'"{value}"'
    if is_list(value):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, Config):
        fields = sorted(type(value).model_fields.items(), key=lambda field: field[0] != "kind")
        set_ = [(key, getattr(value, key), field.default) for key, field in fields]
        given = [(key, found) for key, found, default in set_ if found != default or key == "kind"]
        if len(given) == 1:  # the kind alone
            return _toml(given[0][1])
        return f"{{{', '.join(f'{key} = {_toml(part)}' for key, part in given)}}}"
    return str(value).lower() if isinstance(value, bool) else str(value)
