"""The mapping between a Hugging Face checkpoint and a Megatron model, parameter by parameter. A family fills it in.

Nothing here knows Megatron or files: a `Parameter` defines how HF tensors become one Megatron tensor, how that tensor
is cut over tensor-parallel ranks, and both ways back.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rltool.errors import UsageError
from rltool.models.cost import ModelCost
from rltool.models.pictures import Pictures


class ShapeMismatch(UsageError):
    """A tensor whose shape is not the one that config.json implies."""


def check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raises ShapeMismatch."""
    if found != expected:
        raise ShapeMismatch(
            f"{name} has shape {found}, but config.json implies {expected}; "
            "the weights and the config.json beside them do not belong together"
        )


class Interleaved(NamedTuple):
    """Of every `period` rows of a tensor (a head), `size` from `start` on are turned by rotary positions in pairs of
    neighbours (0 and 1, 2 and 3, ...), and in Megatron in pairs of halves (0 and size / 2, ...).

    So the rows lie in another order there, and one kernel rotates for all families.
    """

    period: int
    start: int
    size: int

    def halves(self, rows: Tensor) -> Tensor:
        """HF's order -> Megatron's; a copy."""
        return self._turned(rows, (self.size // 2, 2))

    def neighbours(self, rows: Tensor) -> Tensor:
        """The inverse of `halves`."""
        return self._turned(rows, (2, self.size // 2))

    def _turned(self, rows: Tensor, pairs: tuple[int, int]) -> Tensor:
        result = rows.clone()
        heads = (-1, self.period, *rows.shape[1:])
        here = slice(self.start, self.start + self.size)
        paired = rows.reshape(heads)[:, here].reshape(-1, *pairs, *rows.shape[1:])
        result.view(heads)[:, here] = paired.transpose(1, 2).reshape(-1, self.size, *rows.shape[1:])
        return result


@dataclass(frozen=True)
class Parameter:
    """One parameter of the Megatron model and the HF tensors that it is made of.

    name: Megatron's name with the global layer index, e.g. "decoder.layers.3.mlp.linear_fc1.weight"
    hf: name and shape of each HF tensor, in merge order
    layer: global layer index; None for embedding, final norm and head
    shard_dim: dimension that tensor parallelism cuts; None: every rank holds all of it
    merge_as: "same" (one HF tensor), "stack" (equal blocks along dimension 0, each cut separately: gate and up), or
        "qkv" (per query group: its queries, its key, its value; cut by group)
    query_groups, head_dim: for "qkv"
    vocabulary: dimension 0 is the vocabulary, padded to a multiple of the tensor-parallel size
    expert: global index of the expert that it belongs to; None outside of experts
    parts: rows of what is merged (queries, keys, values; gate, up) where one HF tensor has several of these, in the
        order of the HF tensors; empty: each is a tensor of its own
    interleaved: of each part; empty: none is
    keeps_fp32: it is fp32 whatever the model's dtype, here and in a checkpoint
    experts: its HF tensor is one for so many experts, along a first dimension of its own, and this is the part of
        expert `expert`; 0: it is this parameter's alone
    transposed: HF's matrix is [inputs, outputs]
    latent: of latent attention's product of keys and values, a head's rows of each; empty: it is another parameter
    """

    name: str
    hf: tuple[tuple[str, tuple[int, ...]], ...]
    layer: int | None = None
    shard_dim: int | None = None
    merge_as: Literal["same", "stack", "qkv"] = "same"
    query_groups: int = 0
    head_dim: int = 0
    vocabulary: bool = False
    expert: int | None = None
    parts: tuple[int, ...] = ()
    interleaved: tuple[Interleaved | None, ...] = ()
    keeps_fp32: bool = False
    experts: int = 0
    transposed: bool = False
    latent: tuple[int, int] | tuple[()] = ()

    @property
    def ends_tensors(self) -> bool:
        """Whether its HF tensors are complete with it: those of all experts are with the last one's part."""
        return not self.experts or self.expert == self.experts - 1

    @property
    def blocks(self) -> int:
        return len(self.parts or self.hf) if self.merge_as == "stack" else 1

    @property
    def split_copies(self) -> bool:
        """Whether `split` returns copies, in place of views."""
        return self.merge_as == "qkv" or bool(self.interleaved) or self.transposed

    def dtype(self, model: torch.dtype) -> torch.dtype:
        """Of this parameter in a model of that dtype."""
        return torch.float32 if self.keeps_fp32 else model

    @property
    def merged_shape(self) -> tuple[int, ...]:
        """Of the unsharded, unpadded Megatron tensor."""
        shapes = [shape[::-1] if self.transposed else shape for shape in self.own_shapes]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    @property
    def own_shapes(self) -> list[tuple[int, ...]]:
        """Of its part of each HF tensor, which is all of it unless that is one of all `experts`."""
        return [shape[1:] if self.experts else shape for _, shape in self.hf]

    def merge(self, tensors: list[Tensor]) -> Tensor:
        """HF tensors in the order of `hf`, of one of all `experts` its own part -> the unsharded, unpadded Megatron
        tensor. Raises ShapeMismatch."""
        for (name, _), shape, tensor in zip(self.hf, self.own_shapes, tensors, strict=True):
            check_shape(name, tuple(tensor.shape), shape)
        if self.transposed:
            tensors = [tensor.t().contiguous() for tensor in tensors]
        parts = tensors
        if self.parts and self.merge_as == "qkv":
            whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
            parts = list(torch.split(whole, list(self.parts)))
        if self.interleaved:
            parts = [x if i is None else i.halves(x) for x, i in zip(parts, self.interleaved, strict=True)]
        if self.merge_as != "qkv":
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        grouped = [part.reshape(self.query_groups, -1, *part.shape[1:]) for part in parts]
        merged = torch.cat(grouped, dim=1)
        return merged.reshape(-1, *merged.shape[2:])

    def split(self, tensor: Tensor) -> list[Tensor]:
        """The inverse of `merge`; contiguous tensors in the order of `hf`."""
        parts = list(tensor.chunk(len(self.hf)))
        if self.merge_as == "qkv":
            grouped = tensor.reshape(self.query_groups, -1, *tensor.shape[1:])
            sizes = [rows // self.query_groups for rows in self.parts or (shape[0] for _, shape in self.hf)]
            parts = [part.reshape(-1, *tensor.shape[1:]) for part in torch.split(grouped, sizes, dim=1)]
        if self.interleaved:
            parts = [x if i is None else i.neighbours(x) for x, i in zip(parts, self.interleaved, strict=True)]
        if len(parts) != len(self.hf):
            parts = list(torch.split(torch.cat(parts), [shape[0] for shape in self.own_shapes]))
        return [part.t().contiguous() for part in parts] if self.transposed else parts

    def shard(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        """The part of the unsharded tensor that tensor-parallel `rank` of `size` holds,
        vocabulary padded with zeros."""
        if self.shard_dim is None:
            return tensor
        if self.vocabulary:
            missing = padded_vocabulary(tensor.shape[0], size) - tensor.shape[0]
            tensor = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor
        parts = [block.chunk(size, dim=self.shard_dim)[rank] for block in tensor.chunk(self.blocks)]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def shard_shape(self, size: int) -> tuple[int, ...]:
        """Of what each of `size` tensor-parallel ranks holds."""
        shape = list(self.merged_shape)
        if self.vocabulary:
            shape[0] = padded_vocabulary(shape[0], size)
        if self.shard_dim is not None:
            shape[self.shard_dim] //= size
        return tuple(shape)

    def unshard(self, shards: list[Tensor]) -> Tensor:
        """The inverse of `shard`, from the parts of all ranks in rank order; vocabulary padding is stripped. One shard
        is returned as it is, several are copied once."""
        if self.shard_dim is None:
            return shards[0]
        if len(shards) == 1:
            full = shards[0]
        else:
            shape = list(shards[0].shape)
            shape[self.shard_dim] *= len(shards)
            full = shards[0].new_empty(shape)
            per_rank = [shard.chunk(self.blocks) for shard in shards]
            for block, *parts in zip(full.chunk(self.blocks), *per_rank, strict=True):
                torch.cat(parts, dim=self.shard_dim, out=block)
        return full[: self.hf[0][1][0]] if self.vocabulary else full


def padded_vocabulary(size: int, tensor_parallel: int) -> int:
    """The smallest multiple of the tensor-parallel size that is not below the vocabulary size."""
    return -(-size // tensor_parallel) * tensor_parallel


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): queries, and keys with values, are made
    of vectors of a low rank; a part of each head has no positions, and one has, which in the key all heads share.

    query_rank: None, queries come straight from the hidden state; rank: of keys and values; plain, rotary: sizes of a
    head's two parts of query and key, in this order; value: of its value
    """

    query_rank: int | None
    rank: int
    plain: int
    rotary: int
    value: int

    @property
    def head(self) -> int:
        """Size of a head's query and key."""
        return self.plain + self.rotary


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta net (Yang et al. 2024, arXiv 2412.06464, section 3): in the place of attention, a state of one size
    for sequences of any length.

    layers: which have one, the others have attention
    key_heads, value_heads: as many of the latter share each of the former; key, value: sizes of a head
    kernel: tokens that the short convolution sees, its own included
    """

    layers: tuple[bool, ...]
    key_heads: int
    value_heads: int
    key: int
    value: int
    kernel: int

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys, values."""
        return 2 * self.key_heads * self.key + self.value_heads * self.value

    @property
    def state(self) -> int:
        """Numbers of a sequence's state in a layer."""
        return self.value_heads * self.key * self.value


@dataclass(frozen=True, eq=False)
class Rotary:
    """Rotary positions (Su et al. 2021).

    inverse_frequencies: [size / 2] float32, scaling applied; a head's dimensions from `size` on are not turned
    scale: of cosines and sines (YaRN)
    sections: of a model that sees pictures, whose tokens have three positions (time, row, column), how many frequencies
        turn by each; see `axes`. None: one position
    sliding: of the layers with a sliding window; None: the same
    longest: tokens of a sequence at most; None: any number
    """

    inverse_frequencies: Tensor
    scale: float = 1.0
    sliding: Rotary | None = None
    longest: int | None = None
    sections: tuple[int, int, int] | None = None

    @property
    def axes(self) -> Tensor:
        """[size / 2] int64, which of a token's three positions turns each frequency: interleaved, so that each axis has
        fast and slow ones (Qwen3-VL, arXiv 2511.21631, section 2.1; transformers' apply_interleaved_mrope)."""
        found = torch.zeros(len(self.inverse_frequencies), dtype=torch.int64)
        for axis, count in enumerate(self.sections or ()):
            if axis:
                found[axis : 3 * count : 3] = axis
        return found


@dataclass(frozen=True)
class Attention:
    """What differs from plain grouped-query attention.

    windows: per layer, how many tokens a token sees (itself included); None: all before it. Empty: no layer has one
    norm_whole: the norm of queries (and that of keys) is over all heads together, in place of each head's
    softcap: scores are softcap * tanh(score / softcap)
    latent: in the place of grouped queries
    sinks: each head has a learned score beside those of the keys, which takes its share of the softmax and adds nothing
    to the output (gpt-oss; StreamingLLM's sink without a token, Xiao et al. 2023, arXiv 2309.17453, section 3.3)
    gated: the output is multiplied with the sigmoid of a product, behind each head's query in the one of queries
    delta: in the place of attention in some layers
    """

    windows: tuple[int | None, ...] = ()
    norm_whole: bool = False
    softcap: float | None = None
    latent: Latent | None = None
    sinks: bool = False
    gated: bool = False
    delta: DeltaNet | None = None

    def is_delta(self, layer: int) -> bool:
        """Whether this layer has a gated delta net."""
        return self.delta is not None and self.delta.layers[layer]


@dataclass(frozen=True, eq=False)
class Family:
    """A model of one family: what Megatron needs to build it, and the mapping of every tensor.

    transformer: keyword arguments of Megatron's TransformerConfig
    parameters: every Megatron parameter of the model, in the order in which weights are exported
    embedding_scale: what the embedding's output is multiplied with; None: nothing
    logit_softcap: logits are logit_softcap * tanh(logit / logit_softcap); None: as they are
    norms: where a layer normalises: "pre", the inputs of attention and MLP; "post", their outputs, before these are
    added to the residual; "sandwich", both
    prefix: how the names of HF tensors begin, but for the head's
    carried: beginnings of the names of tensors that a checkpoint may hold beside the model's. They are neither trained
    nor sent to engines; conversion and export hand them on bit by bit
    pictures: of a model whose pictures the trainer computes
    own: import path of a user's definition that it was built by
    """

    architecture: str
    transformer: dict[str, Any]
    vocab_size: int
    max_position_embeddings: int
    tied_embeddings: bool
    rotary: Rotary
    parameters: tuple[Parameter, ...]
    attention: Attention = Attention()
    embedding_scale: float | None = None
    logit_softcap: float | None = None
    norms: Literal["pre", "post", "sandwich"] = "pre"
    prefix: str = "model."
    carried: tuple[str, ...] = ()
    pictures: Pictures | None = None
    own: str | None = None
    _by_name: dict[str, Parameter] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {parameter.name: parameter for parameter in self.parameters})

    def parameter(self, name: str) -> Parameter:
        """The parameter with this Megatron name (global layer index). The head of a tied model is its embedding."""
        if self.tied_embeddings and name == HEAD:
            name = EMBEDDING
        return self._by_name[name]

    @property
    def modalities(self) -> frozenset[str]:
        """Kinds of input beside text ("image", "video", "audio") that the trainer computes for this model."""
        return frozenset(() if self.pictures is None else ("image",))

    @property
    def num_layers(self) -> int:
        return self.transformer["num_layers"]

    @property
    def num_experts(self) -> int:
        """Experts per layer; 0 for a dense model."""
        return self.transformer.get("num_moe_experts") or 0

    @property
    def expert_layers(self) -> list[bool]:
        """Whether each layer has experts."""
        return [bool(x) for x in self.transformer.get("moe_layer_freq") or [self.num_experts] * self.num_layers]

    def cost(self) -> ModelCost:
        """What training on a token costs."""
        products = 0
        for parameter in self.parameters:
            table = parameter.name == EMBEDDING and not self.tied_embeddings
            if table or len(parameter.merged_shape) < 2 or not parameter.name.endswith("weight"):
                continue
            size = math.prod(parameter.merged_shape)
            # Of the experts a token meets the chosen ones; which these are does not matter for the sum.
            if parameter.expert is not None:
                size = size * self.transformer["moe_router_topk"] // self.num_experts
            products += size
        latent, head = self.attention.latent, self.transformer["kv_channels"]
        # Queries x keys, and weights x values: they may differ in size.
        sizes = 2 * head if latent is None else latent.head + latent.value
        width = self.transformer["num_attention_heads"] * sizes // 2
        windows = Counter(window for window in self.attention.windows if window is not None)
        delta = self.attention.delta
        nets, state = (0, 0) if delta is None else (sum(delta.layers), delta.state)
        full = self.num_layers - windows.total() - nets
        by_window = tuple((size, count * width) for size, count in windows.items())
        return ModelCost(products, full * width, by_window, nets * state)

    def hf_tensors(self) -> list[tuple[str, tuple[int, ...]]]:
        """Name and shape of every HF tensor that a checkpoint of this model holds. A tied model has no lm_head."""
        return [tensor for parameter in self.parameters if parameter.ends_tensors for tensor in parameter.hf]


Cut = Literal["tp", "pp", "cp", "ep"]
"""Tensor, pipeline, context and expert parallelism."""


@dataclass(frozen=True)
class FamilyDefinition:
    """A family as its file states it, in `FAMILY`: `rltool models` and docs/models.md say what is here.

    architectures: names in config.json that it builds
    build: config.json -> the model; UsageError, naming key and value, for what is not implemented
    opens: checkpoints, as people call them
    special: how it differs from Llama; refuses: what a config.json may ask for and is refused
    layouts: in which it is compared with transformers (logits, gradients, every tensor) over two ranks, beside one
        rank; tests/e2e/test_model_families.py runs these
    engines: in which an exported model and synced weights are compared with transformers
    no_sglang: why SGLang 0.5.23's build for a CPU is not among these
    """

    architectures: tuple[str, ...]
    build: Callable[[dict[str, Any]], Family]
    opens: str
    special: str = ""
    refuses: str = ""
    layouts: tuple[Cut, ...] = ("tp", "pp", "cp")
    engines: tuple[str, ...] = ("vllm",)
    no_sglang: str = ""


WITH_EXPERTS: tuple[Cut, ...] = ("tp", "pp", "cp", "ep")

EMBEDDING = "embedding.word_embeddings.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
HEAD = "output_layer.weight"
