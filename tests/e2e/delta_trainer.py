"""A trainer that writes deltas to one real engine: patches and anchors, checked by values and by bits at each step."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rltool.config.rollout import WeightsConfig
from rltool.engines.client import EngineClient
from rltool.engines.dialects.checksums import ParameterLayout, compare, with_ranks
from rltool.engines.dialects.table import dialect
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.fleet.fleet import Fleet
from rltool.engines.weight_version import WeightVersion
from rltool.weights import connections
from rltool.weights.sync import SyncDeadlines, WeightSync
from rltool.weights.verify.values import ValueCheck
from tests.e2e.engines import RunningEngine
from tests.e2e.hf_ranks import HfRanks
from tests.e2e.weights import new_request, perturbed_model

RUN = "c" * 32
EQUAL = 1e-5
"""Mean |log-probability difference| in fp32."""
SECONDS = 60.0


class Ranks(HfRanks):
    """A model of which two elements in a hundred change at each step."""

    def __init__(self, config: WeightsConfig, model_files: Path) -> None:
        super().__init__(config, model_files)
        self.models = [perturbed_model(model_files, seed=21)]
        self.model = self.models[0]

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


@asynccontextmanager
async def trainer(engine: RunningEngine, config: WeightsConfig, directory: Path) -> AsyncIterator[Trainer]:
    ranks, endpoint, fleet = Ranks(config, engine.launch.model), engine.endpoint, Fleet()
    async with EngineClient() as client:
        info = await client.probe(endpoint)
        fleet.add_probed(endpoint, info)
        vocab_size = ranks.at(0).config.vocab_size  # SGLang does not tell it
        sync = WeightSync(
            EngineSet(fleet, client), connections.Trainer(ranks, "cpu", directory / "unused", vocab_size), config,
            ValueCheck(vocab_size, 1.0, EQUAL, info.max_model_len), SyncDeadlines(SECONDS, SECONDS),
        )  # fmt: skip
        try:
            await sync.sync(WeightVersion(RUN, 0, 0))
            yield Trainer(client, endpoint, ranks, sync)
        finally:
            ranks.close()
            await client.run(endpoint, dialect(info.dialect).resume(), timeout=SECONDS)


@dataclass
class Trainer:
    """Of one engine, which it has synced with the weights of step 0."""

    client: EngineClient
    endpoint: EngineEndpoint
    ranks: Ranks
    sync: WeightSync

    async def step(self, step: int) -> None:
        """A sync that is checked by value, with requests running through it."""
        running = asyncio.create_task(
            self.client.generate(self.endpoint, new_request(n=8, max_tokens=200), timeout=SECONDS)
        )
        report = await self.sync.sync(WeightVersion(RUN, 0, step), check_all=True)
        print(report.line())
        assert report.updated == (self.endpoint.url,) and report.difference is not None
        assert report.difference < EQUAL
        samples = await running
        known = {str(WeightVersion(RUN, 0, n)) for n in (step - 1, step)}
        for sample in samples:
            assert len(sample.token_ids) == 200 and {span.version for span in sample.versions} <= known

    async def assert_bit_equal(self) -> None:
        """Of vLLM on a CPU: all parameters but the matrices that it has packed."""
        checksums = await self.client.checksums(self.endpoint, timeout=SECONDS)
        assert checksums is not None
        implied = await self.ranks.weight_checksums(ParameterLayout("float32"))
        compared = compare(checksums, with_ranks(checksums, implied))
        assert not compared.differing and compared.equal > 5
