"""Where Megatron runs: device, process groups, and how Megatron-core 0.16 and 0.19 differ. Nothing else asks."""

from __future__ import annotations

import functools
import inspect
import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from rltool.config.parallel import ParallelLayout
from rltool.engines.transfer.wire import host_store, local_address
from rltool.errors import RltoolError, UsageError
from rltool.megatron.patches import cpu_mode
from rltool.processes.hosts import interface_of

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""torch's settings of its memory on the GPU; a user's own are left alone."""


GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


class RendezvousFailed(RltoolError):
    """The trainer ranks did not find each other in time."""

    of_a_peer = True


class OtherRankFailed(RltoolError):
    """Something that one rank does for all of them failed there; that rank's own error has the cause."""

    of_a_peer = True


@dataclass(frozen=True)
class Rendezvous:
    """How one rank finds the others: rank 0 hosts a store at address:port, the others connect to it.

    port: 0 is any that is free, in a world of one rank
    timeout: seconds for the rendezvous, and for every collective after it
    """

    rank: int
    address: str
    port: int
    timeout: float


@dataclass(frozen=True)
class Coordinates:
    """Where a rank stands in the layout. Megatron's order: tensor parallel innermost, then context, data, pipeline.

    The ranks over which experts are spread (ep) are neighbours by `replica_rank`.
    """

    rank: int
    layout: ParallelLayout
    tp_rank: int
    pp_rank: int
    cp_rank: int
    dp_rank: int
    ep_rank: int

    @property
    def is_last_stage(self) -> bool:
        """Of the pipeline: where the loss is."""
        return self.pp_rank == self.layout.pp - 1

    @property
    def returns_logprobs(self) -> bool:
        """True on the one rank of each data-parallel replica that hands results back."""
        return self.is_last_stage and self.tp_rank == 0 and self.cp_rank == 0

    @property
    def replica_rank(self) -> int:
        """Among the `layout.replica_size` ranks that hold the same parameters: this one's index."""
        return self.cp_rank + self.layout.cp * self.dp_rank


def with_known_fields(cls: Callable[..., T], *, optional: dict[str, Any], **required: Any) -> T:
    """cls(**required, **optional) without those optional fields that this Megatron version does not have.

    An unknown required field still raises TypeError: a setting that changes results is never dropped in silence.
    """
    known = {item.name for item in fields(cls)}  # type: ignore[arg-type]
    return cls(**required, **{name: value for name, value in optional.items() if name in known})


class Runtime:
    """Device and process groups of this process; at most one is open at a time. `close` ends them."""

    def __init__(self, layout: ParallelLayout, rendezvous: Rendezvous, *, device: str, seed: int) -> None:
        """Joins the other ranks. device: cpu, cuda, or auto for what torch finds here.

        Raises RendezvousFailed, and UsageError for a device that is not here.
        """
        if dist.is_initialized():
            raise RuntimeError("this process already belongs to a torch.distributed group; close that trainer first")
        self.device = _pick_device(device, rendezvous.rank)
        self._join(layout.world_size, rendezvous)
        try:
            with self.mode():
                self.coordinates = _build_groups(layout, rendezvous.timeout, seed)
        except BaseException:
            dist.destroy_process_group()
            raise

    def mode(self) -> AbstractContextManager[None]:
        """Context for every entry into Megatron."""
        return cpu_mode() if self.device.type == "cpu" else nullcontext()

    def _join(self, world_size: int, at: Rendezvous) -> None:
        limit = timedelta(seconds=at.timeout)
        backend = "gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl"
        self._chose_interface = _keep_gloo_on_route(at.address, at.port)
        try:
            # A TCPStore of its own making listens on every interface, whatever address it is given.
            if at.rank == 0:
                store = host_store(at.address, at.port, at.timeout)
            else:
                # Public (torch's documentation), but not in the module's list of names.
                store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
                    at.address, at.port, world_size, timeout=limit
                )
            dist.init_process_group(backend, store=store, rank=at.rank, world_size=world_size, timeout=limit)
        except (dist.DistError, RuntimeError, TimeoutError) as error:
            raise RendezvousFailed(
                f"trainer rank {at.rank} of {world_size} on host {socket.gethostname()} could not join the others at "
                f"{at.address}:{at.port} within {at.timeout:g} s ({error}); check that all ranks run and that this "
                "address is reachable from each of their hosts"
            ) from error

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """This rank's tensor-parallel ranks."""
        from megatron.core import parallel_state

        return cast(dist.ProcessGroup, parallel_state.get_tensor_model_parallel_group())

    @property
    def cp_group(self) -> dist.ProcessGroup:
        """This rank's context-parallel ranks."""
        return context_parallel_group()

    def global_rank(self, *, tp: int, pp: int, replica: int = 0) -> int:
        """Rank in the whole world of these coordinates: see `ParallelLayout.global_rank`."""
        return self.coordinates.layout.global_rank(tp=tp, pp=pp, replica=replica)

    def sum_over_world(self, values: list[float]) -> list[float]:
        """Element-wise sum over all ranks, in float64, equal everywhere (NaN and inf included)."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def max_over_world(self, values: list[float]) -> list[float]:
        """Element-wise maximum over all ranks, in float64, equal everywhere."""
        largest = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return largest.tolist()

    def on_rank_zero(self, action: Callable[[], T], what: str) -> T | None:
        """Runs `action` on rank 0; if it raises, all ranks raise: its own error there, OtherRankFailed elsewhere."""
        return self.on_every_rank(action if self.coordinates.rank == 0 else lambda: None, what)

    def on_every_rank(self, action: Callable[[], T], what: str) -> T:
        """Runs `action`, which talks to no other rank. If it raises anywhere, all ranks raise.

        Its own error there, OtherRankFailed elsewhere. Without this the others would wait in the next collective until
        its deadline.
        """
        failure: Exception | None = None
        result: T | None = None
        try:
            result = action()
        except Exception as error:
            failure = error
        rank, failed = self.coordinates.rank, [0.0] * self.coordinates.layout.world_size
        failed[rank] = float(failure is not None)
        failed = self.max_over_world(failed)
        if failure is not None:
            raise failure
        if any(failed):
            raise OtherRankFailed(f"{what} failed on rank {failed.index(1.0)}; its own error has the cause")
        return cast(T, result)

    def close(self) -> None:
        """Leaves the process groups. Idempotent."""
        from megatron.core import parallel_state

        if not dist.is_initialized():
            return
        with self.mode():
            parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        if self._chose_interface:  # that of this rendezvous; what this process starts later is about others
            os.environ.pop(GLOO_INTERFACE, None)


def _keep_gloo_on_route(address: str, port: int) -> bool:
    """Gloo listens on the interface that leads to where the ranks meet, in this group and in those made later.

    By itself it takes the address that the host's name resolves to: often 127.0.1.1, or that of another network. A
    setting of the user's is left alone. Returns whether one was made.
    """
    if GLOO_INTERFACE in os.environ:
        return False
    try:
        interface = interface_of(local_address(address, port or 1))
    except OSError:  # no such name or no route: the rendezvous reports it
        return False
    if interface is not None:
        os.environ[GLOO_INTERFACE] = interface
    return interface is not None



def context_parallel_group() -> dist.ProcessGroup:
    """This rank's context-parallel ranks, for code inside the model, which has no `Runtime`."""
    from megatron.core import parallel_state

    return cast(dist.ProcessGroup, parallel_state.get_context_parallel_group())


def in_megatron(method: F) -> F:
    """A method of something with a `runtime` that touches Megatron: it runs inside the runtime's mode."""

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.runtime.mode():
            return method(self, *args, **kwargs)

    return wrapped  # type: ignore[return-value]


def _build_groups(layout: ParallelLayout, timeout: float, seed: int) -> Coordinates:
    """Megatron's process groups and random generators of this process. Returns where it stands in them."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        distributed_timeout_minutes=cast(Any, timeout / 60),  # a timedelta's minutes: annotated int, may be a fraction
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    return Coordinates(
        rank=dist.get_rank(),
        layout=layout,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
    )


def _pick_device(wanted: str, rank: int) -> torch.device:
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError(
            f"trainer.device is cuda, but torch finds no CUDA device for rank {rank} on host {socket.gethostname()}; "
            f"use device = cpu or auto"
        )
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        # Read at the first allocation. Packed rows differ in length: without it, free memory comes in pieces too small.
        os.environ[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def asynchronous_save_options() -> dict[str, Any]:
    """Further arguments of an asynchronous dist_checkpointing.save: 0.19's default needs another package."""
    from megatron.core import dist_checkpointing

    known = inspect.signature(dist_checkpointing.save).parameters
    return {"async_strategy": "mcore"} if "async_strategy" in known else {}


def mlp_submodules(layer: Any) -> Any:
    """The submodules of the MLP in a dense layer's spec: 0.16 has another spec there, 0.19 a partial of the class."""
    mlp = layer.submodules.mlp
    return mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy that does not hold up the host: from ordinary memory it would wait until the device's queue is empty."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
