"""NCCL through ctypes, with a library of Python in place of libnccl's calls: no GPU."""

from __future__ import annotations

import ctypes
import threading
from contextlib import nullcontext

import pytest
import torch

from rltool.engines.transfer import nccl

CPU = torch.device("cpu")
SECONDS = 60.0
"""For what comes at once, on a busy host."""


def test_structures_are_laid_out_as_nccl_h_has_them():
    """ncclUniqueId is char[128]; ncclConfig_t begins with size_t size, unsigned magic and version, int blocking."""
    assert ctypes.sizeof(nccl.UniqueId) == 128
    offsets = {name: getattr(nccl.CommConfig, name).offset for name in ("size", "magic", "version", "blocking")}
    assert offsets == {"size": 0, "magic": 8, "version": 12, "blocking": 16}
    assert ctypes.sizeof(nccl.CommConfig) == 24


class Library:
    """hang: the call after which nothing completes ("init", "all_reduce", "broadcast"); error: the state from then."""

    def __init__(self, hang: str = "", error: int | None = None) -> None:
        self.hang, self.error = hang, error
        self.calls: list[str] = []
        self.aborted: list[int] = []
        self._state = nccl.SUCCESS

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self.hang:
            self._state = nccl.IN_PROGRESS if self.error is None else self.error

    def init_rank(self, unique_id: bytes, world_size: int, rank: int) -> int:
        self._called("init")
        return 77

    def state(self, comm: int) -> int:
        assert comm == 77
        return self._state

    def check(self, result: int, what: str) -> int:
        if result not in (nccl.SUCCESS, nccl.IN_PROGRESS):
            raise nccl.NcclError(f"{what}: error {result}")
        return result

    def abort(self, comm: int) -> None:
        self.aborted.append(comm)

    def broadcast(self, comm: int, pointer: int, num_bytes: int, root: int, stream: int) -> None:
        self._called("broadcast")

    def exchange(self, comm: int, sends, receives, stream: int) -> None:
        self._called(f"{[peer for _, peer in sends]} {[peer for _, peer in receives]} on {stream}")

    def all_reduce(self, comm: int, pointer: int, num_floats: int, stream: int) -> None:
        assert num_floats == 1
        self._called("all_reduce")


class Queue:
    """A stream on which everything is done at once, unless `done` says otherwise."""

    handle = 5

    def __init__(self) -> None:
        self.order: list[str] = []
        self.done = lambda: True

    def follow(self) -> None:
        self.order.append("follow")

    def mark(self):
        self.order.append("mark")
        return lambda: self.done()

    def on_device(self):
        return nullcontext()


def communicator(library: Library, queue: Queue | None = None, seconds: float = 5.0) -> nccl.Communicator:
    return nccl.Communicator(library, bytes(128), 3, 0, CPU, seconds=seconds, queue=queue or Queue())  # type: ignore[arg-type]


def flat() -> torch.Tensor:
    return torch.zeros(16, dtype=torch.uint8)


def test_joining_ends_with_the_all_reduce_that_vllm_does():
    library = Library()
    communicator(library).join(SECONDS)
    assert library.calls == ["init", "all_reduce"]
    torch_has_none = Library()
    communicator(torch_has_none).join(SECONDS, warm_up=False)
    assert torch_has_none.calls == ["init"]


@pytest.mark.parametrize("hang", ["init", "all_reduce"])
def test_a_join_that_nobody_answers_is_aborted_at_its_deadline(hang):
    library = Library(hang)
    joining = communicator(library, seconds=0.02)
    with pytest.raises(nccl.NcclError, match=r"took longer than 0\.02 s"):
        joining.join(0.02)
    assert library.aborted == [77] and not joining.alive


def test_a_broadcast_goes_behind_what_its_caller_has_enqueued():
    queue = Queue()
    sending = communicator(Library(), queue)
    work = sending.broadcast(flat())
    assert queue.order == ["follow", "mark"]
    work.wait(SECONDS)


def test_a_broadcast_that_nobody_receives_is_aborted_at_its_deadline():
    library, queue = Library(), Queue()
    sending = communicator(library, queue)
    queue.done = lambda: False
    with pytest.raises(nccl.NcclError, match=r"a broadcast of 16 bytes took longer than 0\.01 s"):
        sending.broadcast(flat()).wait(0.01)
    assert library.aborted == [77]
    with pytest.raises(nccl.NcclError, match="aborted: a broadcast of 16 bytes took longer"):
        sending.broadcast(flat())


def test_messages_go_together_behind_what_their_caller_has_enqueued():
    library, queue = Library(), Queue()
    to = communicator(library, queue)
    to.exchange([(flat(), 1)], [(flat(), 2), (flat(), 4)]).wait(SECONDS)
    assert library.calls[1:] == ["[1] [2, 4] on 5"] and queue.order == ["follow", "mark"]
    queue.done = lambda: False
    with pytest.raises(nccl.NcclError, match=r"messages of 32 bytes took longer than 0\.01 s"):
        to.exchange((), [(flat(), 1), (flat(), 2)]).wait(0.01)
    assert library.aborted == [77]


class Calls:
    """libnccl's, of which `fails` gives an error; all else succeeds."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.made = fails, []

    def __getattr__(self, name: str):
        def call(*arguments):
            self.made.append((name, *arguments))
            return 3 if name == self.fails else nccl.SUCCESS

        call.__name__ = name
        return call

    def ncclGetErrorString(self, result):
        return b"planned"

    def ncclGetLastError(self, comm):
        return None


@pytest.mark.parametrize("fails", ["", "ncclRecv", "ncclGroupEnd"])
def test_a_group_of_messages_is_ended_whatever_one_of_them_says(fails):
    library = object.__new__(nccl.NcclLibrary)
    library._lib = calls = Calls(fails)
    sent, received = flat(), torch.zeros(3, dtype=torch.uint8)
    if fails:
        with pytest.raises(nccl.NcclError, match=f"{fails}: planned"):
            library.exchange(77, [(sent, 1)], [(received, 2)], 5)
    else:
        library.exchange(77, [(sent, 1)], [(received, 2)], 5)
    assert [made for made in calls.made if made[0].startswith("nccl")] == [
        ("ncclGroupStart",),
        ("ncclSend", sent.data_ptr(), 16, nccl.UINT8, 1, 77, 5),
        ("ncclRecv", received.data_ptr(), 3, nccl.UINT8, 2, 77, 5),
        ("ncclGroupEnd",),
    ]


def test_an_error_of_the_communicator_ends_a_wait_at_once():
    library, queue = Library("broadcast", error=6), Queue()
    sending = communicator(library, queue)
    queue.done = lambda: False
    with pytest.raises(nccl.NcclError, match="error 6"):
        sending.broadcast(flat()).wait(SECONDS)
    assert library.aborted == [77]


def test_kernels_that_end_because_of_an_abort_are_no_completion():
    queue = Queue()
    sending = communicator(Library(), queue)
    work = sending.broadcast(flat())
    sending.abort("planned")
    with pytest.raises(nccl.NcclError, match="planned"):
        work.wait(SECONDS)


def test_an_abort_is_made_once_whoever_asks():
    library = Library()
    sending = communicator(library)
    threads = [threading.Thread(target=sending.abort, args=(f"reason {i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert library.aborted == [77]


def test_what_a_check_raises_ends_the_wait_and_leaves_the_communicator():
    library, queue = Library(), Queue()
    sending = communicator(library, queue)
    queue.done = lambda: False

    def check() -> None:
        raise ValueError("given up")

    with pytest.raises(ValueError, match="given up"):
        sending.broadcast(flat()).wait(SECONDS, check=check)
    assert sending.alive and library.aborted == []


def test_the_watchdog_frees_a_thread_that_cannot_look_at_the_clock(monkeypatch):
    monkeypatch.setattr(nccl, "WATCHDOG_GRACE_SECONDS", 0.0)
    library, queue = Library(), Queue()
    sending = communicator(library, queue, seconds=0.01)
    queue.done = lambda: False
    ended = threading.Event()
    library.abort = lambda comm: ended.set()  # a kernel that ends when its communicator is aborted
    sending.broadcast(flat())
    assert ended.wait(SECONDS)
    assert sending.reason == "a broadcast of 16 bytes took longer than 0.01 s"


def test_the_watchdog_leaves_a_broadcast_alone_that_is_done_and_not_waited_for_yet(monkeypatch):
    """The gather may take its time until the next bucket is there."""
    monkeypatch.setattr(nccl, "WATCHDOG_GRACE_SECONDS", 0.0)
    library, queue = Library(), Queue()
    looked = threading.Event()
    queue.done = lambda: bool(looked.set()) or True
    sending = communicator(library, queue, seconds=0.01)
    work = sending.broadcast(flat())
    assert looked.wait(SECONDS)
    work._watchdog.join(SECONDS)
    work.wait(SECONDS)
    assert sending.alive and library.aborted == []


def test_a_broadcast_behind_another_has_the_time_of_both(monkeypatch):
    timers = []

    class Timer(threading.Timer):
        def __init__(self, interval, *more):
            timers.append(interval)
            super().__init__(interval, *more)

    monkeypatch.setattr(nccl.threading, "Timer", Timer)
    monkeypatch.setattr(nccl, "WATCHDOG_GRACE_SECONDS", 1.0)
    sending = communicator(Library(), seconds=5.0)
    first, second = sending.broadcast(flat()), sending.broadcast(flat())
    first.wait(SECONDS)
    third = sending.broadcast(flat())
    for work in (second, third, third):
        work.wait(SECONDS)
    sending.broadcast(flat()).wait(SECONDS)
    assert timers == [6.0, 11.0, 11.0, 6.0]


def test_a_missing_library_is_named_with_what_to_do(monkeypatch):
    monkeypatch.setenv(nccl.LIBRARY_VARIABLE, "/nowhere/libnccl.so.2")
    with pytest.raises(nccl.NcclError, match=r"/nowhere/libnccl.so.2.*VLLM_NCCL_SO_PATH"):
        nccl.NcclLibrary()


def test_a_library_that_is_not_nccl_is_refused():
    with pytest.raises(nccl.NcclError, match="has no ncclGetVersion"):
        nccl.NcclLibrary("libc.so.6")


def test_both_sides_must_have_exactly_the_same_version():
    nccl.check_version(22907)
    nccl.check_version(22809, least=0, engine=22809)
    with pytest.raises(nccl.NcclError, match=r"trainer has NCCL 2\.29\.7, the engine NCCL 2\.29\.3"):
        nccl.check_version(22907, engine=22903)
    with pytest.raises(nccl.NcclError, match=r"need NCCL 2\.29\.0 or newer, this process loads NCCL 2\.28\.9"):
        nccl.check_version(22809)
