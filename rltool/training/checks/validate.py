"""What can be known to be wrong before anything is started, beside the rules between keys (rltool/config/rules.py):
files, imports, and what a verb needs to be given.

Every message names the setting (and its flag) and the fix.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

from rltool.agents.pool import check_agent
from rltool.checkpoints.lora import check_lora
from rltool.checkpoints.manifest import is_checkpoint, sizes_match
from rltool.checkpoints.manifest import read as read_manifest
from rltool.checkpoints.peft_format import PeftAdapter, check_settings, is_peft
from rltool.config.algorithm import AlgorithmConfig
from rltool.config.engine_rules import setting_of
from rltool.config.engine_weights import EngineWeights
from rltool.config.import_path import load_callable
from rltool.config.rollout import EnginesConfig, WeightsConfig
from rltool.config.sections import LoraConfig
from rltool.config.serve import POLICY
from rltool.config.train import TrainConfig
from rltool.engines.dialects.table import launches
from rltool.environments.loading import load_episodes
from rltool.errors import UsageError
from rltool.megatron.fp8 import rounded_parameters
from rltool.megatron.shards import LEAVE_OUT, QUANTISED, check_family
from rltool.models.adapters import adapters_of
from rltool.models.base import Family
from rltool.models.experts import check_grouped_products, check_router_bias
from rltool.models.hf_directory import HFTensors, check_tensors
from rltool.models.layout import check_layout
from rltool.models.quantized import AS_BFLOAT16, format_of
from rltool.models.registry import family_for, load_family, read_hf_config
from rltool.rollout.data import data_summary, load_prompts
from rltool.rollout.data.gym import check_held_out
from rltool.rollout.data.own import load_own_source
from rltool.rollout.data.spec import DataSpec, parse_spec
from rltool.rollout.generate import load_generate
from rltool.rollout.measure.own_evaluation import load_eval_function
from rltool.rollout.measure.own_metrics import load_metrics
from rltool.rollout.rewards.group import load_group_reward
from rltool.rollout.rewards.parts import check_rewards
from rltool.rollout.rewards.pool import load_reward
from rltool.rollout.rewards.scoring import load_filter, load_hook
from rltool.rollout.tokenizer import Tokenizer, load_tokenizer
from rltool.training.checks.asked_models import check_reward_models, check_tasks
from rltool.training.checks.disaggregated import check_groups
from rltool.training.checks.modalities import run_tokenizer, shown_pictures, training_refusal
from rltool.training.checks.routing_replay import routing_of
from rltool.weights.transport import CANDIDATES


def check_config(config: TrainConfig) -> None:
    """Raises UsageError for the first setting that cannot work."""
    check_own_functions(config.algorithm)
    check_files(config)
    check_models(config)
    if config.needs_engines:
        check_addresses(config.engines)
        check_teachers_engines(config)
        check_fp8_transports(config)
        check_groups(config)


def check_models(config: TrainConfig) -> None:
    """[models.NAME]: directories, and what is asked of each model."""
    for name, model in config.models.items():
        if model.path is not None:
            check_model_directory(model.path, setting=f"models.{name}.path")
    check_tasks(config, {name: model.task for name, model in config.models.items()})


def check_addresses(engines: EnginesConfig) -> None:
    """External engines have an address."""
    if engines.mode == "external" and not engines.external:
        raise UsageError(
            'engines.mode = "external" without an address: give --rollout-external HOST:PORT or '
            "--rollout-external @runs/NAME/endpoints.json "
            "(`rltool serve-engines` starts engines and prints the line to paste)"
        )


def check_own_functions(algorithm: AlgorithmConfig) -> None:
    """The functions that [algorithm] names can be imported and called."""
    advantage, objective = algorithm.advantage, algorithm.objective
    if advantage.kind == "own":
        load_callable(advantage.function, setting="algorithm.advantage", takes=("batch", "algorithm"))
    if objective.kind == "own":
        load_callable(objective.function, setting="algorithm.objective", takes=("logprobs", "tokens", "algorithm"))


def check_teachers_engines(config: TrainConfig) -> None:
    """Servers that the run starts give the log-probabilities of this many tokens; others report it when they refuse."""
    if config.model.teacher is None or not config.algorithm.uses_teacher_topk:
        return
    topk = config.algorithm.distill_top_k
    for group in config.engines.groups:
        if group.model != config.model.teacher:
            continue
        most = launches(group.engine).max_logprobs(group.flags)
        if most < topk:
            raise UsageError(
                f"algorithm.distill_top_k = {topk} is more than the engines of group {group.name!r} give "
                f'({most:g}): add flags = ["--max-logprobs", "{topk}"] to it, or lower the one'
            )


def check_fp8_transports(config: TrainConfig) -> None:
    """FP8 reaches engines that the run starts and that sleep. What only a running engine shows is preflight's."""
    if config.engines.quantization != "fp8" or not config.engines.shares_gpus:
        return
    for group in config.engines.groups:
        if group.model != POLICY or group.role == "placeholder":
            continue
        ways = _ways(config.weights, group.name)
        backends = [backend for _, way in ways for backend in CANDIDATES[way.transport]]
        reasons = [launches(group.engine).no_fp8_after_sleep(backend) for backend in backends]
        if all(reasons):
            rule, way = ways[0]
            raise UsageError(
                f'{setting_of("transport", rule)} = "{way.transport}", engines.quantization = "fp8" and engines.mode = '
                f'"colocate" contradict each other: group {group.name!r} {reasons[0]}'
            )


def _ways(weights: WeightsConfig, group: str) -> list[tuple[EngineWeights | None, WeightsConfig]]:
    """Of `variants` those that may hold for an engine of the group, whose address is not known yet."""
    default, *ruled = weights.variants()
    found: list[tuple[EngineWeights | None, WeightsConfig]] = []
    for rule, way in ruled:
        assert rule is not None, "of `variants` the first alone"
        if rule.group in (None, group):
            found.append((rule, way))
            if rule.match is None:
                return found
    return [*found, default]


def check_model(config: TrainConfig) -> None:
    """The model is there, and the trainer can build it and cut it: an unknown architecture is refused by name."""
    check_model_directory(config.model.path)
    trainer = config.trainer
    hf_config = read_hf_config(config.model.path)
    own = config.model.family
    family = family_for(hf_config, own)
    if own is not None and family.architecture not in load_family(own).architectures:
        raise UsageError(
            f"model.family = {own!r} builds {', '.join(load_family(own).architectures)}, but {config.model.path} is a "
            f"{family.architecture}"
        )
    quantised = format_of(hf_config)
    if config.needs_engines and config.engines.mode != "external" and quantised:
        raise UsageError(
            f"model.path: {config.model.path} is in {quantised}, and engines that serve it take no bfloat16 weights; "
            f"{AS_BFLOAT16}"
        )
    check_layout(
        family, trainer.layout, sequence_parallel=trainer.sequence_parallel, shared_prefixes=trainer.shared_prefixes
    )
    if config.weights.sharded:
        if config.engines.quantization != "none":
            raise UsageError(f"{QUANTISED}: {LEAVE_OUT}")
        check_family(family)
    longest = config.sampling.max_prompt_tokens + config.sampling.max_response_tokens
    if family.rotary.longest is not None and config.needs_engines and longest > family.rotary.longest:
        raise UsageError(
            f"sampling.max_prompt_tokens + sampling.max_response_tokens = {longest}: of longrope the short factors "
            f"are implemented, with which a sequence has at most {family.rotary.longest} tokens"
        )
    if config.algorithm.routing_replay:
        routing_of(family)
    if trainer.expert_products == "grouped":
        check_grouped_products(family, tensor_parallel=trainer.tensor_parallel, dtype=config.model.dtype)
    if trainer.router_bias_update_rate:
        check_router_bias(family)
    if trainer.fake_quantization:
        rounded_parameters(family, trainer.tensor_parallel)
    if config.lora.rank:
        check_adapters(family, config.lora)
    if config.model.teacher_path is not None:
        check_teacher(family, config.model.path, config.model.teacher_path)
    if config.critic.path is not None:
        critic = check_critic(family, config.model.path, config.critic.path)
        check_layout(
            critic, trainer.layout, sequence_parallel=trainer.sequence_parallel, shared_prefixes=trainer.shared_prefixes
        )


def check_adapters(family: Family, lora: LoraConfig) -> None:
    """The model has what lora.targets names, and lora.init holds adapters of these. Reads no tensor."""
    adapted = adapters_of(family, lora.rank, lora.targets)
    if lora.init is None:
        return
    if is_peft(lora.init):
        check_settings(lora.init, lora)
        PeftAdapter(lora.init, adapted).close()
    elif is_checkpoint(lora.init):
        check_lora(read_manifest(lora.init), lora, lora.init)
    else:
        raise UsageError(f"lora.init: {lora.init} is neither an adapter of peft's nor a checkpoint of a run")


def check_weights(config: TrainConfig) -> None:
    """The weights are all there, of the names and shapes that config.json implies. Reads no tensor but a doubtful head.

    What a header does not show (a hash, a NaN) is found where the weights are loaded.
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
                check_tensors(family_for(read_hf_config(path), config.model.family), tensors, path)


def check_teacher(family: Family, model: Path, teacher: Path) -> None:
    """The teacher's tensors have the names and shapes of the model's: its weights are swapped into the model."""
    check_model_directory(teacher, setting="model.teacher_path")
    theirs = family_for(read_hf_config(teacher), family.own).hf_tensors()
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
    theirs = family_for(read_hf_config(critic), family.own)
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
    tokenizer = run_tokenizer(config)
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
        load_episodes(config, shown_pictures(config))
        if isinstance(config.rollout.agent, str) and config.rollout.agent != "remote":
            check_agent(config.rollout.agent)
        load_filter(config.rollout)
        load_hook(config.rollout)
    return data_summary(train, held_out)
