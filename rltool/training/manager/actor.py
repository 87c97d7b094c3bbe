"""The Ray actor around the rollout service: an asyncio actor without GPU and CPU, outside of the placement group."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from rltool.agents.gateway_process import GatewayPlace
from rltool.config.own_functions import raised
from rltool.config.train import TrainConfig
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.run_client import ComparedWeights, EngineStatus
from rltool.errors import RltoolError
from rltool.processes import garbage
from rltool.processes.output import redirect_output
from rltool.rollout.measure.evaluation import Evaluated
from rltool.rollout.snapshot import SourceState
from rltool.terminal import write_line
from rltool.training.manager.batch import Rollout
from rltool.training.manager.rollout_engines import Engines, Syncing
from rltool.training.manager.service import RolloutService
from rltool.weights.sync_report import SyncReport


class ManagerFailed(RltoolError):
    """An unexpected error of the rollout manager. The trainer's state is whole, and is to be saved."""


@contextmanager
def failing_in_order() -> Iterator[None]:
    """ManagerFailed for what is none of our errors; its traceback goes to the manager's log. What a rank raised stays
    as it is: its peers may wait for it, and cannot save."""
    try:
        yield
    except (RltoolError, RayError):
        raise
    except Exception as error:
        traceback.print_exc()
        raise ManagerFailed(
            f"the rollout manager failed: {raised(error)}; rollout_manager.log has the traceback (`rltool logs`)"
        ) from error


@ray.remote(num_cpus=0)
class RolloutActor:
    """Every method is a coroutine: a long poll for a batch does not keep a status or a stop waiting."""

    def __init__(
        self, config: TrainConfig, engines: Engines, *, syncing: Syncing, log_file: Path | None, gateway: GatewayPlace,
        cwd: Path,
    ) -> None:  # fmt: skip
        """cwd: the driver's, by which relative paths are meant. That of a cluster's processes is where its node was
        started."""
        redirect_output(log_file)
        os.chdir(cwd)
        self._arguments = (config, engines)
        self._options: dict[str, Any] = {"syncing": syncing, "gateway": gateway}
        self._service: RolloutService

    async def start(self) -> str:
        self._service = RolloutService(*self._arguments, **self._options, log=write_line)
        summary = await self._service.start()
        garbage.settle()
        return summary

    async def driver_is_there(self) -> None:
        self._service.driver_is_there()

    async def next_batch(self, step: int) -> Rollout:
        """Wide fields stay in the object store, for the ranks: the driver gets references."""
        with failing_in_order():
            return await self._service.next_batch(step, put=ray.put)

    async def sync_weights(self, step: int) -> SyncReport:
        return await self._service.sync_weights(step)

    async def free_gpus(self) -> float:
        return await self._service.free_gpus()

    async def hold_evaluation_engines(self, step: int) -> SyncReport:
        return await self._service.hold_evaluation_engines(step)

    async def evaluate(self, *, with_samples: bool) -> Evaluated:
        """with_samples: they are many, and travel only to be written."""
        with failing_in_order():
            found = await self._service.evaluate()
        return found if with_samples else Evaluated(found.metrics, {})

    async def state_dict(self, done: int) -> SourceState:
        """Files stay in the object store, for the ranks."""
        with failing_in_order():
            found = await self._service.state_dict(done)
            return replace(found, files=ray.put(found.files)) if found.files else found

    async def load_state_dict(self, state: dict[str, Any], directory: Path | None) -> None:
        await self._service.load_state_dict(state, directory)

    async def status(self) -> dict[str, Any]:
        return await self._service.status()

    async def events(self) -> list[str]:
        return self._service.take_events()

    async def add_engine(self, endpoint: EngineEndpoint) -> EngineStatus:
        return await self._service.add_engine(endpoint)

    async def remove_engine(self, url: str) -> EngineStatus:
        return await self._service.remove_engine(url)

    async def compare_weights(self, urls: Sequence[str]) -> ComparedWeights:
        return await self._service.compare_weights(urls)

    async def all_engines(self) -> tuple[EngineEndpoint, ...]:
        return self._service.all_engines()

    async def present_engines(self) -> tuple[EngineEndpoint, ...]:
        return self._service.present_engines()

    async def interrupt(self) -> None:
        await self._service.interrupt()

    async def close(self) -> list[str]:
        return await self._service.close()
