"""What of a run listens on more than loopback, logged at its start. By default nothing does on one host without
GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from rltool.config.train import TrainConfig
from rltool.processes.hosts import interface_of, is_loopback
from rltool.training.cluster.devices import Device


def beyond_loopback(config: TrainConfig, device: Device, *, sends: bool) -> Sequence[str]:
    """Each listener that cannot be bound to loopback, with the setting that decides where it listens.

    sends: engines connect to the trainer to receive weights.
    """
    found = []
    if config.ray.address is not None:
        found.append(f"Ray at {config.ray.address} and the ranks on its nodes listen on the nodes' addresses")
    elif device == "cuda" and config.trainer.world_size > 1:
        found.append("NCCL among the ranks listens on the interface that it picks (NCCL_SOCKET_IFNAME sets it)")
    transports = {weights.transport for _, weights in config.weights.variants()}
    nccl = bool(transports & {"auto", "nccl"}) and not config.engines.shares_gpus
    if device == "cuda" and sends and nccl:
        found.append("NCCL towards the engines listens on the interface that it picks (NCCL_SOCKET_IFNAME sets it)")
    host = config.weights.advertise_host
    if sends and host is not None and not is_loopback(host):
        where = f"on {host}" if interface_of(host) else "on every interface, for that is no address of this host"
        found.append(f"the rendezvous with engines listens {where} (weights.advertise_host)")
    if config.engines.started_by_train:
        found += _engines(config)
    return found


def _engines(config: TrainConfig) -> Sequence[str]:
    """Of the engines that the run starts: those that others can reach."""
    hosts = [group.host for group in config.engines.groups if group.role != "placeholder"]
    where = [f"on {host}" for host in dict.fromkeys(hosts) if host is not None and not is_loopback(host)]
    if config.ray.address is not None and None in hosts:
        where.append("on the addresses of their nodes")
    if not where:
        return []
    return [f"the run's engines listen {' and '.join(where)}, guarded by the key, not encrypted (engines.groups: host)"]
