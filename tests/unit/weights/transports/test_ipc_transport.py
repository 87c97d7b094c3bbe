"""The ipc transport's parts: whose turn the buffer is, which handle goes to which worker, what SGLang unpickles."""

from __future__ import annotations

import base64
import io
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rltool.config.rollout import WeightsConfig
from rltool.engines.plugin.channels import ChannelError, IpcChannel
from rltool.engines.types import TensorMeta
from rltool.errors import EngineError
from rltool.weights.send.sender import (
    NOT_CONNECTED,
    Rank,
    SendReport,
    WeightSender,
    one_answer,
    one_meeting,
    one_report,
)
from rltool.weights.transport import Receiver, Rendezvous, SenderOptions, TransportError, transport
from rltool.weights.transports import sglang_tensors
from rltool.weights.transports.ipc import IpcSender, check_handles
from tests.contract.fakes import ipc as fake_ipc
from tests.ranks import plan_of

BUCKETS = [(TensorMeta(name, "uint8", (size,)),) for name, size in (("a", 3), ("b", 5))]
CPU = torch.device("cpu")
PATIENCE = 10.0
NOW = 0.01


@pytest.fixture
def sender(monkeypatch, tmp_path: Path):
    fake_ipc.installed(monkeypatch)
    options = SenderOptions("g", WeightsConfig(), CPU, PATIENCE, tmp_path, tmp_path, gpu="gpu-b", largest_bucket=5)
    made = IpcSender(Receiver("http://e:1", "vllm", "ipc", 2, ("gpu-a", "gpu-b")), options)
    yield made
    made.close()


def bytes_of(number: int) -> torch.Tensor:
    return torch.full((BUCKETS[number][0].shape[0],), 7 + number, dtype=torch.uint8)


# -- the buffer


def test_a_rank_offers_memory_on_its_own_gpu_alone(sender):
    meeting = sender.host()
    assert list(meeting.handles) == ["gpu-a", "gpu-b"] and meeting.handles["gpu-a"] == ""
    sender.send(BUCKETS[1], bytes_of(1))
    opened = fake_ipc.SharedOpening(meeting.handles["gpu-b"], CPU)
    assert torch.equal(opened.flat(5), bytes_of(1))
    opened.close()


def test_a_bucket_is_done_when_the_engine_has_taken_it_and_the_next_is_waited_for(sender):
    sender.host()
    sender.begin("v1", BUCKETS)
    work = sender.send(BUCKETS[0], bytes_of(0))
    sender.ready("v1", 0, NOW)
    with pytest.raises(TransportError, match="the engine did not take a bucket within 0.01 s"):
        work.wait(NOW)
    with pytest.raises(TransportError, match="the trainer did not fill a bucket within 0.01 s"):
        sender.ready("v1", 1, NOW)
    work.wait(PATIENCE)
    sender.send(BUCKETS[1], bytes_of(1))
    sender.ready("v1", 1, NOW)
    sender.ready("v1", 2, NOW)  # there is no third one
    sender.finish()


def test_a_version_that_is_sent_once_more_is_not_found_ready_before_it_is(sender):
    sender.host()
    for _ in range(2):
        with pytest.raises(TransportError, match="did not fill"):
            sender.ready("v1", 0, NOW)
        sender.begin("v1", BUCKETS[:1])
        sender.send(BUCKETS[0], bytes_of(0))
        sender.ready("v1", 0, NOW)
        sender.ready("v1", 1, NOW)
        sender.finish()


def test_a_bucket_of_which_a_rank_has_nothing_is_ready_there_as_soon_as_it_sends_the_version(sender):
    """weights.sharded: () stands for such a bucket."""
    sender.host()
    buckets = [(), BUCKETS[0], (), BUCKETS[1], ()]
    for _ in range(2):
        with pytest.raises(TransportError, match="did not fill"):
            sender.ready("v1", 0, NOW)
        sender.begin("v1", buckets)
        sender.ready("v1", 0, NOW)
        for number, taken in ((0, 1), (1, 3)):
            with pytest.raises(TransportError, match="did not fill"):
                sender.ready("v1", taken, NOW)
            work = sender.send(BUCKETS[number], bytes_of(number))
            sender.ready("v1", taken, NOW)
            with pytest.raises(TransportError, match="did not take"):
                work.wait(NOW)
            if taken == 1:
                sender.ready("v1", 2, NOW)
                work.wait(PATIENCE)
        sender.ready("v1", 4, NOW)
        work.wait(PATIENCE)
        sender.finish()
        sender.ready("v1", 5, NOW)  # beside its end


def test_an_abort_ends_whoever_waits(sender):
    sender.host()
    sender.begin("v1", BUCKETS)
    reasons: list[str] = []

    def wait() -> None:
        try:
            sender.ready("v1", 0, PATIENCE)
        except TransportError as error:
            reasons.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    sender.abort("the engine died")
    waiting.join(PATIENCE)
    assert reasons == ["the engine died"]
    with pytest.raises(TransportError, match="the engine died"):
        sender.send(BUCKETS[0], bytes_of(0)).wait(PATIENCE)


# -- which rank, which handle


def senders(tmp_path: Path) -> list[WeightSender]:
    return [
        WeightSender(
            WeightsConfig(), plan_of({}), device=CPU, deadline=PATIENCE, model_files=tmp_path, rank=Rank(rank, gpu)
        )
        for rank, gpu in enumerate(("gpu-a", "gpu-b", "gpu-c"))
    ]


def test_every_rank_on_a_gpu_of_an_engine_sends_to_it_and_rank_0_to_the_others(monkeypatch, tmp_path):
    fake_ipc.installed(monkeypatch)
    ranks = senders(tmp_path)
    shared = Receiver("http://shared", "sglang", "ipc", 2, ("gpu-c", "gpu-b"))
    away = Receiver("http://away", "vllm", "disk", 1)
    meetings = [rank.host([shared, away], "g", tmp_path) for rank in ranks]
    assert [set(meeting) for meeting in meetings] == [{"http://away"}, {"http://shared"}, {"http://shared"}]
    assert [rank.join() for rank in ranks] == [{}, {}, {}]
    handles = one_meeting(meetings)["http://shared"].handles
    assert list(handles) == ["gpu-c", "gpu-b"], "in the order of the workers"
    assert handles == {
        "gpu-c": meetings[2]["http://shared"].handles["gpu-c"],
        "gpu-b": meetings[1]["http://shared"].handles["gpu-b"],
    }
    assert all(rank.needs_all_ranks(["http://shared", "http://away"]) for rank in ranks)
    assert not any(rank.needs_all_ranks(["http://away"]) for rank in ranks)
    failed = ranks[1]._channels["http://shared"]
    failed.fail("CUDA error")
    reports = [rank.send(iter(()), "v1", ["http://shared"]) for rank in ranks]
    assert [report.failures for report in reports] == [{}, {"http://shared": "CUDA error"}, {}]
    assert ranks[1].ready("http://shared", "v1", 0, NOW) == "CUDA error"
    assert ranks[0].ready("http://shared", "v1", 0, NOW) == NOT_CONNECTED
    assert all(rank.needs_all_ranks(["http://shared"]) for rank in ranks), "a collective, whatever failed where"
    for rank in ranks:
        rank.leave(["http://shared"])
        assert not rank.needs_all_ranks(["http://shared"])
        rank.close()
    failed._thread.join(PATIENCE)  # nobody else waits for a channel that has failed
    assert fake_ipc.SharedExport.live == set()


def test_the_ranks_answer_as_one():
    first = Rendezvous("ipc", 3, "g", handles={"a": "A", "b": ""})
    second = Rendezvous("ipc", 3, "g", handles={"a": "", "b": "B"})
    gloo = Rendezvous("gloo", 2, "g", "10.0.0.1", 4000)
    assert one_meeting([{"u": first, "v": gloo}, {"u": second}]) == {
        "u": Rendezvous("ipc", 3, "g", handles={"a": "A", "b": "B"}),
        "v": gloo,
    }
    reports = [SendReport(10, 1.0, {"u": "first"}), SendReport(10, 2.0, {"u": "second", "v": "third"})]
    assert one_report(reports) == SendReport(10, 2.0, {"u": "first", "v": "third"})
    assert one_answer([{}, {}]) == {}


@pytest.mark.parametrize(
    ("world_size", "handles", "message"),
    [
        (3, {"gpu-a": "A", "gpu-b": ""}, "no trainer rank shares memory on its GPU gpu-b: .*trainer.world_size"),
        (3, {}, "has 2 workers, and the GPUs of 0 are known"),
    ],
)
def test_an_engine_with_a_worker_that_no_rank_serves_is_refused(world_size, handles, message):
    for dialect in ("vllm", "sglang"):
        control = transport(dialect, "ipc").control
        with pytest.raises(EngineError, match=message):
            control.init(Rendezvous("ipc", world_size, "g", handles=handles), rank_offset=1, timeout_seconds=9)
    check_handles(Rendezvous("ipc", 2, "g", handles={"gpu-a": "A"}))


def test_vllm_is_told_all_handles_once_and_one_bucket_at_a_time():
    control = transport("vllm", "ipc").control
    meeting = Rendezvous("ipc", 2, "g", handles={"gpu-a": "A"})
    [http] = control.init(meeting, rank_offset=1, timeout_seconds=9)
    assert http.body == {"init_info": {"transport": "ipc", "handles": {"gpu-a": "A"}}}
    told = control.announce(BUCKETS, meeting, version="v1")
    assert [(http.body["update_info"]["names"], covered) for http, covered in told] == [(["a"], 1), (["b"], 1)]


# -- the worker


def test_a_worker_opens_the_memory_on_its_own_gpu(monkeypatch):
    fake_ipc.installed(monkeypatch)
    exported = {gpu: fake_ipc.SharedExport(5, CPU) for gpu in ("gpu-a", "gpu-b")}
    exported["gpu-b"].flat.copy_(bytes_of(1))
    handles = {gpu: memory.handle for gpu, memory in exported.items()}
    channel = IpcChannel(handles, "gpu-b", CPU)
    [(bucket, flat)] = channel.receive(BUCKETS[1:])
    exported["gpu-b"].flat.zero_()  # the trainer fills it anew
    assert bucket == BUCKETS[1] and torch.equal(flat, bytes_of(1))
    with pytest.raises(ChannelError, match="2 buckets were announced at once"):
        list(channel.receive(BUCKETS))
    channel.close()
    with pytest.raises(ChannelError, match="on GPU gpu-c, and the trainer's ranks are on gpu-a, gpu-b"):
        IpcChannel(handles, "gpu-c", CPU)
    for memory in exported.values():
        memory.close()
    with pytest.raises(ChannelError, match="opening the trainer's memory on GPU gpu-a"):
        IpcChannel(handles, "gpu-a", CPU)


# -- SGLang


def test_sglangs_payload_says_where_each_tensor_lies_and_how_torch_opens_it(monkeypatch):
    opened: list[tuple] = []
    bucket = (TensorMeta("a", "bfloat16", (2, 3)), TensorMeta("b", "bfloat16", (5,)))
    raw = bytes(range(64))
    text = sglang_tensors.serialized_bucket(bucket, "8f6e-01", base64.b64encode(raw).decode(), 100)
    monkeypatch.setattr("torch.multiprocessing.reductions.rebuild_cuda_tensor", lambda *a: opened.append(a))
    named: set[str] = set()

    class Noting(pickle.Unpickler):
        def find_class(self, module_name: str, global_name: str) -> object:
            named.add(f"{module_name}.{global_name}")
            return super().find_class(module_name, global_name)

    content = Noting(io.BytesIO(base64.b64decode(text))).load()
    assert named == {
        "types.SimpleNamespace", "torch.Tensor", "torch.uint8", "torch.bfloat16", "torch.storage.TypedStorage",
        "torch.multiprocessing.reductions.rebuild_cuda_tensor",
    }, "SGLang's unpickler lets no others through"  # fmt: skip
    assert content["metadata"] == [
        SimpleNamespace(name="a", shape=(2, 3), dtype=torch.bfloat16, start_idx=0, end_idx=12, numel=12),
        SimpleNamespace(name="b", shape=(5,), dtype=torch.bfloat16, start_idx=12, end_idx=22, numel=10),
    ]
    [arguments] = opened
    assert arguments[:6] == (torch.Tensor, (22,), (1,), 0, torch.storage.TypedStorage, torch.uint8)
    assert arguments[6:10] == ("8f6e-01", raw, 100, 0)
    assert arguments[10:] == (False, bytes(64), 0, bytes(64), False)


def test_sglang_gets_a_payload_for_each_rank_in_order_and_the_size_of_the_largest_bucket(monkeypatch):
    made: list[tuple] = []
    monkeypatch.setattr(
        "rltool.weights.transports.ipc.serialized_bucket", lambda *a: made.append(a) or f"{a[0][0].name} {a[1]}"
    )
    meeting = Rendezvous("ipc", 3, "g", handles={"gpu-b": "B", "gpu-a": "A"})
    told = transport("sglang", "ipc").control.announce(BUCKETS, meeting, version="v1")
    assert [(http.path, http.body["serialized_named_tensors"], covered) for http, covered in told] == [
        ("/update_weights_from_tensor", ["a gpu-b", "a gpu-a"], 1),
        ("/update_weights_from_tensor", ["b gpu-b", "b gpu-a"], 1),
    ]
    assert {size for _, _, _, size in made} == {5}
