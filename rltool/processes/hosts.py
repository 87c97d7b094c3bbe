"""Host names of listeners: which are loopback, and how others reach one that listens everywhere."""

from __future__ import annotations

import ipaddress
import socket

import psutil


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def interface_of(address: str) -> str | None:
    """Name of this host's interface that has the address."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return None


def reachable_host(bind_host: str) -> str:
    """What to write into a URL for a server bound to `bind_host`: itself, or this host's own address for 0.0.0.0 and
    ::.

    Connecting a UDP socket sends nothing; it asks the kernel which local address the default route has.
    """
    if bind_host not in ("0.0.0.0", "::"):
        return bind_host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1, never answered
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"


def http_url(bind_host: str, port: int) -> str:
    host = reachable_host(bind_host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
