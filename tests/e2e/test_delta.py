"""The delta transport into the real engines: patches and anchors, checked by values at each step."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rltool.config.rollout import WeightsConfig
from rltool.engines.client import EngineClient
from rltool.engines.delta.follow import Report, follow
from rltool.engines.delta.store import open_store
from rltool.engines.dialects import dialect
from rltool.engines.fleet import Fleet
from rltool.engines.weight_version import WeightVersion
from rltool.weights.sync import WeightSync
from rltool.weights.verify import ValueCheck
from tests.e2e.engines import RunningEngine, serving_sglang
from tests.e2e.hf_ranks import HfRanks
from tests.e2e.weights import new_request, perturbed_model

pytestmark = [pytest.mark.e2e, pytest.mark.long]

RUN = "c" * 32
EQUAL = 1e-5
"""Mean |log-probability difference| in fp32."""
STEPS = 6
SECONDS = 60.0


class Ranks(HfRanks):
    """A model of which two elements in a hundred change at each step."""

    def __init__(self, config: WeightsConfig, model_files: Path) -> None:
        super().__init__(config, model_files)
        self.models = [perturbed_model(model_files, seed=21)]

    def at(self, step: int) -> Any:
        while len(self.models) <= step:
            model, generator = copy.deepcopy(self.models[-1]), torch.Generator().manual_seed(len(self.models))
            with torch.no_grad():
                for parameter in model.parameters():
                    chosen = torch.rand(parameter.shape, generator=generator) < 0.02
                    parameter.add_(chosen * torch.randn(parameter.shape, generator=generator) * 0.3)
            self.models.append(model)
        return self.models[step]

    def weights(self, step: int) -> Mapping[str, torch.Tensor]:
        self.model = self.at(step)
        return super().weights(step)


async def sync_some_steps(engine: RunningEngine, store: Path) -> None:
    """Some syncs of which each is checked by value, with requests running through all of them."""
    config = WeightsConfig(transport="delta", store=str(store), anchor_every=4, bucket_bytes=200_000)
    ranks, endpoint, fleet = Ranks(config, engine.launch.model), engine.endpoint, Fleet()
    async with EngineClient() as client:
        info = await client.probe(endpoint)
        fleet.add(endpoint.url, takes_weights=True)
        sent_at = fleet.member(endpoint.url).since
        fleet.probe_succeeded(endpoint.url, sent_at=sent_at, boot_id=info.boot_id, version=info.weight_version)
        vocab_size = ranks.at(0).config.vocab_size  # SGLang does not tell it
        sync = WeightSync(
            client, fleet, {endpoint.url: endpoint}, {endpoint.url: info}, ranks, config,
            ValueCheck(vocab_size, 1.0, EQUAL, info.max_model_len),
            trainer_device="cpu", step_deadline=SECONDS, bucket_deadline=SECONDS, directory=store / "unused",
        )  # fmt: skip
        try:
            await sync.sync(WeightVersion(RUN, 0, 0))
            for step in range(1, STEPS):
                running = asyncio.create_task(
                    client.generate(endpoint, new_request(n=8, max_tokens=200), timeout=SECONDS)
                )
                report = await sync.sync(WeightVersion(RUN, 0, step), check_all=True)
                print(report.line())
                assert report.updated == (endpoint.url,) and report.difference is not None
                assert report.difference < EQUAL
                samples = await running
                known = {str(WeightVersion(RUN, 0, n)) for n in (step - 1, step)}
                for sample in samples:
                    assert len(sample.token_ids) == 200 and {span.version for span in sample.versions} <= known
            kinds = [sorted({p.name[:5] for p in (store / f"{RUN}-0-{n}").glob("*.safetensors")}) for n in range(STEPS)]
            assert kinds == [["model"], ["patch"], ["patch"], ["patch"], ["model", "patch"], ["patch"]]
        finally:
            ranks.sender.close()
            await client.run(endpoint, dialect(info.dialect).resume(), timeout=SECONDS)


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_vllm_computes_with_what_the_patches_make(request, kind, tmp_path):
    asyncio.run(sync_some_steps(request.getfixturevalue(f"vllm_engine_{kind}"), tmp_path / "store"))


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
