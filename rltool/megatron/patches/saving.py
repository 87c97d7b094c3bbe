"""Saves without a manager process, and without files that are written while a save is planned."""

from __future__ import annotations

import io
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rltool.megatron.patches.registry import Target, patch, replace


@patch(
    "0.16",
    "0.19",
    targets=(
        Target(
            "megatron.core.dist_checkpointing.strategies.filesystem_async:_results_queue",
            used="if _results_queue is None:",
        ),
    ),
)
def save_without_manager_process() -> None:
    """Keeps dist_checkpointing from starting a manager process for the results of its writers.

    It does so at the first save (2.6 s), only to hand results from this process to this process, and the manager
    outlives a rank that is killed. A plain queue serves a synchronous save; an asynchronous one would need the manager.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if getattr(filesystem_async, "_results_queue", None) is None:
        replace(filesystem_async, "_results_queue", queue.SimpleQueue())


@patch(
    "0.16",
    targets=(
        Target(
            "megatron.core.dist_checkpointing.strategies.common:TorchCommonSaveStrategy.save_common",
            ("self", "common_state_dict", "checkpoint_dir"),
        ),
    ),
)
@contextmanager
def unsharded_state_kept(kept: list[bytes]) -> Iterator[None]:
    """Keeps the unsharded state that would be written on rank 0 while a save is planned, as bytes in `kept`.

    There a full disk would leave the other ranks waiting. Megatron-core 0.19 has no such file; all of it is sharded.
    """
    from megatron.core.dist_checkpointing.strategies import common

    strategy = getattr(common, "TorchCommonSaveStrategy", None)
    if strategy is None:
        yield
        return
    original = strategy.save_common

    def keep(self: Any, state: Any, directory: Any) -> None:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        kept.append(buffer.getvalue())

    replace(strategy, "save_common", keep)
    try:
        yield
    finally:
        strategy.save_common = original
