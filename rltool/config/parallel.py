"""All parallel sizes of the trainer in one record, checked where it is made. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ParallelLayout:
    """How `world_size` ranks share one model and its data.

    world_size: all ranks
    tp: tensor-parallel ranks, over which the weights of each layer are cut
    pp: pipeline stages, over which the layers are cut
    cp: context-parallel ranks, over which each sequence is cut
    ep: expert-parallel ranks, over which the experts of each layer are spread; taken from the cp x dp ranks
    Data parallel is what is left: `dp`. ValueError, in the words of [trainer]'s keys, for sizes that do not divide.
    """

    world_size: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if min(self.world_size, self.tp, self.pp, self.cp, self.ep) < 1:
            raise ValueError(f"every parallel size is at least 1; found {self}")
        if self.world_size % (self.tp * self.cp * self.pp):
            raise ValueError(
                f"world_size {self.world_size} is not a multiple of tensor_parallel {self.tp} "
                f"x context_parallel {self.cp} x pipeline_parallel {self.pp}"
            )
        if self.replica_size % self.ep:
            raise ValueError(
                f"expert_parallel {self.ep} does not divide the context- and data-parallel ranks "
                f"({self.cp} x {self.dp}), over which experts are spread"
            )

    @property
    def dp(self) -> int:
        """Data-parallel ranks: replicas of the model, each with its own samples."""
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def replica_size(self) -> int:
        """Ranks that hold the same parameters (experts aside): those of context and data parallelism."""
        return self.cp * self.dp

    def global_rank(self, *, tp: int, pp: int, replica: int = 0) -> int:
        """Rank in the whole world, in Megatron's order: tensor parallel innermost, then replicas, then pipeline stages.

        replica: 0 .. replica_size - 1, context-parallel ranks innermost.
        """
        return tp + self.tp * (replica + self.replica_size * pp)

    def to_json(self) -> dict[str, int]:
        """As it stands in a checkpoint's manifest: the keys of [trainer], and data_parallel for its readers."""
        return {
            "tensor_parallel": self.tp,
            "pipeline_parallel": self.pp,
            "context_parallel": self.cp,
            "expert_parallel": self.ep,
            "data_parallel": self.dp,
        }

    @classmethod
    def from_json(cls, sizes: Mapping[str, Any]) -> ParallelLayout:
        """The inverse of `to_json`. A size that is missing is 1; ValueError or TypeError for what is no layout."""
        names = ("tensor", "pipeline", "context", "expert", "data")
        tp, pp, cp, ep, dp = (int(sizes.get(f"{name}_parallel", 1)) for name in names)
        return cls(tp * pp * cp * dp, tp, pp, cp, ep)
