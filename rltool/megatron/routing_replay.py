"""Rollout routing replay (R3; Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and
Inference Routers", arXiv 2510.11370): a router takes the experts that the engine's router chose, in place of its own.

Which experts those are travels with the packed tokens (`PackedSequences.inputs`), and each layer hands its own
to its router just before it runs: so whichever micro-batch a pipeline stage computes, and when a layer is computed
again in the backward pass, the router sees what belongs to the tokens at hand. Megatron's own `RouterReplay` keeps a
queue of micro-batches per router and one list of all routers of the process, a critic's among them, and wants to be
set before each backward pass; of Megatron only the place is used where its router asks for such an object.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from rltool.errors import RltoolError

REPLAYED = "routed_experts"
"""The field of a batch that routers take."""


class ReplayedRouter:
    """In the place of a router's megatron.core.transformer.moe.router_replay.RouterReplay, for one layer.

    experts: [tokens, top_k] of the tokens that come next, negative where the router is to choose; None: for all.
    """

    def __init__(self) -> None:
        self.experts: Tensor | None = None
        self.counts: Tensor | None = None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """scores: [tokens, experts], logits or probabilities. Returns those of the chosen experts and their indices,
        [tokens, topk] each; the gradient goes through the scores, as with the router's own choice."""
        assert default_compute_topk is not None
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.experts is None:
            return values, own
        if self.experts.shape != own.shape:
            raise RltoolError(
                f"experts of {tuple(self.experts.shape)} tokens and choices to replay, and the router has "
                f"{tuple(own.shape)}"
            )
        replayed = self.experts >= 0
        chosen = torch.where(replayed, self.experts, own)
        # A layer that is computed again counts again, in both numbers.
        same = (chosen.unsqueeze(-1) == own.unsqueeze(-2)).any(-1)
        found = torch.stack([(replayed & same).sum(), replayed.sum()])
        self.counts = found if self.counts is None else self.counts + found
        return scores.gather(1, chosen), chosen


class RoutingReplay:
    """The routers of one rank that replay."""

    def __init__(self, model: GPTModel, *, layers: int, tp_rank: int, tp_size: int) -> None:
        """Lets each mixture of experts of this pipeline stage replay what `packed_seq_params` has for its layer.

        layers: of the whole model. tp_size: ranks that share the tokens before each router: those of sequence
        parallelism, 1 without.
        """
        self._routers: list[ReplayedRouter] = []
        for layer in cast(Any, model.decoder.layers):
            if (router := getattr(layer.mlp, "router", None)) is None:
                continue
            router.router_replay = replayed = ReplayedRouter()
            hook = _hand_over(replayed, layer.layer_number - 1, layers, tp_rank, tp_size)
            layer.register_forward_pre_hook(hook, with_kwargs=True)
            self._routers.append(replayed)

    def start_counting(self) -> None:
        for router in self._routers:
            router.counts = None

    def agreement(self) -> list[float]:
        """[replayed choices that the routers would have made themselves, all that were replayed] since
        `start_counting`."""
        counts = [router.counts for router in self._routers if router.counts is not None]
        return torch.stack(counts).sum(0).double().tolist() if counts else [0.0, 0.0]


def _hand_over(
    replayed: ReplayedRouter, layer: int, layers: int, tp_rank: int, tp_size: int
) -> Callable[..., None]:  # fmt: skip
    """layer: counted over all pipeline stages, of which all have `layers` together."""

    def hook(_module: torch.nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        experts = kwargs["packed_seq_params"].inputs.get(REPLAYED)
        if experts is None:
            replayed.experts = None
            return
        held = experts.unflatten(1, (layers, -1))[:, layer].chunk(tp_size)[tp_rank].long()
        replayed.experts = held.masked_fill(held == torch.iinfo(experts.dtype).max, -1)

    return hook
