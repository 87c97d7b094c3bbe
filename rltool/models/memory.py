"""What a model takes: its parameters, bytes of a trainer's rank, bytes of an engine, and a layout that fits. Pure.

Activations are those that the trainer's kernels on a GPU save for the backward pass; with other kernels (torch's own,
on a CPU) there are more. Peaks measured on GPUs lie 6 % below to 2 % above (tests/unit/models/test_memory.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F

from rltool.config.parallel import ParallelLayout
from rltool.config.sections import LoraConfig, TrainerConfig
from rltool.errors import UsageError
from rltool.models.adapters import Adapted, adapters_of
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
    item, replicas = _item(dtype), layout.replica_size if distributed else 1
    by_optimizer = 12 if item == 2 else 8
    weights = gradients = 0
    optimizer = 0.0
    for parameter in _held(family, family.parameters, layout, stage):
        size = math.prod(parameter.shard_shape(layout.tp))
        weights += size * (4 if parameter.keeps_fp32 else item)
        if lora.rank or parameter.keeps_fp32:  # the latter is a router's bias, which has no gradient
            continue
        gradients += 4 * size
        optimizer += by_optimizer * size / _spread(parameter, layout, replicas, distributed)
    trained = [parameter for adapted in _adapted(family, lora) for parameter in adapted.parameters]
    for parameter in _held(family, trained, layout, stage):
        size = math.prod(parameter.shard_shape(layout.tp))
        weights, gradients = weights + 4 * size, gradients + 4 * size
        optimizer += 8 * size / _spread(parameter, layout, replicas, distributed)
    return RankMemory(weights, gradients, math.ceil(optimizer))


def _adapted(family: Family, lora: LoraConfig) -> tuple[Adapted, ...]:
    return adapters_of(family, lora.rank, lora.targets) if lora.rank else ()


def _spread(parameter: Parameter, layout: ParallelLayout, replicas: int, distributed: bool) -> int:
    """Ranks that share the optimizer's state of a parameter."""
    return replicas // layout.ep if parameter.expert is not None and distributed else replicas


def _held(
    family: Family, parameters: Iterable[Parameter], layout: ParallelLayout, stage: int
) -> Iterator[Parameter]:  # fmt: skip
    """Those of a rank of this stage; of the experts as many as each rank has."""
    last, layers = layout.pp - 1, family.num_layers // layout.pp
    experts = family.num_experts // layout.ep
    for parameter in parameters:
        if parameter.expert is not None and parameter.expert >= experts:
            continue
        at = {last} if parameter.layer is None else {parameter.layer // layers}
        if parameter.name == EMBEDDING:
            at = {0, last} if family.tied_embeddings else {0}
        if stage in at:
            yield parameter


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
    low = _low(family, lora)
    norms = trainer.recompute == "selective"
    kept = [_saved(family, i, trainer, norms=norms, gated=gated) + low[i] for i in every[whole:]]
    # While a layer is computed again, all that it saves is there once.
    once = max((_saved(family, i, trainer, norms=False, gated=gated) + low[i] for i in every[:whole]), default=0.0)
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
    largest = max(_saved(family, i, trainer, norms=False, gated=False) for i in every)
    stream = 2 * hidden * (item if trainer.residual == "model" else 4)
    forward = int((largest * item + stream) * trainer.forward_tokens)
    return RankMemory(held.weights, held.gradients, held.optimizer, max(activations, forward), head)


def _saved(family: Family, layer: int, trainer: TrainerConfig, *, norms: bool, gated: bool) -> float:
    """Numbers a token that a layer keeps on a rank. norms, gated: these outputs are computed again."""
    shape, tp = family.transformer, trainer.tensor_parallel
    hidden = shape["hidden_size"] / (tp if trainer.sequence_parallel else 1)
    before, after = family.norms in ("pre", "sandwich"), family.norms in ("post", "sandwich")
    # Of attention and MLP each: the residual, the norm's output, what a norm behind takes.
    around = 2 * hidden * (1 + (before and not norms) + after)
    experts = family.expert_layers[layer]
    mlp = _experts(shape, tp, gated=gated) if experts else _gated(shape, shape["ffn_hidden_size"] / tp, gated=gated)
    return around + (_delta_net(family, tp) if family.attention.is_delta(layer) else _attention(family, tp)) + mlp


def _low(family: Family, lora: LoraConfig) -> list[int]:
    """Numbers a token that the adapters of each layer keep between A and B."""
    found = [0] * family.num_layers
    for adapted in _adapted(family, lora):
        layer, expert = adapted.base.layer, adapted.base.expert
        if layer is not None and (expert is None or expert < family.transformer["moe_router_topk"]):
            found[layer] += lora.rank * len(adapted.a)
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
        for recompute in ("none", "selective", "full"):
            try:
                trainer = TrainerConfig(
                    world_size=gpus, tensor_parallel=tp, pipeline_parallel=pp, expert_parallel=ep,
                    sequence_parallel=tp > 1, distributed_optimizer=gpus > tp * pp, recompute=recompute,
                    max_tokens_per_micro_batch=tokens, logprob_tokens_per_micro_batch=logprob_tokens,
                )  # fmt: skip
                memory = training_memory(family, trainer, dtype=dtype, lora=lora)
            except (UsageError, ValueError):
                break
            if memory.total <= USED * gpu_bytes:
                return trainer, memory
            if memory.state > USED * gpu_bytes:  # which no recomputation makes smaller
                break
    return None


def reduced_bytes(family: Family, layout: ParallelLayout, *, dtype: str) -> int:
    """What a rank sends at least, in a step with the distributed optimizer, to those that hold the same parameters: its
    gradients once in float32 (a reduce-scatter), and the parameters once (an all-gather). Of the rank that sends
    most."""

    def of(parameter: Parameter) -> float:
        replicas = layout.replica_size // layout.ep if parameter.expert is not None else layout.replica_size
        size = math.prod(parameter.shard_shape(layout.tp))
        return (4 + _item(dtype)) * size * (replicas - 1) / replicas

    return int(max(sum(map(of, _held(family, family.parameters, layout, stage))) for stage in range(layout.pp)))
