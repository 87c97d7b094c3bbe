"""Which address of this host an engine can reach."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit


def local_address_towards(url: str) -> str:
    """The local IP address of the route to the host of `url`; no packet is sent (connect on UDP only picks the route)."""
    parts = urlsplit(url)
    infos = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = infos[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return probe.getsockname()[0]
