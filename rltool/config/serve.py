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
    """Hugging Face model directory."""
    engine: EngineKind = "vllm"
    num_engines: int = Field(default=1, ge=1)
    """Each has tp GPUs of its own."""
    gpus: tuple[int, ...] = ()
    """GPU indices of this host, given to engines in order, tp at a time. Empty with device cuda: 0 .. num_engines * tp
    - 1."""
    tp: int = Field(default=1, ge=1)
    """Tensor-parallel size: GPUs per engine."""
    device: Device = "cuda"
    host: str = "127.0.0.1"
    """Address to listen on; another one than loopback is reachable from other hosts, guarded by the key, not
    encrypted."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the first engine, the next ones follow; 0 picks free ports."""
    served_name: str = "policy"
    """Name of the model in endpoints.json and on the servers' /v1/models."""
    dtype: str | None = None
    """Engine dtype; None: float32 on the CPU, the model's own on GPUs."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Longest sequence in tokens; None: the model's own, on a CPU under vLLM at most 2048."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Of the first engine; the others count up, or replicas would sample the same responses."""
    trust_remote_code: bool = False
    """Let the engine run code that comes with the model."""
    engine_python: Path | None = None
    """Interpreter of the environment that has the engine; None: rltool's own."""
    weight_backend: WeightBackend = "rltool"
    """How vLLM receives weights: rltool is the plugin's (nccl, gloo or disk), nccl vLLM's own."""
    ready_timeout: float = Field(default=600.0, gt=0)
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
