"""A Megatron GPTModel from a family: the pipeline stage and tensor-parallel shard that this rank holds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rltool.config.sections import TrainerConfig
from rltool.errors import UsageError
from rltool.megatron.attention import Backend, check_backend
from rltool.megatron.delta_net import GatedAttention, GatedDeltaNet
from rltool.megatron.experts import computes, group_products, wanted
from rltool.megatron.family_layers import (
    LatentAttention,
    NormedRowParallelLinear,
    NormOfAllHeads,
    TwoRopeSelfAttention,
    TwoRotaryPositions,
    one_pass,
)
from rltool.megatron.layers import (
    BiasedExpert,
    GatedMLP,
    GatedSharedExpert,
    PackedCausalAttention,
    RMSNorm,
    RotaryPositions,
    gate_of,
)
from rltool.megatron.packing import PackedSequences
from rltool.megatron.patches import (
    dispatch_without_atomics,
    fuse_weight_gradients,
    recompute_without_transformer_engine,
    rotate_in_one_kernel,
    route_without_transformer_engine,
)
from rltool.megatron.router_bias import bias_as_parameter
from rltool.megatron.runtime import Coordinates, mlp_submodules, with_known_fields
from rltool.models.base import Family, padded_vocabulary
from rltool.models.layout import check_layout

LAYERS_DIFFER = "layers_differ"
"""Attribute of a built model: whether its layers have different parameters of attention, also in other stages."""


def transformer_config(
    family: Family, coordinates: Coordinates, dtype: torch.dtype, device: torch.device, trainer: TrainerConfig
) -> TransformerConfig:
    """Megatron's configuration of this model in this layout.

    Fusions that need Apex or Transformer Engine are off, or our own.
    """
    # Of experts under tensor parallelism Megatron refuses biases, see `BiasedExpert`: set behind its back.
    arguments = family.transformer | {"add_bias_linear": False}
    config = with_known_fields(
        TransformerConfig,
        **arguments,
        tensor_model_parallel_size=coordinates.layout.tp,
        pipeline_model_parallel_size=coordinates.layout.pp,
        expert_model_parallel_size=coordinates.layout.ep,
        context_parallel_size=coordinates.layout.cp,
        sequence_parallel=trainer.sequence_parallel,
        **_recompute(family, coordinates, trainer),
        params_dtype=dtype,
        # What goes from stage to stage is the residual stream.
        pipeline_dtype=dtype if trainer.residual == "model" else torch.float32,
        fp32_residual_connection=trainer.residual != "model",
        bf16=dtype is torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # The loss is divided by the global token count by the trainer; without this, DistributedDataParallel would also
        # divide.
        calculate_per_token_loss=True,
        # Packed rows differ in length, and pipeline stages exchange the lengths; Megatron then insists on this
        # dispatcher even for a model without experts.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        use_cpu_initialization=True,
        perform_initialization=False,
        optional=dict(
            persist_layer_norm=False,
            gradient_accumulation_fusion=fuse_weight_gradients(device),
            masked_softmax_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            apply_rope_fusion=False,
        ),
    )
    config.add_bias_linear = family.transformer["add_bias_linear"]
    return config


def _recompute(family: Family, coordinates: Coordinates, trainer: TrainerConfig) -> dict[str, Any]:
    if trainer.recompute == "none":
        return {}
    recompute_without_transformer_engine()
    if trainer.recompute == "selective":
        # The gated activation is `GatedMLP`'s own part.
        return {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
    held = family.num_layers // coordinates.layout.pp
    layers = min(trainer.recompute_layers or held, held)
    return {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": layers}


def build_model(
    family: Family,
    coordinates: Coordinates,
    dtype: torch.dtype,
    device: torch.device,
    trainer: TrainerConfig | None = None,
) -> GPTModel:
    """The model, its weights uninitialised: load by `hf_weights` or a checkpoint. Logits stay vocabulary-parallel.

    trainer: its settings beside the layout (recompute, sequence parallelism); None: its defaults.
    """
    trainer = trainer or TrainerConfig()
    check_layout(
        family,
        coordinates.layout,
        sequence_parallel=trainer.sequence_parallel,
        shared_prefixes=trainer.shared_prefixes,
    )
    check_backend(trainer.attention, device, dtype)
    if family.attention.sinks and trainer.attention not in ("auto", "torch"):
        raise UsageError(
            f'trainer.attention = "{trainer.attention}" has no gradient of attention sinks, which this model has; '
            'leave it at "auto": torch\'s kernel serves'
        )
    config = transformer_config(family, coordinates, dtype, device, trainer)
    rotate_in_one_kernel()
    dispatch_without_atomics()
    model = GPTModel(
        config=config,
        # Megatron also takes a spec of the whole block, whatever it annotates.
        transformer_layer_spec=cast(Any, _block_spec(family, config, coordinates, trainer)),
        vocab_size=padded_vocabulary(family.vocab_size, coordinates.layout.tp),
        max_sequence_length=family.max_position_embeddings,
        pre_process=coordinates.pp_rank == 0,
        post_process=coordinates.is_last_stage,
        share_embeddings_and_output_weights=family.tied_embeddings,
        position_embedding_type="rope",
        parallel_output=True,
    )
    model.rotary_pos_emb = cast(Any, rotary_positions(family, device))
    if family.embedding_scale is not None and coordinates.pp_rank == 0:
        # Rounded to the model's dtype first, as transformers does: in bfloat16 that is another number.
        scale = torch.tensor(family.embedding_scale, dtype=dtype, device="cpu").item()

        def scaled(_module: torch.nn.Module, _inputs: Any, output: Tensor) -> Tensor:
            return output * scale

        model.embedding.register_forward_hook(scaled)
    whole = config.recompute_num_layers or 0
    for index, layer in enumerate(model.decoder.layers):
        one_pass(cast(Any, layer).self_attention)
        # Changed on the built layers: Megatron-core 0.16 and 0.19 name the MLP's class in different places of the spec.
        for mlp in (layer.mlp, getattr(layer.mlp, "shared_experts", None)):
            gated = {MLP: GatedMLP, SharedExpertMLP: GatedSharedExpert}.get(type(mlp))
            if gated is not None and config.gated_linear_unit and config.activation_func is F.silu:
                mlp.__class__ = gated
                cast(GatedMLP, mlp).recompute_gated = trainer.recompute != "none" and index >= whole
        for expert in getattr(getattr(layer.mlp, "experts", None), "local_experts", ()):
            if config.add_bias_linear:
                gate_of(config)  # before the first step, what it refuses
                expert.__class__ = BiasedExpert
        if config.moe_router_enable_expert_bias and hasattr(layer.mlp, "router"):
            bias_as_parameter(cast(Any, layer.mlp).router, counts=trainer.router_bias_update_rate > 0)
    # With it Megatron would move them itself: see `RouterBiases`.
    config.moe_router_enable_expert_bias = False
    if family.attention.norm_whole:
        # With it Megatron would sum the gradients of these norms over tensor-parallel ranks, which it takes for copies.
        config.qk_layernorm = False
    if family.pictures is not None:
        add_deep_features(model, family.pictures.deep)
    setattr(model, LAYERS_DIFFER, family.attention.delta is not None)
    _mark_sharded(model, family)
    model.to(device)
    if wanted(trainer.expert_products, device, dtype):
        for layer in model.decoder.layers:
            experts = getattr(layer.mlp, "experts", None)
            if isinstance(experts, SequentialMLP) and computes(experts.config):
                group_products(experts, demanded=trainer.expert_products == "grouped")
    return model


def rotary_positions(family: Family, device: torch.device) -> RotaryPositions | TwoRotaryPositions:
    rotary = family.rotary
    if rotary.sliding is None:
        return RotaryPositions(rotary, device)
    return TwoRotaryPositions(rotary, rotary.sliding, device)


def _mark_sharded(model: GPTModel, family: Family) -> None:
    """Marks for Megatron the parameters cut over tensor-parallel ranks; it does so only when it initialises them.

    Unmarked ones count as copies: the gradient norm leaves out all shards but rank 0's, and clips too little.
    """
    for name, parameter in global_names(model).items():
        dim = family.parameter(name).shard_dim
        if dim is not None:
            marked = cast(Any, parameter)  # with Megatron's own attributes
            marked.tensor_model_parallel = True
            marked.partition_dim = dim
            marked.partition_stride = 1


def _block_spec(
    family: Family, config: TransformerConfig, coordinates: Coordinates, trainer: TrainerConfig
) -> TransformerBlockSubmodules:
    backend = trainer.attention
    if family.num_experts:
        route_without_transformer_engine()
    held = config.num_layers // config.pipeline_model_parallel_size
    layers = range(coordinates.pp_rank * held, (coordinates.pp_rank + 1) * held)
    here = [(family.expert_layers[layer], family.attention.is_delta(layer)) for layer in layers]
    specs = {x: _layer_spec(family, config, backend, experts=x[0], delta=x[1]) for x in set(here)}
    if trainer.residual != "model":
        for spec in specs.values():
            spec.submodules.self_attn_bda = spec.submodules.mlp_bda = add_to_stream
    # Named here, the final norm does not depend on whether Apex or Transformer Engine happens to be installed.
    return TransformerBlockSubmodules(layer_specs=[specs[x] for x in here], layer_norm=cast(Any, RMSNorm))


def _layer_spec(family: Family, config: TransformerConfig, backend: Backend, *, experts: bool, delta: bool) -> Any:
    spec = get_gpt_layer_local_spec(
        normalization="RMSNorm",
        num_experts=family.num_experts if experts else None,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
    )
    # The spec objects are shared inside Megatron: change a copy.
    layer = cast(Any, copy.deepcopy(spec))
    before = (AsWeights if config.fp32_residual_connection else IdentityOp) if family.norms == "post" else RMSNorm
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = before
    params = {"attention": family.attention, "backend": backend}
    own: type | None = LatentAttention if family.attention.latent is not None else None
    if family.attention.gated:
        own = GatedDeltaNet if delta else GatedAttention
    if own is not None:
        layer.submodules.self_attention = ModuleSpec(own, params=params)
        return layer
    attention = layer.submodules.self_attention
    attention.submodules.core_attention = ModuleSpec(PackedCausalAttention, params=params)
    if config.qk_layernorm:
        norms = [RMSNorm, RMSNorm]
        if family.attention.norm_whole:
            heads = config.num_attention_heads, config.num_query_groups
            norms = [ModuleSpec(NormOfAllHeads, params={"heads": number}) for number in heads]
        attention.submodules.q_layernorm, attention.submodules.k_layernorm = norms
    if family.norms != "pre":
        attention.submodules.linear_proj = NormedRowParallelLinear
        mlp_submodules(layer).linear_fc2 = NormedRowParallelLinear
    if family.rotary.sliding is not None:
        attention.module = TwoRopeSelfAttention
        attention.params = {**attention.params, "attention": family.attention}
    return layer


def add_to_stream(training: bool, fused: bool) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
    """Megatron's bias_dropout_add rounds the sum to what the layer gave; this one keeps the stream in fp32."""

    def add(output: tuple[Tensor, Tensor | None], stream: Tensor, dropout: float) -> Tensor:
        x, bias = output
        return stream + (x if bias is None else x + bias)

    return add


class AsWeights(torch.nn.Module):
    """In the place of a norm in front of a layer that has none: rounds a stream in fp32 to the weights' dtype."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self._dtype = config.params_dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self._dtype)


def forward(model: torch.nn.Module, tokens: Tensor, packed: PackedSequences) -> Tensor:
    """tokens: [T] on the model's device.

    Last stage: logits [T, padded vocabulary / tp]; else hidden states [T, 1, hidden].
    """
    gpt, given = unwrap(model), {}
    if packed.pictures is not None and gpt.pre_process:
        embedded = gpt.embedding(input_ids=tokens[None], position_ids=packed.positions[None])
        given = {"decoder_input": packed.pictures.placed(embedded)}
    output = model(
        input_ids=tokens[None], position_ids=packed.positions[None], attention_mask=None, packed_seq_params=packed,
        **given,
    )  # fmt: skip
    return output.squeeze(0) if gpt.post_process else output


def add_deep_features(model: GPTModel, layers: int) -> None:
    """From now on the first layers, this many of the whole model, add features of pictures to their output."""

    def hook(_module: Any, _inputs: Any, options: dict[str, Any], output: Any, number: int) -> Any:
        placed = options["packed_seq_params"].pictures
        if placed is None:
            return output
        hidden, *rest = output
        return (placed.added(hidden, number), *rest)

    for layer in model.decoder.layers:
        number = cast(Any, layer).layer_number - 1
        if number < layers:
            layer.register_forward_hook(partial(hook, number=number), with_kwargs=True)


def output_hidden_states(model: GPTModel) -> None:
    """From now on the last stage gives hidden states, [1, T, hidden], in place of logits: for `output_head`."""
    if model.post_process:
        model.output_layer.forward = _pass_through


def _pass_through(
    input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
) -> tuple[Tensor, None]:
    return input_, None


def output_weight(model: GPTModel) -> Tensor:
    """The output layer's parameter on the last stage, [padded vocabulary / tp, hidden]: the embedding's where tied."""
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    weight = model.output_layer.weight
    assert weight is not None  # untied, the layer has its own
    return weight


def unwrap(model: torch.nn.Module) -> GPTModel:
    """The GPTModel inside its data-parallel wrapper."""
    while hasattr(model, "module"):
        model = cast(torch.nn.Module, model.module)
    return cast(GPTModel, model)


def global_names(model: GPTModel) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters by Megatron name with global indices: see `global_name`."""
    return {global_name(model, name): parameter for name, parameter in model.named_parameters()}


def global_name(model: GPTModel, name: str) -> str:
    """A parameter's name in this rank's model -> with global indices: inside, each pipeline stage counts its layers
    from 0, and each expert-parallel rank its experts."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        layer = cast(Any, model.decoder.layers[int(parts[2])])
        parts[2] = str(layer.layer_number - 1)
        if parts[3:6] == ["mlp", "experts", "local_experts"]:
            parts[6] = str(layer.mlp.local_expert_indices[int(parts[6])])
    return ".".join(parts)
