"""Weights gathered to rank 0, or to every rank: ranks are threads, collectives copy between them."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rltool.config.parallel import ParallelLayout
from rltool.megatron import hf_weights
from rltool.megatron.runtime import Coordinates
from rltool.models.registry import family_for
from tests.unit.test_models_families import hf_config, random_hf_state

SECONDS = 20.0
MIXTURE = hf_config("Qwen3MoeForCausalLM", moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2)
FAMILIES = {"dense": family_for(hf_config()), "experts": family_for(MIXTURE)}


class Ranks:
    """In place of torch.distributed. A group is the tuple of its ranks; who waits in vain fails."""

    def __init__(self, layout: ParallelLayout) -> None:
        self.layout, self._here = layout, threading.local()
        self._barriers: dict[Any, threading.Barrier] = {}
        self._sent: dict[Any, Any] = {}
        self._lock, self._queues = threading.Lock(), {}
        self.broadcasts: Counter[int] = Counter()

    def enter(self, rank: int) -> Coordinates:
        self._here.rank, layout = rank, self.layout
        tp, rest = rank % layout.tp, rank // layout.tp
        replica, pp = rest % layout.replica_size, rest // layout.replica_size
        return Coordinates(rank, layout, tp, pp, replica % layout.cp, replica // layout.cp, replica % layout.ep)

    def all_gather(self, shards, shard, group) -> None:
        self._meet(group, (group, self._here.rank), shard)
        for rank, into in zip(group, shards, strict=True):
            into.copy_(self._sent[group, rank])
        self._meet(group)

    def broadcast(self, tensor, src) -> None:
        world = tuple(range(self.layout.world_size))
        if self._here.rank == src:
            self.broadcasts[src] += 1
        self._meet(world, ("world", self._here.rank), tensor)
        if self._here.rank != src:
            tensor.copy_(self._sent["world", src])
        self._meet(world)

    def send(self, tensor, dst) -> None:
        self._queue(self._here.rank, dst).put(tensor.clone())

    def recv(self, tensor, src) -> None:
        tensor.copy_(self._queue(src, self._here.rank).get(timeout=SECONDS))

    def _meet(self, group, key=None, tensor=None) -> None:
        if key is not None:
            self._sent[key] = tensor
        with self._lock:
            barrier = self._barriers.setdefault(group, threading.Barrier(len(group)))
        barrier.wait(SECONDS)

    def _queue(self, source: int, target: int) -> queue.Queue:
        with self._lock:
            return self._queues.setdefault((source, target), queue.Queue())


def local_parameters(family, state, at: Coordinates) -> dict[str, torch.Tensor]:
    """What Megatron has on this rank."""
    found = {}
    for parameter in family.parameters:
        spread = parameter.expert is not None and parameter.expert * at.layout.ep // family.num_experts != at.ep_rank
        if not spread and hf_weights.owner_stage(parameter, family, at.layout.pp) == at.pp_rank:
            merged = parameter.merge([state[name] for name, _ in parameter.hf])
            found[parameter.name] = parameter.shard(merged, at.tp_rank, at.layout.tp).clone()
    return found


def exported(monkeypatch, family, layout: ParallelLayout, *, everywhere: bool) -> tuple[Ranks, list[dict[str, Any]]]:
    ranks, state = Ranks(layout), random_hf_state(family)
    monkeypatch.setattr(hf_weights, "dist", ranks)
    monkeypatch.setattr(hf_weights, "global_names", lambda model: model)

    def export(rank: int) -> dict[str, Any]:
        at = ranks.enter(rank)
        own = local_parameters(family, state, at)
        before = {name: tensor.clone() for name, tensor in own.items()}
        group = tuple(layout.global_rank(tp=tp, pp=at.pp_rank, replica=at.replica_rank) for tp in range(layout.tp))
        runtime: Any = SimpleNamespace(
            coordinates=at, device=torch.device("cpu"), tp_group=group, global_rank=layout.global_rank
        )
        model: Any = own
        stream = hf_weights.export_weights(model, family, torch.float32, runtime, everywhere=everywhere)
        found = {meta.name: None if tensor is None else tensor.clone() for meta, tensor in stream}
        assert all(torch.equal(own[name], tensor) for name, tensor in before.items()), "the parameters are as they were"
        return found

    with ThreadPoolExecutor(layout.world_size) as pool:
        return ranks, list(pool.map(export, range(layout.world_size)))


@pytest.mark.parametrize(
    ("kind", "layout", "broadcasts"),
    [
        ("dense", ParallelLayout(1), False),
        ("dense", ParallelLayout(2, tp=2), False),
        ("dense", ParallelLayout(4, tp=2), False),
        ("dense", ParallelLayout(2, pp=2), True),
        ("dense", ParallelLayout(8, tp=2, pp=2, cp=2), True),
        ("experts", ParallelLayout(2), False),
        ("experts", ParallelLayout(4, tp=2, ep=2), True),
        ("experts", ParallelLayout(8, tp=2, pp=2, ep=2), True),
    ],
)
def test_every_rank_gets_every_tensor_and_without_that_rank_0_alone(monkeypatch, kind, layout, broadcasts):
    family = FAMILIES[kind]
    state = random_hf_state(family)
    ranks, results = exported(monkeypatch, family, layout, everywhere=True)
    assert bool(ranks.broadcasts) == broadcasts, "replicas that hold everything need nothing from each other"
    for found in results:
        assert found.keys() == state.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    ranks, (first, *others) = exported(monkeypatch, family, layout, everywhere=False)
    assert all(torch.equal(first[name], tensor) for name, tensor in state.items()) and not ranks.broadcasts
    assert all(tensor is None for found in others for tensor in found.values())
