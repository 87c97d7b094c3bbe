"""What every transport asks of an SGLang server."""

from __future__ import annotations

from collections.abc import Sequence

from rltool.engines.dialects.inspection import NO_SUCH_ROUTE
from rltool.engines.dialects.sglang import SglangDialect
from rltool.engines.transfer.wire import dtype_of, tensor_bytes
from rltool.engines.types import INCOMPLETE_VERSION, Bucket, EngineInfo, HttpRequest
from rltool.errors import EngineError
from rltool.weights.transport import Rendezvous


class SglangControl:
    """The part of ReceiverControl that does not depend on how the bytes travel."""

    after_send = False
    staged = False
    acknowledged = False

    def prefetch(
        self, buckets: Sequence[Bucket], rendezvous: Rendezvous, *, version: str, seconds: float
    ) -> list[HttpRequest]:
        return []

    def begin(self) -> list[HttpRequest]:
        # Mandatory before a transfer since 0.5.21, and harmless around a load from disk: weights are processed twice
        # then, which changes neither plain ones nor, but with DeepGEMM on Blackwell, blocks in FP8. Where the route is
        # missing though it is needed, the transfer that follows is refused.
        return [HttpRequest("POST", "/begin_weight_update", {}, tolerate=(NO_SUCH_ROUTE,))]

    def finish(self, version: str) -> list[HttpRequest]:
        """The version comes last: an engine whose flush was refused still holds the old policy's keys and values."""
        return [
            HttpRequest("POST", "/end_weight_update", {}, tolerate=(NO_SUCH_ROUTE,)),
            # Without `timeout`: while paused, waiting for idleness is in vain if requests were kept, and needless if
            # not.
            HttpRequest("POST", "/flush_cache"),
            # abort_all_requests is true by default, which would throw away what a pause with `keep` has kept.
            _version_request(version),
        ]

    def abandon(self) -> list[HttpRequest]:
        return [_version_request(INCOMPLETE_VERSION)]

    def leave(self, group: str) -> list[HttpRequest]:
        return SglangDialect().leave_transfer(group)


def _version_request(version: str) -> HttpRequest:
    return HttpRequest("POST", "/update_weight_version", {"new_version": version, "abort_all_requests": False})


def join_request(rendezvous: Rendezvous, rank_offset: int, backend: str) -> HttpRequest:
    """Join the update group; backend: torch's name. SGLang has no timeout parameter: its scheduler waits torch's
    30 minutes for a trainer that does not come. Refused by the server with data parallelism."""
    body = {
        "master_address": rendezvous.address,
        "master_port": rendezvous.port,
        "rank_offset": rank_offset,
        "world_size": rendezvous.world_size,
        "group_name": rendezvous.group,
        "backend": backend,
    }
    return HttpRequest("POST", "/init_weights_update_group", body)


def bucket_request(bucket: Bucket, group: str) -> HttpRequest:
    """SGLang receives one flat uint8 broadcast from rank 0.

    The version is not passed on here: SGLang would have it from the first bucket on, before it has the others.
    """
    check_alignment(bucket)
    body = {
        "names": [meta.name for meta in bucket],
        "dtypes": [meta.dtype for meta in bucket],
        "shapes": [list(meta.shape) for meta in bucket],
        "group_name": group,
        "load_format": "flattened_bucket",
        "flush_cache": False,
    }
    return HttpRequest("POST", "/update_weights_from_distributed", body)


def load_request(directory: str, buckets: Sequence[Bucket]) -> tuple[HttpRequest, int]:
    """SGLang loads a whole directory, in Hugging Face layout, in one call: all buckets, and how many they are.

    load_format: else it is the one of the server's start, and one that began with `--load-format dummy`, since its
    weights come from the trainer, refuses the update.
    """
    body = {"model_path": directory, "load_format": "auto", "flush_cache": False}
    return HttpRequest("POST", "/update_weights_from_disk", body), len(buckets)


def data_parallel(info: EngineInfo) -> str | None:
    """What keeps a server with replicas of its own out of an update group."""
    if info.dp_size > 1:
        return (
            f"has {info.dp_size} data-parallel replicas, with which SGLang joins no update group: "
            'set weights.transport = "disk", or "auto"'
        )
    return None


def check_alignment(bucket: Bucket) -> None:
    """SGLang views each tensor in place in the flat buffer, so each must start at a multiple of its item size."""
    offset = 0
    for meta in bucket:
        if offset % dtype_of(meta.dtype).itemsize:
            raise EngineError(
                f"{meta.name} ({meta.dtype}) starts at byte {offset} of its bucket, which SGLang cannot read: "
                "put tensors of one dtype into a bucket, or the wider ones first"
            )
        offset += tensor_bytes(meta)
