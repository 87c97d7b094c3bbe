"""Configuration of `rltool serve-trainer` beside that of its trainer (config/train.py)."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from rltool.config.base import Config


class ServeTrainerConfig(Config):
    host: str = "127.0.0.1"
    """Address to listen on; clients on other hosts need another one than loopback."""
    port: int = Field(default=8300, ge=0, le=65535)
    """0 picks a free port."""
    served_name: str | None = None
    """What clients name as the base model; default: MODEL as it was given, a directory as an absolute path."""
    keys: Path | None = None
    """Directory with a file for each client: its name, mode 600, and in it the client's key, which begins with "tml-".
    Default: state/clients of the run, which is made with one for a client `default`."""
    checkpoints: Path | None = None
    """Directory whose entries every client can load, as tinker://shared/weights/NAME: checkpoints of `train` with
    adapters, or adapters of peft's format."""
    lora_rank: int = Field(default=32, ge=0)
    """The largest rank that a client may ask for; 0: all weights are trained, of one model at a time, and engines are
    this trainer's alone."""
    max_in_flight: int = Field(default=256, ge=1)
    """Calls of one client that wait for the trainer."""
    max_samples: int = Field(default=4096, ge=1)
    """Sampling requests of one client that are in flight."""
    max_queued_bytes: int = Field(default=2**30, ge=1024)
    """Of one client's calls and sampling requests that have not ended, as they were sent; at least max_body_bytes. As
    many of its results are kept."""
    max_models: int = Field(default=16, ge=1)
    """Of one client."""
    session_timeout: float = Field(default=600.0, gt=0)
    """Seconds without a request or heartbeat after which a session is idle, and its models are evicted where others
    need their place: the client's own, at `max_models`, or anybody's with `lora_rank` 0."""
    max_checkpoints: int = Field(default=100, ge=1)
    """Of one client."""
    max_body_bytes: int = Field(default=64 * 2**20, ge=1024)
    """Of one request."""
    snapshot_every: int = Field(default=100, ge=1)
    """So many calls, at most, are carried out again after a restart."""
    max_restarts: int = Field(default=5, ge=0)
    """How often the server is started again when it dies, or one of its ranks."""
    ready_timeout: float = Field(default=900.0, gt=0)
    """Seconds until it must serve, Ray and the model's loading with it."""

    @model_validator(mode="after")
    def _takes_a_request(self) -> ServeTrainerConfig:
        if self.max_queued_bytes < self.max_body_bytes:
            raise ValueError(
                f"max_queued_bytes is {self.max_queued_bytes}, less than max_body_bytes ({self.max_body_bytes}) of one "
                "request: raise it, or lower max_body_bytes"
            )
        return self
