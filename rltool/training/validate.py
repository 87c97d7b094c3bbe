"""What can be known to be wrong from the configuration alone, before anything is started. Pure but for looking at
paths.

Every message names the setting (and its flag) and the fix.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

from rltool.agents.pool import check_agent
from rltool.checkpoints.manifest import is_checkpoint, sizes_match
from rltool.checkpoints.manifest import read as read_manifest
from rltool.config.train import TrainConfig
from rltool.environments.loading import load_episodes
from rltool.errors import UsageError
from rltool.models.base import Family
from rltool.models.experts import check_grouped_products
from rltool.models.hf_directory import HFTensors, check_tensors
from rltool.models.layout import check_layout
from rltool.models.registry import family_for, read_hf_config
from rltool.rollout.data import data_summary, load_prompts
from rltool.rollout.data.gym import check_held_out
from rltool.rollout.data.own import load_own_source
from rltool.rollout.data.spec import DataSpec, parse_spec
from rltool.rollout.eval_set import eval_settings
from rltool.rollout.generate import load_generate
from rltool.rollout.group_reward import load_group_reward
from rltool.rollout.own_evaluation import load_eval_function
from rltool.rollout.own_metrics import load_metrics
from rltool.rollout.reward_parts import check_rewards
from rltool.rollout.reward_pool import load_reward
from rltool.rollout.scoring import load_filter, load_hook
from rltool.rollout.tokenizer import Tokenizer, load_tokenizer
from rltool.training.asked_models import check_reward_models, check_tasks
from rltool.training.modalities import training_refusal
from rltool.training.routing_replay import routing_of
from rltool.training.validate_algorithm import check_algorithm
from rltool.training.validate_engines import check_mode
from rltool.training.validate_evaluation import check_evaluation
from rltool.training.validate_sampling import check_sampling


def needs_engines(config: TrainConfig) -> bool:
    """Policy training generates; supervised training uses engines only to evaluate, and only if some were given."""
    some = config.engines.mode != "external" or bool(config.engines.external)
    return config.algorithm.loss == "policy" or (some and bool(config.eval.sets))


def check_config(config: TrainConfig) -> None:
    """Raises UsageError for the first setting that cannot work."""
    check_algorithm(config)
    check_batch_arithmetic(config)
    check_sampling(config)
    check_evaluation(config, asks_engines=needs_engines(config))
    check_files(config)
    check_rollout(config)
    check_models(config)
    if needs_engines(config):
        check_mode(config)


def check_models(config: TrainConfig) -> None:
    """[models.NAME]: train updates the policy alone."""
    for name, model in config.models.items():
        if model.update_weights:
            raise UsageError(
                f"models.{name}.update_weights = true: a run updates its policy alone, so nobody would; leave it out"
            )
        if model.sleep == "disk" and not (
            config.engines.shares_gpus and any(group.model == name for group in config.engines.groups)
        ):
            raise UsageError(
                f'models.{name}.sleep = "disk" has no effect: of other models, only engines sleep that the run starts '
                'on the trainer\'s GPUs (engines.mode = "colocate", and a group); leave it out'
            )
        if model.path is not None:
            check_model_directory(model.path, setting=f"models.{name}.path")
    check_tasks(config, {name: model.task for name, model in config.models.items()})


def check_rollout(config: TrainConfig) -> None:
    """Settings of the collector that would have no effect, or would train on tokens that the bound forbids."""
    rollout, masked_beyond = config.rollout, config.algorithm.mask_tokens_older_than
    check_generation(config)
    if rollout.partial_rollout and rollout.oversampling_factor == 1:
        raise UsageError(
            "rollout.partial_rollout = true keeps groups that lose the race for a batch, but with "
            "rollout.oversampling_factor = 1 there is no race; raise it, to 1.25 for example, or leave "
            "partial_rollout out"
        )
    if rollout.partial_rollout and rollout.max_staleness == 0 and masked_beyond is None:
        raise UsageError(
            "rollout.partial_rollout = true gives a batch tokens of earlier weights, which rollout.max_staleness = 0 "
            "forbids: set max_staleness to 1 or more, or give such tokens no loss with "
            "algorithm.mask_tokens_older_than = 0"
        )
    if rollout.batch_size == "trim" and config.optimizer_steps_per_rollout == 1:
        raise UsageError(
            'rollout.batch_size = "trim" cuts a batch to whole global batches, but with optimizer_steps_per_rollout = '
            '1 the batch is one: a single dropped sample would leave none; set rollout.batch_size = "dynamic", or '
            "optimizer_steps_per_rollout to 2 or more"
        )
    if rollout.on_stale != "wait" and rollout.max_staleness == 0:
        raise UsageError(
            f'rollout.on_stale = "{rollout.on_stale}" has no effect with rollout.max_staleness = 0: '
            "synchronous batches wait for their groups; set max_staleness to 1 or more, or leave on_stale out"
        )


def check_generation(config: TrainConfig) -> None:
    """One way in which samples come about, and the settings of that one."""
    rollout = config.rollout
    chosen = [name for name in ("generate_function", "environment", "agent") if getattr(rollout, name) is not None]
    if len(chosen) > 1:
        raise UsageError(f"rollout.{' and rollout.'.join(chosen)} are each a whole generation: keep one of them")
    if rollout.environment_arguments and rollout.environment is None:
        raise UsageError("rollout.environment_arguments has no effect without rollout.environment")
    if rollout.simulate_step_seconds and rollout.environment is None:
        raise UsageError("rollout.simulate_step_seconds has no effect without rollout.environment")
    if rollout.function is not None:
        for name, default, instead in (
            ("partial_rollout", False, "context.put_back keeps a group for the next call"),
            ("oversampling_factor", 1.0, "context.groups gives it as many as it asks for"),
            ("on_stale", ("wait", "mask"), "its groups are not cut off while it runs"),
        ):
            found = getattr(rollout, name)
            if found != default and not (isinstance(default, tuple) and found in default):
                raise UsageError(
                    f"rollout.{name} = {found!r} does not go with rollout.function, which chooses its groups by "
                    f"itself: {instead}; leave it out"
                )
    for name in ("generate_function", "agent"):
        if rollout.partial_rollout and getattr(rollout, name) is not None:
            raise UsageError(
                f"rollout.partial_rollout = true does not go with rollout.{name}: what it has begun cannot be taken up "
                "where it was, and would start over for every batch; leave it out: with rollout.max_staleness of 1 or "
                "more, groups that lose the race run on for the next batch"
            )
    if rollout.agent is None:
        if rollout.gateway is not None:
            raise UsageError("rollout.gateway has no effect without rollout.agent")
        return
    if not rollout.agent:
        raise UsageError("rollout.agent = []: the words of a command line are wanted, or `package.module:function`")
    if rollout.agent == "remote" and rollout.gateway is None:
        raise UsageError(
            'rollout.agent = "remote" needs rollout.gateway and rollout.gateway_key_file: a gateway that the agents\' '
            "hosts reach (`rltool gateway --host ...`); the run's own listens on loopback"
        )
    if (rollout.gateway is None) != (rollout.gateway_key_file is None):
        raise UsageError("rollout.gateway and rollout.gateway_key_file go together: its URL, and its key for sessions")
    for name in config.eval.sets:
        settings = eval_settings(config.eval, config.sampling, name, pass_reward=config.monitor.pass_reward)
        for key in ("temperature", "top_p", "top_k"):
            wanted, sampled = getattr(settings, key), getattr(config.sampling, key)
            if wanted != sampled:
                raise UsageError(
                    f"eval set {name}: {key} = {wanted:g}, but with rollout.agent the gateway samples every turn at "
                    f"sampling.{key} = {sampled:g}: set both to one value"
                )


def check_batch_arithmetic(config: TrainConfig) -> None:
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
        raise UsageError(
            f"{said} do not split into optimizer_steps_per_rollout = {steps} equal batches of whole prompt groups: "
            f"{rollout.prompts_per_step % steps} prompts remain; set rollout.prompts_per_step to a multiple of "
            f"{steps}, such as {fix}"
        )
    if config.global_batch_size is not None and config.global_batch_size * steps != samples:
        raise UsageError(
            f"{said}, but global_batch_size {config.global_batch_size} x optimizer_steps_per_rollout {steps} = "
            f"{config.global_batch_size * steps}; set global_batch_size to {samples // steps}, or leave it out"
        )
    ranks = config.trainer.layout.dp
    if samples // steps < ranks:
        raise UsageError(
            f"{said} in {steps} optimizer steps leave {samples // steps} samples for {ranks} data-parallel ranks; "
            "raise rollout.prompts_per_step"
        )
    longest = sampling.max_prompt_tokens + sampling.max_response_tokens
    cut = config.trainer.context_parallel
    if longest > config.trainer.micro_batch_tokens:
        shared = f" on each of {cut} context-parallel ranks" if cut > 1 else ""
        raise UsageError(
            f"sampling.max_prompt_tokens {sampling.max_prompt_tokens} + sampling.max_response_tokens "
            f"{sampling.max_response_tokens} = {longest} tokens do not fit trainer.max_tokens_per_micro_batch = "
            f"{config.trainer.max_tokens_per_micro_batch}{shared}; raise it to at least {-(-longest // cut)}"
        )


def check_model(config: TrainConfig) -> None:
    """The model is there, and the trainer can build it and cut it: an unknown architecture is refused by name."""
    check_model_directory(config.model.path)
    trainer = config.trainer
    family = family_for(read_hf_config(config.model.path))
    check_layout(family, trainer.layout, sequence_parallel=trainer.sequence_parallel)
    if config.algorithm.routing_replay:
        routing_of(family)
    if trainer.expert_products == "grouped":
        check_grouped_products(family, tensor_parallel=trainer.tensor_parallel, dtype=config.model.dtype)
    if config.model.teacher_path is not None:
        check_teacher(family, config.model.path, config.model.teacher_path)
    if config.critic.path is not None:
        critic = check_critic(family, config.model.path, config.critic.path)
        check_layout(critic, trainer.layout, sequence_parallel=trainer.sequence_parallel)


def check_weights(config: TrainConfig) -> None:
    """The weights are all there, of the names and shapes that config.json implies. Reads no tensor but a doubtful head.

    What a header cannot tell (a hash, a NaN) is found where the weights are loaded.
    """
    for path in (config.model.path, config.model.teacher_path, config.critic.path):
        if path is None:
            continue
        if is_checkpoint(path):
            if not sizes_match(path, read_manifest(path)):
                raise UsageError(
                    f"{path}: files that its manifest names are missing or have another size; copy it again, or use "
                    "another checkpoint"
                )
        else:
            with HFTensors(path) as tensors:
                check_tensors(family_for(read_hf_config(path)), tensors, path)


def check_teacher(family: Family, model: Path, teacher: Path) -> None:
    """The teacher's tensors have the names and shapes of the model's: its weights are swapped into the model."""
    check_model_directory(teacher, setting="model.teacher_path")
    theirs = family_for(read_hf_config(teacher)).hf_tensors()
    if theirs != family.hf_tensors():
        raise UsageError(
            f"model.teacher_path: {teacher} has other tensors than model.path ({model}); a teacher takes the model's "
            "place while it scores, so it must be of the same architecture, size and vocabulary: the same model, "
            "trained further"
        )


def check_teachers_tokenizer(config: TrainConfig, tokenizer: Tokenizer) -> None:
    """The engines of model.teacher read the ids that the policy writes. Vocabularies may be padded to other sizes."""
    path = config.models[config.model.teacher or ""].path
    assert path is not None  # validate_algorithm
    differing = tokenizer.differs_from(load_tokenizer(path, trust_remote_code=config.model.trust_remote_code))
    if differing is not None:
        raise UsageError(
            f"model.teacher: the tokenizer of {path} has another id for {differing!r} than the model's, or none; a "
            "teacher scores the policy's token ids: take one with the same tokenizer"
        )


def check_critic(family: Family, model: Path, critic: Path) -> Family:
    """The critic reads the tokens that the policy writes. Architecture and size are its own."""
    check_model_directory(critic, setting="critic.path")
    theirs = family_for(read_hf_config(critic))
    if theirs.vocab_size != family.vocab_size:
        raise UsageError(
            f"critic.path: {critic} has a vocabulary of {theirs.vocab_size} tokens, model.path ({model}) one of "
            f"{family.vocab_size}; the critic reads the policy's tokens, so it must be of the same tokenizer"
        )
    return theirs


def check_model_directory(model: Path, *, setting: str = "model.path") -> None:
    """A directory with a config.json."""
    if not model.is_dir():
        raise UsageError(f"{setting}: {model} is not a directory")
    if not (model / "config.json").is_file():
        raise UsageError(
            f"{setting}: {model} has no config.json; expected a Hugging Face model directory or one written by `rltool "
            "convert-ckpt`"
        )


def check_files(config: TrainConfig) -> None:
    """Model directory and data files are there."""
    check_model_directory(config.model.path)
    if not config.data.train and config.data.source is None:
        raise UsageError(
            'data.train names no file; give a JSONL or Parquet file with prompts, or --set data.train=["prompts.jsonl"]'
        )
    if config.data.source is not None and config.algorithm.loss == "sft":
        raise UsageError("data.source gives prompts for rollouts; supervised training reads its rows from data.train")
    train = [parse_spec(name) for name in config.data.train]
    evaluation = {name: parse_spec(held_out) for name, held_out in config.eval.sets.items()}
    check_data_files(("data.train", spec) for spec in train)
    check_data_files((f"eval.sets.{name}", spec) for name, spec in evaluation.items())
    check_held_out(train, evaluation)


def check_data_files(specs: Iterable[tuple[str, DataSpec]]) -> None:
    """UsageError where a (setting, data set) names a file that is not there."""
    for setting, spec in specs:
        if spec.kind == "file" and not Path(spec.name).is_file():
            raise UsageError(f"{setting}: {spec.name} does not exist")


def check_inputs(config: TrainConfig) -> str:
    """Read all data and import all functions here, where nothing has been started: a broken line is named by file and
    number. Returns one line on what was read and left out.

    The process that generates does the same again; what it finds later than this is a file that changed.
    """
    data, limit = config.data, config.sampling.max_prompt_tokens
    refusal = partial(training_refusal, config)
    tokenizer = load_tokenizer(
        config.model.path,
        stop_token_ids=config.sampling.stop_token_ids,
        chat_template=data.chat_template,
        trust_remote_code=config.model.trust_remote_code,
    )
    if config.model.teacher is not None:
        check_teachers_tokenizer(config, tokenizer)
    train = None
    if data.source is not None:
        load_own_source(data, tokenizer, seed=config.seed, max_prompt_tokens=limit)
    else:
        train = load_prompts(data.train, tokenizer, data, max_prompt_tokens=limit, refusal=refusal)
    held_out = {
        name: load_prompts(
            [spec], tokenizer, data, max_prompt_tokens=limit, limit=config.eval.max_prompts, refusal=refusal
        )
        for name, spec in config.eval.sets.items()
    }
    if config.algorithm.loss == "policy" or config.eval.sets:
        check_rewards(config.reward)
        check_reward_models(config, [read for read in (train, *held_out.values()) if read is not None])
        if config.reward.group != "none":
            load_group_reward(config.reward)
        for name, own in config.eval.overrides.items():
            if own.reward is not None:
                load_reward(own.reward, own.reward_options, setting=f"eval.overrides.{name}.reward")
        load_generate(config.rollout)
        if config.monitor.metrics is not None:
            load_metrics(config.monitor)
        load_eval_function(config.eval)
        load_episodes(config)
        if isinstance(config.rollout.agent, str) and config.rollout.agent != "remote":
            check_agent(config.rollout.agent)
        load_filter(config.rollout)
        load_hook(config.rollout)
    return data_summary(train, held_out)
