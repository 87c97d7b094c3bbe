"""All weights for sampling: engines hold those of one save at a time, which the ranks send as in a run of `train`.

Requests of the save that engines hold run side by side. One of another save, or of the base model, waits until they
have ended; then the ranks send its weights, while no client's call is carried out: their own, where no step was made
since the save, else those of its directory, put in the place of theirs meanwhile. So each sample is of the weights that
its sampling session names, whole. Saves take turns in the order in which they were first waited for.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rltool.config.train import TrainConfig
from rltool.engines.client import EngineClient
from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.fleet.fleet import Fleet, State
from rltool.engines.fleet.lease import holder_of_this_process
from rltool.engines.weight_version import Lineage
from rltool.errors import EngineError, UsageError
from rltool.processes.files import write_json_atomic
from rltool.processes.run_directory import RunDirectory
from rltool.processes.tasks import Background
from rltool.rollout.serving.lease import LeaseTerms
from rltool.rollout.serving.versions import VersionBook
from rltool.tinker.books import GONE
from rltool.tinker.sampling import REQUESTS_PER_ENGINE, Held, Samplers
from rltool.tinker.service import Service
from rltool.training.checks.preflight import ProbedFleet
from rltool.training.manager.policy_engines import EngineHooks, PolicyEngines
from rltool.training.manager.rollout_engines import Engines
from rltool.training.served import ServedTrainer
from rltool.weights.connections import Trainer

RESYNC_SECONDS = 0.5
"""How often it is looked for engines that have lost the weights."""

Work = Callable[[], Coroutine[Any, Any, bool]]
Exclusively = Callable[[Work], Coroutine[Any, Any, bool]]


class OneVersion(VersionBook):
    """Nothing but the weights that were published last is sampled with."""

    def refusal(self, version: str) -> str | None:
        if self.published is not None and version == str(self.lineage.version(self.published)):
            return None
        return super().refusal(version) or "outdated"


class PublishedWeights(Held):
    """`start` first, `close` last. Owned by one event loop. service: whose calls the ranks carry out; base: directory
    of the base model."""

    def __init__(self, policy: PolicyEngines, trainer: ServedTrainer, service: Service, base: Path) -> None:
        assert policy.weights is not None
        self._policy, self._updates, self._trainer = policy, policy.weights, trainer
        self._service, self._base = service, base
        self._held: Path | None = None
        """What engines have; None: not known."""
        self._named: Path | None = None
        """What the last version names."""
        self._step, self._users, self._swapping = 0, 0, False
        self._waiting: dict[Path, list[asyncio.Future[None]]] = {}
        """Requests by the weights that they want, those that were wanted first first."""
        self._background = Background(lambda failure: policy.engines.log(str(failure)))

    async def start(self) -> None:
        """Engines are taken, and get the weights that were saved last for sampling, or the base model's. `Service.run`
        is not to run yet. RltoolError where none takes them."""

        async def at_once(work: Work) -> bool:
            return await work()

        await self._policy.start()
        await self._bring(self._service.checkpoints.newest_weights() or self._base, at_once)
        self._background.repeat(self._resync, "engines that lost the weights", seconds=RESYNC_SECONDS)

    async def close(self) -> None:
        await self._background.close()
        try:
            for url, reason in (await self._updates.leave()).items():
                self._policy.engines.log(f"{url}: {reason}")
        except Exception as error:  # a rank has died
            self._policy.engines.log(f"engines were left as they are: {error}")
        await self._policy.close()

    @asynccontextmanager
    async def using(self, directory: Path | None) -> AsyncIterator[str]:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(directory or self._base, []).append(turn)
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._leave()  # it was granted just now
            raise
        try:
            yield ""
        finally:
            self._leave()

    async def load(self, directory: Path, name: str) -> None:
        raise EngineError(f"all weights are published here, and {name} would be an adapter")

    # -- the rest is private

    def _leave(self) -> None:
        self._users -= 1
        self._grant()

    def _grant(self) -> None:
        while self._waiting and not self._swapping:
            wanted = next(iter(self._waiting))
            turns = [turn for turn in self._waiting[wanted] if not turn.done()]
            if turns and wanted != self._held:
                if not self._users:
                    self._swapping = True
                    self._background.start(self._swap(wanted), f"weights of {wanted}")
                return
            del self._waiting[wanted]
            for turn in turns:
                self._users += 1
                turn.set_result(None)

    async def _swap(self, wanted: Path) -> None:
        try:
            await self._bring(wanted, self._service.exclusively)
        except Exception as error:  # that of a rank ends the server, too
            for turn in self._waiting.pop(wanted, ()):
                if not turn.done():
                    turn.set_exception(error)
        finally:
            self._swapping = False
            self._grant()

    async def _bring(self, wanted: Path, exclusively: Exclusively) -> None:
        """Asks engines again that are away, until deadlines.engines has passed (GenerationLost)."""
        fleet = self._policy.fleet
        while not await exclusively(partial(self._publish, wanted)):
            self._policy.guard.check()
            await asyncio.sleep(fleet.policy.probe_seconds)

    async def _publish(self, wanted: Path) -> bool:
        """Whether an engine has them now. UsageError where they have gone while the request waited."""
        _demand(wanted)
        if wanted != self._named:
            self._step, self._named = self._step + 1, wanted
        self._held = None
        async with self._at_ranks(wanted):
            report = await self._updates.attempt(self._step)
        if report is None:
            return False
        self._policy.engines.log(f"{report.line()}: {wanted}")
        self._held = wanted
        return True

    async def _resync(self) -> None:
        held, fleet = self._held, self._policy.fleet
        stale = any(member.takes_weights for member in fleet.members(State.STALE))
        if held is None or not stale or self._swapping:
            return

        async def again() -> bool:
            if self._held != held:  # meanwhile
                return True
            async with self._at_ranks(held):
                return await self._updates.resync()

        if not await self._service.exclusively(again):
            await asyncio.sleep(fleet.policy.probe_seconds)

    @asynccontextmanager
    async def _at_ranks(self, wanted: Path) -> AsyncIterator[None]:
        """The ranks hold these weights inside the block."""
        if wanted == self._service.fresh:
            yield
            return
        await asyncio.to_thread(self._trainer.put_in, wanted)
        try:
            yield
        finally:
            await asyncio.to_thread(self._trainer.put_back)


def _demand(weights: Path) -> None:
    if not weights.is_dir():
        raise UsageError(GONE)


@asynccontextmanager
async def full_samplers(
    fleet: ProbedFleet, client: EngineClient, config: TrainConfig, *, sender: Trainer, trainer: ServedTrainer,
    service: Service, run: RunDirectory, log: Callable[[str], None],
) -> AsyncIterator[Samplers]:  # fmt: skip
    """Over engines that are this run's alone. sender: what sends weights, of the ranks of `trainer`."""
    # Lengths are those of a run's data, which there are none of; an engine that joins is checked by them.
    sampling = {"temperature": 1.0, "max_prompt_tokens": 1, "max_response_tokens": 1}
    config = config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update={"requests_per_engine": REQUESTS_PER_ENGINE}),
            "sampling": config.sampling.model_copy(update=sampling),
            "engines": config.engines.model_copy(update={"min_serving": 1}),
        }
    )
    lease = LeaseTerms(holder_of_this_process(run.run_id, run.name), config.engines.lease_seconds)
    engines = EngineSet(Fleet(), client, log=log)

    async def none_is_colocated(url: str, why: str) -> None:
        raise AssertionError(url, why)

    policy = PolicyEngines(
        config, Engines(fleet.endpoints.engines, fleet.infos, absent=fleet.absent), engines,
        OneVersion(Lineage(run.run_id, _attempt(run))), trainer=sender, lease=lease,
        hooks=EngineHooks(None, none_is_colocated, lambda error: log(str(error)), lambda: False),
    )  # fmt: skip
    published = PublishedWeights(policy, trainer, service, config.model.path)
    try:
        await published.start()
        yield Samplers(engines, policy.plane, published, deadline=config.deadlines.generate)
    finally:
        await policy.membership.close()
        await published.close()


def _attempt(run: RunDirectory) -> int:
    """Of this start of the server: a version of an earlier one names other weights."""
    file = run.path / "served" / "starts.json"
    attempt = 1 + (json.loads(file.read_text(encoding="utf-8"))["starts"] if file.exists() else 0)
    write_json_atomic(file, {"starts": attempt}, mode=0o600)
    return attempt
