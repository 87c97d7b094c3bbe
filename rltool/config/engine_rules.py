"""Rules between engines.mode, engines.groups and [weights]; see rltool/config/rules.py."""

from __future__ import annotations

from collections.abc import Collection

from rltool.config.engine_weights import EngineWeights
from rltool.config.rollout import WeightsConfig
from rltool.config.sections import Sections
from rltool.config.serve import POLICY

SET_BY_FP8 = ("--hf-overrides", "--json-model-override-args", "--quantization", "-q", "--load-format", "--config")
"""Flags of engines."""


def check_engines(config: Sections) -> None:
    """The relation between engines and trainer. That external engines have an address is for the verbs to ask."""
    if not config.needs_engines:
        return
    engines = config.engines
    if engines.quantization == "fp8":
        check_fp8(config)
    ipc = [setting_of("transport", rule) for rule, weights in config.weights.variants() if weights.transport == "ipc"]
    beside = config.weights.lora_sync == "adapter" and config.trainer.share_gpus  # engines that do not sleep
    if ipc and not engines.shares_gpus and not beside:
        raise ValueError(
            f'{ipc[0]} = "ipc" and engines.mode = "{engines.mode}" contradict each other: CUDA IPC is for '
            'engines on the trainer\'s GPUs (engines.mode = "colocate"; trainer.share_gpus with weights.lora_sync = '
            '"adapter"); leave weights.transport at "auto"'
        )
    if engines.mode == "external":
        return
    if engines.external:
        raise ValueError(
            f'--rollout-external and engines.mode = "{engines.mode}" contradict each other: '
            "external engines are not started by the run; leave engines.mode out, or leave the addresses out"
        )
    if engines.router is not None:
        raise ValueError(
            f'--router and engines.mode = "{engines.mode}" contradict each other: that router does not know the '
            "engines that train starts; set engines.start_router = true for one that does"
        )
    check_groups(config)
    if engines.shares_gpus:
        check_colocated(config)


def check_fp8(config: Sections) -> None:
    """Engines that hold FP8, which is sent to them with every sync."""
    what = 'engines.quantization = "fp8"'
    if config.weights.lora_sync == "adapter":
        raise ValueError(
            f'{what} and weights.lora_sync = "adapter" contradict each other: the weights under the adapters would '
            'never be sent; leave weights.lora_sync at "merged", or quantization out'
        )
    for group in config.engines.groups if config.engines.started_by_train else ():
        if group.model != POLICY or group.role == "placeholder":
            continue
        if group.weight_backend != "rltool":
            raise ValueError(f'{what}: group {group.name!r} needs weight_backend = "rltool"')
        if group.dtype not in (None, "auto", "bfloat16"):
            raise ValueError(f"{what}: group {group.name!r} computes in bfloat16; leave dtype = {group.dtype!r} out")
        decided = [flag for flag in group.flags if flag.replace("_", "-").startswith(SET_BY_FP8)]
        if decided:
            raise ValueError(f"{what} sets {decided[0]} of group {group.name!r} itself; leave it out of flags")


def check_colocated(config: Sections) -> None:
    """What engines on the trainer's own GPUs cannot do: work while it trains, or take weights from GPU to GPU."""
    if config.rollout.max_staleness:
        raise ValueError(
            f'engines.mode = "colocate" and rollout.max_staleness = {config.rollout.max_staleness} contradict each '
            "other: engines on the trainer's GPUs sleep while it trains, so nothing is generated ahead; leave "
            'max_staleness at 0, or give the engines GPUs of their own with engines.mode = "managed"'
        )
    for rule, weights in config.weights.variants():
        _check_colocated_weights(weights, rule, config.trainer.device)


def _check_colocated_weights(weights: WeightsConfig, rule: EngineWeights | None, device: str) -> None:
    if weights.staged:
        raise ValueError(
            f'{setting_of("staged", rule)} and engines.mode = "colocate" contradict each other: engines that sleep '
            "generate nothing while weights arrive; leave it out"
        )
    if weights.delta:
        raise ValueError(
            f'{setting_of("delta", rule)} and engines.mode = "colocate" contradict each other: it is for engines that '
            "generate while patches arrive; leave it out"
        )
    if weights.transport == "nccl":
        raise ValueError(
            f'{setting_of("transport", rule)} = "nccl" and engines.mode = "colocate" contradict each other: NCCL joins '
            'no two processes on one GPU; leave weights.transport at "auto"'
        )
    if weights.transport == "ipc" and device == "cpu":
        raise ValueError(
            f'{setting_of("transport", rule)} = "ipc" and trainer.device = "cpu" contradict each other: CUDA IPC '
            'shares memory of GPUs; leave weights.transport at "auto"'
        )


def setting_of(name: str, rule: EngineWeights | None) -> str:
    """Where it was set: in [weights], or in a section of weights.engines."""
    if rule is None or name not in rule.settings:
        return f"weights.{name}"
    return f"weights.engines ({rule.whom}): {name}"


def check_groups(config: Sections) -> None:
    """What a run can start of engines.groups."""
    if all(group.role == "placeholder" for group in config.engines.groups):
        raise ValueError(
            f'engines.mode = "{config.engines.mode}": no engine to start: the configuration has no [[engines.groups]]; '
            "see docs/engines.md"
        )
    for group in config.engines.groups:
        if group.gpus:
            raise ValueError(
                f"group {group.name!r} names gpus, which is for serve-engines: a run takes its GPUs from --gpus "
                "(trainer.gpus), the ranks' first"
            )
    policy = [group for group in config.engines.groups if group.model == POLICY and group.role != "placeholder"]
    if not policy:
        raise ValueError(
            f'engines.mode = "{config.engines.mode}" needs a group of the policy, which rollouts are sampled from'
        )
    roles, kinds = {group.role for group in policy}, {group.engine for group in policy}
    if config.engines.shares_gpus and roles != {"regular"}:
        raise ValueError(
            'engines.mode = "colocate" and prefill and decode engines contradict each other: the caches of engines '
            "that sleep are gone, and with them what the two have registered for transfers; use another engines.mode"
        )
    why = halves_fault(roles, kinds, pause_mode=config.weights.pause_mode)
    if why is not None:
        raise ValueError(why)
    others = [g for g in config.engines.groups if g.model != POLICY and g.role in ("prefill", "decode")]
    if others:
        raise ValueError(
            f"group {others[0].name!r}: a run asks regular engines of other models alone; `rltool serve-engines "
            "--config` starts the others"
        )


def halves_fault(
    roles: Collection[str], kinds: Collection[str | None], *, pause_mode: str | None
) -> str | None:
    """What a run cannot do with prefill and decode engines; None: nothing, or all are regular.

    roles, kinds: of the engines that the policy is sampled from. pause_mode: weights.pause_mode; None: they are not
    synced.
    """
    if not set(roles) - {"regular"}:
        return None
    if set(roles) != {"prefill", "decode"}:
        named = " and ".join(sorted(set(roles)))
        return f"engines of role {named}: prefill and decode go together, without regular ones"
    if len(set(kinds)) > 1:
        return "prefill and decode engines are all vLLM's or all SGLang's: their caches are not alike"
    if pause_mode not in (None, "auto", "abort"):
        return (
            f'weights.pause_mode = "{pause_mode}" with prefill and decode engines: a KV cache of old weights would be '
            'used after a sync; set weights.pause_mode = "abort", with which the tokens so far are kept, and their '
            'cache is computed anew, or leave it at "auto"'
        )
    return None
