"""Which tokens top-p and top-k left to choose from, place by place: vLLM's sampling mask.

An engine that truncates renormalises the log-probabilities that it returns over the tokens which it kept. The trainer
must do the same over the same tokens (DeepSeek-AI 2025, "DeepSeek-V3.2", arXiv:2512.02556, section 3.1, "Keep Sampling
Mask"). They are read off the most probable tokens of each place: with logprobs_mode = "processed_logprobs" a token that
was not kept has the log-probability -inf. vLLM's own `return_sampling_mask` needs its second model runner, so a GPU.
Pure: for the dialects and the plugin.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from rltool.engines.plugin.sglang_api import MISSING_LOGPROB
from rltool.errors import EngineError

LARGEST_DIFFERENCE = 0.02
"""From 1, of the probability of all kept tokens: by rounding, and by tokens that an engine kept and did not name."""


def logprobs_of(top_k: int) -> int:
    """How many of the most probable tokens to ask for, so that all that are kept are among them. top_k tokens, and
    those that tie with the last of these, which vLLM keeps as well: in bfloat16 many logits are equal."""
    return top_k + max(8, top_k // 4)


@dataclass(frozen=True)
class SamplingMask:
    """ids ("i"): the tokens that were kept, place after place, the sampled one among them; counts ("i"): how many in
    each place, which stands for one sampled token."""

    ids: array[int]
    counts: array[int]

    def __post_init__(self) -> None:
        if sum(self.counts) != len(self.ids):
            raise ValueError(f"a sampling mask of {sum(self.counts)} tokens with {len(self.ids)} ids")

    def first(self, places: int) -> SamplingMask:
        """That of the first places."""
        counts = self.counts[:places]
        return SamplingMask(self.ids[: sum(counts)], counts)


@dataclass(frozen=True)
class FoundMask:
    """mass: probability of the kept tokens in the place where it is furthest from 1, which it is but for rounding."""

    mask: SamplingMask
    mass: float

    def checked(self) -> SamplingMask:
        """EngineError where tokens are missing, or where log-probabilities are not those of the kept tokens alone."""
        if abs(self.mass - 1) <= LARGEST_DIFFERENCE:
            return self.mask
        raise EngineError(
            f"the tokens that top-p and top-k kept have the probability {self.mass:.4g} in one place, where it must be "
            "1: was the engine started without --logprobs-mode processed_logprobs?"
        )


def find_mask(places: Iterable[Iterable[tuple[int, float]]]) -> FoundMask:
    """places: for each sampled token (id, log-probability) of it and of the most probable ones, in any order."""
    ids, counts, mass = array("i"), array("i"), 1.0
    for place in places:
        kept = {token: logprob for token, logprob in place if logprob > MISSING_LOGPROB}
        ids.extend(kept)
        counts.append(len(kept))
        mass = min(mass, sum(map(math.exp, kept.values())), key=lambda value: -abs(value - 1))
    return FoundMask(SamplingMask(ids, counts), mass)
