"""What is said at the start of a run about listeners that are open to the network."""

from __future__ import annotations

import os
from contextlib import closing

import pytest

from rltool.config.parallel import ParallelLayout
from rltool.config.train import TrainConfig
from rltool.megatron.runtime import GLOO_INTERFACE, Rendezvous, Runtime, _keep_gloo_on_route
from rltool.processes.hosts import interface_of
from rltool.training.cluster.listening import beyond_loopback


def said(device="cpu", sends=True, **settings):
    return list(beyond_loopback(TrainConfig.model_validate({"model": {"path": "m"}, **settings}), device, sends=sends))


def test_on_one_host_without_gpus_nothing_is_open_to_the_network():
    assert said() == [] and said(trainer={"world_size": 2}) == [] and said("cuda", sends=False) == []


@pytest.mark.parametrize(
    ("device", "settings", "part"),
    [
        ("cpu", {"ray": {"address": "10.0.0.1:6379"}}, "Ray at 10.0.0.1:6379 and the ranks on its nodes"),
        ("cuda", {"trainer": {"world_size": 2}, "weights": {"transport": "gloo"}}, "NCCL among the ranks"),
        ("cuda", {}, "NCCL towards the engines"),
        ("cpu", {"weights": {"advertise_host": "203.0.113.9"}}, "listens on every interface, for that is no address"),
    ],
)
def test_each_open_listener_is_named_with_what_decides_it(device, settings, part):
    [line] = said(device, **settings)
    assert part in line


def test_managed_engines_on_a_cluster_listen_where_other_nodes_reach_them():
    def engines(*hosts, address=None):
        groups = [{"name": f"g{n}", **({"host": host} if host else {})} for n, host in enumerate(hosts)]
        lines = said(engines={"mode": "managed", "groups": groups}, ray={"address": address} if address else {})
        return [line for line in lines if line.startswith("the run's engines listen")]

    assert engines(None) == engines("127.0.0.1", address="10.0.0.1:6379") == []
    [line] = engines(None, "0.0.0.0", address="10.0.0.1:6379")
    assert "on 0.0.0.0 and on the addresses of their nodes, guarded by the key" in line


def test_an_advertised_loopback_address_or_no_transfer_opens_nothing():
    assert said(weights={"advertise_host": "127.0.0.1"}) == []
    assert said(weights={"advertise_host": "203.0.113.9"}, sends=False) == []


def test_gloo_listens_on_the_interface_that_leads_to_the_rendezvous_and_a_users_choice_stands(monkeypatch):
    monkeypatch.setenv(GLOO_INTERFACE, "to be put back")
    monkeypatch.delenv(GLOO_INTERFACE)
    _keep_gloo_on_route("no such name.invalid", 1)
    assert GLOO_INTERFACE not in os.environ
    _keep_gloo_on_route("127.0.0.1", 0)
    assert os.environ[GLOO_INTERFACE] == interface_of("127.0.0.1") != ""
    monkeypatch.setenv(GLOO_INTERFACE, "eth7")
    _keep_gloo_on_route("127.0.0.1", 1)
    assert os.environ[GLOO_INTERFACE] == "eth7"


def test_a_runtime_that_is_closed_leaves_no_interface_behind(monkeypatch):
    """What is started later in this process would take it for the user's."""
    monkeypatch.setenv(GLOO_INTERFACE, "to be put back")
    monkeypatch.delenv(GLOO_INTERFACE)
    runtime = Runtime(ParallelLayout(), Rendezvous(0, "127.0.0.1", 0, timeout=60.0), device="cpu", seed=0)
    with closing(runtime):
        assert os.environ[GLOO_INTERFACE] == interface_of("127.0.0.1")
    assert GLOO_INTERFACE not in os.environ
