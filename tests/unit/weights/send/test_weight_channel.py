"""One connection's thread, and the buffers that several of them send from."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from rltool.errors import EngineError
from rltool.weights.send import channel as channel_module
from rltool.weights.send.buffers import CPU, BucketBuffers
from rltool.weights.send.channel import Channel

PATIENCE = 30.0
"""Seconds after which a test is given up; none takes as long."""


class FakeTransport:
    """Only what a channel itself calls."""

    def __init__(self) -> None:
        self.aborted: list[str] = []
        self.closed = threading.Event()

    def abort(self, reason: str) -> None:
        self.aborted.append(reason)

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Opened at the end, so that no thread stays blocked."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def channel() -> Iterator[Channel]:
    made = Channel(FakeTransport(), "http://engine:1")
    yield made
    made.close()
    assert made.transport.closed.wait(PATIENCE)


def failing(error: BaseException) -> Callable[[], None]:
    def call() -> None:
        raise error

    return call


def test_calls_run_in_order_on_one_thread_that_is_not_the_callers(channel):
    seen = []
    calls = [
        channel.submit("a call", lambda number=number: seen.append((number, threading.get_ident())), PATIENCE)
        for number in range(3)
    ]
    channel.wait(calls[-1])
    assert [number for number, _ in seen] == [0, 1, 2]
    assert len({ident for _, ident in seen} | {threading.get_ident()}) == 2
    assert channel.failure is None


@pytest.mark.parametrize("error", [RuntimeError("peer gone"), OSError("peer gone"), EngineError("peer gone")])
def test_a_failure_ends_the_channel_and_says_what_failed(channel, error):
    seen = []
    channel.wait(channel.submit("sending weights", failing(error), PATIENCE))
    channel.wait(channel.submit("sending weights", lambda: seen.append(1), PATIENCE))
    assert channel.failure == "sending weights: peer gone" and seen == []
    assert channel.transport.aborted == ["sending weights: peer gone"]


def test_a_bug_is_raised_to_whoever_waits(channel):
    call = channel.submit("sending weights", failing(KeyError("ours")), PATIENCE)
    with pytest.raises(KeyError, match="ours"):
        channel.wait(call)


def test_an_abort_lets_go_of_whoever_waits_though_the_thread_stays_blocked(channel, gate):
    started, waiting = threading.Event(), threading.Event()

    def blocked() -> None:
        started.set()
        gate.wait(PATIENCE)

    first = channel.submit("joining", blocked, PATIENCE)
    second = channel.submit("joining", lambda: None, PATIENCE)

    def wait() -> None:
        channel.wait(second)
        channel.wait(first)
        waiting.set()

    threading.Thread(target=wait, daemon=True).start()
    assert started.wait(PATIENCE)
    channel.fail("the engine failed: 500")
    assert waiting.wait(PATIENCE) and not gate.is_set()
    channel.fail("something else")
    assert channel.failure == "the engine failed: 500" == channel.transport.aborted[0]
    assert len(channel.transport.aborted) == 1


def test_a_call_that_ignores_its_deadline_is_aborted_by_the_channel(channel, gate, monkeypatch):
    monkeypatch.setattr(channel_module, "LATE_SECONDS", 0.0)
    channel.wait(channel.submit("sending weights", lambda: gate.wait(PATIENCE), 0.01))
    assert "took longer than 0.01 s, a quarter of deadlines.sync" in channel.failure
    assert channel.transport.aborted == [channel.failure]


def test_a_call_is_given_its_time_from_when_it_begins_not_from_when_it_is_submitted(channel, gate):
    """A buffer waits behind the one before it, which has a deadline of its own."""
    order = []
    first = channel.submit("a", lambda: order.append(gate.wait(PATIENCE)), PATIENCE)
    second = channel.submit("b", lambda: order.append("b"), 0.0)  # late by now, had it begun
    gate.set()
    channel.wait(first)
    channel.wait(second)
    assert order == [True, "b"] and channel.failure is None


# -- buffers


@pytest.fixture
def channels(gate) -> Iterator[list[Channel]]:
    made = [Channel(FakeTransport(), str(i)) for i in range(2)]
    yield made
    gate.set()
    for one in made:
        one.close()
        assert one.transport.closed.wait(PATIENCE)


def test_two_buckets_lie_in_two_buffers_and_the_third_in_the_first_again():
    buffers = BucketBuffers(CPU, {CPU})
    places = []
    for size in (8, 8, 6, 8):
        flat = buffers.take(size)
        assert flat.shape == (size,) and flat.dtype == torch.uint8
        assert buffers.filled()[CPU].data_ptr() == flat.data_ptr()
        places.append(flat.data_ptr())
    assert places[0] == places[2] != places[1] == places[3]


def test_a_buffer_grows_for_a_larger_bucket():
    buffers = BucketBuffers(CPU, {CPU})
    for size in (4, 4, 16, 2):
        assert buffers.take(size).shape == (size,)


def test_a_buffer_is_free_when_the_last_channel_has_taken_it(channels, gate):
    quick, slow = channels
    buffers = BucketBuffers(CPU, {CPU})
    first = buffers.take(4)
    taking = [(quick, quick.submit("s", lambda: None, PATIENCE)), (slow, slow.submit("s", gate.wait, PATIENCE))]
    buffers.sent_to(taking)
    buffers.take(4)
    again: list[torch.Tensor] = []
    filler = threading.Thread(target=lambda: again.append(buffers.take(4)), daemon=True)
    filler.start()
    quick.wait(taking[0][1])
    assert filler.is_alive() and again == []
    gate.set()
    filler.join(PATIENCE)
    assert again[0].data_ptr() == first.data_ptr()


def test_what_a_dropped_channel_may_still_read_is_not_filled_again(channels, gate):
    quick, dropped = channels
    buffers = BucketBuffers(CPU, {CPU})
    first = buffers.take(4).fill_(7)
    buffers.sent_to([(one, one.submit("s", act, PATIENCE)) for one, act in ((quick, int), (dropped, gate.wait))])
    buffers.take(4).fill_(8)
    dropped.fail("too slow")
    buffers.take(4).fill_(9)
    assert first.tolist() == [7] * 4
