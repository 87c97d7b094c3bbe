"""Where engines meet the trainer: a TCPStore in rank 0, at an address of this host that the engine can reach."""

from __future__ import annotations

from urllib.parse import urlsplit

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # public

from rltool.config.rollout import WeightsConfig
from rltool.engines.transfer import wire
from rltool.weights.transport import TransportError


def host_rendezvous(url: str, config: WeightsConfig, seconds: float) -> tuple[str, TCPStore]:
    """(address, store): a store for the engine at `url`, listening at weights.advertise_host, or on the route to the
    engine, within weights.port_range. TransportError where none of these ports is free."""
    address = config.advertise_host or local_address_towards(url)
    if config.port_range is None:
        return address, wire.host_store(address, 0, seconds)
    first, last = config.port_range
    for port in range(first, last + 1):
        try:
            return address, wire.host_store(address, port, seconds)
        except OSError:
            continue
    raise TransportError(f"weights.port_range: no free port on {address} from {first} to {last}")


def local_address_towards(url: str) -> str:
    """The local IP address of the route to the host of `url`."""
    parts = urlsplit(url)
    return wire.local_address(parts.hostname or "", parts.port or 80)
