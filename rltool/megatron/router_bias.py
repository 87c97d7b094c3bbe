"""The correction biases of routers (DeepSeek-V3, arXiv 2412.19437, section 2.1.2): parameters without a gradient.

They stay as they are unless `trainer.router_bias_update_rate` is set.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel


def bias_as_parameter(router: Any, *, counts: bool) -> None:
    """Makes the bias, a buffer of Megatron's router, a parameter that is not trained: so that it is loaded, saved,
    exported and sent as the others are. It stays fp32. counts: whether the router counts the tokens of each expert."""
    bias = router.expert_bias
    del router.expert_bias
    router.expert_bias = torch.nn.Parameter(torch.zeros_like(bias), requires_grad=False)
    router.enable_expert_bias = counts


class RouterBiases:
    """Those of this rank that move: by `rate` after each step, up where an expert had fewer tokens than the average
    expert of its layer, else down (Wang et al. 2024, arXiv 2408.15664, algorithm 1).

    Not by Megatron, which moves them at the end of each backward pass, also where the step is then skipped. The padding
    of context and sequence parallelism counts as tokens.
    """

    def __init__(self, model: GPTModel, rate: float) -> None:
        routers: list[Any] = [getattr(layer.mlp, "router", None) for layer in cast(Any, model.decoder.layers)]
        self._routers = [router for router in routers if rate and getattr(router, "enable_expert_bias", False)]
        self._rate = rate

    def forget(self) -> None:
        """Drop the tokens that were counted since the last step."""
        for router in self._routers:
            router.local_tokens_per_expert.zero_()

    @torch.no_grad()
    def move(self) -> None:
        """Collective over the ranks of a pipeline stage."""
        if not self._routers:
            return
        counts = torch.stack([router.local_tokens_per_expert for router in self._routers])
        dist.all_reduce(counts, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
        for router, moves in zip(self._routers, torch.sign(counts.mean(1, keepdim=True) - counts), strict=True):
            router.expert_bias.add_(moves, alpha=self._rate)
        self.forget()
