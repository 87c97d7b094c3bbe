"""Rules between the keys of a run's configuration: what contradicts what, and what would have no effect. TrainConfig
applies them, so it is valid however it was made. What needs a file, an import or an engine is checked in
rltool/training/checks/validate.py.

Each rule raises ValueError for the first setting that cannot work. The message names the key and the fix.
"""

from __future__ import annotations

from rltool.config.algorithm_rules import check_algorithm
from rltool.config.engine_rules import check_engines
from rltool.config.sections import Sections


def check_batch_arithmetic(config: Sections) -> None:
    """prompts x samples = global batch x optimizer steps, and every data-parallel rank gets a sample in every step."""
    rollout, sampling, steps = config.rollout, config.sampling, config.optimizer_steps_per_rollout
    samples_per_prompt = rollout.samples_per_prompt if config.algorithm.loss == "policy" else 1
    samples = rollout.prompts_per_step * samples_per_prompt
    said = (
        f"rollout.prompts_per_step {rollout.prompts_per_step} x rollout.samples_per_prompt {samples_per_prompt} = "
        f"{samples} samples"
    )
    if rollout.prompts_per_step % steps:
        fix = rollout.prompts_per_step - rollout.prompts_per_step % steps or steps
        raise ValueError(
            f"{said} do not split into optimizer_steps_per_rollout = {steps} equal batches of whole prompt groups: "
            f"{rollout.prompts_per_step % steps} prompts remain; set rollout.prompts_per_step to a multiple of "
            f"{steps}, such as {fix}"
        )
    if config.global_batch_size is not None and config.global_batch_size * steps != samples:
        raise ValueError(
            f"{said}, but global_batch_size {config.global_batch_size} x optimizer_steps_per_rollout {steps} = "
            f"{config.global_batch_size * steps}; set global_batch_size to {samples // steps}, or leave it out"
        )
    ranks = config.trainer.layout.dp
    if samples // steps < ranks:
        raise ValueError(
            f"{said} in {steps} optimizer steps leave {samples // steps} samples for {ranks} data-parallel ranks; "
            "raise rollout.prompts_per_step"
        )
    longest = sampling.max_prompt_tokens + sampling.max_response_tokens
    cut = config.trainer.context_parallel
    if longest > config.trainer.micro_batch_tokens:
        shared = f" on each of {cut} context-parallel ranks" if cut > 1 else ""
        raise ValueError(
            f"sampling.max_prompt_tokens {sampling.max_prompt_tokens} + sampling.max_response_tokens "
            f"{sampling.max_response_tokens} = {longest} tokens do not fit trainer.max_tokens_per_micro_batch = "
            f"{config.trainer.max_tokens_per_micro_batch}{shared}; raise it to at least {-(-longest // cut)}"
        )


def check_sampling(config: Sections) -> None:
    """A distribution that the policy could be trained on."""
    if config.algorithm.loss != "policy":
        return
    sampling = config.sampling
    if sampling.truncates:
        _check_truncated(config)
    if sampling.min_tokens:
        raise ValueError(
            f"sampling.min_tokens {sampling.min_tokens}: engines give stop tokens the probability 0 until then and "
            "renormalise the others, the trainer does not, so log-probabilities would differ; train without it, and "
            "let the reward or rollout.group_hook judge what is too short"
        )


def _check_truncated(config: Sections) -> None:
    """The engines report which tokens were left to choose from, and everything is about these."""
    sampling = config.sampling
    said = f"sampling.top_p = {sampling.top_p:g} and sampling.top_k = {sampling.top_k}"
    if sampling.top_k < 0:
        raise ValueError(
            f"{said}: the trainer must know which tokens top_p left to choose from, and without sampling.top_k there "
            "may be as many as the vocabulary has; set sampling.top_k as well, such as 50, or leave top_p at 1"
        )
    if config.rollout.agent is not None:
        raise ValueError(
            f"{said} with rollout.agent: the gateway does not record which tokens were left to choose from; train with "
            "top_p = 1 and top_k = -1"
        )
    engines = config.engines
    if engines.router is not None or engines.start_router:
        setting = "--router" if engines.router is not None else "engines.start_router = true"
        raise ValueError(
            f"{said} with {setting}: sglang-router does not pass on which tokens were left to choose from; leave it "
            "out (train then asks the engines directly), or set top_p = 1 and top_k = -1"
        )
    if config.model.teacher is not None or config.algorithm.uses_teacher_topk:
        setting = "model.teacher" if config.model.teacher is not None else "algorithm.distill_kl_coef"
        raise ValueError(
            f"{said} with {setting}: the teacher's log-probabilities are over the whole vocabulary, the policy's over "
            "what was left to choose from; train with top_p = 1 and top_k = -1, or distill from model.teacher_path by "
            'algorithm.advantage = "distill" or algorithm.distill_coef'
        )


def check_evaluation(config: Sections) -> None:
    """What [eval] asks for and cannot have."""
    _check_best_metric(config)
    _check_evaluation_engines(config)
    if not config.eval.blocking and config.engines.shares_gpus:
        raise ValueError(
            'eval.blocking = false and engines.mode = "colocate" contradict each other: engines on the trainer\'s GPUs '
            "sleep while it trains, so nothing is evaluated beside it; leave eval.blocking out"
        )
    if config.eval.stop_at is not None and not (config.eval.sets and config.eval.every_steps):
        raise ValueError(
            "eval.stop_at needs a set in [eval.sets] and eval.every_steps above 0: nothing would ever be measured"
        )


def _check_best_metric(config: Sections) -> None:
    """What ranks checkpoints is measured, as far as that is known beforehand."""
    metric = config.checkpoint.best_metric
    if metric is None or not metric.startswith("eval/"):
        return
    known = [f"eval/{name}/accuracy" for name in config.eval.sets]
    if not any(metric.startswith(f"eval/{name}/") for name in config.eval.sets) or not config.eval.every_steps:
        raise ValueError(
            f"checkpoint.best_metric = {metric!r} would never be measured: it needs a set of that name in [eval.sets] "
            f"(there is {', '.join(known) or 'none'}) and eval.every_steps above 0 (it is {config.eval.every_steps})"
        )


def _check_evaluation_engines(config: Sections) -> None:
    """eval.engines stand beside engines that rollouts use, and hold weights of their own."""
    if not config.eval.engines:
        return
    if not config.needs_engines or not config.eval.sets:
        raise ValueError(
            "eval.engines would never be asked: they stand beside engines.external (or managed engines), for the sets "
            "of [eval.sets]; name those too, or leave eval.engines out"
        )
    if config.engines.shares_gpus:
        raise ValueError(
            'eval.engines and engines.mode = "colocate" contradict each other: the trainer has its weights on the GPUs '
            "only while its own engines take them; leave eval.engines out"
        )
    if config.rollout.agent is not None:
        raise ValueError(
            "eval.engines and rollout.agent contradict each other: agents reach the policy through the run's gateway, "
            "which asks the engines that rollouts use; leave eval.engines out"
        )


def check_rollout(config: Sections) -> None:
    """Settings of the collector that would have no effect, or would train on tokens that the bound forbids."""
    rollout, masked_beyond = config.rollout, config.algorithm.mask_tokens_older_than
    check_generation(config)
    if rollout.partial_rollout and rollout.oversampling_factor == 1:
        raise ValueError(
            "rollout.partial_rollout = true keeps groups that lose the race for a batch, but with "
            "rollout.oversampling_factor = 1 there is no race; raise it, to 1.25 for example, or leave "
            "partial_rollout out"
        )
    if rollout.partial_rollout and rollout.max_staleness == 0 and masked_beyond is None:
        raise ValueError(
            "rollout.partial_rollout = true gives a batch tokens of earlier weights, which rollout.max_staleness = 0 "
            "forbids: set max_staleness to 1 or more, or give such tokens no loss with "
            "algorithm.mask_tokens_older_than = 0"
        )
    if rollout.batch_size == "trim" and config.optimizer_steps_per_rollout == 1:
        raise ValueError(
            'rollout.batch_size = "trim" cuts a batch to whole global batches, but with optimizer_steps_per_rollout = '
            '1 the batch is one: a single dropped sample would leave none; set rollout.batch_size = "dynamic", or '
            "optimizer_steps_per_rollout to 2 or more"
        )
    if rollout.on_stale != "wait" and rollout.max_staleness == 0:
        raise ValueError(
            f'rollout.on_stale = "{rollout.on_stale}" has no effect with rollout.max_staleness = 0: '
            "synchronous batches wait for their groups; set max_staleness to 1 or more, or leave on_stale out"
        )


def check_generation(config: Sections) -> None:
    """One way in which samples come about, and the settings of that one."""
    rollout = config.rollout
    chosen = [name for name in ("generate_function", "environment", "agent") if getattr(rollout, name) is not None]
    if len(chosen) > 1:
        raise ValueError(f"rollout.{' and rollout.'.join(chosen)} are each a whole generation: keep one of them")
    if rollout.environment_arguments and rollout.environment is None:
        raise ValueError("rollout.environment_arguments has no effect without rollout.environment")
    if rollout.function is not None:
        for name, default, instead in (
            ("partial_rollout", False, "context.put_back keeps a group for the next call"),
            ("oversampling_factor", 1.0, "context.groups gives it as many as it asks for"),
            ("on_stale", ("wait", "mask"), "its groups are not cut off while it runs"),
        ):
            found = getattr(rollout, name)
            if found != default and not (isinstance(default, tuple) and found in default):
                raise ValueError(
                    f"rollout.{name} = {found!r} does not go with rollout.function, which chooses its groups by "
                    f"itself: {instead}; leave it out"
                )
    for name in ("generate_function", "agent"):
        if rollout.partial_rollout and getattr(rollout, name) is not None:
            raise ValueError(
                f"rollout.partial_rollout = true does not go with rollout.{name}: what it has begun cannot be taken up "
                "where it was, and would start over for every batch; leave it out: with rollout.max_staleness of 1 or "
                "more, groups that lose the race run on for the next batch"
            )
    if rollout.agent is None:
        if rollout.gateway is not None:
            raise ValueError("rollout.gateway has no effect without rollout.agent")
        return
    if not rollout.agent:
        raise ValueError("rollout.agent = []: the words of a command line are wanted, or `package.module:function`")
    if rollout.agent == "remote" and rollout.gateway is None:
        raise ValueError(
            'rollout.agent = "remote" needs rollout.gateway and rollout.gateway_key_file: a gateway that the agents\' '
            "hosts reach (`rltool gateway --host ...`); the run's own listens on loopback"
        )
    if (rollout.gateway is None) != (rollout.gateway_key_file is None):
        raise ValueError("rollout.gateway and rollout.gateway_key_file go together: its URL, and its key for sessions")
    for name in config.eval.sets:
        own = config.eval.overrides.get(name)
        for key in ("temperature", "top_p", "top_k"):
            given, sampled = getattr(own, key, None), getattr(config.sampling, key)
            wanted = getattr(config.eval.sampling, key) if given is None else given
            if wanted != sampled:
                raise ValueError(
                    f"eval set {name}: {key} = {wanted:g}, but with rollout.agent the gateway samples every turn at "
                    f"sampling.{key} = {sampled:g}: set both to one value"
                )


def check_models(config: Sections) -> None:
    """[models.NAME]: train updates the policy alone."""
    for name, model in config.models.items():
        if model.update_weights:
            raise ValueError(
                f"models.{name}.update_weights = true: a run updates only its policy; leave it out"
            )
        if model.sleep == "disk" and not (
            config.engines.shares_gpus and any(group.model == name for group in config.engines.groups)
        ):
            raise ValueError(
                f'models.{name}.sleep = "disk" has no effect: of other models, only engines sleep that the run starts '
                'on the trainer\'s GPUs (engines.mode = "colocate", and a group); leave it out'
            )


def check_lora(config: Sections) -> None:
    """What adapters leave as it is cannot be trained beside them; adapters alone go to engines that hold several."""
    if config.weights.lora_sync == "adapter":
        _check_adapter_sync(config)
    if config.lora.rank and config.trainer.router_bias_update_rate:
        raise ValueError(
            "trainer.router_bias_update_rate moves the routers' biases, but with lora.rank above 0 the model stays as "
            "it is; leave one of them out"
        )


def _check_adapter_sync(config: Sections) -> None:
    weights, merged = config.weights, 'or leave weights.lora_sync at "merged"'
    if not config.lora.rank:
        raise ValueError('weights.lora_sync = "adapter" has no effect: lora.rank is 0, so there are no adapters')
    for what, is_set in (
        ("weights.engines", bool(weights.engines)), ("weights.staged", bool(weights.staged)),
        ("weights.delta", bool(weights.delta)), ("eval.engines", bool(config.eval.engines)),
        ("rollout.gateway", bool(config.rollout.gateway)),
    ):  # fmt: skip
        if is_set:
            raise ValueError(f'{what} does not go with weights.lora_sync = "adapter"; leave it out, {merged}')
    if config.rollout.partial_rollout:
        raise ValueError(
            "rollout.partial_rollout = true goes on with a response under later weights, and with weights.lora_sync = "
            f'"adapter" each is of one version; leave it out, {merged}'
        )
    if any(group.role in ("prefill", "decode") for group in config.engines.groups):
        raise ValueError(
            f'weights.lora_sync = "adapter" does not go with prefill and decode engines; use regular ones, {merged}'
        )


def check_fake_quantization(config: Sections) -> None:
    """The policy has the weights that its engines have, and no other model is in their place."""
    if not config.trainer.fake_quantization:
        return
    setting = "trainer.fake_quantization = true"
    if config.needs_engines and config.engines.quantization != "fp8":
        raise ValueError(
            f'{setting} is for engines in FP8, and engines.quantization is "{config.engines.quantization}"; '
            'set that to "fp8", or leave fake_quantization out'
        )
    if config.model.dtype != "bfloat16":
        raise ValueError(
            f'{setting} rounds the bfloat16 weights and needs the optimizer\'s float32 masters, which model.dtype = '
            f'"{config.model.dtype}" has not; set it to "bfloat16", or leave fake_quantization out'
        )
    for name, is_set in (
        ("lora.rank above 0", config.lora.rank > 0),
        ("model.teacher_path", config.model.teacher_path is not None),
    ):
        if is_set:
            raise ValueError(f"{setting} is not implemented with {name}; leave one of them out")


RULES = (
    check_algorithm, check_batch_arithmetic, check_sampling, check_evaluation, check_rollout, check_models,
    check_engines, check_lora, check_fake_quantization,
)  # fmt: skip
RULES_OF_GENERATION = (check_generation, check_engines)
"""Those that hold where nothing is trained."""
