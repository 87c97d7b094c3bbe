"""NCCL through ctypes: a communicator of the trainer with the workers of one engine, which can be aborted at any time.

Not torch's ProcessGroupNCCL: an engine brings an NCCL of its own, every rank must run exactly the same version, and the
trainer has several engines; and a call of ProcessGroupNCCL that waits for a peer that has gone cannot be ended.

The communicator is non-blocking (ncclConfig_t.blocking = 0), so that no call waits for a peer, and `abort` never races
with one. A watchdog aborts it at the deadline where the thread that should look at the clock is stuck in a CUDA call.

Source: nccl.h of NCCL 2.29, "Fault Tolerance" and "Group calls" of its user guide, and
vllm/distributed/device_communicators/pynccl.py, whose communicator does a one-element all_reduce right after its init.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch

from rltool.errors import EngineError

LIBRARY_VARIABLE = "VLLM_NCCL_SO_PATH"
"""vLLM's own: the engine and the trainer name their libnccl by the same variable."""
LIBRARY_NAME = "libnccl.so.2"
"""Without a path: the one that torch has loaded into this process, if it has one."""
VLLM_NEEDS = 22900
"""vLLM 0.32 binds functions of NCCL 2.29; with an older library its communicator disables itself."""

UNIQUE_ID_BYTES = 128
SUCCESS, INVALID_USAGE, IN_PROGRESS = 0, 5, 7  # ncclResult_t
UINT8, FLOAT32, SUM = 1, 7, 0  # ncclDataType_t, ncclRedOp_t
CONFIG_MAGIC, CONFIG_VERSION = 0xCAFEBEEF, 21400

POLL_SECONDS = 2e-5
WATCHDOG_GRACE_SECONDS = 1.0
"""The waiting thread has the deadline too, and knows better what it waited for: the watchdog lets it go first."""
LOCK_SECONDS = 1.0


class NcclError(EngineError):
    """This channel to an engine is unusable; the message has why."""


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * UNIQUE_ID_BYTES)]


class CommConfig(ctypes.Structure):
    """ncclConfig_t as of NCCL 2.14: a newer library reads `version`, and gives every later field its default."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    ]


Message = tuple[torch.Tensor, int]
"""[bytes] uint8 on the communicator's device, contiguous; and the rank that it goes to or comes from."""


class NcclLibrary:
    """The functions of one libnccl.

    path: None for the environment's VLLM_NCCL_SO_PATH, else libnccl.so.2. Loaded with RTLD_DEEPBIND: libnccl reaches
    functions of its own through the dynamic linker, and must not find those of another NCCL of this process.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = path or os.environ.get(LIBRARY_VARIABLE) or LIBRARY_NAME
        try:
            self._lib = ctypes.CDLL(self.path, mode=os.RTLD_NOW | os.RTLD_LOCAL | os.RTLD_DEEPBIND)
        except OSError as error:
            raise NcclError(
                f"cannot load NCCL: {error}. Install nvidia-nccl-cu13, or point {LIBRARY_VARIABLE} at a libnccl.so.2"
            ) from error
        pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
        self._bind("ncclGetVersion", ctypes.POINTER(integer))
        self._bind("ncclGetUniqueId", ctypes.POINTER(UniqueId))
        self._bind(
            "ncclCommInitRankConfig",
            ctypes.POINTER(pointer),
            integer,
            UniqueId,
            integer,
            ctypes.POINTER(CommConfig),
        )
        self._bind("ncclCommGetAsyncError", pointer, ctypes.POINTER(integer))
        self._bind("ncclCommAbort", pointer)
        self._bind("ncclBroadcast", pointer, pointer, size, integer, integer, pointer, pointer)
        self._bind("ncclAllReduce", pointer, pointer, size, integer, integer, pointer, pointer)
        for name in ("ncclSend", "ncclRecv"):
            self._bind(name, pointer, size, integer, integer, pointer, pointer)
        for name in ("ncclGroupStart", "ncclGroupEnd"):
            self._bind(name)
        self._bind("ncclGetErrorString", integer, returns=ctypes.c_char_p)
        self._bind("ncclGetLastError", pointer, returns=ctypes.c_char_p)

    def _bind(self, name: str, *arguments: Any, returns: Any = ctypes.c_int) -> None:
        try:
            function = getattr(self._lib, name)
        except AttributeError as error:
            raise NcclError(f"{self.path} has no {name}: it is older than NCCL 2.14") from error
        function.argtypes, function.restype = arguments, returns

    def check(self, result: int, what: str) -> int:
        """`result`, if it is success or "in progress"; NcclError otherwise."""
        if result in (SUCCESS, IN_PROGRESS):
            return result
        text = self._lib.ncclGetErrorString(result).decode()
        last = (self._lib.ncclGetLastError(None) or b"").decode().strip()
        hint = ""
        if result == INVALID_USAGE:
            hint = (
                f" (this side has {version_text(self.version())} from {self.path}; every rank must load exactly the "
                f"same version: set {LIBRARY_VARIABLE} on both sides)"
            )
        raise NcclError(f"{what}: {text}{hint}{'; ' + last if last else ''}")

    def version(self) -> int:
        """For example 22907 for 2.29.7."""
        value = ctypes.c_int()
        self.check(self._lib.ncclGetVersion(ctypes.byref(value)), "ncclGetVersion")
        return value.value

    def unique_id(self) -> bytes:
        """A new one, of UNIQUE_ID_BYTES; good for one communicator. It names a listening socket of this process."""
        value = UniqueId()
        self.check(self._lib.ncclGetUniqueId(ctypes.byref(value)), "ncclGetUniqueId")
        return ctypes.string_at(ctypes.byref(value), UNIQUE_ID_BYTES)

    def init_rank(self, unique_id: bytes, world_size: int, rank: int) -> int:
        """Begin to join; the handle. It is complete when `state` is success."""
        config = CommConfig(ctypes.sizeof(CommConfig), CONFIG_MAGIC, CONFIG_VERSION, 0)
        comm = ctypes.c_void_p()
        result = self._lib.ncclCommInitRankConfig(
            ctypes.byref(comm), world_size, UniqueId.from_buffer_copy(unique_id), rank, ctypes.byref(config)
        )
        self.check(result, "ncclCommInitRankConfig")
        assert comm.value is not None, "ncclCommInitRankConfig gave no communicator"
        return comm.value

    def state(self, comm: int) -> int:
        """SUCCESS: the last call on `comm` is complete (a collective: enqueued); or IN_PROGRESS, or an error."""
        value = ctypes.c_int()
        self.check(self._lib.ncclCommGetAsyncError(comm, ctypes.byref(value)), "ncclCommGetAsyncError")
        return value.value

    def abort(self, comm: int) -> None:
        self._lib.ncclCommAbort(comm)  # whatever it answers, the handle is gone

    def broadcast(self, comm: int, pointer: int, num_bytes: int, root: int, stream: int) -> None:
        result = self._lib.ncclBroadcast(pointer, pointer, num_bytes, UINT8, root, comm, stream)
        self.check(result, "ncclBroadcast")

    def all_reduce(self, comm: int, pointer: int, num_floats: int, stream: int) -> None:
        result = self._lib.ncclAllReduce(pointer, pointer, num_floats, FLOAT32, SUM, comm, stream)
        self.check(result, "ncclAllReduce")

    def exchange(self, comm: int, sends: Sequence[Message], receives: Sequence[Message], stream: int) -> None:
        """All of them as one group: none waits for another."""
        lib = self._lib
        self.check(lib.ncclGroupStart(), "ncclGroupStart")
        try:
            for call, messages in ((lib.ncclSend, sends), (lib.ncclRecv, receives)):
                for flat, peer in messages:
                    result = call(flat.data_ptr(), flat.numel(), UINT8, peer, comm, stream)
                    self.check(result, call.__name__)
        finally:
            ended = lib.ncclGroupEnd()  # or this thread's next call would still be in the group
        self.check(ended, "ncclGroupEnd")


def version_text(version: int) -> str:
    """NCCL 2.29.7 for 22907."""
    return f"NCCL {version // 10000}.{version // 100 % 100}.{version % 100}"


def check_version(version: int, *, least: int = VLLM_NEEDS, engine: int | None = None) -> None:
    """NcclError where this side's NCCL is older than `least`, or is not the engine's (None: not reported)."""
    if engine is not None and engine != version:
        raise NcclError(
            f"the trainer has {version_text(version)}, the engine {version_text(engine)}, and both must have exactly "
            f"the same: set {LIBRARY_VARIABLE} on both sides to the same libnccl.so.2"
        )
    if version < least:
        raise NcclError(
            f"weights over NCCL need {version_text(least)} or newer, this process loads {version_text(version)}: "
            f"set {LIBRARY_VARIABLE} to a newer libnccl.so.2, here and at the engine"
        )


class DeviceQueue:
    """A CUDA stream of the communicator's own, beside the one on which its caller works."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self.handle: int = self._stream.cuda_stream

    def follow(self) -> None:
        """What is enqueued here from now on waits for what the caller has enqueued: the bytes must be there."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def mark(self) -> Callable[[], bool]:
        """Whether all that is enqueued so far is done; to be asked from any thread."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event.query

    def on_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device)


class Work:
    """One broadcast, or messages that go together. It keeps their buffers; `wait` before these are used again."""

    def __init__(
        self, communicator: Communicator, done: Callable[[], bool], flats: Sequence[torch.Tensor], what: str
    ) -> None:
        self._communicator, self._done, self._flats, self._what = communicator, done, flats, what
        self._is_in_flight = True
        communicator.in_flight += 1
        self._watchdog = communicator.watch(what, communicator.in_flight, done)

    def wait(self, seconds: float, *, check: Callable[[], None] | None = None) -> None:
        """Until the bytes have left (rank 0) or arrived; NcclError when the communicator fails or is late. A late one
        is aborted. What `check` raises ends the wait, and leaves the communicator alone."""

        def done() -> bool:
            if check is not None:
                check()
            return self._done()

        try:
            self._communicator.wait(done, seconds, self._what)
        finally:
            self._communicator.in_flight -= self._is_in_flight
            self._is_in_flight = False
            self._watchdog.cancel()


class Communicator:
    """One rank of one communicator. Its calls return at once and are made under a lock: `abort` may come at any time,
    from any thread."""

    def __init__(
        self,
        library: NcclLibrary,
        unique_id: bytes,
        world_size: int,
        rank: int,
        device: torch.device,
        *,
        seconds: float,
        queue: DeviceQueue | None = None,
    ) -> None:
        """Begins to join; `join` completes it. seconds: the watchdog's, for the join and then for each broadcast."""
        self.device, self.world_size, self.rank, self.seconds = device, world_size, rank, seconds
        self.reason = ""
        self.in_flight = 0  # broadcasts not waited for yet
        self._library, self._lock = library, threading.Lock()
        self._queue = queue or DeviceQueue(device)
        with self._on_device():
            self._comm: int | None = library.init_rank(unique_id, world_size, rank)

    @property
    def alive(self) -> bool:
        return self._comm is not None

    def join(self, seconds: float, *, warm_up: bool = True) -> None:
        """Until all ranks are there. NcclError after `seconds`, with the communicator aborted.

        warm_up: then one all_reduce of one element, as every rank of vLLM's communicator does.
        """
        started, what = time.monotonic(), f"joining {self.world_size - 1} engine ranks"
        watchdog = self.watch(what)
        try:
            self.wait(self._ready, seconds, what)
            if warm_up:
                one = torch.zeros(1, device=self.device)
                self._queue.follow()
                self._enqueue(lambda comm: self._library.all_reduce(comm, one.data_ptr(), 1, self._queue.handle))
                left = max(0.0, seconds - (time.monotonic() - started))
                self.wait(self._queue.mark(), left, "the first all_reduce with the engine")
        finally:
            watchdog.cancel()

    def broadcast(self, flat: torch.Tensor, root: int = 0) -> Work:
        """Enqueue one flat uint8 buffer on the communicator's own stream, behind what the caller's stream has by now.

        flat: [bytes] uint8 on `device`, contiguous; read on rank `root`, written on the others.
        """
        assert flat.dtype == torch.uint8 and flat.is_contiguous() and flat.device.type == self.device.type
        self._queue.follow()
        self._enqueue(
            lambda comm: self._library.broadcast(comm, flat.data_ptr(), flat.numel(), root, self._queue.handle)
        )
        return Work(self, self._queue.mark(), (flat,), f"a broadcast of {flat.numel()} bytes")

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Work:
        """Enqueue messages to and from other ranks, as `broadcast` does; those between two ranks are in the same order
        on both."""
        flats = [flat for flat, _ in (*sends, *receives)]
        assert all(flat.dtype == torch.uint8 and flat.is_contiguous() for flat in flats)
        self._queue.follow()
        self._enqueue(lambda comm: self._library.exchange(comm, sends, receives, self._queue.handle))
        return Work(self, self._queue.mark(), flats, f"messages of {sum(flat.numel() for flat in flats)} bytes")

    def wait(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        """Poll `done`; NcclError, with the communicator aborted, when it fails or `seconds` have passed."""
        end = time.monotonic() + seconds
        try:
            while not done():
                self._ready()
                if time.monotonic() > end:
                    raise NcclError(f"{what} took longer than {seconds:g} s")
                time.sleep(POLL_SECONDS)
            self._ready()  # an abort ends the kernels, which looks like completion
        except NcclError as error:
            self.abort(str(error))
            raise

    def watch(self, what: str, turn: int = 1, done: Callable[[], bool] = lambda: False) -> threading.Timer:
        """Abort at the deadline, whatever the thread that waits is stuck in, but what is done by then. To be cancelled
        by it. turn: 2 is behind one that has its own deadline."""
        text = f"{what} took longer than {self.seconds:g} s"

        def late() -> None:
            with suppress(RuntimeError):  # of CUDA
                if done():  # and is only waited for late
                    return
            self.abort(text)

        timer = threading.Timer(turn * self.seconds + WATCHDOG_GRACE_SECONDS, late)
        timer.daemon = True
        timer.start()
        return timer

    def abort(self, reason: str) -> None:
        """End every kernel of this communicator on this GPU, and free it. Idempotent; peers are not notified."""
        # The holder of the lock returns at once, unless CUDA itself hangs: then the abort is what frees it.
        locked = self._lock.acquire(timeout=LOCK_SECONDS)
        try:
            comm, self._comm = self._comm, None
            if comm is not None:
                self.reason = reason
                with self._on_device():
                    self._library.abort(comm)
        finally:
            if locked:
                self._lock.release()

    def _enqueue(self, call: Callable[[int], None]) -> None:
        """One call, and then until NCCL has put it on the stream: it does no more than one at a time."""
        with self._on_device(), self._lock:
            call(self._live())
        self.wait(self._ready, self.seconds, "enqueueing a collective")

    def _ready(self) -> bool:
        """Whether the last call is complete. Raises NcclError, of NCCL or why it was aborted."""
        with self._lock:
            state = self._library.state(self._live())
        return self._library.check(state, "NCCL") == SUCCESS

    def _live(self) -> int:
        if self._comm is None:
            raise NcclError(f"the communicator was aborted: {self.reason}")
        return self._comm

    def _on_device(self) -> AbstractContextManager[Any]:
        return self._queue.on_device() if self.device.type == "cuda" else nullcontext()
