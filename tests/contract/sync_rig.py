"""A whole weight sync in miniature: fake engines on real sockets, the fleet, one rank without Megatron, a real
WeightSync."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from rltool.config.rollout import WeightsConfig
from rltool.engines.client import EngineClient
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.fleet.fleet import Fleet, State
from rltool.engines.types import EngineRole
from rltool.engines.weight_version import WeightVersion
from rltool.weights.connections import Trainer
from rltool.weights.sleep import SharedGpus
from rltool.weights.sync import SyncDeadlines, WeightSync
from rltool.weights.verify.values import ValueCheck
from tests.contract.fakes.sglang import EXPECTED_KEY as KEY
from tests.contract.fakes.sglang import VOCAB_SIZE
from tests.contract.fakes.vllm import FakeVllm
from tests.ranks import SenderRanks

RUN = "0" * 32
R = TypeVar("R", bound=SenderRanks)


def version(step: int) -> WeightVersion:
    return WeightVersion(RUN, 1, step)


class Rig(Generic[R]):
    """ranks(config, directory): makes the ranks; deadline: seconds of every step and of every bucket. `engines` are the
    fakes, in the order in which they were added; `ended` those that were to be ended, and why."""

    def __init__(
        self,
        client: EngineClient,
        ranks: Callable[[WeightsConfig, Path], R],
        config: WeightsConfig,
        directory: Path,
        deadline: float,
        trainer_device: str,
        shares_gpus: bool,
    ) -> None:
        self.trainer_device, self.shares_gpus, self.ended = trainer_device, shares_gpus, []
        self.client, self.config, self.directory, self.deadline = client, config, directory, deadline
        self._make_ranks, self._key = ranks, directory / "key"
        self._key.write_text(KEY)
        (directory / "config.json").write_text("{}")
        self.engines: list[Any] = []
        self.withdraw: Callable[[], object] = lambda: None
        self.fleet = Fleet()
        self.restart()

    def restart(self) -> None:
        """A new trainer: it has neither connections nor a copy of what was written."""
        self.ranks = self._make_ranks(self.config, self.directory)
        trainer = Trainer(self.ranks, self.trainer_device, self.directory / "weights", VOCAB_SIZE)
        self.sync = WeightSync(
            self.set, trainer, self.config, ValueCheck(VOCAB_SIZE, 1.0, 1e-3, 256),
            SyncDeadlines(self.deadline, self.deadline),
            gpus=SharedGpus(trainer, self._end) if self.shares_gpus else None, withdraw=lambda: self.withdraw(),
        )  # fmt: skip

    @property
    def set(self) -> EngineSet:
        return EngineSet(self.fleet, self.client)

    @property
    def endpoints(self) -> dict[str, EngineEndpoint]:
        """As they are now."""
        return {member.url: member.endpoint for member in self.fleet.members()}

    async def _end(self, url: str, why: str) -> None:
        self.ended.append((url, why))

    async def add(
        self, engine: Any, *, takes_weights: bool = True, group: str = "default", role: EngineRole = "regular"
    ) -> None:
        kind = "vllm" if isinstance(engine, FakeVllm) else "sglang"
        self.engines.append(engine)
        endpoint = EngineEndpoint(
            url=engine.url, dialect=kind, group=group, role=role, key_file=self._key, gpu_uuids=engine.gpus
        )
        self.fleet.add_probed(endpoint, await self.client.probe(endpoint), takes_weights=takes_weights)

    async def probe(self, engine: Any) -> None:
        known = self.fleet.member(engine.url)
        self.fleet.probe_succeeded(engine.url, await self.client.probe(known.endpoint), sent_at=known.since)

    def states(self) -> list[State]:
        return [self.fleet.member(engine.url).state for engine in self.engines]


@asynccontextmanager
async def rig(
    engines: Sequence[Any],
    ranks: Callable[[WeightsConfig, Path], R],
    config: WeightsConfig,
    directory: Path,
    *,
    deadline: float,
    trainer_device: str = "cpu",
    shares_gpus: bool = False,
) -> AsyncIterator[Rig[R]]:
    async with EngineClient() as client:
        made = Rig(client, ranks, config, directory, deadline, trainer_device, shares_gpus)
        for engine in engines:
            await made.add(engine)
        try:
            yield made
        finally:
            await made.ranks.leave_transfer()
