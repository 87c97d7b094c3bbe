"""A save cut in two: a collective plan while training waits, and writing beside training that needs no collective.

Megatron-core's own asynchronous save forks writers from a process full of threads, needs a manager process, and
finishes with collectives of the training ranks. Here its plan and its file format are kept, and the writing is done by
the holders of the plan: every rank its own files, in threads, then rank 0 the description of the whole.
"""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies import common
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch import Tensor

from rltool.megatron.patches import save_without_manager_process, unsharded_state_kept
from rltool.megatron.runtime import Runtime, asynchronous_save_options

BACKEND, BACKEND_VERSION = "torch_dist", 1


class _PlanOnly(TorchDistSaveShardedStrategy):
    """Megatron's strategy up to the point where it would write: keeps the writer, and on rank 0 the metadata."""

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: tuple[Any, ...], *_: Any) -> Any:
        self.writer, self.metadata = writer, save_state_dict_ret[1]
        return _Discarded()


class _Discarded:
    """Stands for Megatron's request for an asynchronous save, to which it appends its last collective steps."""

    def __init__(self) -> None:
        self.finalize_fns: list[Any] = []


@dataclass
class SavePlan:
    """This rank's share of a checkpoint. After `plan_save` nothing here talks to other ranks."""

    directory: Path
    writer: Any
    metadata: Any
    device: torch.device
    """Where the model lies."""
    common: bytes | None
    """Rank 0 only: content of Megatron-core 0.16's common.pt."""

    @property
    def bytes(self) -> int:
        """Bytes of this rank's tensors."""
        return sum(tensor.nbytes for _, _, (_, tensors) in self.writer.write_buckets for _, tensor in tensors)

    def stage(self, *, copy: bool) -> None:
        """Brings the tensors to the CPU. copy: also those of a model that lies there, which training goes on to change.

        Copies from a GPU go through pinned memory, which torch keeps for the next save. On return they are complete.
        """
        # Beside a model on a GPU what lies on the CPU was gathered for this save.
        copy = copy and self.device.type == "cpu"
        self.writer.write_buckets = [
            (path, key, (small, [(item, _on_cpu(tensor, copy=copy)) for item, tensor in tensors]))
            for path, key, (small, tensors) in self.writer.write_buckets
        ]
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()

    def write(self) -> list[Any]:
        """Writes and syncs this rank's files. Returns what `finish` wants to know of them. Raises the first OSError."""
        buckets = self.writer.write_buckets
        if not buckets:
            return []
        with ThreadPoolExecutor(len(buckets), thread_name_prefix="checkpoint-file") as pool:
            outputs = list(pool.map(self._write_bucket, range(len(buckets)), buckets))
        for output in outputs:
            if isinstance(output, BaseException):
                raise output
        return [result for output in outputs for result in output]

    def _write_bucket(self, index: int, bucket: Any) -> Any:
        transforms = [self.writer.transforms] if hasattr(self.writer, "transforms") else []
        results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # Megatron's function signals its end by taking from this queue.
        running: queue.Queue[int] = queue.Queue()
        running.put(index)
        # Annotated with the queues of processes; of these it calls put and get.
        FileSystemWriterAsync.write_preloaded_data(
            transforms, index, bucket, cast(Any, results), cast(Any, running), True
        )
        return results.get()[1]

    @property
    def files(self) -> list[str]:
        """Names of this rank's files within the directory."""
        return [key for _, key, _ in self.writer.write_buckets]

    def finish(self, results: list[list[Any]]) -> None:
        """Rank 0, once all ranks have written: the description of all files. results: of `write`, by rank."""
        self.writer.finish(self.metadata, results)
        if self.common is not None:
            (self.directory / common.COMMON_STATE_FNAME).write_bytes(self.common)
        save_config(CheckpointingConfig(BACKEND, BACKEND_VERSION), str(self.directory))


def _on_cpu(tensor: Tensor, *, copy: bool) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor.clone() if copy else tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def plan_save(runtime: Runtime, state: dict[str, Any], directory: Path) -> SavePlan:
    """Agrees with the other ranks on who writes what of a sharded state dict. A collective that writes nothing.

    directory: exists, is empty, and is seen by all ranks. The plan's tensors are still the model's: `stage` them.
    """
    save_without_manager_process()
    strategy, kept = _PlanOnly(BACKEND, BACKEND_VERSION), []
    with runtime.mode(), unsharded_state_kept(kept):
        dist_checkpointing.save(state, str(directory), strategy, async_sharded_save=True, **asynchronous_save_options())
    common_state = kept[0] if kept and runtime.coordinates.rank == 0 else None
    return SavePlan(Path(directory), strategy.writer, strategy.metadata, runtime.device, common_state)
