"""How much of a GPU's memory colocated engines need: a KV cache for a run's own batch, not for all that is left.

An engine that takes all it may maps tens of GiB anew at each wake (0.35 s for 80 GiB on an H200, of which a run of a
1.5B model used 9 %). What a batch needs follows from the configuration and from config.json. Where it does not (a
window, compressed or no keys and values in some layers, episodes of several turns), engines take their fraction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from rltool.config.serve import POLICY, EngineGroup
from rltool.config.train import TrainConfig
from rltool.engines.dialects.memory_flags import MEMORY_FRACTION, CacheSize, may_set_cache
from rltool.engines.dialects.parallel_flags import parallel_sizes
from rltool.models.base import Family
from rltool.models.memory import BESIDE_BYTES, GIB, USED, engine_bytes, rank_state
from rltool.models.registry import family_for, read_hf_config

BLOCK_TOKENS = 16
"""A sequence takes whole blocks (vLLM's default on GPUs)."""
UNEVEN = 1.25
"""Requests go to the engine with the fewest, and answers differ in length: one engine may have more than its share."""


@dataclass(frozen=True)
class EngineMemory:
    """caches: by group, where their size is set; the others take their fraction. lines: for the log.
    beside: trainer and engines have room on the GPUs at once, between two steps."""

    caches: Mapping[str, CacheSize] = field(default_factory=dict)
    lines: tuple[str, ...] = ()
    beside: bool = False


NOT_SET = EngineMemory()


def engine_memory(config: TrainConfig, gpu_bytes: int | None) -> EngineMemory:
    """gpu_bytes: of the smallest GPU that engines may get; None: not known, and nothing is set."""
    groups = [group for group in config.engines.groups if group.model == POLICY and group.role != "placeholder"]
    if gpu_bytes is None or not config.engines.shares_gpus or not _is_bounded(config):
        return NOT_SET
    hf_config = read_hf_config(config.model.path)
    family, engines = family_for(hf_config, config.model.family), sum(group.count for group in groups)
    caches: dict[str, CacheSize] = {}
    lines = []
    for group in groups:
        a_token = token_bytes(family, hf_config, group)
        if a_token is None or not may_set_cache(group):
            continue
        tokens = max(batch_tokens(config, engines), _rounded(group.max_model_len or family.max_position_embeddings))
        needed = tokens * a_token
        whole = needed + weight_bytes(family, group) + BESIDE_BYTES
        if whole * group.engines_per_gpu > MEMORY_FRACTION * gpu_bytes:
            continue
        caches[group.name] = CacheSize(needed, math.ceil(1000 * whole / gpu_bytes) / 1000)
        lines.append(
            f"group {group.name}: a KV cache of {needed / GIB:.2f} GiB for {tokens:,} tokens in each engine, which a "
            "batch of this run needs at most (a memory flag of your own in engines.groups: flags wins)"
        )
    beside = _has_room(config, family, caches, gpu_bytes)
    if beside:
        lines.append(
            f"the trainer's {trainer_bytes(config, family) / GIB:.1f} GiB a rank stay on the GPUs while engines are "
            "awake: both have room"
        )
    return EngineMemory(caches, tuple(lines), beside)


def _has_room(config: TrainConfig, family: Family, caches: Mapping[str, CacheSize], gpu_bytes: int) -> bool:
    """Not where one takes a fraction, which it measures alone; nor beside a critic, which is of another size."""
    groups = [group for group in config.engines.groups if group.role != "placeholder"]
    if config.algorithm.uses_critic or any(group.name not in caches for group in groups):
        return False
    engines = max(caches[group.name].fraction * group.engines_per_gpu for group in groups)
    return trainer_bytes(config, family) + engines * gpu_bytes <= USED * gpu_bytes


def trainer_bytes(config: TrainConfig, family: Family) -> int:
    """What a rank holds between two steps, that of the pipeline stage which holds most."""
    trainer, dtype = config.trainer, config.model.dtype
    distributed, lora = trainer.distributed_optimizer, config.lora
    return max(
        rank_state(family, trainer.layout, stage, dtype=dtype, distributed=distributed, lora=lora).state
        for stage in range(trainer.pipeline_parallel)
    )


def batch_tokens(config: TrainConfig, engines: int) -> int:
    """Tokens of one engine's share of a batch, if every prompt and every answer is as long as it may be."""
    rollout, sampling = config.rollout, config.sampling
    prompts = math.ceil(rollout.prompts_per_step * rollout.oversampling_factor)
    at_one = min(prompts, math.ceil(UNEVEN * prompts / engines), rollout.requests_per_engine)
    return at_one * rollout.samples_per_prompt * _rounded(sampling.max_prompt_tokens + sampling.max_response_tokens)


def token_bytes(family: Family, hf_config: Mapping[str, object], group: EngineGroup) -> int | None:
    """Of the keys and values of a token on each GPU of an engine; None where layers differ in what they keep."""
    kinds = hf_config.get("layer_types") or ()
    plain = isinstance(kinds, (list, tuple)) and all(kind == "full_attention" for kind in kinds)
    if family.attention.windows or family.attention.latent or family.attention.delta or not plain:
        return None
    sizes, layers = parallel_sizes(group), family.num_layers
    whole = engine_bytes(family, tensor_parallel=sizes.tp, dtype=_dtype(group)).cache
    return whole // layers * math.ceil(layers / sizes.pp)


def weight_bytes(family: Family, group: EngineGroup) -> int:
    """Of an engine's weights on each of its GPUs, about."""
    sizes = parallel_sizes(group)
    return engine_bytes(family, dtype=_dtype(group)).weights // (sizes.tp * sizes.pp)


def _is_bounded(config: TrainConfig) -> bool:
    """Whether no sequence is longer than a prompt and an answer, so far as is known."""
    rollout = config.rollout
    return not (rollout.agent or rollout.environment or rollout.generate_function or rollout.function)


def _rounded(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS


def _dtype(group: EngineGroup) -> str:
    """"auto" is 16 bit also where the checkpoint has 32."""
    return "float32" if group.dtype in ("float", "float32") else "bfloat16"
