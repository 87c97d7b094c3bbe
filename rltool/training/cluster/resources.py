"""What a run takes of its hosts, decided before it starts: bundles, the GPUs of this host, the engines' places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rltool.config.train import TrainConfig
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.launch.plan import EnginePlan, Host
from rltool.engines.launch.start import check_processes
from rltool.errors import UsageError
from rltool.processes.gpus import visible_gpus
from rltool.processes.run_directory import RunDirectory
from rltool.training.cluster.devices import Device
from rltool.training.cluster.engine_memory import NOT_SET, engine_memory
from rltool.training.cluster.gpus import gpus_of_this_host
from rltool.training.cluster.managed import expected_plan
from rltool.training.cluster.placement import PlacementPlan, plan_placement
from rltool.training.cluster.ray_cluster import cluster_hosts


@dataclass(frozen=True)
class Resources:
    """gpus: of this host, in the order in which they are handed out; empty: none, or Ray decides. expected: the engines
    that the run starts, on hosts where nothing else runs."""

    plan: PlacementPlan
    gpus: tuple[int, ...] = ()
    expected: EnginePlan | None = None


def plan_resources(
    config: TrainConfig, run: RunDirectory, device: Device, *, generates: bool, engines: Sequence[EngineEndpoint]
) -> Resources:
    """engines: that run already, whose GPUs are theirs. UsageError for GPUs that are not to be had, and for models or
    interpreters of managed engines that are not as they must be."""
    managed = generates and config.engines.started_by_train
    on_cluster = config.ray.address is not None
    hosts = cluster_hosts(config.ray, config.deadlines.preflight) if on_cluster and managed else []
    per_host = max((len(host.gpus) for host in hosts), default=None)
    memory = engine_memory(config, _gpu_bytes(config)) if managed and device == "cuda" else NOT_SET
    plan = plan_placement(
        config, gpu=device == "cuda", generates=generates, gpus_per_host=per_host, memory=memory
    )
    gpus = _gpus(config, run, plan, engines)
    if not managed:
        return Resources(plan, gpus)
    if not on_cluster:
        here = gpus or tuple(range(int(plan.total("GPU"))))
        hosts = [Host("this host", gpus=here)]
    expected = expected_plan(config, plan, run, hosts)
    if not on_cluster:  # on a cluster each host looks for itself
        check_processes(expected.launches)
    return Resources(plan, gpus, expected)


def _gpu_bytes(config: TrainConfig) -> int | None:
    """Of the smallest GPU of this host that the run may get; None: not known, as on a cluster."""
    if config.ray.address is not None:
        return None
    wanted = config.trainer.gpus
    found = [gpu.memory_mib for gpu in visible_gpus() if not wanted or gpu.index in wanted]
    known = [mib for mib in found if mib is not None]
    return min(known) << 20 if known and len(known) == len(found) else None


def _gpus(
    config: TrainConfig, run: RunDirectory, plan: PlacementPlan, engines: Sequence[EngineEndpoint]
) -> tuple[int, ...]:
    wanted, needed = config.trainer.gpus, int(plan.total("GPU"))
    if config.ray.address is not None:
        if wanted:
            raise UsageError(
                f"--gpus {','.join(map(str, wanted))} and ray.address = {config.ray.address!r}: the GPUs of a cluster "
                "are handed out by its Ray; leave one of the two out"
            )
        return ()
    if not needed:
        if wanted:
            raise UsageError("--gpus (trainer.gpus) names GPUs, and trainer.device puts the run on the CPU")
        return ()
    return gpus_of_this_host(wanted, needed, engines, run.path.parent, shared=config.trainer.share_gpus)
