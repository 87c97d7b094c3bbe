"""Every check that can be made of a run before anything starts, and what they find."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rltool.algorithms.batch import Put
from rltool.checkpoints.directory import latest_checkpoint, step_of
from rltool.config.loader import Loaded
from rltool.config.serve import POLICY
from rltool.config.train import TrainConfig
from rltool.engines.endpoints import ModelEndpoints
from rltool.engines.launch.plan import EnginePlan
from rltool.errors import UsageError
from rltool.models.hub import with_local_models
from rltool.processes.run_directory import RunDirectory
from rltool.rollout.serving.side_model import SideEngines
from rltool.terminal import write_line
from rltool.training.checks.disaggregated import check_regular
from rltool.training.checks.preflight import (
    EnginesAway,
    ProbedFleet,
    check_fleet,
    check_leases,
    check_router,
    probe_fleet,
    resolve_endpoints,
    resolve_evaluation,
    with_difference_limit,
)
from rltool.training.checks.routing_replay import check_rollout_engines
from rltool.training.checks.side_models import check_all_there, probe_models, running_models
from rltool.training.checks.validate import (
    check_config,
    check_inputs,
    check_model,
    check_model_directory,
    check_own_functions,
    check_weights,
)
from rltool.training.cluster.devices import Device, choose_device, visible_gpus
from rltool.training.cluster.placement import PlacementPlan
from rltool.training.cluster.ray_cluster import available_gpus
from rltool.training.cluster.resources import plan_resources
from rltool.training.evaluations import is_due
from rltool.training.observe.loggers import check_loggers
from rltool.training.ranks.profiling import check_recording
from rltool.training.sources import BatchSource, FakeRollouts, RecordedRollouts
from rltool.weights.sleep import check_can_sleep

ASK_AGAIN_SECONDS = 15.0
"""Between two looks at engines that a run which was restarted by itself waits for."""


@dataclass(frozen=True)
class Replay:
    """Rollouts without engines. recorded: directory with a dump, of which `steps` are taken one after the other (None:
    each under its own number), and of each step this share of its groups; None: synthetic samples, also written to
    `record` if given."""

    recorded: Path | None
    record: Path | None = None
    steps: tuple[int, ...] | None = None
    share: float = 1.0

    def source(self, config: TrainConfig, put: Put | None = None) -> BatchSource:
        """Raises UsageError when there is nothing to replay. put: as of samples_to_batch."""
        if self.recorded is None:
            return FakeRollouts(config, self.record)
        return RecordedRollouts(config, self.recorded, steps=self.steps, share=self.share, put=put)


@dataclass(frozen=True)
class Prepared:
    """A run that has passed every check and has started nothing.

    replay: where the rollouts come from in place of engines (debug train-only). resume_from: None where training begins
    with the model's weights. steal: engines that another run has leased are taken from it. restarted: see `prepare`.
    gpus: of this host, the ranks' and then those of managed engines; empty: none, or Ray decides. expected: of managed
    engines, which are not there yet, so fleet is None. evaluation: engines for evaluation alone. models: beside the
    policy, that run already. data: one line on the prompts that were read.
    """

    loaded: Loaded[TrainConfig]
    run: RunDirectory
    plan: PlacementPlan
    device: str
    fleet: ProbedFleet | None
    resume_from: Path | None
    replay: Replay | None = None
    steal: bool = False
    restarted: bool = False
    gpus: tuple[int, ...] = ()
    expected: EnginePlan | None = None
    evaluation: ProbedFleet | None = None
    models: Mapping[str, SideEngines] = field(default_factory=dict)
    data: str = ""

    @property
    def config(self) -> TrainConfig:
        return self.loaded.config

    @property
    def fleets(self) -> list[ProbedFleet]:
        """Of the policy: for rollouts, and for evaluation alone."""
        return [fleet for fleet in (self.fleet, self.evaluation) if fleet is not None]


def trainer_device(config: TrainConfig) -> Device:
    """cpu or cuda, as configured, or by what there is where the ranks will run: a cluster is asked only then, this host
    also where it is to be cuda. UsageError where there is no GPU, or there are too few."""
    if config.trainer.device == "cuda" and config.ray.address is None and visible_gpus() == 0:
        raise UsageError(
            'trainer.device = "cuda": torch sees no GPU on this host: is torch built for CUDA, and does nvidia-smi '
            'work? Otherwise leave it at "auto", set "cpu", or name a cluster with GPUs by --ray-address'
        )
    if config.trainer.device != "auto":
        return config.trainer.device
    gpus, where = available_gpus(config.ray, config.deadlines.preflight)
    return choose_device(ranks=config.trainer.world_size, gpus=gpus, where=where)


def prepare(
    loaded: Loaded[TrainConfig],
    run: RunDirectory,
    *,
    resume: bool,
    replay: Replay | None = None,
    steal: bool = False,
    restarted: bool = False,
) -> Prepared:
    """Every check that can be made before anything starts. Raises UsageError; the run directory is not touched.

    restarted: this command went before, and a fault ended it: go on from what it has saved, or begin once more.
    """
    loaded = loaded._replace(config=with_local_models(loaded.config))
    config = loaded.config
    if replay is None:
        check_config(config)
    else:
        check_model_directory(config.model.path)
        check_own_functions(config.algorithm)
    resume_from = latest_checkpoint(run.checkpoints_dir) if restarted else resume_point(run, resume)
    check_model(config)
    check_weights(config)
    data = check_inputs(config) if replay is None else ""
    device = trainer_device(config)
    generates = replay is None and config.needs_engines
    managed = generates and config.engines.started_by_train
    fleet, models = None, {}
    if generates:
        beside = running_models(config)
        check_all_there(config, {*beside, *(group.model for group in config.engines.groups if managed)})
        models = probe_models(config, beside)
    find = partial(
        _fleet, config=config, device=device, goes_on=resume_from is not None or restarted,
        patience=config.deadlines.engines if restarted else 0.0,
        steal=steal, run_id=run.run_id if run.is_made else None,
    )  # fmt: skip
    if generates and not managed:
        fleet = find(resolve_endpoints(config), needed=config.engines.min_serving)
        check_rollout_engines(config, fleet.infos, router=fleet.endpoints.data_url)
        loaded = with_difference_limit(loaded, fleet)
    evaluation = None
    if generates and config.eval.engines:
        used = [engine.url for engine in fleet.endpoints.engines] if fleet is not None else []
        evaluation = find(resolve_evaluation(config, used), needed=1, given="eval.engines")
        check_regular(evaluation.endpoints.engines, "eval.engines")
    found = [one for one in (fleet, evaluation) if one is not None]
    others = [e for one in found for e in one.endpoints.engines]
    others += [e for side in models.values() for e in side.endpoints]
    resources = plan_resources(config, run, device, generates=generates, engines=others)
    if replay is not None:
        replay.source(config)
    check_loggers(config.monitor)
    check_recording(config, device, step_of(resume_from) if resume_from is not None else 0)
    return Prepared(
        loaded, run, resources.plan, device, fleet, resume_from, replay, steal, restarted, resources.gpus,
        resources.expected, evaluation, models, data,
    )  # fmt: skip


def _fleet(
    endpoints: ModelEndpoints, *, needed: int, given: str = "--rollout-external", config: TrainConfig, device: Device,
    goes_on: bool, patience: float, steal: bool, run_id: str | None,
) -> ProbedFleet:  # fmt: skip
    """Engines that are given by address, found and checked. run_id: None of a run that has none yet."""
    fleet = _probed(endpoints, needed if goes_on else None, config, given=given, patience=patience)
    check_fleet(fleet, config, device)
    if not steal:
        check_leases(fleet, run_id)
    check_router(fleet, config, may_be_down=goes_on)
    return fleet


def _probed(
    endpoints: ModelEndpoints, needed: int | None, config: TrainConfig, *, given: str, patience: float
) -> ProbedFleet:
    """At the first start an address that does not answer is a mistake; when the run goes on, it may be what ended it
    before: then `needed` of them are enough. patience: seconds for this many to answer."""
    deadlines, ends = config.deadlines, time.monotonic() + patience
    while True:
        try:
            return probe_fleet(endpoints, deadlines.preflight, given=given, needed=needed)
        except EnginesAway as error:
            if needed is None or time.monotonic() >= ends:
                raise
            write_line(f"too few engines answer, asked again for deadlines.engines = {patience:g} s: {error}")
            time.sleep(ASK_AGAIN_SECONDS)


def nothing_left(config: TrainConfig, run: RunDirectory) -> str | None:
    """Why a run that is resumed would end at once: its newest checkpoint is of the last step, and the exports that were
    due then are there. None where something is left to do."""
    newest = latest_checkpoint(run.checkpoints_dir)
    if newest is None or step_of(newest) < config.steps:
        return None
    done = step_of(newest)
    exports = config.checkpoint.save_hf_at_end or is_due(config.checkpoint.save_hf_every, done)
    if exports and not run.hf_export(done).exists():
        return None
    return f"run {run.name} is already at step {done} of {config.steps}; raise --steps to train on"


def resume_point(run: RunDirectory, resume: bool) -> Path | None:
    if not resume:
        if run.is_used:
            raise UsageError(
                f"run {run.name} already holds metrics or checkpoints ({run.path}): continue it with --resume, or "
                "choose another name with --run"
            )
        return None
    found = latest_checkpoint(run.checkpoints_dir)
    if found is None:
        raise UsageError(
            f"--resume: {run.checkpoints_dir} holds no complete checkpoint; leave --resume out to start from the "
            "beginning under another --run"
        )
    return found


def with_engines(prepared: Prepared, started: Mapping[str, ModelEndpoints]) -> Prepared:
    """The same once its managed engines serve: asked and compared as external ones are. Raises UsageError."""
    config = prepared.config
    fleet = probe_fleet(started[POLICY], config.deadlines.preflight, given="engines.groups")
    check_fleet(fleet, config, prepared.device)
    check_rollout_engines(config, fleet.infos, router=fleet.endpoints.data_url)
    beside = {name: entry for name, entry in started.items() if name != POLICY}
    models = {**prepared.models, **probe_models(config, beside)}
    if config.engines.shares_gpus:
        check_can_sleep(fleet.infos, prepared.device, updated=config.weights.lora_sync == "merged")
        for name in beside:
            from_disk = models[name].from_disk
            check_can_sleep(models[name].infos, prepared.device, updated=False, from_disk=from_disk)
    return replace(prepared, loaded=with_difference_limit(prepared.loaded, fleet), fleet=fleet, models=models)
