"""Sharded transfers: the plan as a pure function, of random layouts; and what of it stands in the ranks' stores."""

from __future__ import annotations

import random

import pytest
import torch

from rltool.engines.plugin.replay import NotACopy, StandIns, needs_of, storage
from rltool.engines.transfer import shards, wire
from rltool.engines.transfer.shards import Box, Held, ShardError, box_of, plan_shards
from rltool.engines.types import TensorMeta


def random_cut(rng: random.Random, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that make the whole, along one dimension."""
    dim = rng.randrange(len(shape))
    ends = sorted({*rng.sample(range(1, shape[dim]), min(2, shape[dim] - 1)), shape[dim]})
    boxes, first = [], 0
    for end in ends:
        start, size = [0] * len(shape), list(shape)
        start[dim], size[dim] = first, end - first
        boxes.append(Box(tuple(start), tuple(size)))
        first = end
    return boxes


@pytest.mark.parametrize("seed", range(20))
def test_every_needed_element_comes_once_from_a_rank_that_holds_it(seed, monkeypatch):
    monkeypatch.setattr(shards, "CHUNK_BYTES", 64)
    rng, ranks, workers = random.Random(seed), 4, 3
    metas = [TensorMeta(f"t{i}", "float32", (rng.randrange(2, 12), rng.randrange(2, 9))) for i in range(12)]
    tensors = {meta.name: torch.randn(meta.shape) for meta in metas}
    held = {
        meta.name: [
            Held(box, tuple(sorted(rng.sample(range(ranks), rng.randrange(1, ranks + 1)))))
            for box in random_cut(rng, meta.shape)
        ]
        for meta in metas
    }
    needs = [
        {meta.name: rng.sample(cut := random_cut(rng, meta.shape), rng.randrange(1, len(cut) + 1)) for meta in metas}
        for _ in range(workers)
    ]
    buckets = wire.plan_buckets(metas, 300)
    plan = plan_shards(buckets, held, needs, ranks)
    for worker, wanted in enumerate(needs):
        got = {name: [torch.full(box.shape, torch.nan) for box in boxes] for name, boxes in wanted.items()}
        times = {name: [torch.zeros(box.shape) for box in boxes] for name, boxes in wanted.items()}
        for rank in range(ranks):
            for bucket, pieces in zip(buckets, plan[rank, worker], strict=True):
                for piece in pieces:
                    assert piece.name in {meta.name for meta in bucket}
                    assert any(
                        rank in source.ranks and piece.box.overlap(source.box) == piece.box
                        for source in held[piece.name]
                    )
                    need = wanted[piece.name][piece.need]
                    whole = Box.whole(tensors[piece.name].shape)
                    piece.box.of(got[piece.name][piece.need], need).copy_(piece.box.of(tensors[piece.name], whole))
                    piece.box.of(times[piece.name][piece.need], need).add_(1)
        for name, boxes in wanted.items():
            for box, found, count in zip(boxes, got[name], times[name], strict=True):
                assert (count == 1).all()
                assert torch.equal(found, box.of(tensors[name], Box.whole(tensors[name].shape)))


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_what_all_ranks_hold_is_sent_in_even_shares(replicas):
    metas = [TensorMeta(f"t{i}", "bfloat16", (4096, 1024)) for i in range(6)]
    held = {meta.name: [Held(Box.whole(meta.shape), tuple(range(replicas)))] for meta in metas}
    needs = [{meta.name: [Box.whole(meta.shape)] for meta in metas}]
    plan = plan_shards([tuple(metas)], held, needs, replicas)
    dtypes = {meta.name: meta.dtype for meta in metas}
    sent = [shards.sends_bytes(plan[rank, 0], dtypes) for rank in range(replicas)]
    total = sum(map(wire.tensor_bytes, metas))
    assert sum(sent) == total
    assert max(sent) <= total / replicas + shards.CHUNK_BYTES


def test_a_rank_that_alone_holds_much_sends_less_of_what_all_hold():
    own, common = TensorMeta("own", "float32", (1000, 1000)), TensorMeta("common", "float32", (1000, 1000))
    held = {"own": [Held(Box.whole(own.shape), (0,))], "common": [Held(Box.whole(common.shape), (0, 1))]}
    needs = [{"own": [Box.whole(own.shape)], "common": [Box.whole(common.shape)]}]
    plan = plan_shards([(own, common)], held, needs, 2)
    assert [piece.name for piece in plan[0, 0][0]] == ["own"]
    assert {piece.name for piece in plan[1, 0][0]} == {"common"}


def test_the_nearest_rank_that_holds_something_sends_it_and_one_out_of_reach_is_named():
    meta = TensorMeta("a.weight", "float32", (4, 2))
    held, whole = {"a.weight": [Held(Box.whole((4, 2)), (0, 1, 2))]}, {"a.weight": [Box.whole((4, 2))]}
    plan = plan_shards([(meta,)], held, [whole, whole], 3, [{0: 1, 2: 0}, {0: 1, 1: 1}])
    assert [(rank, worker) for (rank, worker), [pieces] in plan.items() if pieces] == [(0, 1), (2, 0)]
    with pytest.raises(ShardError, match=r"a\.weight: .* needs what rank 0, 1, 2 holds, on another host"):
        plan_shards([(meta,)], held, [whole], 3, [{3: 0}])


def test_ranks_write_everything_once_and_an_index_says_where():
    metas = [TensorMeta(name, "bfloat16", (4096, 1024)) for name in ("cut", "common")]
    halves = [Box((0, 0), (2048, 1024)), Box((2048, 0), (2048, 1024))]
    held = {"cut": [Held(box, (rank,)) for rank, box in enumerate(halves)]}
    held["common"] = [Held(Box.whole((4096, 1024)), (0, 1))]
    files = shards.written([tuple(metas)], held, 2)
    dtypes = {meta.name: meta.dtype for meta in metas}
    assert [shards.sends_bytes(file, dtypes) for file in files] == [wire.tensor_bytes(metas[0])] * 2
    assert shards.parse_index(shards.index_text([tuple(metas)], files)) == ([tuple(metas)], files)
    found = shards.held_in_files(files)
    assert [(box, ranks) for box, ranks in found["cut"]] == [(halves[0], (0,)), (halves[1], (1,))]
    assert sum(box.elements for box, _ in found["common"]) == 4096 * 1024
    keys = [shards.slice_key(piece.name, piece.box) for file in files for pieces in file for piece in pieces]
    assert len(keys) == len(set(keys)) and keys[0] == "cut@0.0"


def test_a_part_that_no_rank_holds_is_named():
    meta = TensorMeta("a.weight", "float32", (4, 2))
    held = {"a.weight": [Held(Box((0, 0), (3, 2)), (0,))]}
    with pytest.raises(ShardError, match=r"a\.weight: .* 6 of 8 elements"):
        plan_shards([(meta,)], held, [{"a.weight": [Box.whole((4, 2))]}], 1)
    with pytest.raises(ShardError, match="b is needed"):
        plan_shards([(meta,)], held, [{"b": [Box.whole((4, 2))]}], 1)


def test_what_stands_in_the_stores_is_read_as_it_was_written():
    meta, box = TensorMeta("a", "float32", (4, 2)), Box((1, 0), (2, 2))
    assert shards.parse_buckets(shards.buckets_text([(meta,)])) == [(meta,)]
    assert shards.parse_needs(shards.needs_text({"a": [box]})) == {"a": [box]}
    sends = [[shards.Piece("a", 0, box)], []]
    assert shards.parse_sends(shards.sends_text(sends)) == sends
    memory, lies = shards.Memory("GPU-1", "host", "aGFuZGxl"), [{"a": box}, {}]
    assert shards.parse_memory(shards.memory_text(memory)) == memory
    assert shards.parse_lies(shards.lies_text(lies)) == lies
    assert shards.parse_reach(shards.reach_text({1: 0, 3: 1})) == {1: 0, 3: 1}
    with pytest.raises(ShardError, match="of a worker"):
        shards.parse_needs(shards.needs_text({}, "of a worker"))
    with pytest.raises(ShardError, match="of a rank"):
        shards.parse_sends(shards.sends_text([], "of a rank"))


@pytest.mark.parametrize(
    ("shape", "view", "box"),
    [
        ((6, 4), lambda t: t, Box((0, 0), (6, 4))),
        ((6, 4), lambda t: t[2:5], Box((2, 0), (3, 4))),
        ((6, 4), lambda t: t[:, 1:3], Box((0, 1), (6, 2))),
        ((6, 4), lambda t: t[3:4, 1:3], Box((3, 1), (1, 2))),
        ((6, 4), lambda t: t[3], Box((3, 0), (1, 4))),
        ((3, 1, 4), lambda t: t[1:].squeeze(1), Box((1, 0, 0), (2, 1, 4))),
        ((6,), lambda t: t[5:], Box((5,), (1,))),
        ((6, 4), lambda t: t.t(), None),
        ((6, 4), lambda t: t[::2], None),
        ((6, 4), lambda t: t.reshape(3, 8)[1:], None),
    ],
)
def test_a_view_is_known_as_a_box(shape, view, box):
    assert box_of(shape, view(torch.empty(shape, device="meta"))) == box


class TwoRows:
    """A worker that stores two rows of a tensor in two parameters, one of them twice."""

    def __init__(self) -> None:
        self.first, self.both = torch.zeros(3), torch.zeros(2, 3)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        self.first.copy_(tensor[1])
        self.both.copy_(tensor[1:3])


def test_loaders_are_given_what_came_and_it_is_freed_when_they_have_it():
    meta, tensor, model = TensorMeta("a", "float32", (4, 3)), torch.randn(4, 3), TwoRows()
    needs = needs_of([(meta,)], model.load)
    assert needs == {"a": [Box((1, 0), (1, 3)), Box((1, 0), (2, 3))]}
    assert not model.both.any(), "nothing is stored"
    boxes = {box: box.of(tensor, Box.whole(meta.shape)) for box in needs["a"]}
    with StandIns() as stand_ins:
        stand_in = stand_ins.add(meta, boxes)
        assert stand_ins.held_bytes == 9 * 4
        model.load("a", stand_in)
        with pytest.raises(NotACopy, match="a: its loader takes another part"):
            model.first.copy_(stand_in[0])
    assert torch.equal(model.first, tensor[1]) and torch.equal(model.both, tensor[1:3])
    stand_ins.keep({storage(stand_in)})
    assert stand_ins.held_bytes == 9 * 4
    stand_ins.keep(())
    assert stand_ins.held_bytes == 0


def test_a_worker_whose_rows_are_padding_alone_needs_nothing_and_loads():
    """Of a vocabulary that is padded, the last tensor-parallel worker."""
    meta, model = TensorMeta("a", "float32", (4, 3)), torch.zeros(4, 3)

    def load(name: str, tensor: torch.Tensor) -> None:
        model[:0].copy_(tensor.narrow(0, 4, 0))

    needs = needs_of([(meta,)], load)
    plan = shards.plan_shards([(meta,)], {"a": [Held(Box.whole(meta.shape), (0,))]}, [needs], 1)
    assert plan[0, 0] == [[]]
    with StandIns() as stand_ins:
        load("a", stand_ins.add(meta, {}))


def test_a_loader_that_computes_is_refused_by_name():
    def load(name: str, tensor: torch.Tensor) -> None:
        torch.zeros(4, 3).copy_(tensor + 1)

    with pytest.raises(NotACopy, match="norm.weight: its loader computes"):
        needs_of([(TensorMeta("norm.weight", "float32", (4, 3)),)], load)
