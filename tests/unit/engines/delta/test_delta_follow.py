"""The follower: what it rebuilds, and what it says of itself in the store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rltool.engines.delta import chain
from rltool.engines.delta.follow import Report, follow, newest
from rltool.engines.delta.store import DirectoryStore, StoreError
from rltool.engines.transfer.wire import meta_of, plan_buckets
from rltool.weights.delta.writer import DeltaWriter
from tests.ranks import flat_bytes

RUN = "0123456789abcdef0123456789abcdef"
ENGINE = "http://10.0.0.5:8101"
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def publish(writer: DeltaWriter, number: int) -> str:
    tensors = {"a": torch.full((5,), float(number)), "b": torch.zeros(3)}
    version = f"{RUN}:0:{number}"
    buckets = plan_buckets([meta_of(name, tensor) for name, tensor in tensors.items()], 1 << 20)
    writer.begin(version, buckets)
    for bucket in buckets:
        writer.add(bucket, flat_bytes(tensors, bucket))
    writer.finish()
    return version


class Rounds:
    """`stopped` of a follower: runs what a test does before each of its rounds, and ends after the last."""

    def __init__(self, *acts) -> None:
        self.acts = list(acts)

    def __call__(self) -> bool:
        if not self.acts:
            return True
        self.acts.pop(0)()
        return False


def run(store: DirectoryStore, directory: Path, *acts) -> list[str]:
    """The lines that it logs."""
    lines: list[str] = []
    follow(store, directory, engine=ENGINE, every=0.0, deadline=60.0, log=lines.append, stopped=Rounds(*acts))
    return lines


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(tmp_path / "store")


@pytest.fixture
def writer(store, tmp_path):
    return DeltaWriter(store, anchor_every=10, model_files=tmp_path)


def test_the_config_beside_an_anchor_says_what_its_weights_are_quantised_to(store, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "quantization_config": FP8 | {"old": 1}}))
    publish(DeltaWriter(store, anchor_every=10, model_files=tmp_path, quantization=FP8), 0)
    config = json.loads(store.get(f"{chain.directory(f'{RUN}:0:0')}/config.json"))
    assert config == {"model_type": "qwen3", "quantization_config": FP8}


def test_it_reports_before_there_is_anything_and_then_each_version(store, writer, tmp_path):
    seen: list[Report | None] = []

    def look() -> None:
        seen.append(Report.read(store, ENGINE))

    run(store, tmp_path / "to", look, lambda: publish(writer, 0), look, lambda: publish(writer, 1), look)
    first, second, third = seen
    assert first == Report(ENGINE, None, None, None)
    for report, version in ((second, f"{RUN}:0:0"), (third, f"{RUN}:0:1")):
        assert report == Report(ENGINE, version, str(tmp_path / "to" / chain.directory(version)), None)
        assert (Path(report.directory) / "model.safetensors.index.json").is_file()


def test_a_version_that_cannot_be_had_is_logged_once_and_reported_with_what_there_is(store, writer, tmp_path):
    def lose() -> None:
        publish(writer, 1)
        store.delete([key for key in store.sizes() if key.startswith(chain.directory(f"{RUN}:0:1"))])

    lines = run(store, tmp_path / "to", lambda: publish(writer, 0), lose, lambda: None, lambda: None)
    assert len(lines) == 2 and "anchor" in lines[0] and "cannot be had" in lines[1]
    report = Report.read(store, ENGINE)
    assert report is not None and report.version == f"{RUN}:0:0" and "cannot be had" in (report.error or "")


def test_it_goes_on_after_an_error(store, writer, tmp_path):
    def break_head() -> None:
        store.put(chain.HEAD, b"{")

    run(store, tmp_path / "to", break_head, lambda: publish(writer, 0))
    assert Report.read(store, ENGINE) == Report(
        ENGINE, f"{RUN}:0:0", str(tmp_path / "to" / chain.directory(f"{RUN}:0:0")), None
    )


def test_a_store_that_cannot_be_written_is_an_error_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write"):
        run(DirectoryStore(tmp_path / "file"), tmp_path / "to")


def test_an_engine_without_a_follower_has_no_report(store):
    assert Report.read(store, ENGINE) is None and newest(store) is None
    store.put("followers/http%3A%2F%2F10.0.0.5%3A8101.json", b"[]")
    with pytest.raises(StoreError, match=r"10\.0\.0\.5"):
        Report.read(store, ENGINE)
