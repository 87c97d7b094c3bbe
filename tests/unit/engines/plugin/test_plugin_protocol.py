"""What the trainer asks of rltool's plugin, and under which number: whoever changes a request here counts it up, for an
engine keeps the plugin that it was started with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rltool.engines.plugin.info import PLUGIN_PROTOCOL
from rltool.engines.types import Bucket, TensorMeta
from rltool.weights.transport import Rendezvous, transport

BUCKETS: tuple[Bucket, ...] = ((TensorMeta("a", "float32", (2, 3)),), (TensorMeta("b", "float32", (4,)),))
TENSORS = {"names", "dtypes", "shapes"}
FINISH = {"/rltool/finish_weight_update": {"weight_version", "resume"}}
ONE_BY_ONE = {
    "/start_weight_update": set(),
    "/finish_weight_update": {"weight_version"},
    "/reset_prefix_cache": set(),
}


def by_bucket(**info: set[str]) -> dict[str, set[str]]:
    return {"/init_weight_transfer_engine": info["init"], "/update_weights": info["update"]} | ONE_BY_ONE


def at_once(**bodies: set[str]) -> dict[str, set[str]]:
    said = {"/init_weight_transfer_engine": bodies["init"], "/rltool/update_weights": bodies["update"]} | FINISH
    return said | ({"/rltool/prefetch": bodies["prefetch"]} if "prefetch" in bodies else {})


GLOO = {"transport", "address", "port", "rank_offset", "world_size", "group", "timeout_seconds"}
NCCL = {"transport", "unique_id", "nccl_version", "rank_offset", "world_size", "timeout_seconds"}
STORES = {"transport", "stores", "rank_offset", "world_size", "group", "timeout_seconds"}
FETCHED = TENSORS | {"version"}
ANNOUNCED = {"version", "seconds"} | {f"announced.{key}" for key in (*TENSORS, "bucket_sizes")}

SAID: dict[str, tuple[dict[str, set[str]], dict[str, set[str]] | None]] = {
    "gloo": (by_bucket(init=GLOO, update=TENSORS), at_once(init=GLOO, update=FETCHED, prefetch=ANNOUNCED)),
    "nccl": (
        at_once(init=NCCL, update=TENSORS | {"bucket_sizes"}),
        at_once(init=NCCL, update=FETCHED, prefetch=ANNOUNCED),
    ),
    "ipc": (by_bucket(init={"transport", "handles"}, update=TENSORS), None),
    "disk": (by_bucket(init={"transport"}, update=TENSORS | {"path"}), None),
    "delta": (at_once(init={"transport"}, update=FETCHED, prefetch={"store", "version", "seconds"}), None),
    "gloo-delta": (at_once(init=GLOO, update=FETCHED, prefetch=ANNOUNCED | {"announced.delta"}), None),
    "nccl-delta": (at_once(init=NCCL, update=FETCHED, prefetch=ANNOUNCED | {"announced.delta"}), None),
    "gloo-sharded": (by_bucket(init=STORES, update=TENSORS), None),
    "nccl-sharded": (at_once(init=STORES | NCCL, update=TENSORS | {"bucket_sizes"}), None),
    "ipc-sharded": (by_bucket(init=STORES, update=TENSORS), None),
    "disk-sharded": (by_bucket(init={"transport"}, update=TENSORS | {"path"}), None),
}
"""Backend -> path -> keys of the body, of whole updates and of staged ones."""


def keys_of(body: Any) -> set[str]:
    if not isinstance(body, Mapping):
        return set()
    keys = set()
    for key, value in body.items():
        keys |= {f"{key}.{inner}" for inner in value} if key == "announced" else {key}
    return keys


def said(control: Any) -> dict[str, set[str]]:
    meeting = Rendezvous("gloo", 2, "g", "10.0.0.1", 4000, "id", 64, 22907, "/w/1", {"GPU-1": "handle"})
    requests = [
        *control.init(meeting, rank_offset=1, timeout_seconds=5),
        *control.prefetch(BUCKETS, meeting, version="v", seconds=5),
    ]
    if hasattr(control, "update"):
        requests += [control.update(BUCKETS, meeting, version="v"), control.finish_and_resume("v")]
    else:
        requests += [*control.begin(), *(request for request, _ in control.announce(BUCKETS, meeting, version="v"))]
    requests += control.finish("v")
    found: dict[str, set[str]] = {}
    for request in requests:
        body = request.body or {}
        keys = keys_of(body.get("init_info") or body.get("update_info") or body)
        assert found.setdefault(request.path, keys) == keys, request.path
    return found


def test_the_number_is_that_of_these_requests():
    assert PLUGIN_PROTOCOL == 5, "count it up where SAID changes, and write what changed where it is defined"


@pytest.mark.parametrize("backend", SAID)
def test_what_the_trainer_says_is_what_this_protocol_says(backend):
    found, (whole, staged) = transport("vllm", backend), SAID[backend]
    assert said(found.control) == whole
    assert (said(found.staged) if found.staged else None) == staged
    if backend == "ipc":
        at_rest = at_once(init={"transport", "handles"}, update=FETCHED, prefetch=ANNOUNCED)
        assert said(found.adapters) == at_rest and found.adapters.after_send
