"""vLLM's own code for packed transfer at the receiving end of ours: its request types and its consumer, on the CPU, with
the broadcast replaced."""

from __future__ import annotations

import random
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from rltool.engines.wire import meta_of, plan_buckets
from rltool.weights.stream import fill_buckets
from rltool.weights.transport import Rendezvous
from rltool.weights.transports.nccl_vllm import STOCK

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def weight_transfer():
    return pytest.importorskip("vllm.distributed.weight_transfer.nccl_engine")


@pytest.fixture
def consume(monkeypatch, weight_transfer):
    from vllm.distributed.weight_transfer import packed_tensor

    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda device, count: (stream,) * count)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return packed_tensor.packed_nccl_broadcast_consumer


def test_vllm_takes_our_init_request(weight_transfer):
    meeting = Rendezvous("vllm-nccl", 3, "g", unique_id="QUJD" * 42 + "QUI=", bucket_bytes=100)
    (init,) = STOCK.control.init(meeting, rank_offset=1, timeout_seconds=9)
    info = weight_transfer.NCCLWeightTransferInitInfo(**init.body["init_info"])
    assert len(info.nccl_unique_id_bytes) == 128 and info.packed and info.packed_buffer_size_bytes == 100


@pytest.mark.parametrize("limit", [1, 64, 1000, 10**6])
def test_vllm_unpacks_from_our_buckets_what_we_put_in(consume, weight_transfer, limit):
    rng = random.Random(limit)
    tensors = {
        f"t{i}": torch.randn(rng.randrange(1, 9), rng.randrange(1, 9)).to(torch.bfloat16 if i < 20 else torch.float32)
        for i in range(25)
    }
    metas = [meta_of(name, tensor) for name, tensor in tensors.items()]
    buckets = plan_buckets(metas, limit)
    stream = zip(metas, tensors.values(), strict=True)
    sent = iter([flat for _, flat in fill_buckets(stream, buckets, lambda size: torch.empty(size, dtype=torch.uint8))])
    meeting = Rendezvous("vllm-nccl", 2, "g", bucket_bytes=limit)
    found: dict[str, torch.Tensor] = {}
    for request, _ in STOCK.control.announce(buckets, meeting, version="v"):
        info = weight_transfer.NCCLWeightTransferUpdateInfo(**request.body["update_info"])
        announced = zip(info.names, info.dtype_names, info.shapes, strict=True)
        group = SimpleNamespace(broadcast=lambda tensor, src: tensor.copy_(next(sent)))
        consume(
            iterator=((name, (shape, getattr(torch, dtype))) for name, dtype, shape in announced),
            group=group,
            src=0,
            post_unpack_func=found.update,
            buffer_size_bytes=limit,
            device="cpu",
        )
    assert next(sent, None) is None, "vLLM has received fewer buffers than were sent"
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)
