"""Deltas over transfer groups, from the encoder to the engines' copies, without a network.

The property: whatever happened, an engine that says that it holds a version has every tensor of it, bit by bit.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from rltool.config.rollout import WeightsConfig
from rltool.engines.delta.chain import File, Held, Manifest, Patch
from rltool.engines.delta.memory import MemoryCopy
from rltool.engines.delta.messages import MANIFEST_LIMIT, Kind, flat_of, header, take
from rltool.engines.delta.patch import bits, patch_file
from rltool.engines.delta.rebuild import CannotRebuild, Rebuilt
from rltool.engines.transfer.wire import meta_of, plan_buckets, split_flat
from rltool.engines.types import Bucket
from rltool.weights.delta.encoder import DeltaEncoder
from rltool.weights.memory import Memory
from rltool.weights.transport import Rendezvous, SenderOptions, TransportError
from rltool.weights.transports.delta_group import DeltaGroupSender
from tests.ranks import flat_bytes
from tests.unit.engines.delta.test_delta_patch import random_tensor, with_changes

RUN = "0123456789abcdef0123456789abcdef"
CPU = torch.device("cpu")
SHAPES = {"embed": (40, 6), "q": (7, 6), "norm": (6,), "scale": (), "none": (0, 3), "head": (40, 6)}
LIMIT = 300


@dataclass
class Pipe:
    """The group of another sender, whose broadcasts are kept."""

    device: torch.device = CPU
    sent: deque[torch.Tensor] = field(default_factory=deque)
    announced: list[Bucket] = field(default_factory=list)
    closed: str = ""

    def host(self) -> Rendezvous:
        return Rendezvous("gloo", 2, "g")

    def join(self, seconds: float) -> None: ...

    def begin(self, version, buckets) -> None:
        self.announced = list(buckets)

    def send(self, bucket, flat):
        assert self.announced == [bucket] and flat.numel() == bucket[0].shape[0]
        if flat.numel():
            self.sent.append(flat.clone())
        return self

    def wait(self, seconds: float) -> None: ...

    def finish(self) -> None: ...

    def abort(self, reason: str) -> None:
        self.closed = reason

    def close(self) -> None:
        self.closed = self.closed or "left"

    def receive(self, size: int) -> torch.Tensor:
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        flat = self.sent.popleft()
        assert flat.numel() == size, "the two disagree on the bytes of a broadcast"
        return flat


class Engine:
    """One connection, and the copy behind it."""

    def __init__(self, encoder: DeltaEncoder) -> None:
        self.encoder, self.copy = encoder, MemoryCopy()
        self.connect()

    def connect(self) -> None:
        self.pipe = Pipe()
        options = SenderOptions("g", WeightsConfig(delta=True), CPU, 1.0, Path(), Path(), encoder=self.encoder)
        self.sender = DeltaGroupSender(self.pipe, options)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor for bucket, flat in self.copy.buckets() for name, tensor in split_flat(flat, bucket)}


class Trainer:
    def __init__(self, dtype: torch.dtype, *, anchor_every: int = 7, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.tensors = {name: random_tensor(shape, dtype, self.generator) for name, shape in SHAPES.items()}
        self.encoder = DeltaEncoder(anchor_every=anchor_every, kept=2)
        self.number, self.limit = 0, LIMIT

    @property
    def version(self) -> str:
        return f"{RUN}:0:{self.number}"

    @property
    def buckets(self) -> list[Bucket]:
        return plan_buckets([meta_of(name, tensor) for name, tensor in self.tensors.items()], self.limit)

    def step(self, share: float = 0.02) -> None:
        self.number += 1
        self.tensors = {name: with_changes(tensor, share, self.generator) for name, tensor in self.tensors.items()}

    def send(self, *engines: Engine, only_buckets: int | None = None) -> None:
        self.encoder.begin(self.version, self.buckets)
        for engine in engines:
            engine.sender.begin(self.version, self.buckets)
        for bucket in self.buckets[:only_buckets]:
            flat = flat_bytes(self.tensors, bucket)
            self.encoder.add(bucket, flat)
            for engine in engines:
                engine.sender.send(bucket, flat).wait(60.0)
            flat.zero_()  # the buffer is used again
        if only_buckets is None:
            self.encoder.finish()
            for engine in engines:
                engine.sender.finish()
            self.encoder.release()

    def taken_by(self, engine: Engine) -> Rebuilt:
        return take(engine.copy, engine.pipe.receive, self.buckets, self.version)

    def sync(self, *engines: Engine) -> list[Rebuilt]:
        self.send(*engines)
        return [self.taken_by(engine) for engine in engines]


def assert_holds(engine: Engine, trainer: Trainer) -> None:
    assert engine.copy.held is not None and engine.copy.held.version == trainer.version
    found = engine.tensors()
    assert found.keys() == trainer.tensors.keys()
    for name, tensor in trainer.tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(bits(found[name]), bits(tensor)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_after_hundreds_of_steps_with_losses_every_engine_is_bit_equal(dtype):
    """One engine takes each version. The other misses some, is started anew, or is connected anew; some versions break
    off half way, some are sent again."""
    trainer, rng = Trainer(dtype), random.Random(3)
    steady, other = Engine(trainer.encoder), Engine(trainer.encoder)
    patches = wholes = 0
    for _ in range(300):
        trainer.step()
        event = rng.random()
        if event < 0.05:
            trainer.send(steady, only_buckets=rng.randrange(len(trainer.buckets)))
            steady.connect()
        elif event < 0.10:
            other.copy = MemoryCopy()
            other.connect()
        elif event < 0.15:
            other.connect()
        elif event < 0.20:
            trainer.limit = rng.choice([100, LIMIT, 100_000])
        if rng.random() < 0.2:
            got = trainer.sync(steady)
        else:
            got = trainer.sync(steady, other)
            assert_holds(other, trainer)
        assert_holds(steady, trainer)
        if rng.random() < 0.1:
            trainer.sync(other)
            assert_holds(other, trainer)
            assert_holds(steady, trainer)
        patches += sum(not each.anchor for each in got)
        wholes += sum(each.anchor for each in got)
        assert not steady.pipe.sent and not other.pipe.sent, "all that was sent has been taken"
    assert patches > 200 and wholes > 50


def test_it_is_said_what_is_held_for_patches():
    trainer = Trainer(torch.float32)
    trainer.limit = 100
    there, on_gpu = Engine(trainer.encoder), Engine(trainer.encoder)
    on_gpu.pipe.device = torch.device("meta")
    sizes = [sum(trainer.tensors[meta.name].nbytes for meta in bucket) for bucket in trainer.buckets]
    trainer.send(there, on_gpu)
    assert trainer.encoder.held_bytes == sum(sizes), "of patches nothing, of the weights a copy"
    assert (there.sender.memory, on_gpu.sender.memory) == (Memory(), Memory(device=max(sizes)))
    trainer.step()
    trainer.send(there, on_gpu)
    messages = [header.numel() for header in on_gpu.pipe.sent if header.numel() != 16][len(sizes) + 1 :]
    *patches, _ = messages
    assert len(patches) == len(sizes) > 2 and sum(patches) == trainer.encoder.patch_bytes
    assert on_gpu.sender.memory == Memory(device=max(messages))
    pairs = [first + second for first, second in pairwise(patches)]
    assert trainer.encoder.held_bytes == sum(sizes) + max(pairs), "of the two newest parts"


def test_who_follows_gets_patches_alone_until_a_whole_version_is_due():
    trainer = Trainer(torch.bfloat16, anchor_every=4)
    engine = Engine(trainer.encoder)
    got = []
    for _ in range(9):
        trainer.step()
        got += trainer.sync(engine)
    assert [each.anchor for each in got] == [number % 4 == 0 for number in range(9)]
    assert max(each.bytes for each in got if not each.anchor) < min(each.bytes for each in got if each.anchor)


def test_a_version_that_is_sent_again_keeps_its_state_and_costs_nothing_who_has_it():
    trainer = Trainer(torch.float32)
    first, second = Engine(trainer.encoder), Engine(trainer.encoder)
    trainer.step()
    trainer.sync(first)
    [again, late] = trainer.sync(first, second)
    assert (again.anchor, again.bytes, late.anchor) == (False, 0, True)
    assert first.copy.held == second.copy.held
    trainer.step()
    assert [each.anchor for each in trainer.sync(first, second)] == [False, False]


def test_a_version_that_is_sent_again_is_never_due_to_go_out_whole():
    trainer = Trainer(torch.float32, anchor_every=1)
    engine = Engine(trainer.encoder)
    got = trainer.sync(engine) + trainer.sync(engine)
    trainer.step()
    assert [each.anchor for each in got + trainer.sync(engine)] == [True, False, True]


def test_nothing_is_kept_of_a_version_but_the_newest_parts():
    trainer = Trainer(torch.float32)
    engine = Engine(trainer.encoder)
    trainer.limit = 1
    trainer.encoder.begin(trainer.version, trainer.buckets)
    engine.sender.begin(trainer.version, trainer.buckets)
    for bucket in trainer.buckets:
        trainer.encoder.add(bucket, flat_bytes(trainer.tensors, bucket))
    count = len(trainer.buckets)
    assert [shard for shard in range(count) if trainer.encoder.part(shard)] == [count - 2, count - 1]
    with pytest.raises(TransportError, match="the others have gone on"):
        engine.sender.send(trainer.buckets[0], torch.empty(0))
    trainer.encoder.finish()
    trainer.encoder.release()
    assert not any(trainer.encoder.part(shard) for shard in range(count))


def test_a_connection_that_is_given_up_ends_its_group():
    engine = Engine(Trainer(torch.float32).encoder)
    engine.sender.abort("too late")
    assert engine.pipe.closed == "too late"
    engine.sender.close()


# -- what does not fit


@pytest.fixture
def following() -> tuple[Trainer, Engine]:
    """An engine that holds a version, and a patch on its way to it."""
    trainer = Trainer(torch.float32)
    engine = Engine(trainer.encoder)
    trainer.sync(engine)
    trainer.step(share=0.3)
    trainer.send(engine)
    return trainer, engine


def test_one_byte_that_differs_is_found_wherever_it_is(following):
    trainer, engine = following
    held, before = engine.copy.held, {name: tensor.clone() for name, tensor in engine.tensors().items()}
    messages = [flat.clone() for flat in engine.pipe.sent]
    for broadcast in range(1, len(messages), 2):  # those after a header
        for at in (0, len(messages[broadcast]) // 2, len(messages[broadcast]) - 1):
            engine.pipe.sent = deque(flat.clone() for flat in messages)
            engine.pipe.sent[broadcast][at] ^= 1
            with pytest.raises(CannotRebuild):
                trainer.taken_by(engine)
            assert engine.copy.held == held
            assert all(torch.equal(bits(engine.tensors()[name]), bits(tensor)) for name, tensor in before.items())
    engine.pipe.sent = deque(messages)
    trainer.taken_by(engine)
    assert_holds(engine, trainer)


def test_a_whole_bucket_that_is_damaged_leaves_a_copy_that_holds_nothing():
    trainer = Trainer(torch.float32, anchor_every=1)
    engine = Engine(trainer.encoder)
    trainer.sync(engine)
    trainer.step()
    trainer.send(engine)
    engine.pipe.sent[1][5] ^= 1
    with pytest.raises(CannotRebuild, match="the sha256 of a bucket differs"):
        trainer.taken_by(engine)
    assert engine.copy.held is None


def test_patches_of_another_base_are_refused(following):
    trainer, engine = following
    engine.copy.held = Held(trainer.version, "of another trainer")
    with pytest.raises(CannotRebuild, match=r"are for Held.* and it holds Held.*of another trainer"):
        trainer.taken_by(engine)


@pytest.mark.parametrize(
    ("kind", "size"),
    [(0, 0), (9, 0), (Kind.WHOLE, 1), (Kind.PATCH, -1), (Kind.PATCH, 1 << 40), (Kind.MANIFEST, 10)],
)
def test_a_header_that_cannot_be_is_refused_before_memory_is_taken_for_it(following, kind, size):
    trainer, engine = following
    engine.pipe.sent[0] = header(kind, size)
    with pytest.raises(CannotRebuild, match="came for a bucket of"):
        trainer.taken_by(engine)


def test_another_version_than_was_announced_is_refused(following):
    trainer, engine = following
    with pytest.raises(CannotRebuild, match=f"{RUN}:0:1 .* came, and {RUN}:0:2 .* were announced"):
        take(engine.copy, engine.pipe.receive, trainer.buckets, f"{RUN}:0:2")


@pytest.mark.parametrize("kind", [Kind.PATCH, Kind.MANIFEST])
@pytest.mark.parametrize("size", [-1, 0, MANIFEST_LIMIT + 1, None])
def test_a_message_that_cannot_be_the_manifest_is_refused_before_memory_is_taken_for_it(following, kind, size):
    trainer, engine = following
    real = engine.pipe.sent[-1].numel()
    engine.pipe.sent[-2] = header(kind, real if size is None else size)
    if (kind, size) == (Kind.MANIFEST, None):
        trainer.taken_by(engine)
        return
    with pytest.raises(CannotRebuild, match="came in place of the manifest"):
        trainer.taken_by(engine)
    assert len(engine.pipe.sent) == 1, "it is not received"


def with_manifest(engine: Engine, **fields) -> None:
    """The manifest that comes is another one."""
    manifest = Manifest.from_json(bytes(engine.pipe.sent[-1].numpy().data))
    data = replace(manifest, **fields).to_json()
    engine.pipe.sent[-2], engine.pipe.sent[-1] = header(Kind.MANIFEST, len(data)), flat_of(data)


def test_a_manifest_of_other_buckets_than_were_announced_is_refused(following):
    trainer, engine = following
    with_manifest(engine, shards=len(trainer.buckets) + 1)
    with pytest.raises(CannotRebuild, match=rf"of {len(trainer.buckets) + 1} buckets came, and .* were announced"):
        trainer.taken_by(engine)


def test_patches_with_a_manifest_that_has_none_change_nothing(following):
    trainer, engine = following
    held = engine.copy.held
    with_manifest(engine, patch=None)
    with pytest.raises(CannotRebuild, match="are for None, and it holds"):
        trainer.taken_by(engine)
    assert engine.copy.held == held


def test_whole_buckets_with_a_manifest_that_has_none_leave_a_copy_that_holds_nothing():
    trainer = Trainer(torch.float32, anchor_every=1)
    engine = Engine(trainer.encoder)
    [first] = trainer.sync(engine)
    trainer.step()
    trainer.send(engine)
    with_manifest(engine, anchor=None, patch=Patch(first.held, {}))
    with pytest.raises(CannotRebuild, match="are not what was sent"):
        trainer.taken_by(engine)
    assert engine.copy.held is None


def test_a_patch_that_fits_its_checksum_and_not_its_tensor_leaves_a_copy_that_holds_nothing():
    """As a bug of the trainer's would make it."""
    trainer = Trainer(torch.float32)
    engine = Engine(trainer.encoder)
    [held] = [each.held for each in trainer.sync(engine)]
    data = patch_file([("embed", torch.zeros(3), torch.ones(3))])
    patch = Patch(held, {0: File.of(data or b"")})
    manifest = Manifest(trainer.version, "state", len(trainer.buckets), patch=patch).to_json()
    for shard in range(len(trainer.buckets)):
        flat = flat_of(data if shard == 0 else None)
        engine.pipe.sent += [header(Kind.PATCH, flat.numel()), *([flat] if flat.numel() else [])]
    engine.pipe.sent += [header(Kind.MANIFEST, len(manifest)), flat_of(manifest)]
    with pytest.raises(CannotRebuild, match="a patch does not fit what is held: embed"):
        trainer.taken_by(engine)
    assert engine.copy.held is None
