"""The driver's handle to the rollout manager: the driver's calls, each with a deadline that has a name."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import ray

from rltool.agents.gateway_process import GatewayPlace
from rltool.config.train import TrainConfig
from rltool.engines.endpoints import EngineEndpoint, files_in
from rltool.engines.fleet.fleet import State
from rltool.engines.run_client import COMPARE_SECONDS, ComparedWeights, EngineStatus, RunStatus
from rltool.engines.weight_version import Lineage
from rltool.errors import RltoolError, UsageError
from rltool.processes.files import writing
from rltool.rollout.measure.dump import about_model, write_dump
from rltool.rollout.measure.evaluation import Evaluated, write_evaluated
from rltool.rollout.snapshot import SourceState
from rltool.terminal import Console
from rltool.training.cluster.places import this_node
from rltool.training.cluster.ray_calls import Waiting, get_all, is_ready
from rltool.training.manager.actor import RolloutActor
from rltool.training.manager.batch import Rollout
from rltool.training.manager.endpoints_follow import EndpointsFollow
from rltool.training.manager.rollout_engines import Engines, Syncing
from rltool.training.observe.metrics import progress_line
from rltool.training.sources import SourcedBatch
from rltool.training.stopping import StopRequested, StopSignal
from rltool.weights.sync_report import SyncReport

MANAGER = "the rollout manager"
PROGRESS_SECONDS = 15.0
"""Seconds between progress lines of a long rollout."""
INTERRUPT_SECONDS = 30.0
"""For the rollout manager to abort its requests; engines that hang are not waited for longer than it does itself."""

SIGN_SECONDS = 2.0
"""Between two signs of life for the rollout manager, which may outlive its driver and then gives the engines back."""


@dataclass(frozen=True)
class RolloutFiles:
    """Where the rollout side of a run writes. rollouts: every rollout, or None; evals: for eval.dump; log: the rollout
    manager's, or None; endpoints: the run's own, which follows the fleet; gateway: that of a run with agents."""

    rollouts: Path | None
    evals: Path
    log: Path | None
    endpoints: Path
    gateway: GatewayPlace


class Rollouts:
    """What the loop sees of engines, router and rollout manager."""

    def __init__(
        self, config: TrainConfig, engines: Engines, syncing: Syncing, files: RolloutFiles, *, console: Console,
        stop: StopSignal,
    ) -> None:  # fmt: skip
        self.config, self.console, self._stop, self._dump_dir = config, console, stop, files.rollouts
        self._lineage: Lineage = syncing.lineage
        self._synced = 0
        self._evals_dir = files.evals
        self._started = False
        self._ended = threading.Event()
        self._signs = threading.Thread(target=self._give_signs, name="signs-of-life", daemon=True)
        self._evaluation: tuple[int, Any] | None = None  # the one that runs: step of its weights, Ray's reference
        self._shares_gpus, self._has_gpus = config.engines.shares_gpus, True
        self._given = [str(file.absolute()) for file in files_in(config.engines.external)]
        self._follow = EndpointsFollow(
            files.endpoints, engines.endpoints, data_url=engines.router.url if engines.router else None,
            log=console.print,
        )  # fmt: skip
        # It waits for sockets: no GPU, no CPU, and a place outside of the placement group, on the driver's host: key
        # files, data and the run directory are where the command was given.
        create = RolloutActor.options(scheduling_strategy=this_node()).remote
        self._actor: Any = create(  # whose methods Ray's types do not have
            config, engines, syncing=syncing, log_file=files.log, gateway=files.gateway, cwd=Path.cwd()
        )

    @property
    def weight_version(self) -> str:
        """Of the weights that the engines were given last."""
        return str(self._lineage.version(self._synced))

    def start(self) -> None:
        """Read the data, open connections. A signal ends it with StopRequested."""
        started = self._actor.start.remote()
        self._signs.start()
        summary = self._call(
            started, self.config.deadlines.step, "deadlines.step", while_waiting=self._stop.raise_if_requested
        )
        self._started = True
        self.console.print(summary)

    # -- the loop's calls

    def sync_weights(self, step: int) -> dict[str, float]:
        """Bring the engines to the weights after `step` training steps. Returns weights/* and the seconds of it:
        time/sync_seconds, and of colocated engines time/offload_seconds beside it and time/wake_seconds within it.

        A sync is not interrupted: a stop waits for it, and its own deadlines end it. While there is no engine to sync,
        a signal ends the wait.
        """
        started = time.perf_counter()
        self._has_gpus = True  # however it ends: the ranks' memory may be away
        report = self._sync(self._actor.sync_weights.remote(step))
        self._synced = step
        newly_connected = report.difference is not None and self.config.rollout.max_staleness == 0
        if report.failed or newly_connected:
            self.console.print(report.line())
        self._show_events()
        turns = {"time/offload_seconds": report.offload, "time/wake_seconds": report.wake} if self._shares_gpus else {}
        seconds = time.perf_counter() - started - report.offload
        return {**report.metrics(), **turns, "time/sync_seconds": seconds}

    def next_batch(self, step: int) -> SourcedBatch:
        """The batch of `step`, sampled from weights at most rollout.max_staleness training steps old. A signal ends
        it."""
        self._take_gpus()
        rollout: Rollout = self._interruptible(
            self._actor.next_batch.remote(step), 1.1 * self.config.deadlines.step, "deadlines.step"
        )
        self._show_events()
        if self._dump_dir is not None:
            with writing("the rollout (rollout.dump)", self._dump_dir):
                write_dump(
                    self._dump_dir,
                    step=step,
                    seed=self.config.seed,
                    samples=rollout.samples,
                    info={"metrics": rollout.metrics, **about_model(self.config)},
                )
        return SourcedBatch(rollout.batch, rollout.metrics, rollout.versions, rollout.kept)

    def start_evaluation(self, step: int) -> None:
        """Of every set, with the weights after `step` training steps, which the engines hold; those for evaluation
        alone get them now, while the ranks are idle."""
        self._take_gpus()
        if self.config.eval.engines:
            self._sync(self._actor.hold_evaluation_engines.remote(step))
            self._show_events()
        self._evaluation = step, self._actor.evaluate.remote(with_samples=self.config.eval.dump)

    def evaluated(self, *, wait: bool) -> dict[str, float] | None:
        """Metrics of every set once the evaluation has ended; None: it still runs. A signal ends the wait. Its samples
        are written where eval.dump is set, under the step of the weights that it began with."""
        assert self._evaluation is not None, "start_evaluation comes first"
        step, ref = self._evaluation
        if not wait and not is_ready(ref):
            return None
        self._evaluation = None
        found: Evaluated = self._interruptible(ref, 1.1 * self.config.deadlines.step, "deadlines.step")
        with writing("the evaluation's samples (eval.dump)", self._evals_dir):
            write_evaluated(self._evals_dir, found, self.config, step=step)
        return found.metrics

    def free_gpus(self) -> dict[str, float]:
        """Colocated engines leave their GPUs to the trainer, until weights are synced next. Called before what the
        trainer needs its memory for; those that have GPUs of their own keep them. Returns time/sleep_seconds and
        time/onload_seconds where there was something to do."""
        if self._shares_gpus and self._has_gpus:
            started, deadlines = time.perf_counter(), self.config.deadlines
            loading = max(group.ready_timeout for group in self.config.engines.groups)
            seconds = 4 * deadlines.sync + loading + deadlines.step
            name = "deadlines.sync, ready_timeout and deadlines.step"
            onload: float = self._call(self._actor.free_gpus.remote(), seconds, name)
            self._has_gpus = False
            self._show_events()
            asleep = time.perf_counter() - started - onload
            return {"time/sleep_seconds": asleep, "time/onload_seconds": onload}
        return {}

    def state_dict(self, done: int) -> SourceState:
        return self._call(self._actor.state_dict.remote(done), self.config.deadlines.close, "deadlines.close")

    def load_state_dict(self, state: dict[str, Any], directory: Path | None) -> None:
        self._call(self._actor.load_state_dict.remote(state, directory), self.config.deadlines.close, "deadlines.close")

    # -- a person's requests (training.run_server.RunControl), from threads of its own

    def status(self) -> RunStatus:
        more = {"steps": self.config.steps, "endpoints_files": self._given}
        return cast(RunStatus, {**self._manager_status(), **more})

    def engines(self) -> list[EngineStatus]:
        return self._manager_status()["engines"]

    def all_engines(self) -> tuple[EngineEndpoint, ...]:
        return self._call(self._actor.all_engines.remote(), self.config.deadlines.preflight, "deadlines.preflight")

    def present_engines(self) -> tuple[EngineEndpoint, ...]:
        deadline = self.config.deadlines.preflight
        return self._call(self._actor.present_engines.remote(), deadline, "deadlines.preflight")

    def add_engine(self, engine: EngineEndpoint) -> EngineStatus:
        self._refuse_change()
        key_file = engine.key_file or self.config.engines.api_key_file
        endpoint = engine.model_copy(update={"url": engine.url.rstrip("/"), "key_file": key_file})
        return self._change_engines(self._actor.add_engine.remote(endpoint))

    def remove_engine(self, url: str) -> EngineStatus:
        self._refuse_change()
        return self._change_engines(self._actor.remove_engine.remote(url.rstrip("/")))

    def compare_weights(self, urls: Sequence[str]) -> ComparedWeights:
        return self._call(self._actor.compare_weights.remote(urls), COMPARE_SECONDS, "the comparison of weights")

    def close(self) -> None:
        """Leave the engines serving: resumed, and out of their transfer groups. What fails here is reported, not
        raised."""
        if self._started:
            self._leave()
        self._ended.set()  # before Ray ends: a call after that would start another
        if self._signs.is_alive():
            self._signs.join()

    # -- the rest is private

    def _leave(self) -> None:
        try:
            for line in self._call(self._actor.close.remote(), self.config.deadlines.close, "deadlines.close"):
                self.console.print(f"leaving {line}", style="yellow")
        except RltoolError as error:
            self.console.print(f"closing the rollout manager: {error}", style="yellow")
        if self._evaluation is not None:
            step, ref = self._evaluation
            self.console.print(f"the evaluation of step {step} was dropped: the run ended first")
            self._drop(ref, self.config.deadlines.close, "deadlines.close")

    def _give_signs(self) -> None:
        """One at a time, in a thread of its own: the main one may save, or wait for ranks, for minutes."""
        sign: Any = None
        while not self._ended.wait(SIGN_SECONDS):
            with contextlib.suppress(Exception):  # of a manager that has died: the main thread says so
                if sign is not None and is_ready(sign):
                    said, sign = sign, None
                    ray.get(said)  # Ray prints a failure that is not read
                if sign is None:
                    sign = self._actor.driver_is_there.remote()

    def _refuse_change(self) -> None:
        if self._shares_gpus:
            raise UsageError(
                'engines join and leave a run whose engines have GPUs of their own; with engines.mode = "colocate" '
                "they are on the trainer's: change engines.groups, and go on with --resume"
            )

    def _take_gpus(self) -> None:
        """Engines that sleep have lost their weights: they wake up in a sync, of the weights that they had."""
        if self._shares_gpus and not self._has_gpus:
            self.sync_weights(self._synced)

    def _sync(self, ref: Any) -> SyncReport:
        """Until a sync has ended. A signal interrupts the rollouts meanwhile, once."""
        deadlines, logged = self.config.deadlines, False

        def look(_: float) -> None:
            nonlocal logged
            if self._stop.requested is not None and not logged:
                logged = True
                self._call(self._actor.interrupt.remote(), INTERRUPT_SECONDS, "interrupting the rollout")

        seconds = 20 * deadlines.sync + deadlines.engines
        return self._call(ref, seconds, "deadlines.sync", while_waiting=look)

    def _call(self, ref: Any, deadline: float, name: str, while_waiting: Waiting | None = None) -> Any:
        return get_all([ref], deadline, name, who=[MANAGER], while_waiting=while_waiting)[0]

    def _drop(self, ref: Any, deadline: float, name: str) -> None:
        """A call that was cut off. Its exception is retrieved here; unread, Ray would print it as a failure."""
        with contextlib.suppress(Exception):
            self._call(ref, deadline, name)

    def _change_engines(self, ref: Any) -> EngineStatus:
        row = self._call(ref, self.config.deadlines.preflight, "deadlines.preflight")
        self._follow_fleet()
        return row

    def _follow_fleet(self) -> None:
        self._follow.follow(self.present_engines)

    def _manager_status(self) -> dict[str, Any]:
        return self._call(self._actor.status.remote(), self.config.deadlines.preflight, "deadlines.preflight")

    def _interruptible(self, ref: Any, deadline: float, name: str) -> Any:
        """A wait whose loss costs nothing: a signal aborts the requests at the engines and ends it with
        StopRequested."""
        shown = time.monotonic()

        def look(waited: float) -> None:
            nonlocal shown
            self._stop.raise_if_requested()
            if time.monotonic() - shown < PROGRESS_SECONDS:
                return
            shown = time.monotonic()
            status, needed = self._manager_status(), self.config.rollout.prompts_per_step
            ready, running = (status["groups"][name] for name in ("ready", "running"))
            serving = sum(engine.get("state") == State.READY.value for engine in status["engines"])
            line = progress_line(waited, ready=ready, needed=needed, running=running, serving=serving)
            self.console.print(line)
            self._show_events()

        try:
            return self._call(ref, deadline, name, while_waiting=look)
        except StopRequested:
            with contextlib.suppress(RltoolError):  # the manager may be what has died
                self._call(self._actor.interrupt.remote(), INTERRUPT_SECONDS, "interrupting the rollout")
                self._drop(ref, INTERRUPT_SECONDS, "interrupting the rollout")
            raise

    def _show_events(self) -> None:
        lines = self._call(self._actor.events.remote(), self.config.deadlines.preflight, "deadlines.preflight")
        for line in lines:
            self.console.print(line)
        if lines:  # an engine that was asked for may have answered at last
            self._follow_fleet()
