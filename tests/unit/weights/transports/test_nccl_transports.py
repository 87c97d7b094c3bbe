"""What engines are asked over NCCL, and how the buckets fit vLLM's packed buffers. The transfer itself:
tests/contract/test_nccl_transfer.py."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rltool.config.rollout import WeightsConfig
from rltool.engines.transfer.wire import plan_buckets, tensor_bytes
from rltool.engines.types import TensorMeta
from rltool.weights.transport import Receiver, Rendezvous, SenderOptions
from rltool.weights.transports.nccl_sender import NcclSender
from rltool.weights.transports.nccl_sglang import SGLANG
from rltool.weights.transports.nccl_vllm import PLUGIN, STOCK

MEETING = Rendezvous("nccl", 5, "group", unique_id="QUJD", bucket_bytes=64, nccl_version=22907)
METAS = [TensorMeta("a", "bfloat16", (4, 10)), TensorMeta("b", "bfloat16", (3,)), TensorMeta("r", "float32", (2,))]


def vllm_chunks(metas: list[TensorMeta], limit: int) -> list[list[str]]:
    """packed_nccl_broadcast_consumer's loop: sizes are added up until they are larger than the buffer."""
    chunks, iterator = [], iter(metas)
    while True:
        chunk, size = [], 0
        for meta in iterator:
            chunk.append(meta.name)
            size += tensor_bytes(meta)
            if size > limit:
                break
        if not chunk:
            return chunks
        chunks.append(chunk)


def test_our_buckets_are_vllms_packed_buffers_whatever_the_model():
    rng = random.Random(0)
    for _ in range(300):
        count = rng.randrange(1, 30)
        metas = [TensorMeta(f"t{i}", "bfloat16", (rng.randrange(0, 9), rng.randrange(1, 9))) for i in range(count)]
        total = sum(map(tensor_bytes, metas))
        for limit in (1, total, max(1, total - 1), max(1, total // 3)):
            assert [[m.name for m in bucket] for bucket in plan_buckets(metas, limit)] == vllm_chunks(metas, limit)


def test_a_stock_vllm_is_asked_in_its_own_words():
    (init,) = STOCK.control.init(MEETING, rank_offset=1, timeout_seconds=9)
    assert init.body == {"init_info": {
        "nccl_unique_id_b64": "QUJD", "rank_offset": 1, "world_size": 5, "packed": True,
        "packed_buffer_size_bytes": 64, "packed_num_buffers": 2,
    }}  # fmt: skip
    [(first, two), (second, one)] = STOCK.control.announce(plan_buckets(METAS, 64), MEETING, version="v")
    assert (first.path, two, one) == ("/update_weights", 2, 1), "one request for all buckets of one dtype"
    assert first.body == {
        "update_info": {"names": ["a", "b"], "dtype_names": ["bfloat16"] * 2, "shapes": [[4, 10], [3]]}
    }
    assert second.body["update_info"]["names"] == ["r"]


def test_buckets_that_vllm_would_cut_otherwise_are_refused():
    buckets = plan_buckets(METAS, 10_000)
    with pytest.raises(ValueError, match="packed_buffer_size_bytes"):
        STOCK.control.announce(buckets, replace(MEETING, bucket_bytes=1), version="v")


def test_leaving_a_stock_vllm_makes_it_forget_a_failed_update():
    start, finish, shutdown = STOCK.control.leave("group")
    assert (start.path, start.tolerate, finish.path, finish.tolerate) == (
        "/start_weight_update", (500,), "/finish_weight_update", (500,),
    )  # fmt: skip
    assert shutdown.path == "/shutdown_weight_transfer_engine"


def test_the_plugin_is_told_its_deadline_the_version_and_every_bucket_at_once():
    (init,) = PLUGIN.control.init(MEETING, rank_offset=1, timeout_seconds=9)
    assert init.body == {"init_info": {
        "transport": "nccl", "unique_id": "QUJD", "nccl_version": 22907, "rank_offset": 1, "world_size": 5,
        "timeout_seconds": 9,
    }}  # fmt: skip
    buckets = plan_buckets(METAS, 64)
    [(request, count)] = PLUGIN.control.announce(buckets, MEETING, version="v")
    assert count == len(buckets)
    assert request.body["update_info"] == {
        "names": ["a", "b", "r"], "dtypes": ["bfloat16", "bfloat16", "float32"], "shapes": [[4, 10], [3], [2]],
        "bucket_sizes": [len(bucket) for bucket in buckets],
    }  # fmt: skip


def test_sglang_joins_with_torchs_nccl_and_takes_one_bucket_at_a_time():
    meeting = replace(MEETING, address="10.0.0.1", port=7, unique_id=None)
    (init,) = SGLANG.control.init(meeting, rank_offset=1, timeout_seconds=9)
    assert (init.body["backend"], init.body["master_address"], init.body["world_size"]) == ("nccl", "10.0.0.1", 5)
    announced = SGLANG.control.announce(plan_buckets(METAS, 64), meeting, version="v")
    assert [count for _, count in announced] == [1] * len(announced)
    assert all(request.body["load_format"] == "flattened_bucket" for request, _ in announced)


def test_a_sender_that_is_given_up_waits_for_every_broadcast_that_workers_are_in(tmp_path):
    """An abort before would leave a worker in a kernel that ends by nothing."""
    events: list[str] = []

    class Communicator:
        alive, device = True, torch.device("cpu")

        def broadcast(self, flat: torch.Tensor) -> SimpleNamespace:
            name = f"broadcast {len(events)}"
            events.append(name)
            return SimpleNamespace(wait=lambda seconds, check=None: events.append(f"waited for {name}"))

        def abort(self, reason: str) -> None:
            events.append(f"abort: {reason}")

    options = SenderOptions("g", WeightsConfig(), torch.device("cpu"), 1.0, tmp_path, tmp_path)
    sender = NcclSender(Receiver("http://e", "vllm", "nccl", 1), options)
    sender._communicator = Communicator()  # type: ignore[assignment]
    bucket = (TensorMeta("a", "float32", (2,)),)
    sender.begin("v", [bucket] * 3)
    for _ in range(2):
        sender.send(bucket, torch.zeros(8, dtype=torch.uint8))
    sender.abort("the stream broke off")
    sender.close()
    assert events == [
        "broadcast 0", "broadcast 1", "waited for broadcast 0", "waited for broadcast 1", "broadcast 4",
        "waited for broadcast 4", "abort: the stream broke off",
    ]  # fmt: skip
