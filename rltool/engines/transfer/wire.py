"""The wire contract of weight transfer into rltool's vLLM plugin; both sides import this file. Needs torch alone.

gloo
    The trainer is rank 0, hosts the TCPStore (`host_store`) and asks each engine over HTTP to join: init info
    {transport: "gloo", address, port, rank_offset, world_size, group, timeout_seconds}. A worker's rank is rank_offset
    plus its rank in the engine. Then trainer and workers call `open_group` side by side. A bucket is announced by
    update info {names, dtypes, shapes} and travels, while that request is open, as ONE broadcast of a flat uint8 tensor
    (the tensors' bytes back to back, see `split_flat`) from rank 0. A bucket without bytes is not broadcast.
gloo-sharded
    Init info {transport: "gloo-sharded", stores, rank_offset, world_size, group, timeout_seconds}: stores has
    [address, port] of each of the trainer's ranks, and a worker joins a group with each, in this order, as with gloo.
    Then all agree through these stores, with what rltool.engines.transfer.shards writes: each rank has put the buckets
    there, a worker puts what it needs of them into each store, and each rank what it sends to each worker. A bucket is
    announced as with gloo, and travels as one message of uint8 (tag 0) from each rank that has pieces for a worker.
nccl-sharded
    The same, with unique_id and nccl_version as with nccl: worker 0 puts the unique id into each rank's store, and all
    ranks and workers join one communicator, the ranks first. One update info announces several buckets.
ipc-sharded
    They agree as with gloo-sharded. Each rank has put into its store a handle of its memory and what lies there of each
    bucket, and each worker which ranks it reaches. An update info means that the bucket lies in the memory of all
    ranks, where it stays until the request is answered.
disk-sharded
    Init info {transport: "disk-sharded"}. Update info has the absolute `path` of a version's directory, which holds
    shards.INDEX and, of each rank and bucket, shards.slices_file.
nccl
    Init info {transport: "nccl", unique_id, nccl_version, rank_offset, world_size, timeout_seconds}: the unique id that
    the trainer has minted, in base64, and the version of its library, which must be the engine's. Both sides call
    `rltool.engines.transfer.nccl.Communicator`. The buckets travel as with gloo, but from GPU to GPU, and one update
    info announces several: `bucket_sizes` has the number of names in each.
ipc
    Init info {transport: "ipc", handles}: UUID of a GPU -> base64 of the CUDA IPC handle of memory there, which the
    trainer's rank on that GPU shares; a worker opens that of its own. An update info {names, dtypes, shapes} means that
    its bucket lies at the beginning of that memory, where it stays until the request is answered.
delta
    Init info {transport: "delta"}. POST /rltool/prefetch {version, seconds, store} has every worker fetch the version
    while it generates (rltool.engines.delta has what lies in the store); one update info {names: [], dtypes: [],
    shapes: [], version} then stands for all buckets.
gloo and nccl, staged
    POST /rltool/prefetch {version, seconds, announced} has every worker receive all buckets while it generates;
    `announced` is an update info with bucket_sizes. One update info with the version then stands for them, as with
    delta.
gloo and nccl, delta
    The same with `delta` in `announced`: the buckets come as messages (rltool.engines.delta.messages).
disk
    Init info {transport: "disk"}. A bucket is one safetensors file with exactly the announced tensors; update info has
    its absolute `path` as well, which the engine must see under the same name.

Either way the update is bracketed by start and finish; the version travels with finish and is set only when that
succeeds. Where one update info stands for all buckets, POST /rltool/update_weights {update_info} is the pause, the
start and the update, and POST /rltool/finish_weight_update {weight_version, resume} the finish, the end of the prefix
cache and, where asked for, of the pause. What is changed here is counted in rltool.engines.plugin.info.PLUGIN_PROTOCOL.
"""

from __future__ import annotations

import errno
import math
import socket
from collections.abc import Sequence
from datetime import timedelta

import torch

# Public names, which torch's type information takes for private ones.
from torch.distributed import (
    BroadcastOptions,
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    ProcessGroupGloo,
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
    Work,  # pyright: ignore[reportPrivateImportUsage]
)

from rltool.engines.types import Bucket, TensorMeta

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
"""The dtypes that may travel, by the name that TensorMeta uses."""


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype called `name`. Raises ValueError for one that does not travel."""
    try:
        return DTYPES[name]
    except KeyError:
        raise ValueError(f"unknown dtype {name!r} in a weight transfer; known are {', '.join(DTYPES)}") from None


def meta_of(name: str, tensor: torch.Tensor) -> TensorMeta:
    """How `tensor` is announced."""
    return TensorMeta(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def tensor_bytes(meta: TensorMeta) -> int:
    return math.prod(meta.shape) * dtype_of(meta.dtype).itemsize


def bucket_bytes(bucket: Bucket) -> int:
    """Bytes of a bucket on the wire: its tensors back to back, unpadded."""
    return sum(tensor_bytes(meta) for meta in bucket)


def plan_buckets(metadata: Sequence[TensorMeta], limit: int, *, one_dtype: bool = True) -> list[Bucket]:
    """Cut the stream, in its order, into buckets of one dtype; one is closed after the tensor that makes it larger than
    `limit` bytes. one_dtype: false for files, whose tensors may differ in it.

    That is how vLLM cuts its packed buffers (pack_tensors in vllm/distributed/weight_transfer/packed_tensor.py), so a
    bucket is such a buffer. One dtype, so that every tensor of a bucket is aligned in it: SGLang refuses the others.
    A pure function of metadata and limit, so that the trainer which sends and the manager which announces agree on
    every bucket without talking about it.
    """
    buckets: list[Bucket] = []
    current: list[TensorMeta] = []
    size = 0
    for meta in metadata:
        if current and (size > limit or (one_dtype and meta.dtype != current[0].dtype)):
            buckets.append(tuple(current))
            current, size = [], 0
        current.append(meta)
        size += tensor_bytes(meta)
    if current:
        buckets.append(tuple(current))
    return buckets


def split_flat(flat: torch.Tensor, bucket: Bucket) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) of each announced tensor: views of `flat`, except where its start is not aligned for its dtype."""
    if flat.numel() != bucket_bytes(bucket):
        raise ValueError(f"{flat.numel()} bytes were received for a bucket of {bucket_bytes(bucket)}")
    named, start = [], 0
    for meta in bucket:
        dtype, end = dtype_of(meta.dtype), start + tensor_bytes(meta)
        part = flat[start:end]
        if start % dtype.itemsize:
            part = part.clone()
        named.append((meta.name, part.view(dtype).reshape(meta.shape)))
        start = end
    return named


def host_store(host: str, port: int, timeout_seconds: float) -> TCPStore:
    """The trainer's rendezvous, listening on `host` alone; port 0 picks a free one (see `.port`).

    TCPStore by itself listens on every interface, whatever host it is given: it is handed a listening socket instead.
    Only where `host` is not an address of this machine (an advertised one, behind a translation) does it listen on all
    of them.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            listener.bind(("", port))
        listener.listen()
        store = TCPStore(
            host,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_seconds),
            master_listen_fd=listener.fileno(),
        )
        listener.detach()  # the store owns the descriptor now
    return store


KNOCK_SECONDS = 5.0
"""For a connection to the trainer's store: time for a lost packet to be sent again twice."""


def open_group(
    address: str,
    port: int,
    rank: int,
    world_size: int,
    group: str,
    timeout_seconds: float,
    *,
    store: Store | None = None,
) -> ProcessGroupGloo:
    """Join the transfer group `group` as `rank` of `world_size`; blocks until all have joined or the timeout raises.

    The trainer (rank 0) hosts the store at address:port, unless it passes one that it hosts already; the others connect
    to it. Gloo listens on the interface that leads to the address. Every later broadcast has the same timeout.
    """
    timeout = timedelta(seconds=timeout_seconds)
    if store is None and rank == 0:
        store = host_store(address, port, timeout_seconds)
    elif store is None:
        store = connect_store(address, port, timeout_seconds)
    options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]  # not in torch's stub
    options._timeout = timeout
    options._devices = [ProcessGroupGloo.create_device(hostname=local_address(address, port))]
    return ProcessGroupGloo(PrefixStore(group, store), rank, world_size, options)


def connect_store(address: str, port: int, timeout_seconds: float, *, of: str = "the trainer") -> TCPStore:
    """The trainer's store, from an engine; of: whose it is. Raises ConnectionError naming both ends."""
    _knock(address, port, min(KNOCK_SECONDS, timeout_seconds / 2), of)
    timeout = timedelta(seconds=timeout_seconds)
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)


def _knock(address: str, port: int, seconds: float, of: str) -> None:
    """ConnectionError naming both ends where the trainer's store cannot be reached: TCPStore itself asks for longer
    than the trainer waits for an answer."""
    try:
        socket.create_connection((address, port), seconds).close()
    except OSError as error:
        raise ConnectionError(
            f"host {socket.gethostname()} does not reach {of} at {address}, port {port} ({error}): a firewall "
            "between them (weights.port_range)? The address of another host there (weights.advertise_host)?"
        ) from error


def broadcast(group: ProcessGroupGloo, flat: torch.Tensor) -> None:
    """Send (rank 0) or receive (others) one flat bucket in place; raises RuntimeError after the group's timeout."""
    if flat.numel() == 0:
        return
    options = BroadcastOptions()
    options.rootRank = 0
    group.broadcast([flat], options).wait()  # pyright: ignore[reportAttributeAccessIssue]  # not in torch's stub


def receive(group: ProcessGroupGloo, flat: torch.Tensor) -> Work:
    """One message from rank 0 (tag 0), into `flat`; to be waited for."""
    return group.recv([flat], 0, 0)  # pyright: ignore[reportAttributeAccessIssue]  # not in torch's stub


def local_address(host: str, port: int) -> str:
    """This host's address on the route to `host`. No packet is sent: connecting a UDP socket only picks the route.

    Raises OSError where there is no such host or no route.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return probe.getsockname()[0]
