"""Which files lead from what an engine holds to a version, and which of them nobody needs any more."""

from __future__ import annotations

import json
import tracemalloc
from contextlib import suppress
from dataclasses import replace

import pytest

from rltool.engines.delta import chain
from rltool.engines.delta.chain import Anchor, BadManifest, File, Held, Manifest, Patch, routes

RUN = "0123456789abcdef0123456789abcdef"
OTHER = "f" * 32


def version(number: int, attempt: int = 0) -> str:
    return f"{RUN}:{attempt}:{number}"


def file(size: int, content: int = 0) -> File:
    return File(size, f"{content:064x}")


def make_chain(anchors: set[int], last: int, *, anchor_bytes: int = 1000, patch_bytes: int = 10) -> dict[str, Manifest]:
    """Versions 0 to `last`, each a patch of the one before; those in `anchors` have an anchor as well."""
    made: dict[str, Manifest] = {}
    base: Held | None = None
    for number in range(last + 1):
        patch = Patch(base, {0: file(patch_bytes, number)}) if base else None
        anchor = Anchor({0: file(anchor_bytes)}, {}) if number in anchors else None
        manifest = Manifest(version(number), f"state {number}", 1, anchor, patch)
        made[version(number)] = manifest
        base = manifest.held
    return made


def summary(found: list[chain.Route]) -> list[tuple[str | None, list[str]]]:
    return [(r.anchor.version if r.anchor else None, [m.version for m in r.patches]) for r in found]


def test_an_engine_that_is_one_behind_takes_one_patch():
    made = make_chain({0}, 4)
    best = routes(version(4), made[version(3)].held, made)[0]
    assert summary([best]) == [(None, [version(4)])] and best.bytes == 10


def test_a_late_engine_takes_the_newest_anchor_and_the_chain():
    made = make_chain({0, 3}, 5)
    assert summary(routes(version(5), None, made)) == [
        (version(3), [version(4), version(5)]),
        (version(0), [version(n) for n in (1, 2, 3, 4, 5)]),
    ]


def test_patches_that_are_larger_than_an_anchor_are_not_taken():
    made = make_chain({0, 3}, 5, anchor_bytes=15, patch_bytes=10)
    assert summary(routes(version(5), made[version(1)].held, made))[0] == (version(3), [version(4), version(5)])


def test_who_has_the_version_needs_nothing():
    made = make_chain({0}, 2)
    best = routes(version(2), made[version(2)].held, made)[0]
    assert (best.anchor, best.patches, best.bytes) == (None, (), 0)


def test_another_state_under_the_same_name_is_no_base():
    made = make_chain({0}, 3)
    assert summary(routes(version(3), Held(version(2), "made by another start"), made)) == [
        (version(0), [version(1), version(2), version(3)])
    ]


def test_a_base_that_was_written_anew_ends_the_chain():
    made = make_chain({0}, 3)
    made[version(1)] = replace(made[version(1)], state="another")
    assert routes(version(3), None, made) == []
    assert summary(routes(version(3), made[version(2)].held, made)) == [(None, [version(3)])]


def test_a_base_that_the_store_has_lost_is_held_all_the_same():
    made = make_chain({0}, 3)
    held = made.pop(version(2)).held
    assert summary(routes(version(3), held, made)) == [(None, [version(3)])]
    assert routes(version(3), None, made) == []
    assert routes(version(3), Held(version(2), "made by another start"), made) == []


def test_a_version_that_is_not_there_has_no_route():
    assert routes(version(9), None, make_chain({0}, 3)) == []


def test_manifests_that_name_each_other_end():
    made = make_chain({0}, 2)
    made[version(0)] = replace(made[version(0)], anchor=None, patch=Patch(made[version(2)].held, {}))
    assert routes(version(2), None, made) == []


def test_a_manifest_survives_its_json():
    patch = Patch(Held(version(1), "s"), {1: file(5)})
    made = Manifest(version(2), "state", 2, Anchor({0: file(1), 1: file(2)}, {"config.json": file(3)}), patch)
    assert Manifest.from_json(made.to_json()) == made
    assert Manifest.from_json(replace(made, anchor=None).to_json()).anchor is None


def broken(**fields) -> bytes:
    made = Manifest(version(2), "state", 2, Anchor({0: file(1), 1: file(2)}, {}), Patch(Held(version(1), "s"), {}))
    return json.dumps(json.loads(made.to_json()) | fields).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        broken()[:-20],
        broken(format=99),
        broken(more=1),
        broken(version="../../etc:0:1"),
        broken(shards=3),
        broken(shards=1),
        broken(shards="2"),
        broken(shards=2.0, anchor=None),
        broken(anchor={"files": {"0": {"bytes": 1, "sha256": ""}}, "model_files": {}}),
        broken(anchor={"files": {str(i): {"bytes": 1, "sha256": ""} for i in range(3)}, "model_files": {}}),
        broken(patch={"base": {"version": version(1), "state": "s"}, "files": {"7": {"bytes": 1, "sha256": ""}}}),
        broken(patch={"base": {"version": "v", "state": "s"}, "files": {}}),
        broken(
            anchor={
                "files": {str(i): {"bytes": 1, "sha256": ""} for i in range(2)},
                "model_files": {"../config.json": {"bytes": 1, "sha256": ""}},
            }
        ),
        broken(
            anchor={
                "files": {str(i): {"bytes": 1, "sha256": ""} for i in range(2)},
                "model_files": {"manifest.json": {"bytes": 1, "sha256": ""}},
            }
        ),
    ],
    ids=[
        "empty", "list", "cut off", "format", "extra", "version", "more shards", "fewer shards", "text", "float",
        "half an anchor", "more than an anchor", "no such shard", "base", "path", "itself",
    ],
)  # fmt: skip
def test_what_is_no_manifest_is_refused(data):
    with pytest.raises(BadManifest):
        Manifest.from_json(data)


def test_a_manifest_takes_no_more_memory_than_its_files_however_many_shards_it_claims():
    for claimed in (broken(shards=1_000_000), broken(shards=1_000_000, anchor=None)):
        tracemalloc.start()
        with suppress(BadManifest):
            Manifest.from_json(claimed)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1_000_000


def test_a_state_names_the_base_and_every_file():
    base = Held(version(1), "s")
    states = {
        chain.state_after(None, {0: file(1)}),
        chain.state_after(base, {0: file(1)}),
        chain.state_after(base, {1: file(1)}),
        chain.state_after(base, {0: file(1, 7)}),
        chain.state_after(base, {}),
        chain.state_after(replace(base, state="t"), {0: file(1)}),
    }
    assert len(states) == 6
    files = {0: file(1), 1: file(2)}
    assert chain.state_after(base, files) == chain.state_after(base, dict(reversed(files.items())))


def keys_of(made: dict[str, Manifest]) -> list[str]:
    keys = []
    for manifest in made.values():
        keys.append(chain.manifest_key(manifest.version))
        keys += [*chain.shard_files(manifest, "anchor"), *chain.shard_files(manifest, "patch")]
    return keys


def test_the_last_two_anchors_and_their_chains_are_kept():
    made = make_chain({0, 3, 6}, 8)
    gone = chain.expired([*keys_of(made), chain.HEAD, f"{OTHER}-0-0/manifest.json", "notes.txt"], RUN)
    kept = [version(number) for number in range(3, 9)]
    assert set(gone) == set(keys_of({v: m for v, m in made.items() if v not in kept}))
    manifests = [key.endswith("manifest.json") for key in gone]
    assert manifests == sorted(manifests, reverse=True), "a version stops to exist before it loses its files"


def test_one_anchor_keeps_everything():
    assert chain.expired(keys_of(make_chain({3}, 8)), RUN) == []


def test_an_anchor_without_its_manifest_does_not_count():
    made = make_chain({0, 3, 6}, 8)
    assert chain.expired([k for k in keys_of(made) if k != chain.manifest_key(version(6))], RUN) == []


def test_an_earlier_attempt_is_older_whatever_its_number():
    early = keys_of(make_chain({0}, 8))
    later = [key.replace(f"{RUN}-0-", f"{RUN}-1-") for key in keys_of(make_chain({0, 2}, 2))]
    assert set(chain.expired([*early, *later], RUN)) == set(early)
