"""What a model takes: its parameters, bytes of a trainer's rank, bytes of an engine, and a layout that fits. Pure.

Activations are those that the trainer's kernels on a GPU save for the backward pass; with other kernels (torch's own,
on a CPU) there are more. Peaks measured on GPUs lie 6 % below to 2 % above (tests/unit/models/test_memory.py).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch.nn.functional as F

from rltool.config.parallel import ParallelLayout
from rltool.config.sections import LoraConfig, TrainerConfig
from rltool.errors import UsageError
from rltool.models.adapters import Adapted, Targets, adapters_of
from rltool.models.base import EMBEDDING, HEAD, Family, Parameter, padded_vocabulary
from rltool.models.layout import check_layout

GIB = 1 << 30
USED = 0.9
"""Of a GPU, at most: CUDA contexts, buffers of NCCL and fragments need the rest."""
BESIDE_BYTES = 5 * GIB
"""Of an engine, beside weights and KV cache: activations of its largest batch, CUDA graphs, logits in float32."""
LARGEST_TENSOR_PARALLEL = 8
"""Ranks that a layer's weights are cut over: those of one host."""


@dataclass(frozen=True)
class Parameters:
    """total: all; active: those that a token meets, of the experts the chosen ones; embedding: of the vocabulary, the
    output head's among them where it is not tied."""

    total: int
    active: int
    embedding: int


def parameters_of(family: Family) -> Parameters:
    sizes = [(parameter, math.prod(parameter.merged_shape)) for parameter in family.parameters]
    total = sum(size for _, size in sizes)
    experts = sum(size for parameter, size in sizes if parameter.expert is not None)
    met = experts * family.transformer["moe_router_topk"] // family.num_experts if experts else 0
    embedding = sum(size for parameter, size in sizes if parameter.name in (EMBEDDING, HEAD))
    return Parameters(total, total - experts + met, embedding)


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank of the trainer. optimizer: Adam's moments and, in 16 bit, float32 weights; activations: kept
    for the backward pass, or of a larger pass that keeps none; head: of the output layer while it runs."""

    weights: int
    gradients: int
    optimizer: int
    activations: int = 0
    head: int = 0

    @property
    def state(self) -> int:
        """Between two steps."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """At the peak of a step."""
        return self.state + self.activations + self.head


FULL = LoraConfig()
"""All weights are trained."""


def rank_state(
    family: Family, layout: ParallelLayout, stage: int, *, dtype: str, distributed: bool, lora: LoraConfig = FULL
) -> RankMemory:
    """What each rank of a pipeline stage holds between two steps. distributed: trainer.distributed_optimizer, whose
    padding (of each tensor to 64 numbers) is left out. With adapters the model has weights alone, and they have all in
    float32."""
    item, experts = _item(dtype), family.num_experts // layout.ep
    held = _held(family, layout, stage, lora)
    rest, each = (held.adapters, held.expert_adapters) if lora.rank else (held.model, held.expert)
    weights = item * (held.model + experts * held.expert)
    weights += 4 * (held.fixed + held.adapters + experts * held.expert_adapters)
    by_optimizer = 12 if item == 2 and not lora.rank else 8
    replicas, of_expert = (layout.replica_size, layout.replica_size // layout.ep) if distributed else (1, 1)
    optimizer = by_optimizer * rest / replicas + by_optimizer * experts * each / of_expert
    return RankMemory(weights, 4 * (rest + experts * each), math.ceil(optimizer))


class _Numbers(NamedTuple):
    """On a rank. model: of the model, but for experts; fixed: in float32 and without a gradient (a router's bias);
    adapters: of all else than experts; expert, expert_adapters: of one, as all of a layer are alike."""

    model: int = 0
    fixed: int = 0
    adapters: int = 0
    expert: int = 0
    expert_adapters: int = 0


def _held(family: Family, layout: ParallelLayout, stage: int, lora: LoraConfig = FULL) -> _Numbers:
    """By a rank of this stage."""
    numbers = _numbers(family, lora.rank, lora.targets, layout.tp)
    layers = family.num_layers // layout.pp
    places: list[int | str] = list(range(stage * layers, (stage + 1) * layers))
    if stage == 0 or (family.tied_embeddings and stage == layout.pp - 1):
        places.append(EMBEDDING)
    if stage == layout.pp - 1:
        places.extend(place for place in numbers if not isinstance(place, int) and place != EMBEDDING)
    return _Numbers(*map(sum, zip(*(numbers[place] for place in places), strict=True)))


@lru_cache(maxsize=64)
def _numbers(family: Family, rank: int, targets: Targets, tp: int) -> dict[int | str, _Numbers]:
    """Of each layer, and by name of what is in none. Kept: a search of layouts asks for the same ones all the time."""
    found: defaultdict[int | str, Counter[str]] = defaultdict(Counter)

    def add(parameter: Parameter, kind: str, kind_of_expert: str) -> None:
        place = parameter.name if parameter.layer is None else parameter.layer
        kind = kind if parameter.expert is None else kind_of_expert
        found[place][kind] += math.prod(parameter.shard_shape(tp))

    for parameter in _without_other_experts(family).parameters:
        add(parameter, "fixed" if parameter.keeps_fp32 else "model", "expert")
    for adapted in _adapted(family, rank, targets):
        for parameter in adapted.parameters:
            add(parameter, "adapters", "expert_adapters")
    return {place: _Numbers(**kinds) for place, kinds in found.items()}


def _adapted(family: Family, rank: int, targets: Targets) -> tuple[Adapted, ...]:
    return adapters_of(_without_other_experts(family), rank, targets) if rank else ()


def _without_other_experts(family: Family) -> Family:
    """Those of a layer are alike: the first stands for all."""
    return replace(family, parameters=tuple(parameter for parameter in family.parameters if not parameter.expert))


def training_memory(
    family: Family, trainer: TrainerConfig, *, dtype: str, lora: LoraConfig = FULL
) -> RankMemory:  # fmt: skip
    """Of the rank that needs most. UsageError for a layout that the model cannot have."""
    check_layout(
        family, trainer.layout, sequence_parallel=trainer.sequence_parallel, shared_prefixes=trainer.shared_prefixes
    )
    stages = range(trainer.pipeline_parallel)
    return max((_of_stage(family, trainer, dtype, stage, lora) for stage in stages), key=lambda m: m.total)


def _of_stage(family: Family, trainer: TrainerConfig, dtype: str, stage: int, lora: LoraConfig) -> RankMemory:
    layout, item, tokens = trainer.layout, _item(dtype), trainer.max_tokens_per_micro_batch
    held = rank_state(family, layout, stage, dtype=dtype, distributed=trainer.distributed_optimizer, lora=lora)
    layers = family.num_layers // layout.pp
    full = trainer.recompute == "full"
    whole = min(trainer.recompute_layers or layers, layers) if full else 0
    hidden = family.transformer["hidden_size"] // (layout.tp if trainer.sequence_parallel else 1)
    every = range(stage * layers, (stage + 1) * layers)
    gated = trainer.recompute != "none"
    low = _low(family, lora.rank, lora.targets)
    norms = trainer.recompute == "selective"
    saved = partial(_saved, family, tp=layout.tp, sequence_parallel=trainer.sequence_parallel)
    kept = [saved(i, norms=norms, gated=gated) + low[i] for i in every[whole:]]
    # While a layer is computed again, all that it saves is there once.
    once = max((saved(i, norms=False, gated=gated) + low[i] for i in every[:whole]), default=0.0)
    # 1F1B: so many micro-batches are under way.
    values = (layout.pp - stage) * (sum(kept) + whole * hidden) + once
    head = 0
    if stage == layout.pp - 1:
        # Input and output of the last norm, and the rows of the loss.
        values += 3 * hidden
        words = padded_vocabulary(family.vocab_size, layout.tp) // layout.tp
        head = min(trainer.head_chunk_tokens, tokens) * words * (4 + item)
        head += 0 if trainer.recompute_head else tokens * words * item
    # The stream in fp32: what a layer and each of its norms keep of it has 4 bytes.
    wide = 0 if trainer.residual == "model" else (layout.pp - stage) * hidden * (2 * (layers - whole) + whole)
    activations = int((values * item + wide * (4 - item)) * tokens)
    # A pass that trains nothing has at most one layer's, and the stream.
    largest = max(saved(i, norms=False, gated=False) for i in every)
    stream = 2 * hidden * (item if trainer.residual == "model" else 4)
    forward = int((largest * item + stream) * trainer.forward_tokens)
    return RankMemory(held.weights, held.gradients, held.optimizer, max(activations, forward), head)


@lru_cache(maxsize=4096)
def _saved(family: Family, layer: int, *, tp: int, sequence_parallel: bool, norms: bool, gated: bool) -> float:
    """Numbers a token that a layer keeps on a rank. norms, gated: these outputs are computed again."""
    shape = family.transformer
    hidden = shape["hidden_size"] / (tp if sequence_parallel else 1)
    before, after = family.norms in ("pre", "sandwich"), family.norms in ("post", "sandwich")
    # Of attention and MLP each: the residual, the norm's output, what a norm behind takes.
    around = 2 * hidden * (1 + (before and not norms) + after)
    experts = family.expert_layers[layer]
    mlp = _experts(shape, tp, gated=gated) if experts else _gated(shape, shape["ffn_hidden_size"] / tp, gated=gated)
    return around + (_delta_net(family, tp) if family.attention.is_delta(layer) else _attention(family, tp)) + mlp


@lru_cache(maxsize=64)
def _low(family: Family, rank: int, targets: Targets) -> list[int]:
    """Numbers a token that the adapters of each layer keep between A and B."""
    found = [0] * family.num_layers
    for adapted in _adapted(family, rank, targets):
        layer, expert = adapted.base.layer, adapted.base.expert
        if layer is not None:
            met = 1 if expert is None else family.transformer["moe_router_topk"]
            found[layer] += rank * len(adapted.a) * met
    return found


def _attention(family: Family, tp: int) -> float:
    shape, latent = family.transformer, family.attention.latent
    heads = shape["num_attention_heads"] / tp
    if latent is None:
        queries = heads * shape["kv_channels"]
        keys = shape["num_query_groups"] / tp * shape["kv_channels"]
        # What the product gave (values are a part of it), turned queries and keys, the output; what norms take.
        normed = queries + keys if shape["qk_layernorm"] else 0
        gate = 3 * queries if family.attention.gated else 0  # as it comes of the product, its sigmoid, what that gives
        return (queries + 2 * keys) + (queries + keys) + queries + normed + gate
    low = 2 * (latent.query_rank or 0) + 2 * latent.rank + latent.rotary
    # Queries, keys, keys and values as they come of their product, the output.
    return low + heads * (2 * latent.head + latent.plain + 2 * latent.value)


def _delta_net(family: Family, tp: int) -> float:
    """With fla's kernels."""
    delta = family.attention.delta
    assert delta is not None
    heads, values = delta.value_heads / tp, delta.value_heads / tp * delta.value
    # What the convolution takes; of the rule queries and keys for each value head, normalised, values, a triangle of
    # each chunk of 64 tokens, the output; gate and norm, and their product; of a head beta twice, and in float32 the
    # two lengths, the decay as it is summed and what it is made of.
    return delta.channels / tp + heads * (2 * delta.key + 64 + 12) + 2 * values + 2 * values + values


def _gated(shape: dict[str, Any], ffn: float, *, gated: bool) -> float:
    if shape["activation_func"] is not F.silu:
        return 4 * ffn
    return (2 if gated else 3) * ffn


def _experts(shape: dict[str, Any], tp: int, *, gated: bool) -> float:
    """The chosen experts' copies of a token as they go in, what their products gave, scores of all in float32."""
    top_k, ffn = shape["moe_router_topk"], shape["moe_ffn_hidden_size"] / tp
    values = top_k * (shape["hidden_size"] + _gated(shape, ffn, gated=False)) + 4 * shape["num_moe_experts"]
    shared = shape.get("moe_shared_expert_intermediate_size")
    return values + (_gated(shape, shared / tp, gated=gated) if shared else 0)


def _item(dtype: str) -> int:
    return {"float32": 4, "bfloat16": 2}[dtype]


@dataclass(frozen=True)
class EngineBytes:
    """weights: of an engine, all its GPUs together; cache: of a token in the layers that see all, on each GPU;
    windowed: of one sequence in those with a sliding window or a gated delta net, at most."""

    weights: int
    cache: int
    windowed: int


def engine_bytes(family: Family, *, tensor_parallel: int = 1, dtype: str = "bfloat16") -> EngineBytes:
    """What an engine's layers hold on GPUs over which they are cut; an engine of fewer heads of keys than GPUs has some
    of them twice. dtype: of weights and cache."""
    shape, item, latent = family.transformer, _item(dtype), family.attention.latent
    if latent is not None:  # one vector for all heads, which each GPU has
        a_layer = (latent.rank + latent.rotary) * item
    else:
        a_layer = 2 * max(1, shape["num_query_groups"] // tensor_parallel) * shape["kv_channels"] * item
    windows = [window for window in family.attention.windows if window is not None]
    delta, states = family.attention.delta, 0
    if delta is not None:  # states in float32, and what the convolution sees
        heads = delta.state * 4 + delta.channels * (delta.kernel - 1) * item
        states = sum(delta.layers) * (heads // tensor_parallel)
    full = family.num_layers - len(windows) - (sum(delta.layers) if delta else 0)
    weights = sum(math.prod(p.merged_shape) * (4 if p.keeps_fp32 else item) for p in family.parameters)
    return EngineBytes(weights, full * a_layer, sum(windows) * a_layer + states)


def fitting_layout(
    family: Family, *, gpus: int, gpu_bytes: int, tokens: int, logprob_tokens: int | None = None,
    dtype: str = "bfloat16", lora: LoraConfig = FULL, gpus_per_host: int = LARGEST_TENSOR_PARALLEL,
) -> tuple[TrainerConfig, RankMemory] | None:  # fmt: skip
    """The settings of [trainer] that cut the model least, and then compute least again, within USED of each GPU; None:
    there are none. tokens, logprob_tokens: of a micro-batch; gpus_per_host: a layer's weights are cut within a host."""
    divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
    cuts = sorted(
        (tp * pp * ep, pp, tp, ep)
        for tp in divisors if tp <= LARGEST_TENSOR_PARALLEL and gpus_per_host % tp == 0
        for pp in divisors
        for ep in (divisors if family.num_experts else [1])
    )  # fmt: skip
    for _, pp, tp, ep in cuts:
        distributed = gpus > tp * pp
        try:
            layout = ParallelLayout(gpus, tp=tp, pp=pp, ep=ep)
            check_layout(family, layout, sequence_parallel=tp > 1)
        except (UsageError, ValueError):
            continue
        held = (
            rank_state(family, layout, stage, dtype=dtype, distributed=distributed, lora=lora) for stage in range(pp)
        )
        if any(of_stage.state > USED * gpu_bytes for of_stage in held):  # which no recomputation makes smaller
            continue
        for recompute in ("none", "selective", "full"):
            trainer = TrainerConfig(
                world_size=gpus, tensor_parallel=tp, pipeline_parallel=pp, expert_parallel=ep, sequence_parallel=tp > 1,
                distributed_optimizer=distributed, recompute=recompute, max_tokens_per_micro_batch=tokens,
                logprob_tokens_per_micro_batch=logprob_tokens,
            )  # fmt: skip
            memory = training_memory(family, trainer, dtype=dtype, lora=lora)
            if memory.total <= USED * gpu_bytes:
                return trainer, memory
    return None


def reduced_bytes(family: Family, layout: ParallelLayout, *, dtype: str) -> int:
    """What a rank sends at least, in a step with the distributed optimizer, to those that hold the same parameters: its
    gradients once in float32 (a reduce-scatter), and the parameters once (an all-gather). Of the rank that sends
    most."""

    item, experts, replicas = _item(dtype), family.num_experts // layout.ep, layout.replica_size

    def sent(numbers: int, replicas: int) -> float:
        return (4 + item) * numbers * (replicas - 1) / replicas

    held = [_held(family, layout, stage) for stage in range(layout.pp)]
    return int(max(sent(x.model + x.fixed, replicas) + sent(experts * x.expert, replicas // layout.ep) for x in held))
