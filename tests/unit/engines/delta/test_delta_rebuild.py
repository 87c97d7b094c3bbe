"""A trainer that writes and engines that read, over hundreds of steps and a store that loses and damages files.

The property: whatever happened, an engine that says that it holds a version has every tensor of it, bit by bit.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rltool.engines.delta import chain, rebuild
from rltool.engines.delta.chain import Manifest, Patch
from rltool.engines.delta.follow import DirectoryCopy
from rltool.engines.delta.memory import MemoryCopy
from rltool.engines.delta.patch import bits
from rltool.engines.delta.rebuild import CannotRebuild, bring
from rltool.engines.delta.store import KeyMissing, Store
from rltool.engines.transfer.wire import meta_of, plan_buckets, split_flat
from rltool.weights.delta.writer import DeltaWriter
from tests.ranks import flat_bytes

RUN = "0123456789abcdef0123456789abcdef"
SHAPES = {
    "embed": (40, 6), "layers.0.q": (7, 6), "layers.0.norm": (6,), "layers.1.q": (7, 6), "scale": (), "head": (40, 6),
}  # fmt: skip


class MemoryStore:
    """A store whose files a test can lose, damage and bring back."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.read: list[str] = []

    def put(self, key: str, data: bytes) -> None:
        self.files[key] = data

    def get(self, key: str) -> bytes:
        self.read.append(key)
        if key not in self.files:
            raise KeyMissing(f"{key} is not there")
        return self.files[key]

    def sizes(self, prefix: str = "") -> dict[str, int]:
        return {key: len(data) for key, data in self.files.items() if key.startswith(prefix)}

    def delete(self, keys) -> None:
        for key in keys:
            self.files.pop(key, None)


class Trainer:
    """Weights that change a little at each step, written under RUN:ATTEMPT:N."""

    def __init__(self, store: MemoryStore, model_files: Path, dtype: torch.dtype, *, seed: int = 0) -> None:
        self.store, self.model_files = store, model_files
        self.generator = torch.Generator().manual_seed(seed)
        self.tensors = {name: torch.randn(shape, generator=self.generator).to(dtype) for name, shape in SHAPES.items()}
        self.attempt, self.number = -1, -1
        self.restart()

    def restart(self) -> None:
        """A new process: it has the weights, from its checkpoint, and remembers nothing else."""
        self.attempt += 1
        self.writer = DeltaWriter(self.store, anchor_every=7, model_files=self.model_files)

    def step(self, share: float = 0.02) -> None:
        self.number += 1
        for name, tensor in self.tensors.items():
            chosen = torch.rand(tensor.shape, generator=self.generator) < share
            moved = tensor.float() + torch.randn(tensor.shape, generator=self.generator)
            self.tensors[name] = torch.where(chosen, moved.to(tensor.dtype), tensor)

    @property
    def version(self) -> str:
        return f"{RUN}:{self.attempt}:{self.number}"

    def publish(self):
        buckets = plan_buckets([meta_of(name, tensor) for name, tensor in self.tensors.items()], 500)
        self.writer.begin(self.version, buckets)
        for bucket in buckets:
            self.writer.add(bucket, flat_bytes(self.tensors, bucket))
        return self.writer.finish()


@pytest.fixture
def model_files(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "tiny"}')
    (directory / "model.safetensors.index.json").write_text("of the files that were trained from")
    return directory


@pytest.fixture
def store():
    return MemoryStore()


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(bits(found[name]), bits(tensor)), name


def tensors_of(copy: MemoryCopy) -> dict[str, torch.Tensor]:
    return {name: tensor for bucket, flat in copy.buckets() for name, tensor in split_flat(flat, bucket)}


def assert_holds(copy: MemoryCopy, trainer: Trainer) -> None:
    assert copy.held is not None and copy.held.version == trainer.version
    assert_equal(tensors_of(copy), trainer.tensors)


def patch_keys(store: MemoryStore, version: str) -> list[str]:
    return [key for key in store.files if key.startswith(f"{chain.directory(version)}/patch-")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_after_hundreds_of_steps_every_engine_is_bit_equal(store, model_files, dtype):
    """One engine takes each version, one takes some, one is new each time; nothing is lost."""
    trainer, rng = Trainer(store, model_files, dtype), random.Random(5)
    steady, lazy = MemoryCopy(), MemoryCopy()
    for number in range(200):
        trainer.step()
        trainer.publish()
        rebuilt = bring(steady, store, trainer.version, seconds=60)
        assert_holds(steady, trainer)
        assert rebuilt.anchor == (number == 0), "who follows takes patches alone"
        for copy in (lazy,) if rng.random() < 0.3 else ():
            bring(copy, store, trainer.version, seconds=60)
            assert_holds(copy, trainer)
        if rng.random() < 0.1:
            late = MemoryCopy()
            bring(late, store, trainer.version, seconds=60)
            assert_holds(late, trainer)
    assert len({key.partition("/")[0] for key in store.files} - {chain.HEAD}) <= 14, "old versions are deleted"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_no_engine_holds_anything_else_than_it_says(store, model_files, dtype, seed):
    """Files are lost, cut off, damaged, and come back older; trainers restart; engines come late and are new."""
    trainer, rng = Trainer(store, model_files, dtype, seed=seed), random.Random(seed)
    engines = [MemoryCopy() for _ in range(3)]
    earlier: dict[str, bytes] = {}
    reached = 0
    for _ in range(100):
        trainer.step()
        if rng.random() < 0.05:
            trainer.restart()
        trainer.publish()
        for key in rng.sample(sorted(store.files), k=rng.choice([0, 0, 0, 1, 2])):
            data = store.files[key]
            other = earlier.get(rng.choice(sorted(earlier))) if earlier else b""
            replacements = [None, data[: len(data) // 2], flipped(data, rng), other, b""]
            store.files[key] = rng.choice(replacements) or b""
            if rng.random() < 0.3:
                del store.files[key]
        earlier |= dict(rng.sample(sorted(store.files.items()), k=2))
        if rng.random() < 0.1:
            engines[rng.randrange(3)] = MemoryCopy()
        for copy in engines:
            if rng.random() < 0.3:
                continue
            reached += assert_right_or_refused(copy, store, trainer.version, trainer.tensors)
    assert reached > 100, "most of the time there is a way"


class Late:
    """Another host's view of a store: what was written is seen at some later moment, in any order."""

    def __init__(self, store: MemoryStore, rng: random.Random) -> None:
        self.store, self.rng = store, rng
        self.seen: dict[str, bytes] = {}

    def look(self, share: float) -> None:
        """A share of what differs by now is seen."""
        for key in {*self.store.files, *self.seen}:
            if self.rng.random() < share:
                self.seen.pop(key, None)
                self.seen |= {key: self.store.files[key]} if key in self.store.files else {}

    def get(self, key: str) -> bytes:
        if key not in self.seen:
            raise KeyMissing(f"{key} is not there")
        return self.seen[key]


def test_patches_that_arrive_late_and_in_any_order_over_hundreds_of_steps(store, model_files):
    """An engine may ask for the newest version, or for one that it has passed or missed."""
    trainer, rng = Trainer(store, model_files, torch.bfloat16), random.Random(11)
    engines = [(MemoryCopy(), Late(store, rng)) for _ in range(2)]
    published: list[tuple[str, dict[str, torch.Tensor]]] = []
    reached = 0
    for _ in range(200):
        trainer.step()
        trainer.publish()
        published.append((trainer.version, dict(trainer.tensors)))
        for copy, view in engines:
            view.look(0.6)
            for wanted, tensors in rng.sample(published[-4:], k=min(2, len(published))):
                reached += assert_right_or_refused(copy, view, wanted, tensors)
    assert 200 < reached < 750, "often there is a way, and not always"
    for copy, view in engines:
        view.look(1.0)
        assert assert_right_or_refused(copy, view, *published[-1])


def assert_right_or_refused(copy: MemoryCopy, store: Store, version: str, tensors: dict[str, torch.Tensor]) -> bool:
    held, before = copy.held, {name: tensor.clone() for name, tensor in tensors_of(copy).items()}
    try:
        bring(copy, store, version, seconds=60)
    except CannotRebuild:
        if copy.held is not None:
            assert copy.held == held
            assert_equal(tensors_of(copy), before)
        return False
    assert copy.held is not None and copy.held.version == version
    assert_equal(tensors_of(copy), tensors)
    return True


def flipped(data: bytes, rng: random.Random) -> bytes:
    if not data:
        return b"x"
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def test_a_lost_patch_is_followed_by_an_anchor(store, model_files):
    trainer, copy = Trainer(store, model_files, torch.bfloat16), MemoryCopy()
    for _ in range(3):
        trainer.step()
        trainer.publish()
    bring(copy, store, trainer.version, seconds=60)
    trainer.step()
    trainer.publish()
    store.delete(patch_keys(store, trainer.version))
    with pytest.raises(CannotRebuild, match="is not there"):
        bring(copy, store, trainer.version, seconds=60)
    trainer.step()
    published = trainer.publish()
    assert published.anchor_bytes is not None, "the chain was broken"
    assert bring(copy, store, trainer.version, seconds=60).anchor
    assert_holds(copy, trainer)


def test_a_version_that_is_sent_again_writes_nothing_but_a_missing_anchor(store, model_files):
    trainer, copy = Trainer(store, model_files, torch.bfloat16), MemoryCopy()
    for _ in range(2):
        trainer.step()
        first = trainer.publish()
    bring(copy, store, trainer.version, seconds=60)
    before = dict(store.files)
    assert trainer.publish() == first and store.files == before
    store.delete(patch_keys(store, trainer.version))
    again = trainer.publish()
    assert again.held == first.held, "an anchor that came later is of the same state"
    assert again.anchor_bytes is not None
    late = MemoryCopy()
    bring(late, store, trainer.version, seconds=60)
    assert_holds(late, trainer)
    trainer.step()
    trainer.publish()
    for engine in (copy, late):
        assert not bring(engine, store, trainer.version, seconds=60).anchor
        assert_holds(engine, trainer)


def test_an_anchor_is_written_every_so_many_versions(store, model_files):
    trainer = Trainer(store, model_files, torch.bfloat16)
    published = []
    for _ in range(15):
        trainer.step()
        published.append(trainer.publish())
    assert [n for n, version in enumerate(published) if version.anchor_bytes is not None] == [0, 7, 14]
    assert [n for n, version in enumerate(published) if version.patch_bytes is None] == [0]


def test_a_restarted_trainer_begins_with_an_anchor_and_engines_take_it(store, model_files):
    trainer, copy = Trainer(store, model_files, torch.float32), MemoryCopy()
    trainer.step()
    trainer.publish()
    bring(copy, store, trainer.version, seconds=60)
    trainer.restart()
    assert trainer.publish().patch_bytes is None
    assert bring(copy, store, trainer.version, seconds=60).anchor
    assert_holds(copy, trainer)


def test_a_version_that_was_cut_off_is_not_there_and_the_next_is_an_anchor(store, model_files):
    trainer, copy = Trainer(store, model_files, torch.float32), MemoryCopy()
    trainer.step()
    trainer.publish()
    trainer.step()
    buckets = plan_buckets([meta_of(name, tensor) for name, tensor in trainer.tensors.items()], 500)
    trainer.writer.begin(trainer.version, buckets)
    trainer.writer.add(buckets[0], flat_bytes(trainer.tensors, buckets[0]))
    assert trainer.writer.published is None
    with pytest.raises(CannotRebuild, match=r"manifest\.json is missing"):
        bring(copy, store, trainer.version, seconds=60)
    trainer.step()
    assert trainer.publish().patch_bytes is None
    bring(copy, store, trainer.version, seconds=60)
    assert_holds(copy, trainer)


def test_other_buckets_begin_a_new_chain(store, model_files):
    trainer = Trainer(store, model_files, torch.float32)
    trainer.step()
    trainer.publish()
    trainer.tensors["extra"] = torch.ones(3)
    trainer.number += 1
    assert trainer.publish().patch_bytes is None
    copy = MemoryCopy()
    bring(copy, store, trainer.version, seconds=60)
    assert_holds(copy, trainer)


def test_a_deadline_ends_a_download_and_the_copy_is_what_it_was(store, model_files):
    trainer, copy = Trainer(store, model_files, torch.float32), MemoryCopy()
    trainer.step()
    trainer.publish()
    bring(copy, store, trainer.version, seconds=60)
    before, held = {name: tensor.clone() for name, tensor in tensors_of(copy).items()}, copy.held
    trainer.step()
    trainer.publish()
    with pytest.raises(CannotRebuild, match="did not come in time"):
        bring(copy, store, trainer.version, seconds=-1)
    assert copy.held == held
    assert_equal(tensors_of(copy), before)


def test_an_anchor_that_breaks_off_leaves_a_copy_that_holds_nothing(store, model_files):
    trainer, copy = Trainer(store, model_files, torch.float32), MemoryCopy()
    trainer.step()
    trainer.publish()
    bring(copy, store, trainer.version, seconds=60)
    trainer.restart()
    trainer.step()
    trainer.publish()
    last = max(key for key in store.files if key.startswith(f"{chain.directory(trainer.version)}/model-0"))
    good = store.files[last]
    store.files[last] = good[:-1]
    with pytest.raises(CannotRebuild, match="damaged"):
        bring(copy, store, trainer.version, seconds=60)
    assert copy.held is None
    store.files[last] = good
    assert bring(copy, store, trainer.version, seconds=60).anchor
    assert_holds(copy, trainer)


def test_patches_go_on_from_where_a_cheaper_anchor_broke_off(store, model_files):
    trainer, copy = Trainer(store, model_files, torch.float32), MemoryCopy()
    for number in range(8):  # the last one has an anchor, which is smaller than seven large patches
        trainer.step(share=0.4)
        trainer.publish()
        if number == 0:
            bring(copy, store, trainer.version, seconds=60)
    last = max(key for key in store.files if key.startswith(f"{chain.directory(trainer.version)}/model-0"))
    store.files[last] = store.files[last][:-1]
    rebuilt = bring(copy, store, trainer.version, seconds=60)
    assert last in store.read and not rebuilt.anchor
    assert_holds(copy, trainer)


def test_who_holds_the_version_downloads_nothing_more(store, model_files):
    trainer, copy = Trainer(store, model_files, torch.float32), MemoryCopy()
    trainer.step()
    trainer.publish()
    bring(copy, store, trainer.version, seconds=60)
    store.read.clear()
    bring(copy, store, trainer.version, seconds=60)
    assert store.read == [chain.manifest_key(trainer.version)]


def test_a_directory_is_a_checkpoint_and_the_one_before_stays(store, model_files, tmp_path):
    trainer, copy = Trainer(store, model_files, torch.bfloat16), DirectoryCopy(tmp_path / "weights")
    paths = []
    for number in range(10):
        trainer.step()
        trainer.publish()
        rebuilt = bring(copy, store, trainer.version, seconds=60)
        assert rebuilt.anchor == (number == 0) and copy.path is not None
        paths.append(copy.path)
        index = json.loads((copy.path / "model.safetensors.index.json").read_text())
        found: dict[str, torch.Tensor] = {}
        for name in set(index["weight_map"].values()):
            found |= load_file(copy.path / name)
        assert index["weight_map"].keys() == found.keys()
        assert_equal(found, trainer.tensors)
        assert (copy.path / "config.json").read_text() == '{"model_type": "tiny"}'
    assert {path for path in paths if path.exists()} == set(paths[-2:])


def test_a_manifest_of_another_version_is_not_taken_for_the_one_that_was_asked_for(store, model_files):
    trainer, copy = Trainer(store, model_files, torch.bfloat16), MemoryCopy()
    trainer.step()
    trainer.publish()
    first = trainer.version
    trainer.step()
    trainer.publish()
    store.files[chain.manifest_key(trainer.version)] = store.files[chain.manifest_key(first)]
    with pytest.raises(CannotRebuild, match="missing or damaged"):
        bring(copy, store, trainer.version, seconds=60)
    assert copy.held is None


def test_manifests_that_name_each_other_are_each_read_once(store, model_files):
    trainer = Trainer(store, model_files, torch.bfloat16)
    for _ in range(3):
        trainer.step()
        trainer.publish()
    manifests = [Manifest.from_json(store.files[chain.manifest_key(f"{RUN}:0:{n}")]) for n in range(3)]
    circle = replace(manifests[0], anchor=None, patch=Patch(manifests[2].held, {}))
    store.files[chain.manifest_key(circle.version)] = circle.to_json()
    store.read.clear()
    with pytest.raises(CannotRebuild, match="no anchor is left"):
        bring(MemoryCopy(), store, trainer.version, seconds=60)
    assert sorted(store.read) == [chain.manifest_key(f"{RUN}:0:{n}") for n in range(3)]


def test_a_chain_is_read_so_far_and_no_further(store, model_files, monkeypatch):
    monkeypatch.setattr(rebuild, "CHAIN_LIMIT", 2)
    trainer = Trainer(store, model_files, torch.bfloat16)
    for _ in range(4):
        trainer.step()
        trainer.publish()
    store.read.clear()
    with pytest.raises(CannotRebuild, match="no anchor is left"):
        bring(MemoryCopy(), store, trainer.version, seconds=60)
    assert len(store.read) == 2


def test_a_copy_that_patches_do_not_fit_is_made_anew_from_an_anchor(store, model_files):
    trainer, copy = Trainer(store, model_files, torch.bfloat16), MemoryCopy()
    trainer.step()
    trainer.publish()
    bring(copy, store, trainer.version, seconds=60)
    for shard, _ in enumerate(list(copy.buckets())):
        copy.store(shard, {"other": torch.zeros(3)})
    trainer.step(share=0.3)
    trainer.publish()
    assert bring(copy, store, trainer.version, seconds=60).anchor
    assert_holds(copy, trainer)


def test_who_holds_the_version_keeps_every_tensor_where_it_is(store, model_files):
    trainer, copy = Trainer(store, model_files, torch.bfloat16), MemoryCopy()
    trainer.step()
    trainer.publish()
    bring(copy, store, trainer.version, seconds=60)
    copy.load = lambda shard: pytest.fail("nothing is to be changed")
    assert not bring(copy, store, trainer.version, seconds=60).anchor
