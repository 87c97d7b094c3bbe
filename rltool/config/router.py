"""Configuration of `rltool router`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from rltool.config.base import Config


class RouterConfig(Config):
    host: str = "127.0.0.1"
    """Address to listen on; some of the router's routes demand no key (docs/security.md)."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 picks a free port."""
    policy: Literal["random", "round_robin", "cache_aware", "power_of_two", "manual"] = "cache_aware"
    """How sglang-router picks a worker; cache_aware sends equal prefixes to one worker while the load is even; manual
    keeps each session, of a gateway, an environment or a generate function, on one worker."""
    key_file: Path | None = None
    """Bearer key that the router demands of clients and presents to workers."""
    ready_timeout: float = Field(default=120.0, gt=0)
    """Seconds until all workers must be registered."""
    request_timeout: float = Field(default=1800.0, gt=0)
    """Seconds after which the router gives one generation up."""
    health_check_interval: float = Field(default=10.0, gt=0)
    """Seconds between the router's looks at each worker's /health."""
