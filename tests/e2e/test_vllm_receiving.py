"""vLLM's own code at the receiving end of ours, in this process, on the CPU: its request types and its packed consumer,
with the broadcast replaced, its loaders, whose copies are recorded, and its pool of KV blocks."""

from __future__ import annotations

import os
import random
from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from rltool.engines.plugin.patches import reset_hashed_blocks
from rltool.engines.plugin.replay import record_plan
from rltool.engines.transfer.wire import meta_of, plan_buckets
from rltool.weights.send.stream import fill_buckets
from rltool.weights.transport import Rendezvous
from rltool.weights.transports.nccl_vllm import STOCK
from tests.e2e.engines import free_port
from tests.tiny_models import write_tiny_qwen2

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module", autouse=True)
def own_environment():
    """vLLM sets variables of the process it runs in, such as LD_PRELOAD, which other tests' processes would inherit."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="module")
def weight_transfer():
    return import_module("vllm.distributed.weight_transfer.nccl_engine")


@pytest.fixture
def consume(monkeypatch, weight_transfer):
    from vllm.distributed.weight_transfer import packed_tensor

    stream = SimpleNamespace(synchronize=lambda: None, wait_event=lambda event: None)
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda device, count: (stream,) * count)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: stream)  # this and the next two: since 0.33
    monkeypatch.setattr(torch, "Event", lambda: SimpleNamespace(record=lambda stream: None))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
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


@pytest.fixture
def plain_model(tmp_path):
    """vLLM's own Qwen2 with its own loaders, as it is before it is made ready for the CPU; and its checkpoint."""
    from safetensors.torch import load_file
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    directory = write_tiny_qwen2(tmp_path / "model", tied=False)
    arguments = EngineArgs(model=str(directory), skip_tokenizer_init=True, dtype="float32", max_model_len=64)
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{free_port()}", 0, "gloo")
        try:
            initialize_model_parallel(1, 1)
            model = initialize_model(config)
            for parameter in model.parameters():
                parameter.data.zero_()
            yield model, load_file(directory / "model.safetensors")
        finally:
            cleanup_dist_env_and_memory()


def test_the_copies_of_vllms_own_loaders_are_recorded_and_replayed(plain_model):
    """Fused projections, a vocabulary with padding, norms and biases."""
    model, tensors = plain_model
    metas = [meta_of(name, tensor) for name, tensor in tensors.items()]
    buckets = plan_buckets(metas, 20_000)
    plan = record_plan(buckets, lambda name, tensor: model.load_weights([(name, tensor)]))
    assert not any(parameter.any() for parameter in model.parameters()), "recording stores nothing"
    stream = zip(metas, tensors.values(), strict=True)
    for bucket, flat in fill_buckets(stream, buckets, lambda size: torch.empty(size, dtype=torch.uint8)):
        plan.apply(bucket, flat)
    replayed = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data.zero_()
    model.load_weights(list(tensors.items()))
    assert len(replayed) < len(tensors), "some are fused"
    assert all(torch.equal(replayed[name], parameter) for name, parameter in model.named_parameters())


@pytest.fixture
def block_pool(monkeypatch):
    pools = import_module("vllm.v1.core.block_pool")
    monkeypatch.setattr(pools.BlockPool, "reset_prefix_cache", pools.BlockPool.reset_prefix_cache)
    reset_hashed_blocks({"RLTOOL_KEY_FILE": "key"})
    reset_hashed_blocks({"RLTOOL_KEY_FILE": "key"})
    return pools.BlockPool(1000, True, 16)


def hashed(pool, count):
    """So many blocks that hold hashes, every third the same one as the block before; they are free again."""
    utils = import_module("vllm.v1.core.kv_cache_utils")
    blocks = pool.get_new_blocks(count)
    for number, block in enumerate(blocks):
        digest = utils.BlockHash(str(number - (number % 3 == 2)).encode())
        pool._insert_block_hash(utils.make_block_hash_with_group_id(digest, 0), block, num_tokens=16)
    pool.free_blocks(blocks)
    return blocks


class Unlooked(list):
    """Blocks, of which nobody may look at all."""

    def __iter__(self):
        raise AssertionError("every block of the KV cache was looked at")


def test_a_prefix_cache_is_dropped_without_a_look_at_every_block(block_pool):
    every = block_pool.blocks
    block_pool.blocks = unlooked = Unlooked(every)
    for count in (0, 1, 600):
        blocks = hashed(block_pool, count)
        assert all(block.block_hash is not None for block in blocks)
        assert block_pool.reset_prefix_cache() is True and block_pool.blocks is unlooked
        assert all(block.block_hash is None for block in every)
        assert len(block_pool.cached_block_hash_to_block) == 0


def test_blocks_that_are_held_keep_their_hashes(block_pool):
    blocks = hashed(block_pool, 4)
    block_pool.touch(blocks[:1])
    assert block_pool.reset_prefix_cache() is False
    assert all(block.block_hash is not None for block in blocks)
    block_pool.free_blocks(blocks[:1])
    assert block_pool.reset_prefix_cache() is True and blocks[0].block_hash is None


def test_a_pool_that_looks_blocks_up_by_number_is_left_to_vllm(block_pool):
    (block,) = hashed(block_pool, 1)
    reused = []
    block_pool._reuse_watchers = {block.block_id: reused.append}
    assert block_pool.reset_prefix_cache() is True
    assert reused == [block] and block.block_hash is None


def test_an_engine_quantises_what_it_loads_on_the_device_that_computes(monkeypatch):
    """And not on torch's default device, which is the CPU while vLLM loads."""
    reload, config = import_module("rltool.engines.plugin.reload"), import_module("vllm.config").LoadConfig()
    tensors = {"norm.weight": torch.ones(128), "a.weight": torch.randn(256, 128), "kept.weight": torch.ones(128, 128)}
    monkeypatch.setattr(reload.DefaultModelLoader, "get_all_weights", lambda *_: iter(tensors.items()))
    monkeypatch.setattr(reload.current_platform, "device_type", "meta")
    of_model = SimpleNamespace(hf_config=SimpleNamespace(quantization_config={"modules_to_not_convert": ["kept"]}))
    found = dict(reload.Fp8Loader(config).get_all_weights(of_model, torch.nn.Module()))
    assert {name: (x.dtype, x.device.type) for name, x in found.items()} == {
        "norm.weight": (torch.float32, "cpu"), "kept.weight": (torch.float32, "cpu"),
        "a.weight": (torch.float8_e4m3fn, "meta"), "a.weight_scale_inv": (torch.float32, "meta"),
    }  # fmt: skip
