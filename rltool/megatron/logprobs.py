"""Log-probabilities and entropy from logits that are cut over tensor-parallel ranks along the vocabulary.

Megatron's vocab_parallel_cross_entropy overwrites its input, its fused variant casts the gradient to bf16, and neither knows
temperature, padding of the vocabulary or entropy: hence an own function. To chunk it over rows (so that softmax and logits
of a long row are never held together), call it per chunk of `rows`; nothing in it looks across rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Takes padded vocabulary entries out of the softmax. Finite: -inf times probability 0 would make the entropy NaN.
MASKED_LOGIT = -1e30


class _VocabParallelLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, vocab_size: int, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        rank, size = (group.rank(), group.size()) if group is not None else (0, 1)
        width = logits.size(-1)
        scaled = logits.float() / temperature
        real = max(0, min(width, vocab_size - rank * width))
        scaled[:, real:] = MASKED_LOGIT

        largest = scaled.max(dim=-1).values
        if size > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        scaled -= largest[:, None]
        local = targets - rank * width
        mine = (local >= 0) & (local < width)
        local = local.clamp(0, width - 1)
        chosen = scaled.gather(-1, local[:, None]).squeeze(-1).masked_fill(~mine, 0.0)
        probabilities = scaled.exp()
        sums = torch.stack([chosen, probabilities.sum(-1), (probabilities * scaled).sum(-1)])
        if size > 1:
            dist.all_reduce(sums, group=group)
        chosen, total, weighted = sums
        probabilities /= total[:, None]
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(probabilities, local, mine, entropy)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        # Without an entropy bonus no gradient of the entropy comes back, and its term costs nothing.
        ctx.set_materialize_grads(False)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        probabilities, local, mine, entropy = ctx.saved_tensors
        if grad is None and entropy_grad is None:
            return None, None, None, None, None
        if entropy_grad is None:
            out = probabilities * (grad / -ctx.temperature)[:, None]
        else:
            # dH / dlogit = -p (log p + H) / temperature; xlogy takes 0 log 0 as 0.
            out = torch.xlogy(probabilities, probabilities).addcmul_(probabilities, entropy[:, None])
            out *= (entropy_grad / -ctx.temperature)[:, None]
            if grad is not None:
                out -= probabilities * (grad / ctx.temperature)[:, None]
        if grad is not None:
            out.scatter_add_(-1, local[:, None], (grad / ctx.temperature * mine)[:, None])
        return out.to(ctx.dtype), None, None, None, None


def token_logprobs(
    logits: Tensor,
    tokens: Tensor,
    rows: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """log p(tokens[t] | tokens before t) and the entropy of that distribution, for each t in `rows`, both [len(rows)] float32.

    logits: [T, V / tp], this rank's slice of the vocabulary, any float dtype; position t - 1 holds the logits for token t
    tokens: [T] int64; rows: [R] int64, none of them the first token of a sequence; group: the tensor-parallel ranks
    Computed in fp32 from logits / temperature. Differentiable through both.
    """
    return _VocabParallelLogProb.apply(logits[rows - 1], tokens[rows], temperature, vocab_size, group)
