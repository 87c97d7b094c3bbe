"""Which address of this host an engine can reach."""

from __future__ import annotations

from urllib.parse import urlsplit

from rltool.engines import wire


def local_address_towards(url: str) -> str:
    """The local IP address of the route to the host of `url`."""
    parts = urlsplit(url)
    return wire.local_address(parts.hostname or "", parts.port or 80)
