"""Floating-point operations of a training step: what packing balances,
and what utilisation is measured against. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelCost:
    """What a token costs. parameters: those that it meets (of the experts, the chosen ones); attention_width: sum over
    layers of attention heads x head dimension."""

    parameters: int
    attention_width: int

    def training_flops(self, length: int) -> int:
        """Forward and backward of one sequence: 6 per parameter and token, and of causal attention 6 per unit of width
        and pair of a token with itself or one before it, twice (queries x keys, weights x values), which is
        6 n (n + 1).

        Recomputed activations are not counted: this is the model's work, not the machine's (Chowdhery et al. 2022,
        appendix B).
        """
        return 6 * self.parameters * length + 6 * self.attention_width * length * (length + 1)

    def batch_flops(self, lengths: Iterable[int]) -> int:
        return sum(self.training_flops(length) for length in lengths)
