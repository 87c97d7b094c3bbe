"""NCCL to a stock SGLang: its weight-update group with torch's backend "nccl", one flattened bucket at a time.

SGLang's ranks make the communicator in their first broadcast, where torch's ProcessGroupNCCL looks for rank 0's
ncclUniqueId: in the group's store, under the number of the communicator. It is put there by hand, and the trainer joins
with a communicator of its own (rltool.engines.transfer.nccl), which can be aborted, unlike a call of ProcessGroupNCCL
that waits for its peers. Both sides must run the NCCL that SGLang's torch has loaded: the trainer takes the one of its
own torch.

SGLang sets NCCL_CUMEM_ENABLE=0 for itself where it is unset, and the trainer must run with the same value.

Sources: sglang/srt/utils/common.py (init_custom_process_group), torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp
(broadcastUniqueNCCLID).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # public

from rltool.engines.transfer import nccl
from rltool.engines.types import Bucket, EngineInfo, HttpRequest
from rltool.weights.transport import Receiver, Rendezvous, SenderOptions, Transport
from rltool.weights.transports import nccl_sender, sglang
from rltool.weights.transports.nccl_sender import NcclSender, Sent, no_gpu
from rltool.weights.transports.rendezvous import host_rendezvous
from rltool.weights.transports.sglang_group import torch_prefixes

FIRST_COMMUNICATOR = "0"
"""The key under which ProcessGroupNCCL has the unique id of a group's first communicator."""


class SglangNcclSender(NcclSender):
    announced_ahead = False

    def __init__(self, receiver: Receiver, options: SenderOptions) -> None:
        super().__init__(receiver, options)
        self._store: TCPStore | None = None

    def open_library(self) -> nccl.NcclLibrary:
        return nccl.NcclLibrary(nccl.LIBRARY_NAME)

    def rendezvous(self, unique_id: bytes, version: int) -> Rendezvous:
        options = self.options
        address, self._store = host_rendezvous(self.receiver.url, options.config, options.deadline)
        keys = torch_prefixes(self._store, options.group, "cuda")
        keys.set(FIRST_COMMUNICATOR, unique_id)  # pyright: ignore[reportArgumentType]  # torch's stub has str alone
        found = super().rendezvous(unique_id, version)
        return replace(found, address=address, port=self._store.port, unique_id=None)

    def join(self, seconds: float) -> None:
        """Nobody is there before the first bucket."""

    def send(self, bucket: Bucket, flat: Tensor) -> Sent:
        if self._communicator is None:
            self.connect(self.options.deadline, warm_up=False)
        return super().send(bucket, flat)

    def close(self) -> None:
        if self._communicator is None and self._is_awaited():
            # Given up before the first bucket: its ranks may wait for rank 0 by now, and nothing else ends that.
            with suppress(nccl.NcclError):
                self.connect(nccl_sender.COMPLETE_SECONDS, warm_up=False)
        super().close()
        self._store = None


class SglangNcclControl(sglang.SglangControl):
    def init(self, rendezvous: Rendezvous, *, rank_offset: int, timeout_seconds: float) -> list[HttpRequest]:
        return [sglang.join_request(rendezvous, rank_offset, "nccl")]

    def announce(
        self, buckets: Sequence[Bucket], rendezvous: Rendezvous, *, version: str
    ) -> list[tuple[HttpRequest, int]]:
        return [(sglang.bucket_request(bucket, rendezvous.group), 1) for bucket in buckets]


def obstacle(info: EngineInfo, trainer_device: str) -> str | None:
    return sglang.data_parallel(info) or no_gpu(info, trainer_device)


SGLANG = Transport(SglangNcclSender, SglangNcclControl(), obstacle)
