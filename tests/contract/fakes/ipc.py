"""CUDA IPC without CUDA: memory of the host that processes share by name. Every byte really travels.

`installed(monkeypatch)` puts it in place of rltool.engines.transfer.ipc's, in this process; WorkerProcess is another
one, with the plugin's own channels.
"""

from __future__ import annotations

import base64
import multiprocessing
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import torch

from rltool.engines.transfer import ipc
from rltool.engines.types import Bucket

CPU = torch.device("cpu")
SECONDS = 60.0


class SharedExport:
    """As ipc.ExportedBuffer. `live`: of this process, those that are not closed."""

    live: set[str] = set()

    def __init__(self, size: int, device: torch.device) -> None:
        self._memory = SharedMemory(create=True, size=max(1, size))
        self.live.add(self._memory.name)
        self.handle = base64.b64encode(self._memory.name.encode().ljust(ipc.HANDLE_BYTES, b"\0")).decode()
        self.flat: Any = torch.frombuffer(self._memory.buf, dtype=torch.uint8)[:size]

    def close(self) -> None:
        self.live.discard(self._memory.name)
        self.flat = None
        self._memory.close()
        self._memory.unlink()


class SharedOpening:
    """As ipc.OpenedBuffer."""

    def __init__(self, handle: str, device: torch.device, *, peer: bool = False) -> None:
        name = base64.b64decode(handle, validate=True).rstrip(b"\0").decode()
        try:
            self._memory = SharedMemory(name)
        except FileNotFoundError as error:
            raise ipc.IpcError(f"cudaIpcOpenMemHandle: {error}") from error

    def flat(self, size: int) -> torch.Tensor:
        return torch.frombuffer(self._memory.buf, dtype=torch.uint8)[:size]

    def close(self) -> None:
        self._memory.close()


def installed(monkeypatch: Any) -> None:
    monkeypatch.setattr(ipc, "ExportedBuffer", SharedExport)
    monkeypatch.setattr(ipc, "OpenedBuffer", SharedOpening)


class WorkerProcess:
    """Where workers of engines are; one process for all GPUs, to start quickly."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._turn = threading.Lock()
        self._process = context.Process(target=_work, args=(theirs,), daemon=True)
        self._process.start()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def ask(self, *question: Any) -> Any:
        with self._turn:
            self._pipe.send(question)
            if not self._pipe.poll(SECONDS):
                raise RuntimeError("the worker does not answer")
            answer = self._pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer


class Worker:
    """A worker of an engine on the GPU of this UUID: it opens, and takes buckets."""

    def __init__(self, process: WorkerProcess, gpu: str) -> None:
        self._process, self.gpu = process, gpu

    def open(self, handles: dict[str, str]) -> None:
        """Raises RuntimeError with what the channel said."""
        self._process.ask(self.gpu, "open", handles)

    def take(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        found = self._process.ask(self.gpu, "take", bucket)
        return {name: torch.frombuffer(bytearray(raw), dtype=dtype).view(shape) for name, dtype, shape, raw in found}

    def lying(self, buckets: Sequence[Bucket]) -> list[tuple[Bucket, torch.Tensor]]:
        """All that lie there at once."""
        found = self._process.ask(self.gpu, "lying", list(buckets))
        return [(bucket, torch.frombuffer(bytearray(raw), dtype=torch.uint8)) for bucket, raw in found]

    def leave(self) -> None:
        self._process.ask(self.gpu, "leave", None)


def _work(pipe: Connection) -> None:
    from rltool.engines.plugin.channels import ChannelError, IpcChannel
    from rltool.engines.transfer.wire import split_flat

    ipc.OpenedBuffer = SharedOpening  # pyright: ignore[reportAttributeAccessIssue]
    channels: dict[str, IpcChannel] = {}
    while True:
        gpu, what, argument = pipe.recv()
        answer: Any = []
        try:
            if what == "lying":
                answer = [(bucket, flat.numpy().tobytes()) for bucket, flat in channels[gpu].lying(argument)]
            elif what == "take":
                [(bucket, flat)] = channels[gpu].receive([argument])
                answer = [
                    (name, tensor.dtype, tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
                    for name, tensor in split_flat(flat, bucket)
                ]
            elif gpu in channels:
                channels.pop(gpu).close()
            if what == "open":
                channels[gpu] = IpcChannel(argument, gpu, CPU)
        except ChannelError as error:
            answer = str(error)
        pipe.send(answer)
