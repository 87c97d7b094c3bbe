"""The Ray cluster: a local one of declared size, or an existing one whose nodes run the same rltool."""

from __future__ import annotations

import atexit
import logging
import os
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import rltool
from rltool.config.sections import RayConfig
from rltool.engines.launch.plan import Host
from rltool.errors import RltoolError, UsageError
from rltool.processes.environment import environment
from rltool.processes.leftovers import remove_abandoned, temporary_directory
from rltool.terminal import write_line
from rltool.training.cluster.devices import visible_gpus
from rltool.training.cluster.placement import PlacementPlan
from rltool.training.cluster.ray_calls import LOSS, Waiting
from rltool.training.cluster.ray_start import HeadWatch, RayWatch, children, end_children, start_ray, watched_processes

LOOPBACK = "127.0.0.1"
NICENESS = "RAY_worker_niceness"

_POLL_SECONDS = 0.5

_SOCKET = "session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
"""The longest name of a socket that Ray makes below its directory."""
_HOST_PORT = re.compile(r"(?P<host>[^:/\[\]]+|\[[^\]]+\]):(?P<port>\d+)")


class PlacementTimeout(RltoolError):
    """The cluster did not have the bundles in time. The message names what is missing."""


@contextmanager
def ray_cluster(
    config: RayConfig, plan: PlacementPlan, *, preflight: float, gpus: Sequence[int] = (), deadline: float = 300.0,
    while_waiting: Waiting = lambda _: None, logs: Path | None = None,
) -> Iterator[None]:  # fmt: skip
    """Connect to `config.address`, or start a local cluster with exactly the CPUs and GPUs that the plan asks for.

    gpus: of this host, those that a local cluster hands out; empty: as CUDA_VISIBLE_DEVICES has it, else the first. A
    local cluster ends with the block and is bound to loopback; a cluster that was there before is only left.
    logs: where those of a local one are kept if the block fails; else they go with it.
    deadline: seconds for a local one to start; preflight: for one with an address to take a connection;
    while_waiting(seconds so far): called meanwhile, what it raises gives the start up.
    """
    if config.address is not None:
        _connect(config.address, preflight)
        head = HeadWatch(ray.get_runtime_context().gcs_address)
        try:
            check_versions()
            yield
        finally:
            head.close()
            if LOSS.text is None:
                ray.shutdown()
            else:
                _leave_lost()
        return
    cpus = config.num_cpus or max(1.0, plan.total("CPU"))
    # Ray calls home by default; a training run must not.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with _ray_files(logs) as directory:
        # "local", or Ray would join the cluster that was last started on this host, alive or not.
        options = {
            "address": "local", "num_cpus": int(-(-cpus // 1)), "num_gpus": int(plan.total("GPU")),
            "_node_ip_address": LOOPBACK, "include_dashboard": False, "_temp_dir": str(directory), **_common(),
        }  # fmt: skip
        before = children()
        with _on_loopback(), _in_groups_of_their_own(), _without_unused_services(), environment(_variables(gpus)):
            start_ray(lambda: ray.init(**options), deadline, while_waiting, logs)
        watch = RayWatch(watched_processes(before))
        try:
            yield
        finally:
            watch.close()
            if LOSS.text is None:
                ray.shutdown()
            else:
                _leave_lost()
                ended = threading.Event()
                ended.set()
                end_children(before, ended)


@contextmanager
def _ray_files(logs: Path | None) -> Iterator[Path]:
    """A directory for a local Ray, which opens all that it makes to all users of the host: so it lies below one that
    they cannot enter. What killed runs have left of theirs is removed first."""
    remove_abandoned()
    with temporary_directory(len(_SOCKET)) as directory:
        try:
            yield directory
        except Exception:
            if logs is not None:
                with suppress(OSError, shutil.Error):  # a full disk is no reason to hide why the run ends
                    shutil.copytree(directory / "session_latest" / "logs", logs, dirs_exist_ok=True)
            raise


def _leave_lost() -> None:
    """A Ray that has lost a process of its own: asked to shut down, it would wait for that a minute, and then end this
    process; not asked, its library crashes in the end of the interpreter. So there is none: the last line of `rltool`
    is printed by then."""

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(LOSS.kind.exit_code)

    atexit.register(leave)


def _variables(gpus: Sequence[int]) -> dict[str, str]:
    """For the processes of a local cluster. Ray counts GPUs, and hands out those that CUDA_VISIBLE_DEVICES lists. It
    also gives its workers a niceness of 15, which what they start inherits: beside other work on the host, managed
    engines would get next to no CPU."""
    seen = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {}
    return {NICENESS: os.environ.get(NICENESS, "0"), **seen}


@contextmanager
def _on_loopback() -> Iterator[None]:
    """A Ray that is started in this block listens on loopback alone.

    Ray's processes listen on the address of their node. On Linux, ray.init replaces a loopback address that it is given
    by the host's outer one, for others to join; on systems where clusters are not supported it leaves it, and this is
    the switch between the two. Ray reads it from the environment when it is imported, here and in its processes.
    """
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        with environment({ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}):
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _in_groups_of_their_own() -> Iterator[None]:
    """Ray's processes that are started in this block, and what they start, are in other process groups than this one.

    `timeout`, and a shell that ends its jobs, send SIGTERM to the whole group. That is for the driver, which saves and
    takes the run apart with Ray's help; of Ray's own processes SIGTERM would end them under it.
    """
    from ray._private import services

    before = services.ConsolePopen
    services.ConsolePopen = partial(before, process_group=0)  # pyright: ignore
    try:
        yield
    finally:
        services.ConsolePopen = before  # pyright: ignore


UNUSED_SERVICES = ("start_monitor", "start_log_monitor", "start_api_server")
"""Of ray._private.node.Node, each a Python process: the autoscaler, of one node; the relay of workers' output to the
driver, which _common turns off; the dashboard, which include_dashboard=False starts with fewer pages."""


@contextmanager
def _without_unused_services() -> Iterator[None]:
    """A Ray that is started in this block has no UNUSED_SERVICES: 2 of its 6 s of CPU. ray.init has no options for
    that. What another version of Ray does not have is left out."""
    from ray._private.node import Node

    before = {name: getattr(Node, name) for name in UNUSED_SERVICES if hasattr(Node, name)}
    for name in before:
        setattr(Node, name, lambda _node, **_options: None)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(Node, name, method)


def available_gpus(config: RayConfig, preflight: float) -> tuple[float, str]:
    """GPUs where the ranks of a run would be, in use or not, and whose they are.

    With an address those that the nodes of that cluster declare; this host may have none. UsageError if it cannot be
    reached. Without one a local cluster will be started: those that torch sees here.
    """
    if config.address is None:
        return visible_gpus(), "this host"
    _connect(config.address, preflight)
    try:
        return ray.cluster_resources().get("GPU", 0.0), f"the cluster at {config.address}"
    finally:
        ray.shutdown()


def cluster_hosts(config: RayConfig, preflight: float) -> list[Host]:
    """The nodes of the cluster at ray.address, with the GPUs that each declares, in use or not. UsageError if it cannot
    be reached."""
    assert config.address is not None
    _connect(config.address, preflight)
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        return [
            Host(node["NodeID"], node["NodeManagerAddress"], tuple(range(int(node["Resources"].get("GPU", 0)))))
            for node in nodes
        ]
    finally:
        ray.shutdown()


def _common() -> dict[str, Any]:
    return {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": f"rltool-{os.getpid()}"}


def _connect(address: str, preflight: float) -> None:
    try:
        _knock(address, preflight)
        ray.init(address=address, **_common())
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"--ray-address {address}: cannot connect: {error}. Is it running there (`ray status`), and does a "
            f"firewall let host {socket.gethostname()} through? A cluster that demands a token wants it here too: set "
            "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH)"
        ) from error


def _knock(address: str, timeout: float) -> None:
    """OSError where nothing takes a TCP connection at HOST:PORT within `timeout` seconds (deadlines.preflight): a head
    node that is starting beside this command (docs/hosts.md) has so long.

    ray.init asks such an address again for minutes, with nothing but warnings of its C++ part. Of "auto" and of a Ray
    client's ray://HOST:PORT Ray itself soon reports that no server is there.
    """
    found = _HOST_PORT.fullmatch(address)
    if found is None:
        return
    host, port = found["host"].strip("[]"), int(found["port"])
    ends, reported = time.monotonic() + timeout, False
    while True:
        try:
            socket.create_connection((host, port), timeout=max(_POLL_SECONDS, ends - time.monotonic())).close()
            return
        except OverflowError as error:
            raise ValueError(f"{port} is no port") from error
        except OSError as error:
            if time.monotonic() + _POLL_SECONDS >= ends:
                raise
            if not reported:
                write_line(f"Ray at {address}: {error}; asked again for deadlines.preflight = {timeout:g} s")
                reported = True
        time.sleep(_POLL_SECONDS)


def check_versions() -> None:
    """Refuse nodes where another rltool is installed: actors would unpickle objects of classes that have changed."""

    @ray.remote(num_cpus=0)
    def version() -> str:
        try:
            import rltool as there
        except ImportError:
            return "none"
        return there.__version__

    wrong = []
    for node in ray.nodes():
        if node["Alive"]:
            strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            found = ray.get(version.options(scheduling_strategy=strategy).remote(), timeout=120)
            if found != rltool.__version__:
                wrong.append(f"{node['NodeManagerAddress']} has rltool {found}")
    if wrong:
        raise UsageError(
            f"every node of the cluster needs rltool {rltool.__version__}: {'; '.join(wrong)}; install it there with "
            f"pip install rltool=={rltool.__version__}"
        )


@contextmanager
def placed(
    plan: PlacementPlan, timeout: float, while_waiting: Waiting = lambda _: None
) -> Iterator[PlacementGroup | None]:
    """The plan's bundles, reserved; given back at the end of the block. Raises PlacementTimeout, and what while_waiting
    raises."""
    if not plan.bundles:
        yield None
        return
    group = placement_group([dict(bundle) for bundle in plan.bundles], strategy="PACK")
    try:
        started = time.monotonic()
        while not group.wait(min(_POLL_SECONDS, timeout)):
            waited = time.monotonic() - started
            if waited >= timeout:
                raise PlacementTimeout(_missing(plan.bundles, timeout))
            while_waiting(waited)
        yield group
    finally:
        if LOSS.text is None:
            remove_placement_group(group)


def _missing(bundles: Sequence[dict[str, float]], timeout: float) -> str:
    free, total = ray.available_resources(), ray.cluster_resources()
    lines = []
    for resource in sorted({name for bundle in bundles for name in bundle}):
        wanted = sum(bundle.get(resource, 0) for bundle in bundles)
        if wanted > free.get(resource, 0):
            lines.append(f"{resource}: {wanted:g} wanted, {free.get(resource, 0):g} free of {total.get(resource, 0):g}")
    what = "; ".join(lines) or "the resources are free, but not in pieces that hold the bundles"
    return (
        f"no placement for {len(bundles)} bundles within deadlines.start = {timeout:g} s: {what}. Free them, lower "
        "trainer.world_size, or use --ray-address of a larger cluster."
    )
