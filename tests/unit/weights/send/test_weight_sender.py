"""One gather, several channels, each at its own pace: with transports of the test's own, and no network."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rltool.config.rollout import WeightsConfig
from rltool.engines.transfer.wire import meta_of, split_flat
from rltool.weights.memory import NONE, Memory, most
from rltool.weights.send import buffers as buffers_module
from rltool.weights.send import channel as channel_module
from rltool.weights.send import sender as sender_module
from rltool.weights.send.buffers import BucketBuffers
from rltool.weights.send.sender import WeightSender
from rltool.weights.send.stream import WeightStreamError
from rltool.weights.transport import Receiver, Rendezvous, SenderOptions, SenderTransport, Transport, TransportError
from tests.ranks import plan_of

PATIENCE = 30.0
TENSORS = {f"t{i}": torch.full((4,), float(i)) for i in range(6)}
METADATA = [meta_of(name, tensor) for name, tensor in TENSORS.items()]
EACH = WeightsConfig(bucket_bytes=15)
"""One tensor in each bucket."""


def stream(pulled: list[str] | None = None) -> Iterator:
    for meta, tensor in zip(METADATA, TENSORS.values(), strict=True):
        if pulled is not None:
            pulled.append(meta.name)
        yield meta, tensor


class Link(SenderTransport):
    """A SenderTransport that goes nowhere. gate: closed, its buckets are not taken; broken_at: the bucket that fails;
    deaf: it heeds no deadline."""

    memory = NONE

    def __init__(self, receiver: Receiver, options: SenderOptions) -> None:
        self.receiver, self.device = receiver, torch.device("cpu")
        self.gate, self.holds, self.finished, self.closed = (threading.Event() for _ in range(4))
        self.gate.set()
        self.got: dict[str, torch.Tensor] = {}
        self.broken_at = ""
        self.deaf = False
        self.log: list[str] = []
        self.joinable = threading.Event()
        self.joinable.set()
        LINKS.append(self)

    def host(self) -> Rendezvous:
        return Rendezvous("gloo", 2, "g", port=len(LINKS))

    def join(self, seconds: float) -> None:
        if not self.joinable.wait(seconds):
            raise TransportError("nobody came")

    def begin(self, version, buckets) -> None:
        self.log.append(f"begin {version} {len(buckets)}")
        self.got = {}

    def send(self, bucket, flat):
        if bucket[0].name == self.broken_at:
            raise RuntimeError("connection reset")
        self.log.append(f"send {bucket[0].name}")
        return Going(self, bucket, flat)

    def finish(self) -> None:
        self.finished.set()

    def abort(self, reason: str) -> None:
        self.log.append(f"abort {reason}")

    def close(self) -> None:
        self.closed.set()


class Going:
    def __init__(self, link: Link, bucket, flat) -> None:
        self.link, self.bucket, self.flat = link, bucket, flat

    def wait(self, seconds: float) -> None:
        link = self.link
        link.holds.set()
        if not link.gate.wait(PATIENCE if link.deaf else seconds):
            raise TransportError("timed out")
        link.log.append(f"sent {self.bucket[0].name}")
        link.got |= {name: tensor.clone() for name, tensor in split_flat(self.flat, self.bucket)}  # read late


class PipelinedLink(Link):
    announced_ahead = True


LINKS: list[Link] = []


@pytest.fixture(autouse=True, params=[Link, PipelinedLink])
def links(monkeypatch, request) -> Iterator[list[Link]]:
    """The connections in the order of hosting; `disk` is a shared transport here."""
    LINKS.clear()
    kinds = {
        backend: Transport(request.param, None, lambda info, device: None, shared=backend == "disk")
        for backend in ("gloo", "disk")
    }
    monkeypatch.setattr(sender_module, "transport", lambda dialect, backend: kinds[backend])
    yield LINKS
    for link in LINKS:
        link.gate.set()
        link.joinable.set()


@pytest.fixture
def make(tmp_path: Path) -> Iterator:
    made = []

    def make(*backends: str, deadline: float = PATIENCE, config: WeightsConfig = EACH, tensors=TENSORS) -> WeightSender:
        cpu, plan = torch.device("cpu"), plan_of(tensors)
        sender = WeightSender(config, plan, device=cpu, deadline=deadline, model_files=tmp_path)
        made.append(sender)
        receivers = [Receiver(str(i), "vllm", backend, 1) for i, backend in enumerate(backends)]
        assert set(sender.host(receivers, "g", tmp_path)) == {receiver.url for receiver in receivers}
        return sender

    yield make
    for sender in made:
        sender.close()


def assert_got(link: Link) -> None:
    assert list(link.got) == list(TENSORS)
    assert all(torch.equal(link.got[name], tensor) for name, tensor in TENSORS.items())
    assert link.finished.is_set()


def in_thread(act) -> tuple[threading.Thread, list]:
    results: list = []
    thread = threading.Thread(target=lambda: results.append(act()), daemon=True)
    thread.start()
    return thread, results


def test_one_gather_feeds_every_channel_and_each_has_all(make, links):
    sender = make("gloo", "gloo", "disk", "disk")
    assert sender.join() == {}
    pulled: list[str] = []
    report = sender.send(stream(pulled), "v:1:2", ["0", "1", "2", "3"])
    assert (report.bytes, report.failures, pulled) == (6 * 16, {}, list(TENSORS))
    assert len(links) == 3, "the engines of a shared transport have one sender"
    for link in links:
        assert_got(link)
        assert link.log[0] == "begin v:1:2 6"


def test_patches_are_made_where_an_engine_takes_them_alone(make, links, monkeypatch):
    """They are made of a copy of all weights in the host's memory, where buckets that go to GPUs never come."""
    sender = make("gloo", "disk", config=WeightsConfig(bucket_bytes=15, delta="auto"))
    assert sender._encoder is not None
    monkeypatch.setattr(sender._encoder, "add", lambda *_: pytest.fail("nobody takes patches"))
    assert sender.join() == {}
    report = sender.send(stream(), "v", ["0", "1"])
    assert report.failures == {} and report.patch_bytes is None
    for link in links:
        assert_got(link)


def test_the_next_bucket_goes_out_before_the_wait_for_the_one_before_where_the_transport_can(make, links):
    sender = make("gloo")
    assert sender.join() == {}
    assert sender.send(stream(), "v", ["0"]).failures == {}
    one_by_one = [f"{step} t{i}" for i in range(6) for step in ("send", "sent")]
    ahead = ["send t0", *(line for i in range(5) for line in (f"send t{i + 1}", f"sent t{i}")), "sent t5"]
    assert links[0].log[1:] == (ahead if isinstance(links[0], PipelinedLink) else one_by_one)


def test_a_channel_that_lags_never_sees_a_buffer_that_was_filled_again(make, links):
    sender = make("gloo", "gloo")
    sender.join()
    links[1].gate.clear()
    pulled: list[str] = []
    sending, results = in_thread(lambda: sender.send(stream(pulled), "v", ["0", "1"]))
    assert links[1].holds.wait(PATIENCE)
    # The gather waits with the third bucket's first tensor for the first bucket's buffer.
    assert sending.is_alive() and len(pulled) <= 3
    links[1].gate.set()
    sending.join(PATIENCE)
    assert results[0].failures == {}
    for link in links:
        assert_got(link)


@pytest.mark.parametrize("deaf", [False, True])
def test_an_engine_that_holds_a_bucket_too_long_is_dropped_and_the_others_get_everything(
    make, links, monkeypatch, deaf
):
    monkeypatch.setattr(channel_module, "LATE_SECONDS", 0.05)
    sender = make("gloo", "gloo", deadline=0.2)
    sender.join()
    links[0].deaf = deaf
    links[0].gate.clear()
    report = sender.send(stream(), "v", ["0", "1"])
    assert report.failures.keys() == {"0"}
    assert ("0.2 s, a quarter of deadlines.sync" if deaf else "sending weights: timed out") in report.failures["0"]
    assert_got(links[1])
    assert report.memory == Memory(host=(2 + 2) * 16), "it may still read two"
    links[0].gate.set()
    assert links[0].closed.wait(PATIENCE), "its connection is of no use any more"
    assert sender.send(stream(), "v", ["0", "1"]).failures == {"0": sender_module.NOT_CONNECTED}
    assert_got(links[1])


@pytest.mark.parametrize("count", [3, 12])
def test_a_sync_holds_two_buckets_however_many_there_are_and_whatever_the_engines(make, monkeypatch, count):
    """The model is streamed: what lies in memory does not grow with it."""
    held, most, allocate = [0], [0], torch.empty

    def counted(*size: int, **options) -> torch.Tensor:
        tensor = allocate(*size, **options)
        held[0] += tensor.nbytes
        most[0] = max(most[0], held[0])
        weakref.finalize(tensor, lambda of=tensor.nbytes: held.__setitem__(0, held[0] - of))
        return tensor

    monkeypatch.setattr(buffers_module.torch, "empty", counted)
    tensors = {f"t{index}": torch.full((8 + index % 3,), 1.0) for index in range(count)}
    metadata = [meta_of(name, tensor) for name, tensor in tensors.items()]
    sender = make("gloo", "gloo", "disk", config=WeightsConfig(bucket_bytes=1), tensors=tensors)
    sender.join()
    stream = zip(metadata, tensors.values(), strict=True)
    report = sender.send(stream, "v", ["0", "1", "2"])
    assert report.failures == {} and report.memory == Memory(host=most[0])
    assert most[0] == 2 * 10 * 4 if count > 3 else 0 < most[0] < 2 * 10 * 4
    assert most[0] < report.bytes, "the model is larger than what is held of it"


def test_what_is_held_is_counted_where_it_is():
    buffers = BucketBuffers(torch.device("meta"), {torch.device("meta")})
    for size in (10, 30, 20, 20, 5):
        buffers.take(size)
        buffers.filled()
        buffers.sent_to([])
    assert buffers.memory == Memory(device=30 + 20)
    gathering, other = Memory.on(torch.device("cpu"), 3), Memory.on(torch.device("cuda"), 4)
    assert gathering + other == Memory(host=3, device=4)
    assert most([Memory(5, 1), Memory(2, 6)]) == Memory(5, 6) and most([]) == Memory()


def test_what_the_stream_holds_is_reported_by_every_rank(make):
    sender = make("gloo")
    sender.join()
    assert sender.send(stream(), "v", ["0"], stream_bytes=1000).memory == Memory(host=2 * 16 + 1000)
    assert make().send(stream(), "v", [], stream_bytes=1000).memory == Memory(host=1000)


def test_a_transports_own_memory_is_held_too(make, links):
    sender = make("gloo", "gloo", "disk")
    sender.join()
    for link in links[:2]:
        link.memory = Memory(host=5, device=70)
    assert sender.send(stream(), "v", ["0", "1"]).memory == Memory(host=2 * 16 + 10, device=140)
    assert sender.send(stream(), "v", ["2"]).memory == Memory(host=2 * 16), "of this sync alone"


def test_a_connection_that_breaks_fails_alone(make, links):
    sender = make("gloo", "gloo")
    links[0].broken_at = "t2"
    sender.join()
    assert sender.send(stream(), "v", ["0", "1"]).failures == {"0": "sending weights: connection reset"}
    assert_got(links[1])
    assert set(links[0].got) <= {"t0", "t1"} and not links[0].finished.is_set()


def test_an_abort_ends_a_blocked_join_and_the_others_are_joined(make, links):
    sender = make("gloo", "gloo", "disk")
    links[0].joinable.clear()
    joining, results = in_thread(sender.join)
    sender.abort(["0", "2", "unknown"], "the engine did not join: 500")
    joining.join(PATIENCE)
    assert results == [{"0": "the engine did not join: 500"}]
    assert sender.send(stream(), "v", ["1", "2"]).failures == {}, "a shared sender is not aborted for one"


def test_an_abort_ends_a_blocked_send_and_the_others_get_everything(make, links):
    sender = make("gloo", "gloo")
    sender.join()
    links[0].gate.clear()
    sending, results = in_thread(lambda: sender.send(stream(), "v", ["0", "1"]))
    assert links[0].holds.wait(PATIENCE)
    sender.abort(["0"], "the engine failed: 500")
    sending.join(PATIENCE)
    assert results[0].failures == {"0": "the engine failed: 500"}
    assert_got(links[1])


def test_a_shared_sender_that_fails_is_the_failure_of_all_its_engines_and_is_made_anew(make, links, tmp_path):
    sender = make("gloo", "disk", "disk")
    links[1].broken_at = "t0"
    sender.join()
    report = sender.send(stream(), "v", ["0", "1", "2"])
    assert report.failures == {url: "sending weights: connection reset" for url in ("1", "2")}
    sender.host([Receiver(url, "vllm", "disk", 1) for url in ("1", "2")], "g", tmp_path)
    assert len(links) == 3 and sender.join() == {}
    assert sender.send(stream(), "v", ["0", "1", "2"]).failures == {}
    assert_got(links[2])


def test_other_engines_connections_stay_as_they_are(make, links):
    sender = make("gloo", "gloo")
    sender.join()
    assert sender.send(stream(), "v", ["1"]).failures == {}
    assert links[0].log == []
    sender.leave(["1"])
    assert links[1].closed.wait(PATIENCE) and not links[0].closed.is_set()
    assert sender.send(stream(), "v", ["0"]).failures == {}


def test_the_stream_is_drained_though_nobody_receives_it(make):
    pulled: list[str] = []
    report = make().send(stream(pulled), "v", ["gone"])
    assert pulled == list(TENSORS) and report.failures == {"gone": sender_module.NOT_CONNECTED}


def test_the_stream_is_drained_when_the_trainer_itself_fails(make, links, monkeypatch):
    """The other ranks are inside the same gather."""
    sender, pulled = make("gloo"), []
    sender.join()
    monkeypatch.setattr(BucketBuffers, "filled", lambda self: {}[0])
    with pytest.raises(KeyError):
        sender.send(stream(pulled), "v", ["0"])
    assert pulled == list(TENSORS)


def test_a_stream_that_breaks_off_ends_every_connection_at_once(make, links):
    sender = make("gloo")
    sender.join()
    with pytest.raises(WeightStreamError):
        sender.send(list(stream())[:3], "v", ["0"])
    assert links[0].log[-1].startswith("abort the trainer failed: WeightStreamError")
    assert links[0].closed.wait(PATIENCE)
    assert sender.send(stream(), "v", ["0"]).failures == {"0": sender_module.NOT_CONNECTED}
