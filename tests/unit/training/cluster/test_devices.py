"""Which device the trainer's ranks run on, decided by what is there where they run."""

from __future__ import annotations

import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from rltool.config.sections import RayConfig
from rltool.config.train import TrainConfig
from rltool.errors import UsageError
from rltool.processes.ports import reserved_ports
from rltool.processes.run_directory import RunDirectory, open_run
from rltool.training import prepare
from rltool.training.cluster import ray_cluster as cluster
from rltool.training.cluster.devices import (
    RankDevice,
    check_rank_devices,
    check_shared_run,
    choose_device,
    describe_devices,
    device_of_rank,
)
from rltool.training.cluster.placement import plan_placement
from rltool.training.manager.actor import RolloutActor
from rltool.training.ranks.trainer_actor import TrainerActor


@pytest.mark.parametrize(("gpus", "device"), [(0, "cpu"), (4, "cuda"), (64.0, "cuda")])
def test_ranks_run_on_gpus_where_there_is_one_for_each(gpus, device):
    assert choose_device(ranks=4, gpus=gpus, where="this host") == device


def test_fewer_gpus_than_ranks_are_no_reason_to_train_on_cpus():
    with pytest.raises(
        UsageError, match=r'trainer\.device = "auto": this host has 3 GPUs, but trainer\.world_size = 4'
    ):
        choose_device(ranks=4, gpus=3, where="this host")


def test_a_rank_without_the_planned_gpu_is_named_with_its_host():
    found = [RankDevice(0, "a", "H200"), RankDevice(1, "b", None), RankDevice(2, "c", None)]
    with pytest.raises(UsageError, match="torch sees no GPU in rank 1 on host b, rank 2 on host c:"):
        check_rank_devices("cuda", found)
    check_rank_devices("cuda", found[:1])
    check_rank_devices("cpu", found)


def test_ranks_that_do_not_see_the_run_directory_are_named_with_their_hosts(tmp_path):
    run, other = open_run("x", create=True, root=tmp_path), open_run("x", create=True, root=tmp_path / "elsewhere")
    found = [device_of_rank(0, run), replace(device_of_rank(1, other), host="b"), RankDevice(2, "c", None)]
    with pytest.raises(UsageError, match=rf"{run.checkpoints_dir}, .* not seen by rank 1 on host b, rank 2 on host c:"):
        check_shared_run(run, found)
    check_shared_run(run, found[:1])
    assert device_of_rank(0, RunDirectory(tmp_path / "none")).run_id is None


def test_ranks_are_described_by_host_and_device():
    found = [RankDevice(0, "a", "H200"), RankDevice(1, "a", "H200"), RankDevice(2, "b", "H100")]
    assert describe_devices("cuda", found) == "2 ranks: H200 on a, 1 rank: H100 on b"
    assert describe_devices("cpu", found[:1]) == "1 rank: CPU on a"


def test_a_rank_reports_what_torch_sees_in_its_process(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert device_of_rank(3) == RankDevice(3, socket.gethostname(), None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "H200")
    assert device_of_rank(3).gpu == "H200"


def config(device: str, address: str | None) -> TrainConfig:
    return TrainConfig(model={"path": "m"}, trainer={"world_size": 2, "device": device}, ray={"address": address})


@pytest.fixture
def gpus_of_driver_and_cluster(monkeypatch):
    """f(here, there): GPUs that torch sees in this process, and that any cluster declares. Returns the calls made."""

    def have(here: int, there: float) -> list[str]:
        calls: list[str] = []
        monkeypatch.setattr(cluster, "_knock", lambda *_: None)
        monkeypatch.setattr(cluster, "visible_gpus", lambda: here)
        monkeypatch.setattr(prepare, "visible_gpus", lambda: here)
        monkeypatch.setattr(cluster.ray, "init", lambda **options: calls.append(f"init {options['address']}"))
        monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: {"CPU": 8.0} | ({"GPU": there} if there else {}))
        monkeypatch.setattr(cluster.ray, "shutdown", lambda: calls.append("shutdown"))
        return calls

    return have


@pytest.mark.parametrize(("here", "there", "device"), [(0, 8.0, "cuda"), (8, 0.0, "cpu")])
def test_with_an_address_the_cluster_decides_and_not_the_driver(gpus_of_driver_and_cluster, here, there, device):
    calls = gpus_of_driver_and_cluster(here, there)
    assert prepare.trainer_device(config("auto", "10.0.0.1:6379")) == device
    assert calls == ["init 10.0.0.1:6379", "shutdown"]


@pytest.mark.parametrize(("here", "device"), [(0, "cpu"), (2, "cuda")])
def test_without_an_address_this_host_decides_and_no_cluster_is_asked(gpus_of_driver_and_cluster, here, device):
    calls = gpus_of_driver_and_cluster(here, 8.0)
    assert prepare.trainer_device(config("auto", None)) == device and calls == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_configured_device_is_taken_and_nobody_is_asked(gpus_of_driver_and_cluster, device):
    calls = gpus_of_driver_and_cluster(0 if device == "cuda" else 8, 8.0)
    assert prepare.trainer_device(config(device, "10.0.0.1:6379")) == device and calls == []


def test_cuda_on_a_host_without_a_gpu_is_refused_before_anything_starts(gpus_of_driver_and_cluster):
    gpus_of_driver_and_cluster(0, 8.0)
    with pytest.raises(UsageError, match=r'trainer\.device = "cuda": torch sees no GPU on this host'):
        prepare.trainer_device(config("cuda", None))
    gpus_of_driver_and_cluster(1, 0.0)
    assert prepare.trainer_device(config("cuda", None)) == "cuda"


@pytest.mark.parametrize("address", ["auto", "ray://head.example:10001", "127.0.0.1:{listening}", "[::1]:x"])
def test_a_cluster_that_cannot_be_reached_is_named(monkeypatch, address):
    def refuse(**_):
        raise ConnectionError("nobody there")

    monkeypatch.setattr(cluster.ray, "init", refuse)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = address.format(listening=server.getsockname()[1])
        with pytest.raises(UsageError, match=f"--ray-address {re.escape(address)}: cannot connect: nobody there"):
            cluster.available_gpus(RayConfig(address=address), 30.0)


def a_free_port() -> int:
    with reserved_ports(1) as held:
        return held.ports[0]


def test_an_address_that_takes_no_connection_is_refused_without_ray_which_would_ask_for_minutes(monkeypatch, capsys):
    monkeypatch.setattr(cluster, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(cluster.ray, "init", lambda **_: pytest.fail("Ray was asked"))
    port = a_free_port()
    for ask in (cluster.available_gpus, cluster.cluster_hosts):
        with pytest.raises(UsageError, match=f"--ray-address 127.0.0.1:{port}: cannot connect: .*refused"):
            ask(RayConfig(address=f"127.0.0.1:{port}"), 0.1)
        assert capsys.readouterr().out.count("asked again for deadlines.preflight = 0.1 s") == 1


def test_a_head_node_that_is_starting_is_waited_for(monkeypatch):
    """As in the job of docs/hosts.md, which starts Ray and train one after the other."""
    port, servers = a_free_port(), []
    monkeypatch.setattr(cluster.time, "sleep", lambda _: servers.append(socket.create_server(("127.0.0.1", port))))
    monkeypatch.setattr(cluster.ray, "init", lambda **_: None)
    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: {"GPU": 2.0})
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)
    try:
        assert cluster.available_gpus(RayConfig(address=f"127.0.0.1:{port}"), 30.0)[0] == 2.0
        assert len(servers) == 1
    finally:
        for server in servers:
            server.close()


def test_the_plan_says_what_its_ranks_run_on():
    assert plan_placement(config("auto", None), gpu=True, generates=False).device == "cuda"
    assert plan_placement(config("auto", None), gpu=False, generates=False).device == "cpu"


def test_relative_paths_mean_the_drivers_directory_in_actors_and_ranks_elsewhere_keep_theirs(tmp_path, monkeypatch):
    """A cluster's processes start where `ray start` was."""
    monkeypatch.chdir(tmp_path)
    driver = tmp_path / "driver"
    driver.mkdir()
    settings = config("cpu", None)
    rank, manager = (actor.__ray_metadata__.modified_class for actor in (TrainerActor, RolloutActor))
    rank(settings, 0, None, cwd=tmp_path / "not on this host")
    assert Path.cwd() == tmp_path
    rank(settings, 0, None, cwd=driver)
    assert Path.cwd() == driver
    monkeypatch.chdir(tmp_path)
    manager(settings, None, syncing=None, log_file=None, gateway=None, cwd=driver)
    assert Path.cwd() == driver
