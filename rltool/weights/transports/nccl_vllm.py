"""NCCL to vLLM: to a stock server with vLLM's own weight-transfer backend "nccl", and to rltool's plugin.

Both find the trainer by its ncclUniqueId, in their init request, and then join while the trainer does: there is no
store to wait at. A stock server is sent vLLM's packed buffers, which are our buckets (see wire.plan_buckets); the
plugin has the contract of rltool.engines.transfer.wire.

Source: vllm/distributed/weight_transfer/{nccl_common,nccl_engine,packed_tensor}.py of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from rltool.engines.transfer import nccl
from rltool.engines.transfer.wire import plan_buckets
from rltool.engines.types import Bucket, EngineInfo, HttpRequest
from rltool.weights.transport import Rendezvous, Transport
from rltool.weights.transports import vllm
from rltool.weights.transports.nccl_sender import NcclSender, no_gpu

PACKED_BUFFERS = 2
"""In the engine: one is received while the other is loaded."""


class StockVllmSender(NcclSender):
    def check_version(self, version: int) -> None:
        # The engine's own is known to NCCL alone, which refuses to connect two that differ.
        nccl.check_version(version)


class StockVllmControl(vllm.VllmControl):
    """The server's own weight-transfer API, packed.

    Its /pause sleeps for 0.02 s when all is done (AsyncLLM.pause_generation). Sleep level 0 stops the scheduler as
    well, at once, and leaves caches as they are: what holds values of the old weights goes with `finish`.
    """

    def pause(self) -> list[HttpRequest]:
        return [HttpRequest("POST", "/sleep", query={"level": "0", "mode": "keep"})]

    def resume(self) -> list[HttpRequest]:
        """/resume would do, and leave vllm:engine_sleep_state as it is."""
        return [HttpRequest("POST", "/wake_up", query={"tags": "scheduling"})]

    def finish(self, version: str) -> list[HttpRequest]:
        finish, reset = super().finish(version)
        everything = {**reset.query, "reset_external": "true"}  # caches of a KV connector
        return [finish, replace(reset, query=everything), HttpRequest("POST", "/reset_encoder_cache")]

    def init(self, rendezvous: Rendezvous, *, rank_offset: int, timeout_seconds: float) -> list[HttpRequest]:
        """vLLM has no timeout for the trainer."""
        return [
            vllm.init_request(
                nccl_unique_id_b64=rendezvous.unique_id,
                rank_offset=rank_offset,
                world_size=rendezvous.world_size,
                packed=True,
                packed_buffer_size_bytes=rendezvous.bucket_bytes,
                packed_num_buffers=PACKED_BUFFERS,
            )
        ]

    def announce(
        self, buckets: Sequence[Bucket], rendezvous: Rendezvous, *, version: str
    ) -> list[tuple[HttpRequest, int]]:
        """One request for each run of buckets of one dtype, so most often one for all: vLLM cuts a request into
        buffers by their size alone."""
        requests = []
        for _, run in groupby(buckets, key=lambda bucket: bucket[0].dtype):
            together = list(run)
            metas = [meta for bucket in together for meta in bucket]
            if plan_buckets(metas, rendezvous.bucket_bytes) != together:
                raise ValueError("these buckets are not what vLLM makes of its packed_buffer_size_bytes")
            info: dict[str, Any] = {
                "names": [meta.name for meta in metas],
                "dtype_names": [meta.dtype for meta in metas],
                "shapes": [list(meta.shape) for meta in metas],
            }
            requests.append((HttpRequest("POST", "/update_weights", {"update_info": info}), len(together)))
        return requests

    def leave(self, group: str) -> list[HttpRequest]:
        """Before, an update without tensors.

        A failed one leaves layers that hold some of their tensors, and a worker that is or is not in an update. The
        next update would complete those layers with a mixture, and drop what comes after their last element. `start` is
        refused inside an update, and `finish` then ends that one; either way vLLM forgets what it has half loaded. It
        warns of layers without weights, which keep theirs. Between the two the layers have none, and vLLM would compute
        without: it is paused.
        """
        return [
            HttpRequest("POST", "/start_weight_update", tolerate=(500,)),
            HttpRequest("POST", "/finish_weight_update", tolerate=(500,)),
            *super().leave(group),
        ]


class PluginControl(vllm.PluginUpdateControl):
    """rltool's receiver: loading is prepared once and replayed, and every wait in the engine has a deadline."""

    def init(self, rendezvous: Rendezvous, *, rank_offset: int, timeout_seconds: float) -> list[HttpRequest]:
        return [
            vllm.init_request(
                transport="nccl",
                unique_id=rendezvous.unique_id,
                nccl_version=rendezvous.nccl_version,
                rank_offset=rank_offset,
                world_size=rendezvous.world_size,
                timeout_seconds=timeout_seconds,
            )
        ]

    def announce(
        self, buckets: Sequence[Bucket], rendezvous: Rendezvous, *, version: str
    ) -> list[tuple[HttpRequest, int]]:
        info = vllm.buckets_info(buckets)
        return [(HttpRequest("POST", "/update_weights", {"update_info": info}), len(buckets))]


class StagedPluginControl(vllm.StagedControl, PluginControl):
    """The buckets of a whole version lie beside the weights on the engine's GPU until they are copied."""


def stock_obstacle(info: EngineInfo, trainer_device: str) -> str | None:
    why = vllm.no_transfer(info) or no_gpu(info, trainer_device)
    if why is None and info.weight_backend != "nccl":
        why = f"offers the weight backend {info.weight_backend!r}, not vLLM's own nccl"
    return why


def plugin_obstacle(info: EngineInfo, trainer_device: str) -> str | None:
    why = vllm.no_transfer(info) or no_gpu(info, trainer_device)
    if why is None and info.weight_backend != "rltool":
        why = f"offers the weight backend {info.weight_backend!r}, not rltool's"
    return why


STOCK = Transport(StockVllmSender, StockVllmControl(), stock_obstacle)
PLUGIN = Transport(NcclSender, PluginControl(), plugin_obstacle, staged=StagedPluginControl())
