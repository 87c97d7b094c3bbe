"""What every transport asks of a vLLM server: vllm/entrypoints/rl/online has the routes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from rltool.engines.dialects.vllm import VllmDialect
from rltool.engines.types import Bucket, EngineInfo, HttpRequest, TensorMeta
from rltool.weights.transport import NO_TRANSFER, Rendezvous


class VllmControl:
    """The part of ReceiverControl that does not depend on how the bytes travel."""

    after_send = False
    staged = False
    acknowledged = False

    def prefetch(
        self, buckets: Sequence[Bucket], rendezvous: Rendezvous, *, version: str, seconds: float
    ) -> list[HttpRequest]:
        return []

    def begin(self) -> list[HttpRequest]:
        return [HttpRequest("POST", "/start_weight_update")]

    def finish(self, version: str) -> list[HttpRequest]:
        # The prefix cache holds keys and values of the old weights: a prompt that hits it gets log-probabilities that
        # are off by 1. A pause drops it too, but vLLM documents that it may not with mode=keep, and an update needs no
        # pause. Running requests hold blocks of it: they are requeued, so that their tokens so far stay and their cache
        # is computed anew.
        return [
            HttpRequest("POST", "/finish_weight_update", {"weight_version": version}),
            HttpRequest("POST", "/reset_prefix_cache", query={"reset_running_requests": "true"}),
        ]

    def abandon(self) -> list[HttpRequest]:
        """The plugin sees to it (rltool.engines.plugin.server). A stock server is behind no router, so that requests at
        it are withdrawn."""
        return []

    def leave(self, group: str) -> list[HttpRequest]:
        return VllmDialect().leave_transfer(group)


class PluginUpdateControl(VllmControl, ABC):
    """Of rltool's plugin, where one update info stands for all buckets: see rltool.engines.plugin.routes."""

    @abstractmethod
    def announce(
        self, buckets: Sequence[Bucket], rendezvous: Rendezvous, *, version: str
    ) -> list[tuple[HttpRequest, int]]: ...

    def update(self, buckets: Sequence[Bucket], rendezvous: Rendezvous, *, version: str) -> HttpRequest:
        [(announced, _)] = self.announce(buckets, rendezvous, version=version)
        return HttpRequest("POST", "/rltool/update_weights", announced.body)

    def finish(self, version: str) -> list[HttpRequest]:
        return [_finish_request(version, resume=False)]

    def finish_and_resume(self, version: str) -> HttpRequest:
        return _finish_request(version, resume=True)


class StagedControl(PluginUpdateControl):
    """Of rltool's plugin: buckets arrive in a second buffer while the engine generates."""

    staged = True

    def prefetch(
        self, buckets: Sequence[Bucket], rendezvous: Rendezvous, *, version: str, seconds: float
    ) -> list[HttpRequest]:
        body = {"version": version, "seconds": seconds, "announced": buckets_info(buckets)}
        return [HttpRequest("POST", "/rltool/prefetch", body)]

    def announce(
        self, buckets: Sequence[Bucket], rendezvous: Rendezvous, *, version: str
    ) -> list[tuple[HttpRequest, int]]:
        return [fetched_request(buckets, version)]


def init_request(**info: Any) -> HttpRequest:
    return HttpRequest("POST", "/init_weight_transfer_engine", {"init_info": info})


def bucket_request(bucket: Bucket, **more: Any) -> HttpRequest:
    """One bucket, for rltool's plugin (rltool.engines.transfer.wire)."""
    return HttpRequest("POST", "/update_weights", {"update_info": _info(bucket) | more})


def buckets_info(buckets: Sequence[Bucket]) -> dict[str, Any]:
    """The update info of several buckets."""
    metas = [meta for bucket in buckets for meta in bucket]
    return _info(metas) | {"bucket_sizes": [len(bucket) for bucket in buckets]}


def fetched_request(buckets: Sequence[Bucket], version: str) -> tuple[HttpRequest, int]:
    """All buckets, which the engine has by now; and how many they are."""
    return HttpRequest("POST", "/update_weights", {"update_info": _info(()) | {"version": version}}), len(buckets)


def _finish_request(version: str, *, resume: bool) -> HttpRequest:
    return HttpRequest("POST", "/rltool/finish_weight_update", {"weight_version": version, "resume": resume})


def _info(metas: Sequence[TensorMeta]) -> dict[str, Any]:
    return {
        "names": [meta.name for meta in metas],
        "dtypes": [meta.dtype for meta in metas],
        "shapes": [list(meta.shape) for meta in metas],
    }


def no_transfer(info: EngineInfo) -> str | None:
    """What is wrong with a server that takes no weights at all."""
    return NO_TRANSFER if info.weight_backend is None else None


def without_plugin(info: EngineInfo, refusal: str) -> str | None:
    """Why a server whose weight backend is not rltool's is left out. refusal: up to the backend's name."""
    if info.weight_backend is not None and info.weight_backend != "rltool":
        return f"{refusal} {info.weight_backend!r}; start it with `rltool serve-engines --weight-backend rltool`"
    return no_transfer(info)
