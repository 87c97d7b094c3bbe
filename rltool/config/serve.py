"""Configuration of `rltool serve-engines`, and of one engine that it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from rltool.config.base import Config

EngineKind = Literal["vllm", "sglang"]
Device = Literal["cuda", "cpu"]
WeightBackend = Literal["rltool", "nccl"]


class ServeConfig(Config):
    """What the command line of serve-engines says."""

    model: Path
    engine: EngineKind = "vllm"
    num_engines: int = Field(1, ge=1)
    gpus: tuple[int, ...] = ()
    """GPU indices of this host, given to engines in order, tp at a time. Empty with device cuda: 0 .. num_engines * tp - 1."""
    tp: int = Field(1, ge=1)
    device: Device = "cuda"
    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)
    """Port of the first engine, the next ones follow; 0 picks free ports."""
    served_name: str = "policy"
    dtype: str | None = None
    """Engine dtype; None: float32 on the CPU, the model's own on GPUs."""
    max_model_len: int | None = Field(None, ge=1)
    seed: int = 0
    trust_remote_code: bool = False
    engine_python: Path | None = None
    ready_timeout: float = Field(600.0, gt=0)
    """Seconds from launch until all engines serve."""
    extra_args: tuple[str, ...] = ()
    """Passed to each engine's own command line untouched."""


class EngineLaunch(Config):
    """One engine, fully resolved: what a dialect builds argv and environment from."""

    index: int
    model: Path
    host: str
    port: int
    gpus: tuple[int, ...]
    tp: int
    device: Device
    served_name: str
    dtype: str | None
    max_model_len: int | None
    seed: int
    trust_remote_code: bool
    python: Path
    """Interpreter of the environment in which the engine is installed."""
    key_file: Path
    """0600 file with the bearer key; its path, not the key, goes into environment or argv."""
    boot_id: str
    """uuid4 hex, new at every start of this engine; the plugin reports it back."""
    weight_backend: WeightBackend
    work_dir: Path
    """Where a dialect may have a config file written (0600), for what must not stand in argv."""
    extra_args: tuple[str, ...] = ()
