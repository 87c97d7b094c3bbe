"""What engines are asked to do by each transport, what the disk transport leaves, and which transport is chosen."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rltool.config.rollout import WeightsConfig
from rltool.engines.transfer.wire import plan_buckets
from rltool.engines.types import EngineInfo, TensorMeta
from rltool.errors import EngineError, UsageError
from rltool.weights.transport import TRANSPORTS, Receiver, Rendezvous, SenderOptions, choose, transport
from rltool.weights.transports.disk import DiskSender
from tests.ranks import flat_bytes

BUCKET = (TensorMeta("a", "float32", (2, 3)), TensorMeta("b", "bfloat16", (5,)))
MEETING = Rendezvous("gloo", 3, "g", "10.0.0.1", 4000)
ON_DISK = Rendezvous("disk", 3, "g", directory="/w")
VERSION = "run:0:3"


def control(dialect: str, backend):
    return transport(dialect, backend).control


@pytest.mark.parametrize("pair", TRANSPORTS, ids=str)
def test_every_transport_of_the_table_is_there_and_covers_every_bucket(pair):
    found = transport(*pair)
    meeting = replace(MEETING, transport=pair[1], directory="/w", bucket_bytes=20)
    buckets = plan_buckets([*BUCKET, *(replace(meta, name=f"{meta.name}2") for meta in BUCKET)], 20)
    announced = found.control.announce(buckets, meeting, version=f"{'a' * 32}:0:3")
    assert sum(covered for _, covered in announced) == len(buckets)
    joins = pair[1] != "adapters"  # which an engine loads beside all else
    assert all(bool(asked) == joins for asked in (found.control.leave("g"), found.control.finish(VERSION)))
    assert bool(found.control.begin()) == joins


def test_a_rendezvous_travels_as_json():
    assert Rendezvous(**json.loads(json.dumps(asdict(MEETING)))) == MEETING


# -- vLLM


def test_vllm_joins_over_gloo_with_all_that_the_plugin_needs():
    (http,) = control("vllm", "gloo").init(MEETING, rank_offset=1, timeout_seconds=9)
    assert (http.path, http.body) == (
        "/init_weight_transfer_engine",
        {
            "init_info": {
                "transport": "gloo", "address": "10.0.0.1", "port": 4000, "rank_offset": 1, "world_size": 3,
                "group": "g", "timeout_seconds": 9,
            }
        },
    )  # fmt: skip
    (http,) = control("vllm", "disk").init(ON_DISK, rank_offset=1, timeout_seconds=9)
    assert http.body == {"init_info": {"transport": "disk"}}


def test_vllm_is_announced_each_bucket_with_names_dtypes_and_shapes_and_its_file():
    info = {"names": ["a", "b"], "dtypes": ["float32", "bfloat16"], "shapes": [[2, 3], [5]]}
    [(http, _)] = control("vllm", "gloo").announce([BUCKET], MEETING, version=VERSION)
    assert (http.path, http.body) == ("/update_weights", {"update_info": info})
    (_, (second, _)) = control("vllm", "disk").announce([BUCKET, BUCKET], ON_DISK, version=VERSION)
    assert second.body == {"update_info": info | {"path": "/w/run-0-3/model-00002-of-00002.safetensors"}}


def test_vllm_gets_the_version_with_finish_and_drops_the_cache_of_the_old_weights():
    finish, reset = control("vllm", "gloo").finish(VERSION)
    assert (finish.path, finish.body) == ("/finish_weight_update", {"weight_version": VERSION})
    assert (reset.path, reset.query) == ("/reset_prefix_cache", {"reset_running_requests": "true"})


# -- SGLang


def test_sglang_joins_over_gloo_with_group_and_rank():
    (http,) = control("sglang", "gloo").init(MEETING, rank_offset=1, timeout_seconds=9)
    assert http.path == "/init_weights_update_group"
    assert http.body == {
        "master_address": "10.0.0.1", "master_port": 4000, "rank_offset": 1, "world_size": 3, "group_name": "g",
        "backend": "gloo",
    }  # fmt: skip
    assert control("sglang", "disk").init(ON_DISK, rank_offset=1, timeout_seconds=9) == []


def test_sglang_is_announced_a_bucket_as_one_flat_broadcast_that_names_no_version_yet():
    [(http, _)] = control("sglang", "gloo").announce([BUCKET], MEETING, version=VERSION)
    assert http.path == "/update_weights_from_distributed"
    assert http.body == {
        "names": ["a", "b"], "dtypes": ["float32", "bfloat16"], "shapes": [[2, 3], [5]], "group_name": "g",
        "load_format": "flattened_bucket", "flush_cache": False,
    }  # fmt: skip


def test_sglang_names_the_version_after_the_cache_of_the_old_weights_is_gone_and_aborts_nothing():
    requests = control("sglang", "gloo").finish(VERSION)
    assert [http.path for http in requests] == ["/end_weight_update", "/flush_cache", "/update_weight_version"]
    assert requests[-1].body == {"new_version": VERSION, "abort_all_requests": False}


def test_a_bucket_that_sglang_could_not_view_in_place_is_refused():
    unaligned = (BUCKET[1], BUCKET[0])
    with pytest.raises(EngineError, match=r"a \(float32\) starts at byte 10"):
        control("sglang", "gloo").announce([unaligned], MEETING, version=VERSION)


def test_sglang_loads_a_whole_directory_in_one_request():
    [(http, covered)] = control("sglang", "disk").announce([BUCKET] * 3, ON_DISK, version=VERSION)
    assert (http.path, http.body["model_path"], covered) == ("/update_weights_from_disk", "/w/run-0-3", 3)


# -- disk


@pytest.fixture
def disk(tmp_path: Path) -> DiskSender:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors.index.json"):
        (model / name).write_text('{"of": "the model"}')
    options = SenderOptions("g", WeightsConfig(), torch.device("cpu"), 9.0, tmp_path / "w", model)
    return DiskSender(Receiver("http://e:1", "vllm", "disk", 2), options)


def test_the_disk_sender_leaves_a_directory_that_engines_find_where_they_are_told(disk):
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(5, dtype=torch.bfloat16)}
    buckets = [BUCKET[:1], BUCKET[1:]]
    meeting = disk.host()
    disk.join(60)
    disk.begin(VERSION, buckets)
    disk.send(buckets[0], flat_bytes(tensors, buckets[0])).wait(60)  # and there the sync fails: it is repeated
    disk.begin(VERSION, buckets)
    for bucket in buckets:
        disk.send(bucket, flat_bytes(tensors, bucket)).wait(60)
    assert not (disk.options.directory / "run-0-3").exists(), "a reader never sees half a version"
    disk.finish()
    requests = control("vllm", "disk").announce(buckets, meeting, version=VERSION)
    found = {}
    for bucket, (http, _) in zip(buckets, requests, strict=True):
        found |= load_file(http.body["update_info"]["path"])
        assert set(found) >= {meta.name for meta in bucket}
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    directory = disk.options.directory / "run-0-3"
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    assert (directory / "config.json").exists() and [path.name for path in directory.parent.iterdir()] == ["run-0-3"]


# -- which one


def info(**changes) -> EngineInfo:
    values = dict(
        dialect="vllm", engine_version="0.32.0", model_id="policy", world_size=1, max_model_len=4096, vocab_size=128,
        dtype="float32", weight_backend="rltool", weight_version=None, boot_id="b", plugin=True,
    )  # fmt: skip
    return EngineInfo(**{**values, **changes})


SGLANG = {"dialect": "sglang", "weight_backend": "sglang", "plugin": False}


@pytest.mark.parametrize(
    ("changes", "wanted", "chosen"),
    [
        ({}, "auto", "gloo"),
        (SGLANG, "auto", "gloo"),
        ({**SGLANG, "dp_size": 2}, "auto", "disk"),
        ({}, "disk", "disk"),
        (SGLANG, "disk", "disk"),
        ({**SGLANG, "dp_size": 2}, "disk", "disk"),
    ],
)
def test_the_transport_is_chosen_by_what_the_engine_reports(changes, wanted, chosen):
    assert choose(info(**changes), WeightsConfig(transport=wanted), "cpu") == chosen


@pytest.mark.parametrize(
    ("changes", "wanted", "message"),
    [
        ({"weight_backend": None}, "auto", "has no weight transfer; start vLLM with --weight-transfer-config"),
        ({"weight_backend": None}, "gloo", "has no weight transfer"),
        ({"weight_backend": None}, "disk", "has no weight transfer"),
        (
            {"weight_backend": "nccl"},
            "auto",
            "offers the weight backend 'nccl', which a trainer on device 'cpu' cannot",
        ),
        ({"weight_backend": "nccl"}, "gloo", "gloo needs rltool's own.*--weight-backend rltool"),
        ({"weight_backend": "nccl"}, "disk", "cannot load weights from disk.*--weight-backend rltool"),
        ({"weight_backend": "nccl"}, "nccl", "over nccl by a trainer on the CPU"),
        ({}, "nccl", "over nccl by a trainer on the CPU"),
        (SGLANG, "nccl", "over nccl by a trainer on the CPU"),
        ({**SGLANG, "dp_size": 2}, "gloo", 'has 2 data-parallel replicas.*weights.transport = "disk"'),
    ],
)
def test_an_engine_that_cannot_be_reached_is_told_what_to_change(changes, wanted, message):
    with pytest.raises(UsageError, match=message):
        choose(info(**changes), WeightsConfig(transport=wanted), "cpu")


@pytest.mark.parametrize(
    ("changes", "wanted", "chosen"),
    [
        ({}, "auto", "nccl"),
        ({}, "nccl", "nccl"),
        ({"device": "cpu"}, "auto", "gloo"),
        ({"weight_backend": "nccl", "plugin": False}, "auto", "vllm-nccl"),
        ({"weight_backend": "nccl", "plugin": False}, "nccl", "vllm-nccl"),
        (SGLANG, "auto", "nccl"),
        ({**SGLANG, "device": "cpu"}, "auto", "gloo"),
        ({**SGLANG, "dp_size": 2}, "auto", "disk"),
    ],
)
def test_a_trainer_on_a_gpu_sends_over_nccl_to_whoever_has_one_too(changes, wanted, chosen):
    assert choose(info(**changes), WeightsConfig(transport=wanted), "cuda") == chosen


@pytest.mark.parametrize(
    ("changes", "chosen"),
    [
        ({}, "ipc"),
        (SGLANG, "ipc"),
        ({"device": "cpu"}, "gloo"),
        ({**SGLANG, "dp_size": 2}, "disk"),
    ],
)
def test_on_a_gpu_that_trainer_and_engine_share_weights_go_through_its_memory_and_never_over_nccl(changes, chosen):
    assert choose(info(**changes), WeightsConfig(), "cuda", shares_gpus=True) == chosen
    with pytest.raises(UsageError, match="NCCL joins no two ranks on one GPU"):
        choose(info(**changes), WeightsConfig(transport="nccl"), "cuda", shares_gpus=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "cpu"}, "runs on the CPU, where there is no NCCL"),
        ({"weight_backend": "ipc"}, "offers the weight backend 'ipc', not rltool's"),
        ({**SGLANG, "dp_size": 2}, "has 2 data-parallel replicas"),
    ],
)
def test_an_engine_that_cannot_be_reached_over_nccl_says_why(changes, message):
    with pytest.raises(UsageError, match=message):
        choose(info(**changes), WeightsConfig(transport="nccl"), "cuda")


@pytest.mark.parametrize(
    ("changes", "device", "shared", "message"),
    [
        ({}, "cuda", False, "has GPUs of its own"),
        ({}, "cpu", True, "need GPUs"),
        ({"device": "cpu"}, "cuda", True, "need GPUs"),
        ({"weight_backend": "nccl"}, "cuda", True, "cannot open the trainer's memory.*--weight-backend rltool"),
        ({"weight_backend": None}, "cuda", True, "has no weight transfer"),
        ({**SGLANG, "dp_size": 2}, "cuda", True, "has 2 data-parallel replicas"),
    ],
)
def test_an_engine_that_cannot_be_reached_over_ipc_says_why(changes, device, shared, message):
    with pytest.raises(UsageError, match=message):
        choose(info(**changes), WeightsConfig(transport="ipc"), device, shares_gpus=shared)


def test_colocated_engines_on_the_cpu_are_reached_over_gloo():
    assert choose(info(), WeightsConfig(), "cpu", shares_gpus=True) == "gloo"


def test_a_transport_that_this_version_lacks_is_named(monkeypatch):
    monkeypatch.delitem(TRANSPORTS, ("sglang", "gloo"))
    with pytest.raises(UsageError, match="cannot be sent weights over gloo.*no such transport for sglang"):
        choose(info(**SGLANG), WeightsConfig(transport="gloo"), "cpu")
    assert choose(info(**SGLANG), WeightsConfig(), "cpu") == "disk"


@pytest.mark.parametrize(
    ("changes", "wanted", "device", "chosen"),
    [
        ({}, "auto", "cpu", "gloo-delta"),
        ({}, "gloo", "cuda", "gloo-delta"),
        ({}, "auto", "cuda", "nccl-delta"),
        ({}, "nccl", "cuda", "nccl-delta"),
        ({"device": "cpu"}, "auto", "cuda", "gloo-delta"),
    ],
)
def test_patches_go_over_the_group_that_whole_weights_would_take(changes, wanted, device, chosen):
    assert choose(info(**changes), WeightsConfig(transport=wanted, delta=True), device) == chosen


@pytest.mark.parametrize("wanted", ["auto", "gloo", "nccl"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (SGLANG, "needs a vLLM with rltool's plugin: set weights.delta to \"auto\" or false, or use weights.transport"),
        ({"weight_backend": "nccl"}, r"\(weights.delta\): its backend is 'nccl'; start it with `rltool serve-engines"),
        ({"weight_backend": None}, "has no weight transfer"),
    ],
)
def test_an_engine_that_cannot_take_patches_is_refused(changes, message, wanted):
    with pytest.raises(UsageError, match=message):
        choose(info(**changes), WeightsConfig(transport=wanted, delta=True), "cuda")


@pytest.mark.parametrize("how", ["delta", "staged"])
@pytest.mark.parametrize(
    ("changes", "wanted", "chosen"),
    [
        ({}, "auto", {"delta": "nccl-delta", "staged": "nccl"}),
        ({"weight_backend": "nccl"}, "auto", {"delta": "vllm-nccl", "staged": "vllm-nccl"}),
        (SGLANG, "auto", {"delta": "nccl", "staged": "nccl"}),
        (SGLANG, "gloo", {"delta": "gloo", "staged": "gloo"}),
        ({"weight_backend": "nccl"}, "gloo", "gloo needs rltool's own"),
    ],
)
def test_with_auto_an_engine_gets_what_it_can(changes, wanted, chosen, how):
    config = WeightsConfig(transport=wanted, **{how: "auto"})
    if isinstance(chosen, dict):
        assert choose(info(**changes), config, "cuda") == chosen[how]
    else:
        with pytest.raises(UsageError, match=chosen):
            choose(info(**changes), config, "cuda")


def test_patches_over_nccl_need_a_gpu_on_both_sides():
    config = WeightsConfig(transport="nccl", delta=True)
    with pytest.raises(UsageError, match="over nccl by a trainer on the CPU"):
        choose(info(), config, "cpu")
    with pytest.raises(UsageError, match="runs on the CPU, where there is no NCCL"):
        choose(info(device="cpu"), config, "cuda")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"transport": "ipc"}, 'delta and transport = "ipc" contradict each other'),
        ({"transport": "disk"}, 'delta and transport = "disk" contradict each other'),
        ({"transport": "delta", "store": "/w"}, 'delta and transport = "delta" contradict.*leave delta out'),
        ({"staged": True}, "staged has no effect with delta"),
        ({"store": "/w"}, "for patches without a store leave both out, and set delta = true"),
    ],
)
def test_what_contradicts_patches_over_a_group_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        WeightsConfig(delta=True, **settings)


@pytest.mark.parametrize("backend", ["gloo-delta", "nccl-delta"])
def test_vllm_is_announced_buckets_as_messages_and_joins_the_group_of_whole_weights(backend):
    asked, plain = control("vllm", backend), control("vllm", backend.removesuffix("-delta"))
    buckets = [BUCKET[:1], BUCKET[1:]]
    [request] = asked.prefetch(buckets, MEETING, version=VERSION, seconds=9.0)
    assert request.path == "/rltool/prefetch" and request.body == {"version": VERSION, "seconds": 9.0, "announced": {
        "names": ["a", "b"], "dtypes": ["float32", "bfloat16"], "shapes": [[2, 3], [5]], "bucket_sizes": [1, 1],
        "delta": True,
    }}  # fmt: skip
    meeting = replace(MEETING, unique_id="QUJD")
    init = asked.init(meeting, rank_offset=1, timeout_seconds=9)
    assert init == plain.init(meeting, rank_offset=1, timeout_seconds=9)
    assert asked.staged and not asked.after_send


# -- sharded


@pytest.mark.parametrize(
    ("wanted", "device", "shares", "backend"),
    [
        ("auto", "cuda", True, "ipc-sharded"),
        ("auto", "cuda", False, "nccl-sharded"),
        ("auto", "cpu", False, "gloo-sharded"),
        ("ipc", "cuda", True, "ipc-sharded"),
        ("nccl", "cuda", False, "nccl-sharded"),
        ("gloo", "cuda", True, "gloo-sharded"),
        ("disk", "cpu", False, "disk-sharded"),
    ],
)
def test_sharded_weights_go_over_what_whole_ones_do(wanted, device, shares, backend):
    config = WeightsConfig(sharded=True, transport=wanted)
    assert choose(info(device=device), config, device, shares_gpus=shares) == backend


@pytest.mark.parametrize(
    ("wanted", "device", "shares", "why"),
    [
        ("ipc", "cuda", False, "has GPUs of its own"),
        ("nccl", "cuda", True, "NCCL joins no two ranks on one GPU"),
        ("nccl", "cpu", False, "by a trainer on the CPU"),
        ("ipc", "cpu", True, "trainer and engine need GPUs"),
    ],
)
def test_where_sharded_weights_cannot_go_is_said(wanted, device, shares, why):
    config = WeightsConfig(sharded=True, transport=wanted)
    with pytest.raises(UsageError, match=why):
        choose(info(device=device), config, device, shares_gpus=shares)


def test_sharded_weights_go_to_rltools_plugin_and_others_are_refused_by_name():
    config = WeightsConfig(sharded=True)
    with pytest.raises(UsageError, match=r"weights\.sharded.*need a vLLM with rltool's plugin"):
        choose(info(dialect="sglang", plugin=False), config, "cpu")
    with pytest.raises(UsageError, match="cannot be sent sharded weights: its backend is 'nccl'"):
        choose(info(weight_backend="nccl", plugin=False), config, "cuda")


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"transport": "delta", "store": "/s"}, 'transport = "delta"'),
        ({"staged": True}, "with staged"),
        ({"advertise_host": "10.0.0.9"}, "every rank listens"),
        ({"delta": "auto"}, "with delta"),
        ({"lora_sync": "adapter"}, "an adapter is sent by rank 0"),
        ({"engines": ({"group": "far", "transport": "delta"},), "store": "/s"}, 'transport = "delta"'),
    ],
)
def test_what_sharded_does_not_go_with_is_named(other, named):
    with pytest.raises(ValueError, match=named):
        WeightsConfig(sharded=True, **other)


def test_a_worker_joins_every_rank_in_their_order():
    stores = {"10": ("10.0.0.3", 7), "2": ("10.0.0.2", 6), "0": ("10.0.0.1", 5)}
    meeting = Rendezvous("gloo-sharded", 3, "g", stores=stores)
    (http,) = control("vllm", "gloo-sharded").init(meeting, rank_offset=1, timeout_seconds=9)
    assert http.body["init_info"]["stores"] == [["10.0.0.1", 5], ["10.0.0.2", 6], ["10.0.0.3", 7]]
