"""Floating-point operations of a training step: what packing balances,
and what utilisation is measured against. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelCost:
    """What a token costs.

    products: weights that it is multiplied with: of the experts the chosen ones, the output head also where it is tied,
        and not the table of embeddings, norms and biases
    attention_width: sum over layers of attention heads x head dimension, of the layers that see all before a token
    windows: (tokens that a token sees, the same sum over the layers with that sliding window) for each size of one
    state: numbers of a sequence's state in all layers with a gated delta net, each of which a token multiplies three
        times: to read what its key has, to write, and to read for its query (arXiv 2412.06464, equation 10)
    """

    products: int
    attention_width: int
    windows: tuple[tuple[int, int], ...] = ()
    state: int = 0

    def training_flops(self, length: int) -> int:
        """Forward and backward of one sequence: 6 per product and token, and of causal attention 6 per unit of width
        and pair of a token with itself or one before it, twice (queries x keys, weights x values).

        Recomputed activations are not counted: this is the model's work, not the machine's (Chowdhery et al. 2022,
        appendix B).
        """
        pairs = sum(width * seen_pairs(length, window) for window, width in self.windows)
        products = self.products + 3 * self.state
        return 6 * products * length + 12 * (self.attention_width * seen_pairs(length) + pairs)

    def batch_flops(self, lengths: Iterable[int]) -> int:
        return sum(self.training_flops(length) for length in lengths)


def seen_pairs(length: int, window: int | None = None) -> int:
    """How many pairs of a token and one that it sees, itself included, a sequence has."""
    seen = length if window is None else min(window, length)
    return seen * (seen + 1) // 2 + (length - seen) * seen
