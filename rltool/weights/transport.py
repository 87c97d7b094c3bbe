"""How weights reach one engine: a sender in trainer rank 0, or in each rank that is on one of the engine's GPUs, and
the HTTP requests that make the engine receive.

A transport is chosen per engine (`choose_for`), from what the engine reports and from [weights] as it holds for that
engine; one sync may feed engines over several of them. Nothing outside `transports/` depends on which it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from rltool.config.engine_weights import TransportName
from rltool.config.rollout import WeightsConfig
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.types import Bucket, EngineInfo, HttpRequest
from rltool.errors import EngineError, UsageError
from rltool.megatron.shards import OwnPart
from rltool.weights.delta.encoder import DeltaEncoder
from rltool.weights.memory import NONE, Memory

Backend = Literal[
    "ipc", "gloo", "disk", "delta", "nccl", "vllm-nccl", "gloo-delta", "nccl-delta", "ipc-sharded", "nccl-sharded",
    "gloo-sharded", "disk-sharded", "adapters",
]  # fmt: skip
"""vllm-nccl: vLLM's own nccl backend, of a stock server; nccl: of rltool's plugin, and of SGLang. gloo-delta,
nccl-delta: what changed alone, over these (weights.delta). -sharded: from each rank what it holds (weights.sharded).
adapters: a directory of peft's format, which the engine loads under a name."""


class TransportError(EngineError):
    """An engine could not be joined or sent to. `join`, `send` and Work.wait raise this, RuntimeError (torch's) or
    OSError for a failure that is that engine's alone; anything else is a bug, and ends the sync."""


@dataclass(frozen=True)
class Receiver:
    """An engine that shall receive weights. world_size: workers, as it reports them, data-parallel replicas
    included; gpus: their GPUs' UUIDs in the order of the workers, () where these are not known."""

    url: str
    dialect: str
    backend: Backend
    world_size: int
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rendezvous:
    """Where an engine finds the trainer, which is rank 0 of `world_size` = 1 + the engine's. JSON-able.

    address, port: of a TCPStore, or "" and 0; unique_id: base64 of NCCL's 128 bytes; bucket_bytes: what the buckets are
    cut by; nccl_version: of the trainer's library; directory: for transports that leave files; handles: for each GPU of
    the engine, in the order of its workers, base64 of the CUDA IPC handle of a rank there, "" where there is none;
    stores: address and port of the TCPStore of each rank that sends, by rank, where there are several; store_ranks: how
    many these should be.
    """

    transport: Backend
    world_size: int
    group: str
    address: str = ""
    port: int = 0
    unique_id: str | None = None
    bucket_bytes: int = 0
    nccl_version: int = 0
    directory: str | None = None
    handles: dict[str, str] = field(default_factory=dict)
    stores: dict[str, tuple[str, int]] = field(default_factory=dict)
    store_ranks: int = 0


@dataclass(frozen=True)
class SenderOptions:
    """What all senders of a trainer have in common.

    device: the trainer's own; deadline: seconds for joining, and then for each bucket (DeadlinesConfig.bucket);
    directory: of this run alone, for transports that leave files; model_files: the trainer's model, whose *.json go
    with those files; gpu: UUID of the rank's own, "" without one; largest_bucket, all_buckets: bytes; encoder: with
    weights.delta, what has changed; peft, quantization: of the ExportPlan; part: what the rank holds, with
    weights.sharded.
    """

    group: str
    config: WeightsConfig
    device: torch.device
    deadline: float
    directory: Path
    model_files: Path
    gpu: str = ""
    largest_bucket: int = 0
    encoder: DeltaEncoder | None = None
    peft: Mapping[str, Any] | None = None
    all_buckets: int = 0
    part: OwnPart | None = None
    quantization: Mapping[str, Any] | None = None


class Work(Protocol):
    """A bucket on its way."""

    def wait(self, seconds: float) -> None:
        """Returns when the buffer may be filled anew. Raises when sending failed or took longer."""
        ...


class SenderTransport(Protocol):
    """The trainer's end of one connection, in one rank, and a base class for it. Made by its factory without side
    effects.

    `host` is called first, then `join`; for each sync `begin`, `send` for each bucket in order, `finish`; `close` last.
    All but `host` and `abort` are called on one thread of this connection's own, which they may block: join, begin,
    finish, and send with its wait, each for the bucket's deadline at most; then the connection is aborted.
    """

    device: torch.device
    """Where the buckets given to `send` must lie: the CPU for gloo and disk, the trainer's GPU for NCCL."""
    announced_ahead: bool = False
    """Whether the engine waits for all buckets of the update, and not for one at a time: then a bucket can be sent
    while the one before it is on its way, and their works are waited for in order."""
    encoder: DeltaEncoder | None = None
    """Of one that sends what this has made of each bucket (weights.delta)."""
    sent_bytes: int | None = None
    """That the rank itself has sent since `begin`, to all workers together; None: not counted."""

    @property
    def memory(self) -> Memory:
        """What it held at most beside the buckets that it was given, in the sync that was begun last."""
        return NONE

    def host(self) -> Rendezvous:
        """Listening from now on."""
        ...

    def join(self, seconds: float) -> None:
        """Blocks until all ranks of the group are there."""
        ...

    def begin(self, version: str, buckets: Sequence[Bucket]) -> None:
        """A sync begins, in which exactly these buckets will be sent, in this order."""
        ...

    def send(self, bucket: Bucket, flat: Tensor) -> Work:
        """Enqueue one bucket. flat: [bytes] uint8 on `device`, complete (the stream that filled it was synchronised),
        and left alone until the work is done."""
        ...

    def finish(self) -> None:
        """All buckets were sent. Returns when the engine can have all of them: what was held back goes out now."""
        ...

    def abort(self, reason: str) -> None:
        """From any thread, at any time, idempotent, returns at once. A blocked `join`, `send` or `wait` ends as soon as
        the transport can make it; only its own thread waits for that, which then calls `close`."""
        ...

    def close(self) -> None:
        """Leave the group. Idempotent."""
        ...

    def ready(self, version: str, number: int, seconds: float) -> None:
        """From any thread, where the control is `acknowledged`: the engine has taken the first `number` buckets of
        `version`. Returns once the next one lies there for it, or there is none. Raises TransportError where it does
        not come within this many seconds."""
        raise TransportError("its engine acknowledges no buckets")


class ReceiverControl(Protocol):
    """What one kind of engine is asked to do, as HTTP requests: pure, without state. Runs in the rollout manager.

    after_send: the engine takes what the ranks have left for it, once they have sent everything. staged: it takes the
    buckets beside the sending, by `prefetch`. Either way it generates until `prefetch` has been answered, and only then
    is it paused, for `begin` and `announce`. The others are paused first, and announced to beside the sending.
    acknowledged: the sender has `ready`: each request of `announce` is for one bucket, waits until that
    is ready, and has taken it when it is answered.
    """

    after_send: bool
    staged: bool
    acknowledged: bool

    def init(self, rendezvous: Rendezvous, *, rank_offset: int, timeout_seconds: float) -> list[HttpRequest]:
        """Join the group; blocks in the engine until the trainer has joined as rank 0. timeout_seconds: for that, and
        then for each bucket, in an engine that takes it."""
        ...

    def prefetch(
        self, buckets: Sequence[Bucket], rendezvous: Rendezvous, *, version: str, seconds: float
    ) -> list[HttpRequest]:
        """Have everything ready that needs no pause, within this many seconds. With after_send or staged alone."""
        ...

    def begin(self) -> list[HttpRequest]: ...

    def announce(
        self, buckets: Sequence[Bucket], rendezvous: Rendezvous, *, version: str
    ) -> list[tuple[HttpRequest, int]]:
        """The requests that make the engine take all buckets, in order, each with the number of buckets that it covers;
        these numbers add up to len(buckets)."""
        ...

    def finish(self, version: str) -> list[HttpRequest]:
        """The update is complete: the engine drops its prefix cache and has the version."""
        ...

    def abandon(self) -> list[HttpRequest]:
        """Before an engine goes on whose update failed: what it samples from now on is of no version."""
        ...

    def leave(self, group: str) -> list[HttpRequest]:
        """Leave the group and close an unfinished update, where there are any."""
        ...


@runtime_checkable
class OneRequestControl(ReceiverControl, Protocol):
    """Of an engine that one request pauses and updates, and another makes generate again."""

    def update(self, buckets: Sequence[Bucket], rendezvous: Rendezvous, *, version: str) -> HttpRequest:
        """A pause with "keep", `begin` and `announce`."""
        ...

    def finish_and_resume(self, version: str) -> HttpRequest:
        """`finish`, and the end of the pause."""
        ...


@runtime_checkable
class PausingControl(ReceiverControl, Protocol):
    """Of an engine that stands still, its requests kept, sooner than by its dialect's pause; and that must when it
    leaves."""

    def pause(self) -> list[HttpRequest]: ...

    def resume(self) -> list[HttpRequest]: ...


Located = Callable[[str, Rendezvous, str, float], Rendezvous]
"""(URL of the engine, rendezvous, version, seconds) -> the rendezvous with what `announce` needs of this version.
Blocks, this many seconds at most, until something beside the engine has it ready. Raises TransportError."""

SenderFactory = Callable[[Receiver, SenderOptions], SenderTransport]
Obstacle = Callable[[EngineInfo, str], str | None]
"""(engine, device of the trainer: cpu or cuda) -> why weights cannot go there this way, and what to do; None: they
can."""


@dataclass(frozen=True)
class Transport:
    """sender: the factory of SenderTransport. shared: one sender serves all engines of this transport, because what it
    sends does not depend on them. listens: the sender has a port that engines connect to. located: for engines that do
    not fetch by themselves. staged: the control for weights.staged; None: these engines cannot. adapters: for
    weights.lora_sync = "adapter", where it is not as staged. senders: the ranks that have one for an engine; every:
    each rank that is on one of the engine's GPUs; owners: all, each for what it holds."""

    sender: SenderFactory
    control: ReceiverControl
    obstacle: Obstacle
    shared: bool = False
    listens: bool = True
    located: Located | None = None
    staged: ReceiverControl | None = None
    adapters: ReceiverControl | None = None
    senders: Literal["rank0", "every", "owners"] = "rank0"


TRANSPORTS: dict[tuple[str, Backend], str] = {
    ("vllm", "adapters"): "rltool.weights.transports.adapters:VLLM",
    ("sglang", "adapters"): "rltool.weights.transports.adapters:SGLANG",
    ("vllm", "ipc"): "rltool.weights.transports.ipc:VLLM",
    ("sglang", "ipc"): "rltool.weights.transports.ipc:SGLANG",
    ("vllm", "gloo"): "rltool.weights.transports.gloo:VLLM",
    ("sglang", "gloo"): "rltool.weights.transports.gloo:SGLANG",
    ("vllm", "disk"): "rltool.weights.transports.disk:VLLM",
    ("sglang", "disk"): "rltool.weights.transports.disk:SGLANG",
    ("vllm", "delta"): "rltool.weights.transports.delta:VLLM",
    ("sglang", "delta"): "rltool.weights.transports.delta:SGLANG",
    ("vllm", "nccl"): "rltool.weights.transports.nccl_vllm:PLUGIN",
    ("vllm", "vllm-nccl"): "rltool.weights.transports.nccl_vllm:STOCK",
    ("sglang", "nccl"): "rltool.weights.transports.nccl_sglang:SGLANG",
    ("vllm", "gloo-delta"): "rltool.weights.transports.delta_group:GLOO",
    ("vllm", "nccl-delta"): "rltool.weights.transports.delta_group:NCCL",
    ("vllm", "ipc-sharded"): "rltool.weights.transports.sharded:IPC",
    ("vllm", "nccl-sharded"): "rltool.weights.transports.sharded:NCCL",
    ("vllm", "gloo-sharded"): "rltool.weights.transports.sharded:GLOO",
    ("vllm", "disk-sharded"): "rltool.weights.transports.sharded_disk:VLLM",
}
"""(dialect, backend) -> the import path of its Transport: imported when an engine needs it."""


NO_TRANSFER = "has no weight transfer; start vLLM with --weight-transfer-config, or use `rltool serve-engines`"

CANDIDATES: dict[str, tuple[Backend, ...]] = {
    "auto": ("ipc", "nccl", "vllm-nccl", "gloo", "disk"),
    "ipc": ("ipc",),
    "nccl": ("nccl", "vllm-nccl"),
    "gloo": ("gloo",),
    "disk": ("disk",),
    "delta": ("delta",),
}
"""weights.transport -> what is tried, in order."""

DELTA_CANDIDATES: dict[str, tuple[Backend, ...]] = {
    "auto": ("nccl-delta", "gloo-delta"),
    "nccl": ("nccl-delta",),
    "gloo": ("gloo-delta",),
}
"""The same with weights.delta."""

SHARDED_CANDIDATES: dict[str, tuple[Backend, ...]] = {
    "auto": ("ipc-sharded", "nccl-sharded", "gloo-sharded"),
    "ipc": ("ipc-sharded",),
    "nccl": ("nccl-sharded",),
    "gloo": ("gloo-sharded",),
    "disk": ("disk-sharded",),
}
"""The same with weights.sharded."""

TAKES_ADAPTERS: tuple[Backend, ...] = ("ipc", "nccl", "gloo", "delta")
"""Over which rltool's plugin takes adapters: it generates until it has all of one, and after."""
BETWEEN_GPUS: tuple[Backend, ...] = ("nccl", "vllm-nccl", "nccl-delta", "nccl-sharded")
ON_ONE_GPU = "shares the trainer's GPU, and NCCL joins no two ranks on one GPU: leave weights.transport at \"auto\""
ON_OTHER_GPUS = 'has GPUs of its own, and CUDA IPC is for engines.mode = "colocate": leave weights.transport at "auto"'
NO_DELTA = (
    "cannot take patches over a transfer group (weights.delta), which needs a vLLM with rltool's plugin: set "
    'weights.delta to "auto" or false, or use weights.transport = "delta" with a weights.store and a follower beside it'
)

NO_SHARDS = (
    "cannot be sent sharded weights (weights.sharded), which need a vLLM with rltool's plugin: leave weights.sharded "
    "out"
)


def transport(dialect: str, backend: Backend) -> Transport:
    """The transport of this kind of engine. Raises KeyError for a pair that `choose` does not return."""
    module, name = TRANSPORTS[dialect, backend].split(":")
    return getattr(import_module(module), name)


def choose_for(
    endpoint: EngineEndpoint, info: EngineInfo, config: WeightsConfig, trainer_device: str, *, shares_gpus: bool = False
) -> Backend:
    """`choose` with what holds for this engine; where a section of weights.engines decides, UsageError names it."""
    rule = config.rule_of(endpoint.url, endpoint.group)
    try:
        return choose(info, config.of(endpoint.url, endpoint.group), trainer_device, shares_gpus=shares_gpus)
    except UsageError as error:
        if rule is None:
            raise
        raise UsageError(f"{error} (for this engine [[weights.engines]] with {rule.whom} decides)") from error


def choose(info: EngineInfo, config: WeightsConfig, trainer_device: str, *, shares_gpus: bool = False) -> Backend:
    """How weights reach this engine: the first of what weights.transport admits that can.

    config: as it holds for this engine (WeightsConfig.of); trainer_device: cpu or cuda; shares_gpus: the engine is on
    the trainer's, where NCCL refuses it. UsageError, a sentence without the engine's name, where none can.
    """
    if config.lora_sync == "adapter":
        return _choose_for_adapters(info, config.transport, trainer_device, shares_gpus=shares_gpus)
    reasons = []
    whole = () if config.delta is True else (SHARDED_CANDIDATES if config.sharded else CANDIDATES)[config.transport]
    for backend in (*(DELTA_CANDIDATES[config.transport] if config.delta else ()), *whole):
        if shares_gpus and backend in BETWEEN_GPUS:
            why = ON_ONE_GPU
        elif backend in ("ipc", "ipc-sharded") and not shares_gpus:
            why = ON_OTHER_GPUS
        else:
            why = obstacle(info, backend, trainer_device)
        if why is None:
            if config.staged is True and transport(info.dialect, backend).staged is None:
                raise UsageError(
                    "cannot take staged weights: that needs a vLLM with rltool's plugin, over gloo or nccl; set "
                    'weights.staged to "auto" or false, or start it with `rltool serve-engines --weight-backend rltool`'
                )
            return backend
        reasons.append(why)
    if config.delta is True or config.sharded:
        raise UsageError(reasons[-1])
    if config.transport != "auto":
        raise UsageError(reasons[-len(whole)])
    if info.weight_backend is None:
        raise UsageError(NO_TRANSFER)
    raise UsageError(
        f"offers the weight backend {info.weight_backend!r}, which a trainer on device {trainer_device!r} cannot send "
        "to: start it with `rltool serve-engines --weight-backend rltool`"
    )


def _choose_for_adapters(
    info: EngineInfo, wanted: TransportName, trainer_device: str, *, shares_gpus: bool
) -> Backend:
    """Tensors into rltool's plugin beside generation; a directory, which every engine's own route loads, to others and
    with "disk"."""
    if shares_gpus and not info.plugin:
        raise UsageError(
            'sleeps while the trainer has its GPUs, and with weights.lora_sync = "adapter" that is for a vLLM with '
            'rltool\'s plugin alone: use one, or set it to "merged"'
        )
    if not info.plugin or wanted == "disk":
        if wanted not in ("auto", "disk"):
            raise UsageError(
                f'takes adapters from a directory alone, so weights.transport = "{wanted}" does not reach it: leave it '
                'at "auto", with a weights.disk_dir that trainer and engines share'
            )
        return "adapters"
    reasons = []
    for backend in CANDIDATES[wanted]:
        if backend not in TAKES_ADAPTERS:
            continue
        if backend == "ipc" and not shares_gpus and wanted != "ipc":  # which rank is on which GPU is seen at the join
            why = ON_OTHER_GPUS
        else:
            why = ON_ONE_GPU if shares_gpus and backend == "nccl" else obstacle(info, backend, trainer_device)
        if why is None:
            return backend
        reasons.append(why)
    raise UsageError(reasons[-1])


def obstacle(info: EngineInfo, backend: Backend, trainer_device: str) -> str | None:
    """Why weights cannot reach this engine over `backend`; None: they can."""
    if (info.dialect, backend) not in TRANSPORTS and backend in ("gloo-delta", "nccl-delta"):
        return NO_DELTA
    if (info.dialect, backend) not in TRANSPORTS and backend.endswith("-sharded"):
        return NO_SHARDS
    if (info.dialect, backend) not in TRANSPORTS:
        return (
            f"cannot be sent weights over {backend}: this version of rltool has no such transport for {info.dialect}; "
            'leave weights.transport at "auto"'
        )
    return transport(info.dialect, backend).obstacle(info, trainer_device)
