"""The trainer's side of SGLang's weight-update group: a gloo group of its own, beside those that Megatron uses.

SGLang joins with torch's own rendezvous (sglang/srt/utils/common.py, init_custom_process_group): a TCPStore at the
trainer, keys under PrefixStore(group), and below that the prefix that torch's _new_process_group_helper adds. The same
store and the same prefixes are built here by hand: init_process_group would claim torch.distributed's default group,
which is Megatron's, and registering one more group there would bind its life to Megatron's process groups.
"""

from __future__ import annotations

from datetime import timedelta

# Public names, which torch's type information takes for private ones.
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    ProcessGroupGloo,
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

TRAINER_RANK = 0


def open_sglang_group(store: TCPStore, world_size: int, group: str, timeout: float) -> ProcessGroupGloo:
    """Join `group` as rank 0 over a store that the trainer hosts. Blocks until all `world_size` ranks are there.

    world_size: 1 + the engine's world size. timeout: seconds, for joining and then for each broadcast; RuntimeError (of
    which torch's DistStoreError is one) when it passes. The result sends a contiguous uint8 CPU tensor with
    `broadcast(tensor, 0).wait()`; dropping the last reference to it closes its connections.
    """
    limit = timedelta(seconds=timeout)
    store.set_timeout(limit)
    return ProcessGroupGloo(torch_prefixes(store, group, "cpu"), TRAINER_RANK, world_size, limit)


def torch_prefixes(store: TCPStore, group: str, device: str) -> PrefixStore:
    """Where the group's backend keeps its keys; device: cpu for gloo, cuda for NCCL."""
    return PrefixStore(f"{device}/", PrefixStore(f"{group}/", PrefixStore(group, store)))
