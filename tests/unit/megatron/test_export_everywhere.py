"""Weights gathered to rank 0, or to every rank: ranks are threads, collectives copy between them."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from rltool.config.parallel import ParallelLayout
from rltool.megatron import gathering, hf_weights
from rltool.megatron.export_plan import ExportPlan, drain, full_plan
from rltool.megatron.runtime import Coordinates
from rltool.models.base import EMBEDDING
from rltool.models.registry import family_for
from tests.export_plans import quantised
from tests.unit.models.test_models_families import hf_config, random_hf_state

SECONDS = 20.0
MIXTURE = hf_config("Qwen3MoeForCausalLM", moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2)
FAMILIES = {
    "dense": family_for(hf_config()),
    "tied": family_for(hf_config(tie_word_embeddings=True)),
    "experts": family_for(MIXTURE),
}


class Ranks:
    """In place of torch.distributed. A group is the tuple of its ranks; who waits in vain fails. made: collectives and
    sends, each counted once."""

    def __init__(self, layout: ParallelLayout) -> None:
        self.layout, self._here = layout, threading.local()
        self._barriers: dict[Any, threading.Barrier] = {}
        self._sent: dict[Any, Any] = {}
        self._lock, self._queues = threading.Lock(), {}
        self.made: Counter[str] = Counter()

    def enter(self, rank: int) -> Coordinates:
        self._here.rank, layout = rank, self.layout
        tp, rest = rank % layout.tp, rank // layout.tp
        replica, pp = rest % layout.replica_size, rest // layout.replica_size
        return Coordinates(rank, layout, tp, pp, replica % layout.cp, replica // layout.cp, replica % layout.ep)

    def all_gather_into_tensor(self, rows, row, group) -> None:
        self._count("all_gather", self._here.rank == group[0])
        self._meet(group, (group, self._here.rank), row)
        for rank, into in zip(group, rows.view(len(group), -1), strict=True):
            if rank != self._here.rank:
                into.copy_(self._sent[group, rank])
        self._meet(group)
        del self._sent[group, self._here.rank]

    def broadcast(self, tensor, src) -> None:
        world = tuple(range(self.layout.world_size))
        self._count("broadcast", self._here.rank == src)
        self._meet(world, ("world", self._here.rank), tensor)
        if self._here.rank != src:
            tensor.copy_(self._sent["world", src])
        self._meet(world)
        del self._sent["world", self._here.rank]

    def send(self, tensor, dst) -> None:
        self._count("send", True)
        with _disable_current_modes():
            self._queue(self._here.rank, dst).put(tensor.clone())

    def recv(self, tensor, src) -> None:
        tensor.copy_(self._queue(src, self._here.rank).get(timeout=SECONDS))

    def _count(self, name: str, once: bool) -> None:
        with self._lock:
            self.made[name] += once

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
        if not spread and gathering.owner_stage(parameter, family.num_layers, at.layout.pp) == at.pp_rank:
            merged = parameter.merge([state[name] for name, _ in parameter.hf])
            found[parameter.name] = parameter.shard(merged, at.tp_rank, at.layout.tp).clone()
    return found


class Allocations(TorchDispatchMode):
    """What the operations of one thread have allocated. most: bytes that were held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        self._held = {at: held for at, held in self._held.items() if not held[0].expired()}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (at := tensor.untyped_storage().data_ptr()) not in given:
                self._held[at] = StorageWeakRef(tensor.untyped_storage()), tensor.untyped_storage().nbytes()
        self.most = max(self.most, sum(size for _, size in self._held.values()))
        return result


@dataclass(frozen=True)
class Exported:
    """tensors, held: of each rank; held: bytes beside the parameters, at most."""

    tensors: list[dict[str, Any]]
    held: list[int]
    made: Counter[str]


def exported(
    monkeypatch, family, layout: ParallelLayout, *, everywhere: bool, bound: int = gathering.GATHER_BYTES,
    drained: bool = False, plan: ExportPlan | None = None,
) -> Exported:  # fmt: skip
    """plan: None for the full one."""
    ranks, state, plan = Ranks(layout), random_hf_state(family), plan or full_plan(family, torch.float32)
    monkeypatch.setattr(gathering, "dist", ranks)
    monkeypatch.setattr(hf_weights, "global_names", lambda model: model)

    def export(rank: int) -> tuple[dict[str, Any], int]:
        at = ranks.enter(rank)
        own = local_parameters(family, state, at)
        before = {name: tensor.clone() for name, tensor in own.items()}
        group = tuple(layout.global_rank(tp=tp, pp=at.pp_rank, replica=at.replica_rank) for tp in range(layout.tp))
        runtime: Any = SimpleNamespace(
            coordinates=at, device=torch.device("cpu"), tp_group=group, global_rank=layout.global_rank
        )
        model: Any = own
        found = {}
        if drained:
            with Allocations() as allocations:
                drain(hf_weights.export_weights(model, plan, runtime, everywhere=everywhere, bound=bound))
            return found, allocations.most
        with Allocations() as allocations:
            for meta, tensor in hf_weights.export_weights(model, plan, runtime, everywhere=everywhere, bound=bound):
                with _disable_current_modes():
                    found[meta.name] = None if tensor is None else tensor.clone()
                del tensor
        assert list(found) == [meta.name for meta in plan.tensors]
        assert all(torch.equal(own[name], tensor) for name, tensor in before.items()), "the parameters are as they were"
        return found, allocations.most

    with ThreadPoolExecutor(layout.world_size) as pool:
        tensors, held = zip(*pool.map(export, range(layout.world_size)), strict=True)
        return Exported(list(tensors), list(held), ranks.made)


LAYOUTS = [
    ("dense", ParallelLayout(1), False),
    ("dense", ParallelLayout(2, tp=2), False),
    ("dense", ParallelLayout(4, tp=2), False),
    ("dense", ParallelLayout(2, pp=2), True),
    ("tied", ParallelLayout(4, tp=2, pp=2), True),
    ("dense", ParallelLayout(8, tp=2, pp=2, cp=2), True),
    ("experts", ParallelLayout(2), False),
    ("experts", ParallelLayout(4, tp=2, ep=2), True),
    ("experts", ParallelLayout(8, tp=2, pp=2, ep=2), True),
]


@pytest.mark.parametrize("bound", [1, 3000, gathering.GATHER_BYTES])
@pytest.mark.parametrize(("kind", "layout", "broadcasts"), LAYOUTS)
def test_every_rank_gets_every_tensor_and_without_that_rank_0_alone(monkeypatch, kind, layout, broadcasts, bound):
    family = FAMILIES[kind]
    state = random_hf_state(family)
    found = exported(monkeypatch, family, layout, everywhere=True, bound=bound)
    assert bool(found.made["broadcast"]) == broadcasts, "replicas that hold everything need nothing from each other"
    for tensors in found.tensors:
        assert tensors.keys() == state.keys()
        assert all(torch.equal(tensors[name], tensor) for name, tensor in state.items())
    found = exported(monkeypatch, family, layout, everywhere=False, bound=bound)
    first, *others = found.tensors
    assert all(torch.equal(first[name], tensor) for name, tensor in state.items()) and not found.made["broadcast"]
    assert all(tensor is None for tensors in others for tensor in tensors.values())


@pytest.mark.parametrize(("kind", "layout", "broadcasts"), LAYOUTS)
def test_what_another_plan_makes_of_the_parameters_is_made_after_the_gather(monkeypatch, kind, layout, broadcasts):
    family = FAMILIES[kind]
    plan, state = quantised(full_plan(family, torch.float32)), random_hf_state(family)
    merged = plan.made(lambda parameter: parameter.merge([state[name] for name, _ in parameter.hf]))
    expected = {meta.name: tensor for meta, tensor in merged}
    assert len(expected) > len(state) and any(tensor.dtype == torch.uint8 for tensor in expected.values())
    first, *others = exported(monkeypatch, family, layout, everywhere=False, plan=plan).tensors
    assert all(tensor is None for tensors in others for tensor in tensors.values())
    for tensors in (first, *exported(monkeypatch, family, layout, everywhere=True, plan=plan).tensors):
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("bound", [1, 3000, gathering.GATHER_BYTES])
@pytest.mark.parametrize(("kind", "layout", "broadcasts"), LAYOUTS)
def test_a_rank_holds_what_it_says_and_no_more(monkeypatch, kind, layout, broadcasts, bound, everywhere):
    family = FAMILIES[kind]
    most = gathering.gather_bytes(full_plan(family, torch.float32), layout, everywhere=everywhere, bound=bound)
    found = exported(monkeypatch, family, layout, everywhere=everywhere, bound=bound)
    assert max(found.held) == found.held[0] == most
    assert max(exported(monkeypatch, family, layout, everywhere=everywhere, bound=bound, drained=True).held) <= most


@pytest.mark.parametrize(
    ("kind", "layout", "alone", "together"),
    [
        ("dense", ParallelLayout(1), {}, {}),
        # Without a head of its own: an embedding, 5 that are cut and 2 that are not of each of 2 layers, a norm.
        ("tied", ParallelLayout(2, tp=2), {"all_gather": 1 + 2 * 5}, {"all_gather": 1}),
        ("tied", ParallelLayout(2, pp=2), {"send": 7 + 1}, {"send": 1}),
        ("tied", ParallelLayout(4, tp=2, pp=2), {"all_gather": 11, "send": 8}, {"all_gather": 2, "send": 1}),
        # Of 4 experts of a layer two are elsewhere, each with two parameters.
        ("experts", ParallelLayout(2, ep=2), {"send": 2 * 2 * 2}, {"send": 2}),
    ],
)
def test_parameters_share_collectives_up_to_the_bound(monkeypatch, kind, layout, alone, together):
    for bound, expected in ((1, alone), (gathering.GATHER_BYTES, together)):
        found = exported(monkeypatch, FAMILIES[kind], layout, everywhere=False, bound=bound)
        assert +found.made == expected, bound


def test_where_nothing_is_gathered_tensors_are_the_parameters_themselves(monkeypatch):
    monkeypatch.setattr(hf_weights, "global_names", lambda model: model)
    family, layout = FAMILIES["dense"], ParallelLayout(1)
    at = Ranks(layout).enter(0)
    own: Any = local_parameters(family, random_hf_state(family), at)
    runtime: Any = SimpleNamespace(coordinates=at, device=torch.device("cpu"), global_rank=layout.global_rank)
    plan = full_plan(family, torch.float32)
    tensors = {m.name: t for m, t in hf_weights.export_weights(own, plan, runtime) if t is not None}
    assert tensors["model.embed_tokens.weight"].data_ptr() == own[EMBEDDING].data_ptr()
    gate_and_up = own["decoder.layers.1.mlp.linear_fc1.weight"]
    up = tensors["model.layers.1.mlp.up_proj.weight"]
    assert up.untyped_storage().data_ptr() == gate_and_up.untyped_storage().data_ptr()
