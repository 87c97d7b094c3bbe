"""Puts a run together: cluster, placement, trainer ranks, rollout manager, loop; and takes it apart in reverse."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

import rltool
from rltool.agents.gateway_process import GatewayPlace
from rltool.algorithms.controllers import Coefficients
from rltool.checkpoints.directory import latest_checkpoint, step_of, sweep
from rltool.engines.fleet.lease import holder_of_this_process
from rltool.engines.weight_version import Lineage
from rltool.errors import PartLost, UsageError
from rltool.processes.files import write_json_atomic
from rltool.processes.marks import TRAINER_ROLE, marking
from rltool.processes.run_directory import RunDirectory, attempt_of, open_run
from rltool.processes.run_lock import RunLock
from rltool.processes.state import remove_state, state_of_this_process, write_state
from rltool.processes.stop_run import end_left_behind
from rltool.processes.waiting import waiting
from rltool.rollout.serving.lease import LeaseTerms
from rltool.rollout.serving.restarts import EngineProcesses
from rltool.terminal import Console
from rltool.training.checkpointer import Checkpointer
from rltool.training.checks.exact import LayerSearch
from rltool.training.checks.preflight import (
    backends,
    describe_engines,
    describe_fleet,
    foreign_weights,
    model_facts,
    of_text,
)
from rltool.training.checks.weight_routes import describe_routes, idle_rules
from rltool.training.cluster.devices import describe_devices
from rltool.training.cluster.listening import beyond_loopback
from rltool.training.cluster.managed import ManagedEngines
from rltool.training.cluster.places import find_places, in_order
from rltool.training.cluster.ray_calls import Waiting
from rltool.training.cluster.ray_cluster import placed, ray_cluster
from rltool.training.console import LoggedConsole
from rltool.training.hf_exports import HfExports
from rltool.training.loop import Loop, Parts, Progress
from rltool.training.manager.rollout_engines import Engines, Syncing
from rltool.training.manager.rollouts import RolloutFiles, Rollouts
from rltool.training.observe.live_metrics import LiveMetrics
from rltool.training.observe.loggers import open_loggers
from rltool.training.observe.metrics import MetricsWriter
from rltool.training.observe.report import run_facts
from rltool.training.observe.sample_log import SampleLog
from rltool.training.prepare import Prepared, resume_point, with_engines
from rltool.training.ranks.profiling import StepRecording
from rltool.training.ranks.trainer_group import TrainerGroup
from rltool.training.run_server import run_server
from rltool.training.sources import BatchSource, SupervisedData
from rltool.training.stopping import StopRequested, StopSignal
from rltool.weights.transport import transport


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    checkpoint: the newest of this run, None where there is none. parameter_hash: sha256 over all parameters of all
    ranks, comparable between runs of one parallel layout; None where this command trained nothing, or the training on a
    rollout was dropped. stopped_by: the signal that ended it before its last step. gave_up: between two optimizer
    steps of one rollout, after steps that are saved.
    """

    step: int
    checkpoint: Path | None
    parameter_hash: str | None
    exit_code: int
    stopped_by: str | None = None
    gave_up: bool = False


def execute(prepared: Prepared, lock: RunLock, console: Console, stop: StopSignal) -> Outcome:
    """Start everything, train, and take everything apart again, in any case. UsageError if another process has the
    run."""
    run = open_run(prepared.run.name, create=True, root=prepared.run.path.parent)
    lock.take()
    if prepared.restarted and prepared.resume_from is None:
        run.metrics_file.unlink(missing_ok=True)  # of steps that nothing was saved of
    elif prepared.resume_from is None:
        resume_point(run, resume=False)  # once more: until now the run may have been another's
    try:
        return _train(prepared, run, console, stop)
    except StopRequested:  # before the first step of this command: there is nothing of it to save
        if prepared.resume_from is None:
            run.metrics_file.unlink(missing_ok=True)  # so that the run still counts as unused
        step = step_of(prepared.resume_from) if prepared.resume_from is not None else 0
        return Outcome(step, prepared.resume_from, None, stop.exit_code, stop.name)


def _train(prepared: Prepared, run: RunDirectory, console: Console, stop: StopSignal) -> Outcome:
    config = prepared.config
    log = run.new_log("train")
    log_dir = log.parent
    console = LoggedConsole(console, log)
    settings = {
        "rltool": rltool.__version__,
        "config": config.shown(),
        "origins": prepared.loaded.origins,
    }
    write_json_atomic(run.config_file, settings)
    with ExitStack() as stack:
        state = state_of_this_process(TRAINER_ROLE, argv=sys.argv, log=log).model_copy(update={"gpus": prepared.gpus})
        write_state(run, state)
        stack.callback(remove_state, run, state)
        stack.enter_context(marking(run, state))
        end_left_behind(run, report=console.print)
        console.print(f"placement: {prepared.plan.describe()}")
        for line in prepared.plan.memory:
            console.log_line(line)
        if prepared.gpus:
            console.log_line(f"GPUs of this host: {','.join(map(str, prepared.gpus))}")
        if prepared.fleet is not None:
            _describe(prepared, run, console)
        sends = _hosts_rendezvous(prepared) or prepared.expected is not None
        for line in beyond_loopback(config, prepared.plan.device, sends=sends):
            console.print(f"open to the network: {line}", style="yellow")
        stop.consequence = "the start was cancelled; nothing was trained, and no checkpoint is written"
        look = stop.raise_if_requested
        deadlines = config.deadlines
        with waiting(f"starting Ray (deadlines.start = {deadlines.start:g} s)", console.log_line):
            stack.enter_context(
                ray_cluster(
                    config.ray, prepared.plan, gpus=prepared.gpus, deadline=deadlines.start,
                    preflight=deadlines.preflight, while_waiting=look, logs=log_dir / "ray",
                )
            )
        stop.arm()
        with waiting(f"placing the ranks (deadlines.start = {deadlines.start:g} s)", console.log_line):
            group = stack.enter_context(placed(prepared.plan, deadlines.start, look))
            places = find_places(
                config.ray, group, prepared.plan.bundles, deadlines.start, look, shared=prepared.plan.shares_gpus
            )
        managed = None
        if prepared.expected is not None and group is not None:
            managed = ManagedEngines(config, run, prepared.plan, group, places, log_dir, console)
            stack.callback(managed.close)
            if prepared.plan.starts_beside:
                _begin(managed, console, look)
        ranks_at = in_order([place for place in places if place.bundle < len(prepared.plan.trainer)])
        order = [place.bundle for place in ranks_at]
        trainer = TrainerGroup(config, prepared.plan, group, log_dir, order=order)
        ranks = f"{config.trainer.world_size} rank{'s' if config.trainer.world_size > 1 else ''}"
        with waiting(
            f"building the model on {ranks} (trainer.rendezvous_timeout = {config.trainer.rendezvous_timeout:g} s)",
            console.log_line,
        ):
            trainer.start(config.policy_optimizer_steps, look)
        stack.push(_closing(trainer))
        devices = describe_devices(prepared.plan.device, trainer.devices)
        console.log_line(f"trainer: {devices}")
        write_json_atomic(run.config_file, {**settings, "facts": run_facts(config, devices, prepared.fleet)})
        from_where = prepared.resume_from or config.model.path
        with waiting(f"loading {from_where} (deadlines.step = {deadlines.step:g} s)", console.log_line):
            loaded = _load(prepared, run, trainer, attempt_of(log), look)
        progress, lineage = loaded.progress, loaded.lineage
        if managed is not None:
            # The order: engines that take what they find free on the trainer's GPUs (a fraction, as they measure it
            # when they start) come after it has left. All others load beside it, and while they do it compiles its
            # kernels, which needs its parameters, and allocates the host's memory that these will wait in.
            if prepared.plan.starts_beside:
                trainer.warm_up(look)
            if prepared.plan.shares_gpus:
                trainer.offload(look)
            if not prepared.plan.starts_beside:
                _begin(managed, console, look)
            with waiting(
                "waiting for the engines (engines.groups: ready_timeout)", console.log_line,
                still=lambda: managed.starting,
            ):  # fmt: skip
                prepared = with_engines(prepared, managed.wait(look))
            config = prepared.config
            _describe(prepared, run, console)
        with waiting(f"reading the data (deadlines.step = {config.deadlines.step:g} s)", console.log_line):
            processes = managed.handles() if managed is not None else None
            engines = _rollouts(prepared, run, trainer, lineage, log_dir, console, stop, stack, processes)
            source = _source(prepared, engines)
        if isinstance(source, SupervisedData):
            console.print(source.summary)
        live = LiveMetrics(run.name)
        if engines is not None:
            stack.enter_context(run_server(run, state, engines, live=live, port=config.monitor.endpoint_port))
        if prepared.resume_from is not None:
            source.load_state_dict(loaded.source, prepared.resume_from)
        loggers = [live, *open_loggers(config, run, first_step=progress.step)]
        writer = MetricsWriter(run.metrics_file, console=console, loggers=loggers, first_step=progress.step)
        stack.callback(writer.close)

        def describe(at: Progress) -> tuple[dict[str, Any], Any]:
            kept = source.state_dict(at.step)
            facts = {
                "step": at.step,
                "weight_version": str(lineage.version(at.step)),
                "lineage": lineage.to_json(),
                "source": kept.state,
                "coefficients": asdict(at.coefficients) if at.coefficients else None,
            }
            return facts | {"config": config.shown()}, kept.files

        sweep(run.checkpoints_dir)
        checkpoints = Checkpointer(
            config.checkpoint,
            trainer,
            run.checkpoints_dir,
            describe,
            console,
            resumed_from=progress.step if progress.saved else None,
        )
        recording = StepRecording(config.monitor, trainer, run.path / "profile", writer.log)
        stack.callback(recording.close)
        samples = SampleLog(run.samples_dir)
        stops = config.checkpoint.on_save_failure == "stop"
        exports = HfExports(trainer, run, console.log_line, stops=stops)
        layers = LayerSearch(trainer, run.path / "exact", console.log_line)
        parts = Parts(trainer, source, engines, checkpoints, exports, writer, stop, samples, layers)
        loop = Loop(config, parts, progress, stops_on_difference=prepared.replay is None, around_step=recording.around)
        stop.consequence = "what is in progress comes to its end first; no step is done, so no checkpoint is written"
        done = loop.run()
        if stop.requested and done.step == progress.step:
            raise StopRequested
        stopped_by = stop.name if stop.requested and done.step < config.steps else None
        newest = latest_checkpoint(run.checkpoints_dir)
        if loop.between_updates:
            if config.checkpoint.save_hf_at_end:
                console.log_line("no export (checkpoint.save_hf_at_end): the ranks hold half a step; use convert-ckpt")
            return Outcome(done.step, newest, None, stop.exit_code, stopped_by, gave_up=True)
        if config.checkpoint.save_hf_at_end:
            exports.save(done.step, final=True)
        return Outcome(done.step, newest, trainer.parameter_hash(), stop.exit_code, stopped_by)


def _begin(managed: ManagedEngines, console: LoggedConsole, look: Waiting) -> None:
    with waiting("starting the engines", console.log_line):
        managed.start(look)


def _describe(prepared: Prepared, run: RunDirectory, console: LoggedConsole) -> None:
    """The engines that were found, how weights reach them, and of which other runs they hold weights."""
    assert prepared.fleet is not None
    for line in describe_engines(prepared.fleet, prepared.config):
        console.print(line)
    for name, engines in prepared.models.items():
        console.log_line(f"model {name}: {len(engines.endpoints)} engines, weights not updated")
    if prepared.evaluation is not None:
        console.log_line(f"engines for evaluation alone: {describe_fleet(prepared.evaluation)}")
    if prepared.config.weights.engines:
        console.log_line(describe_routes(prepared.fleets, prepared.config, prepared.device))
    warnings = [line for fleet in prepared.fleets for line in foreign_weights(fleet, run.run_id)]
    for line in [*warnings, *idle_rules(prepared.fleets, prepared.config.weights)]:
        console.print(line, style="yellow")


def _hosts_rendezvous(prepared: Prepared) -> bool:
    """Whether engines connect to a port of the trainer's to receive weights."""
    return any(
        transport(fleet.infos[url].dialect, backend).listens
        for fleet in prepared.fleets
        for url, backend in backends(fleet, prepared.config, prepared.device).items()
    )


def _closing(trainer: TrainerGroup) -> Callable[..., None]:
    """Closes the ranks, which waits for a save in flight. Not where one of them died, hangs or raised an unexpected
    error, for the others may wait for it; where the start was cancelled; and not after a second Ctrl-C: they end
    with Ray then. What the driver failed of costs no save."""

    def close(kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or (issubclass(kind, Exception) and not issubclass(kind, (PartLost, RayError))):
            trainer.close()

    return close


@dataclass(frozen=True)
class _Loaded:
    """progress: of the loop; lineage: names of the weights from here on; source: the data's state in the checkpoint."""

    progress: Progress
    lineage: Lineage
    source: dict[str, Any]


def _load(
    prepared: Prepared, run: RunDirectory, trainer: TrainerGroup, attempt: int, while_waiting: Waiting
) -> _Loaded:
    """Weights from the model or the checkpoint."""
    adapters = prepared.config.weights.lora_sync == "adapter"
    if prepared.resume_from is None:
        trainer.load_weights(while_waiting)
        return _Loaded(Progress(0), Lineage(run.run_id, attempt, adapters=adapters), {})
    extra = trainer.load_checkpoint(prepared.resume_from, while_waiting)
    if "lineage" not in extra:
        raise UsageError(
            f"{prepared.resume_from} was written by an earlier release, whose data position this one cannot go on "
            f"from: start a new run from its weights (--set model.path={prepared.resume_from} --run NEW)"
        )
    kept = extra.get("coefficients")
    return _Loaded(
        Progress(extra["step"], saved=True, coefficients=Coefficients(**kept) if kept else None),
        replace(Lineage.from_json(extra["lineage"]).resumed(attempt, extra["step"]), adapters=adapters),
        extra["source"],
    )


def _rollouts(
    prepared: Prepared,
    run: RunDirectory,
    trainer: TrainerGroup,
    lineage: Lineage,
    log_dir: Path,
    console: Console,
    stop: StopSignal,
    stack: ExitStack,
    processes: EngineProcesses | None,
) -> Rollouts | None:
    config = prepared.config
    if prepared.fleet is None:
        return None
    found = prepared.fleet.endpoints
    engines = Engines(
        found.engines, prepared.fleet.infos, router=found.data_endpoint(), models=prepared.models, processes=processes,
        absent=prepared.fleet.absent, evaluation=_evaluation_engines(prepared),
    )  # fmt: skip
    # A directory of this run alone: what else lies in a shared one is other runs'.
    directory = (config.weights.disk_dir / lineage.run) if config.weights.disk_dir else run.path / "weights"
    lease = LeaseTerms(holder_of_this_process(run.run_id, run.name), config.engines.lease_seconds, prepared.steal)
    vocab_size = of_text(model_facts(config.model.path))["vocab_size"]
    syncing = Syncing(trainer.handles(), lineage, prepared.device, directory, lease, vocab_size)
    files = RolloutFiles(
        rollouts=run.rollouts_dir if config.rollout.dump else None, evals=run.evals_dir,
        log=log_dir / "rollout_manager.log", endpoints=run.endpoints_file,
        gateway=GatewayPlace(run.sessions_dir, run.gateway_key_file, log_dir / "gateway.log"),
    )  # fmt: skip
    side = Rollouts(config, engines, syncing, files, console=console, stop=stop)
    stack.callback(side.close)
    side.start()
    trainer.take_gpus = side.free_gpus
    return side


def _evaluation_engines(prepared: Prepared) -> Engines | None:
    found = prepared.evaluation
    if found is None:
        return None
    return Engines(found.endpoints.engines, found.infos, router=found.endpoints.data_endpoint(), absent=found.absent)


def _source(prepared: Prepared, engines: Rollouts | None) -> BatchSource:
    config = prepared.config
    if prepared.replay is not None:
        return prepared.replay.source(config, ray.put)
    if config.algorithm.loss == "sft":
        return SupervisedData(config)
    assert engines is not None
    return engines
