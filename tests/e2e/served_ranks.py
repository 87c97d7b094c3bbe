"""A served trainer in tests without Ray: each rank of a pool runs the driver's code beside its own part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import torch.distributed as dist

from rltool.algorithms.schedule import plan_micro_batches
from rltool.training.ranks.sharding import Shards
from rltool.training.served import Datum, RankedTrainer

MAX_TOKENS = 64
LENGTHS = [5, 17, 2, 9, 12, 3, 8, 40]


class LocalRanks:
    def __init__(self, own: Any, model: Any) -> None:
        self.own, self.model = own, model

    def call(self, method: str, *arguments: Any, **named: Any) -> list[Any]:
        return [getattr(self.own, method)(*arguments, **named)]

    def call_on_shards(self, batch: Any, method: str, *arguments: Any, forward_only: bool = False) -> Any:
        at = self.model.coordinates
        plan = plan_micro_batches(batch.lengths.tolist(), max_tokens=MAX_TOKENS, data_parallel=at.layout.dp)
        shards, every = Shards(batch, plan), [None] * at.layout.world_size
        result = getattr(self.own, method)(shards.micro_batches(at.dp_rank), *arguments)
        dist.all_gather_object(every, (at, result))
        return shards.in_order([place for place, _ in every], [found for _, found in every])


@contextmanager
def served(place: Any, path: Any, **options: Any) -> Iterator[RankedTrainer]:
    """options: as for make_trainer."""
    from rltool.checkpoints.saving import CheckpointSaver
    from rltool.config.sections import ModelConfig, TrainerConfig
    from rltool.megatron.runtime import Rendezvous
    from rltool.megatron.served import ServedModel
    from rltool.training.ranks.served_rank import ServedRank
    from tests.e2e.megatron_models import DEVICE, VOCAB

    trainer = TrainerConfig(
        world_size=place.world_size, device=DEVICE, tensor_parallel=options.get("tp", 1),
        pipeline_parallel=options.get("pp", 1), context_parallel=options.get("cp", 1),
        expert_parallel=options.get("ep", 1), torch_threads=1, **options.get("trainer", {}),
    )  # fmt: skip
    rendezvous = Rendezvous(place.rank, "127.0.0.1", place.port, timeout=60)
    model = ServedModel(ModelConfig(path=path, dtype=options.get("dtype", "float32")), trainer, rendezvous)
    with closing(model), closing(CheckpointSaver(model, asynchronous=False)) as saver:
        model.load_hf_weights(path)
        ranks = LocalRanks(ServedRank(model, saver, path), model)
        yield RankedTrainer(ranks, vocab_size=VOCAB, max_tokens=MAX_TOKENS)


def data_of(seed: int, lengths: list[int] = LENGTHS, *, policy: bool = True) -> list[Datum]:
    """Random data; half of their targets are not the next token."""
    from tests.e2e.megatron_models import VOCAB

    draw = np.random.default_rng(seed)
    found = []
    for i, n in enumerate(lengths):
        tokens = draw.integers(0, VOCAB, n + 1)
        targets = tokens[1:] if i % 2 else draw.integers(0, VOCAB, n)
        inputs = {"weights": draw.random(n).astype(np.float32)}
        if policy:
            inputs["logprobs"] = (-5 + 0.3 * draw.standard_normal(n)).astype(np.float32)
            inputs["advantages"] = draw.standard_normal(n).astype(np.float32)
        found.append(Datum(tokens[:-1], targets, inputs))
    return found
