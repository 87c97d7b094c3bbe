"""Deltas into the real engines, through a store and over the transfer group: patches and anchors, checked by values at
each step."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from rltool.config.rollout import WeightsConfig
from rltool.engines.delta.follow import Report, follow
from rltool.engines.delta.store import open_store
from tests.e2e.delta_trainer import RUN, SECONDS, trainer
from tests.e2e.engines import RunningEngine, serving_sglang

pytestmark = pytest.mark.e2e

STEPS = 6


async def sync_some_steps(engine: RunningEngine, store: Path) -> None:
    config = WeightsConfig(transport="delta", store=str(store), anchor_every=4, bucket_bytes=200_000)
    async with trainer(engine, config, store) as made:
        for step in range(1, STEPS):
            await made.step(step)
    kinds = [sorted({p.name[:5] for p in (store / f"{RUN}-0-{n}").glob("*.safetensors")}) for n in range(STEPS)]
    assert kinds == [["model"], ["patch"], ["patch"], ["patch"], ["model", "patch"], ["patch"]]


@pytest.mark.parametrize("kind", ["tied", pytest.param("untied", marks=pytest.mark.long)])
def test_vllm_computes_with_what_the_patches_make(request, kind, tmp_path):
    asyncio.run(sync_some_steps(request.getfixturevalue(f"vllm_engine_{kind}"), tmp_path / "store"))


@pytest.mark.parametrize("kind", [pytest.param("tied", marks=pytest.mark.long), "untied"])
def test_vllm_computes_with_patches_that_come_over_its_transfer_group(request, kind, tmp_path):
    engine = request.getfixturevalue(f"vllm_engine_{kind}")
    config = WeightsConfig(transport="gloo", delta=True, anchor_every=4, bucket_bytes=200_000)
    whole = []

    async def scenario() -> None:
        async with trainer(engine, config, tmp_path) as made:
            for step in range(1, 9):
                if step == 3:  # as after any failure of this engine
                    made.sync.connections.lost(engine.url)
                if step == 6:  # as after a version that was cut off
                    made.ranks.sender._encoder.forget()
                await made.step(step)
                await made.assert_bit_equal()
                whole.append(made.ranks.sender._channels[engine.url].transport._wholes is not None)

    asyncio.run(scenario())
    assert [step for step, all_of_it in enumerate(whole, 1) if all_of_it] == [3, 4, 6]


@pytest.mark.long
def test_sglang_computes_with_what_its_follower_rebuilds(tiny_tied_dir, tmp_path):
    store, stopped = tmp_path / "store", threading.Event()
    with serving_sglang(tiny_tied_dir, tmp_path) as engine:
        follower = threading.Thread(
            target=follow,
            args=(open_store(str(store)), tmp_path / "rebuilt"),
            kwargs={"engine": engine.url, "every": 0.1, "deadline": SECONDS, "log": print, "stopped": stopped.is_set},
        )
        follower.start()
        try:
            while Report.read(open_store(str(store)), engine.url) is None:
                assert follower.is_alive()
            asyncio.run(sync_some_steps(engine, store))
        finally:
            stopped.set()
            follower.join()
