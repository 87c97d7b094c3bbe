"""Mixture of experts in the place of the MLP: a router and experts that are gated MLPs, chosen token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rltool.errors import UsageError
from rltool.models.base import Family, Interleaved, Parameter
from rltool.models.decoder import Part, gated_mlp, refuse, require


@dataclass(frozen=True)
class Router:
    """How a token chooses its experts.

    top_k: how many; normalize: their weights sum to 1
    score: "softmax" of the logits, or the "sigmoid" of each (DeepSeek-V3, arXiv 2412.19437, equations 12 to 16)
    bias: HF's name, within the block, of what is added to the scores for the choice alone; None: nothing
    groups, chosen_groups: experts are chosen within the groups whose two best have the largest sums
    scaling: what the weights are multiplied with in the end
    """

    top_k: int
    normalize: bool
    score: Literal["softmax", "sigmoid"] = "softmax"
    bias: str | None = None
    groups: int = 1
    chosen_groups: int = 1
    scaling: float = 1.0

    def transformer(self, experts: int) -> dict[str, Any]:
        """Arguments of Megatron's TransformerConfig. UsageError for what its router cannot do."""
        if not 0 < self.top_k <= experts:
            raise UsageError(
                f"config.json: num_experts_per_tok {self.top_k} is not between 1 and the number of experts {experts}"
            )
        if self.top_k == 1 and self.normalize:
            raise UsageError("config.json: one expert per token with normalised weights (always 1) is not implemented")
        result: dict[str, Any] = dict(
            moe_router_topk=self.top_k, moe_router_load_balancing_type="none", moe_aux_loss_coeff=0.0
        )
        if self.score == "softmax":
            return result | dict(moe_router_pre_softmax=not self.normalize)
        if not self.normalize:
            raise UsageError("config.json: norm_topk_prob = False with sigmoid scores is not implemented; only True is")
        result |= dict(
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=self.bias is not None,
            moe_router_topk_scaling_factor=self.scaling,
            moe_router_dtype="fp32",
        )
        if self.groups == 1:
            return result
        # Megatron takes the best top_k / chosen_groups of a group for its sum.
        if self.top_k != 2 * self.chosen_groups or experts % self.groups:
            raise UsageError(
                f"config.json: n_group {self.groups}, topk_group {self.chosen_groups} and num_experts_per_tok "
                f"{self.top_k} of {experts} experts are not implemented; only twice as many experts as groups are"
            )
        return result | dict(moe_router_num_groups=self.groups, moe_router_group_topk=self.chosen_groups)


@dataclass(frozen=True)
class Shared:
    """An expert that every token meets. block, gate: HF's names within the layer's module of it, and of what it is
    multiplied with, the sigmoid of a product; gate None: nothing."""

    ffn: int
    block: str
    gate: str | None = None


@dataclass(frozen=True)
class Names:
    """HF's: block, of the layer's module; projections, of gate, up and down within an expert."""

    block: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


def mixture_of_experts(
    *, hidden: int, ffn: int, experts: int, router: Router, names: Names = Names(), shared: Shared | None = None
) -> Part:
    """Routing without capacity limit: no token is dropped, no auxiliary loss is added. ffn: of each expert."""

    def gated(hf: str, megatron: str, layer: int, size: int, expert: int | None) -> list[Parameter]:
        gate, up, down = names.projections
        gate_and_up = tuple((f"{hf}{name}.weight", (size, hidden)) for name in (gate, up))
        back = ((f"{hf}{down}.weight", (hidden, size)),)
        return [
            Parameter(f"{megatron}linear_fc1.weight", gate_and_up, layer, 0, "stack", expert=expert),
            Parameter(f"{megatron}linear_fc2.weight", back, layer, 1, expert=expert),
        ]

    def parameters(layer: int) -> list[Parameter]:
        hf, megatron = f"model.layers.{layer}.{names.block}.", f"decoder.layers.{layer}.mlp."
        result = [Parameter(f"{megatron}router.weight", ((f"{hf}gate.weight", (experts, hidden)),), layer)]
        if router.bias is not None:
            bias = ((f"{hf}{router.bias}", (experts,)),)
            result.append(Parameter(f"{megatron}router.expert_bias", bias, layer, keeps_fp32=True))
        for e in range(experts):
            result += gated(f"{hf}experts.{e}.", f"{megatron}experts.local_experts.{e}.", layer, ffn, e)
        if shared is not None:
            result += gated(f"{hf}{shared.block}.", f"{megatron}shared_experts.", layer, shared.ffn, None)
            if shared.gate is not None:
                gate = ((f"{hf}{shared.gate}.weight", (1, hidden)),)
                result.append(Parameter(f"{megatron}shared_experts.gate_weight", gate, layer))
        return result

    transformer = dict(ffn_hidden_size=ffn, moe_ffn_hidden_size=ffn, num_moe_experts=experts)
    if shared is not None:
        transformer |= dict(
            moe_shared_expert_intermediate_size=shared.ffn, moe_shared_expert_gate=shared.gate is not None
        )
    return Part(transformer | router.transformer(experts), parameters)


def stacked_experts(
    *, hidden: int, ffn: int, experts: int, router: Router, gate: str, bias: bool, by_turns: bool
) -> Part:
    """As `mixture_of_experts`, with one tensor of each kind for all experts of a layer, matrices as [inputs, outputs].

    gate: HF's name of the router; bias: it and every product have one; by_turns: so the columns of gate and up lie,
    else those of gate are first
    """
    halves: dict[str, Any] = {"merge_as": "stack", "parts": (ffn, ffn)}
    if by_turns:
        halves["interleaved"] = (Interleaved(2 * ffn, 0, 2 * ffn),)

    def parameters(layer: int) -> list[Parameter]:
        hf, megatron = f"model.layers.{layer}.mlp.", f"decoder.layers.{layer}.mlp."

        def stacked(name: str, megatron_name: str, shape: tuple[int, ...], cut: int | None, **more: Any):
            of_all = ((f"{hf}experts.{name}", (experts, *shape)),)
            return [
                Parameter(
                    f"{megatron}experts.local_experts.{e}.{megatron_name}", of_all, layer, cut, expert=e,
                    experts=experts, transposed=len(shape) == 2, **more,
                )
                for e in range(experts)
            ]  # fmt: skip

        result = [Parameter(f"{megatron}router.weight", ((f"{hf}{gate}.weight", (experts, hidden)),), layer)]
        # One tensor after the other: all its parts are held until it is complete.
        up = stacked("gate_up_proj", "linear_fc1.weight", (hidden, 2 * ffn), 0, **halves)
        down = stacked("down_proj", "linear_fc2.weight", (ffn, hidden), 1)
        if not bias:
            return [*result, *up, *down]
        return [
            *result,
            Parameter(f"{megatron}router.bias", ((f"{hf}{gate}.bias", (experts,)),), layer),
            *up,
            *stacked("gate_up_proj_bias", "linear_fc1.bias", (2 * ffn,), 0, **halves),
            *down,
            *stacked("down_proj_bias", "linear_fc2.bias", (hidden,), None),
        ]

    transformer = dict(ffn_hidden_size=ffn, moe_ffn_hidden_size=ffn, num_moe_experts=experts)
    return Part(transformer | router.transformer(experts), parameters)


def dense_and_sparse(dense: Part, sparse: Part, has_experts: Sequence[bool]) -> Part:
    """has_experts: of each layer."""
    return Part(
        sparse.transformer | dense.transformer | dict(moe_layer_freq=[int(x) for x in has_experts]),
        lambda layer: (sparse if has_experts[layer] else dense).parameters(layer),
    )


def deepseek_experts(config: dict[str, Any], has_experts: Sequence[bool]) -> Part:
    """The feed-forward layers of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) under its keys of config.json.

    has_experts: of each layer; the others have a dense MLP.
    """
    refuse(config, topk_method="noaux_tc", scoring_func="sigmoid", moe_layer_freq=1)
    hidden, ffn, experts, top_k = require(
        config, "hidden_size", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok"
    )
    router = Router(
        top_k,
        normalize=config.get("norm_topk_prob") is not False,
        score="sigmoid",
        bias="gate.e_score_correction_bias",
        groups=config["n_group"] or 1,
        chosen_groups=config["topk_group"] or 1,
        scaling=config["routed_scaling_factor"],
    )
    shared = Shared(ffn * config["n_shared_experts"], "shared_experts")
    sparse = mixture_of_experts(hidden=hidden, ffn=ffn, experts=experts, router=router, shared=shared)
    return dense_and_sparse(gated_mlp(config), sparse, has_experts) if not all(has_experts) else sparse


def predicting_layers(config: dict[str, Any]) -> tuple[str, ...]:
    """How the names of multi-token-prediction layers begin (DeepSeek-V3, section 2.2): those behind the last layer."""
    first, count = config["num_hidden_layers"], config.get("num_nextn_predict_layers") or 0
    return tuple(f"model.layers.{layer}." for layer in range(first, first + count))


def check_router_bias(family: Family) -> None:
    """UsageError where no router has a correction bias."""
    if not family.transformer.get("moe_router_enable_expert_bias"):
        raise UsageError("trainer.router_bias_update_rate is set, but this model's routers have no bias; leave it out")


def check_grouped_products(family: Family, *, tensor_parallel: int, dtype: str) -> None:
    """UsageError where torch's grouped products cannot take this model's experts: they want rows of whole 16 bytes."""
    if not family.num_experts:
        raise UsageError(
            'trainer.expert_products = "grouped", but the model has no experts; leave trainer.expert_products at "auto"'
        )
    multiple = 16 // {"float32": 4, "bfloat16": 2}[dtype]
    hidden, ffn = family.transformer["hidden_size"], family.transformer["moe_ffn_hidden_size"]
    for what, size in (("hidden_size", hidden), ("experts' size on each tensor-parallel rank", ffn // tensor_parallel)):
        if size % multiple:
            raise UsageError(
                f'trainer.expert_products = "grouped" in {dtype} needs multiples of {multiple}, but the {what} is '
                f'{size}; leave trainer.expert_products at "auto"'
            )
