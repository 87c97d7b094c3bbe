"""torch_dist directories parameter by parameter, without a model in memory: for models larger than that.

Megatron gives the keys and offsets of each parameter, from a model whose parameters have no memory. Writing
then follows torch.distributed.checkpoint's plan, whose tensors are made when they are written; reading is per
parameter, too.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from rltool.checkpoints.manifest import CheckpointDamaged
from rltool.megatron.lora import sharded
from rltool.megatron.model import build_model
from rltool.megatron.runtime import Runtime
from rltool.megatron.state import model_state
from rltool.models.base import Family, Parameter

Place = tuple[str, tuple[int, ...]]
"""Key and global offset of a tensor in a torch_dist directory."""


class ShardedLayout:
    """Where each parameter of a model lies in a torch_dist directory. One process, the whole model."""

    def __init__(self, family: Family, dtype: torch.dtype, runtime: Runtime) -> None:
        self.family, self.dtype, self.runtime = family, dtype, runtime
        with runtime.mode(), torch.device("meta"):
            self.state = model_state(build_model(family, runtime.coordinates, dtype, torch.device("meta")))

    def pieces(self, parameter: Parameter, memory: Tensor) -> list[ShardedTensor]:
        """The pieces that the parameter is saved as (gate and up apart), as views into `memory`, its merged tensor."""
        return _pieces_of(dataclasses.replace(self.state[parameter.name], data=memory))

    def write(self, directory: Path, read: Callable[[Parameter], Tensor]) -> None:
        """Saves into the empty directory what `read` returns for each parameter: its merged tensor, in its dtype.

        Holds one parameter at a time, and a copy of one of its pieces.
        """
        with self.runtime.mode():
            dist_checkpointing.save(dict(self.state), str(directory), sharded_strategy=_StreamedSave(self, read))


def _pieces_of(entry: ShardedTensor | ShardedTensorFactory) -> list[ShardedTensor]:
    if not isinstance(entry, ShardedTensorFactory):
        return [entry]
    built = entry.build()
    return list(built.values()) if isinstance(built, dict) else list(built)


class Pieces(Protocol):
    """dtype: of the model that is read."""

    dtype: torch.dtype

    def pieces(self, parameter: Parameter, memory: Tensor) -> list[ShardedTensor]:
        """As in `ShardedLayout`."""
        ...


class AdapterLayout:
    """Where each parameter of adapters lies in a torch_dist directory."""

    dtype = torch.float32

    def pieces(self, parameter: Parameter, memory: Tensor) -> list[ShardedTensor]:
        return _pieces_of(sharded(parameter, memory, None))


class TorchDistReader:
    """Read access to a torch_dist directory that was saved under any layout of ranks."""

    def __init__(self, layout: Pieces, directory: Path) -> None:
        self._layout, self._directory = layout, directory
        self._reader = FileSystemReader(directory)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def read(self, parameter: Parameter) -> Tensor:
        """The merged tensor of this parameter, cast to its dtype in the layout.
        CheckpointDamaged when a part is not there."""
        memory = torch.empty(parameter.merged_shape, dtype=parameter.dtype(self._layout.dtype))
        planner = _FillPieces(self._layout.pieces(parameter, memory), self._metadata, self._directory)
        self._reader.read_data(self._reader.prepare_local_plan(planner.create_local_plan()), planner).wait()
        return memory


class _StreamedSave(TorchDistSaveShardedStrategy):
    """Megatron's torch_dist format by torch's own single-threaded file writer."""

    def __init__(self, layout: ShardedLayout, read: Callable[[Parameter], Tensor]) -> None:
        super().__init__("torch_dist", 1)
        self._planner = _LazyPlanner(layout, read)

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        # The state dict has the tensors without memory and is ignored but for the objects: the planner knows the rest.
        objects = [entry for entry in sharded_state_dict.values() if isinstance(entry, ShardedObject)]
        self._planner.objects = {entry.unique_key: entry for entry in objects}
        # Not by torch's own `save`: it wraps every error in a CheckpointException with the traceback as its text.
        # Without copying ahead, also where there is a GPU: each tensor is written before the next is asked for.
        writer = FileSystemWriter(checkpoint_dir, thread_count=1, per_thread_copy_ahead=0, sync_files=False)
        planner = self._planner
        writer.set_up_storage_writer(is_coordinator=True)
        (plan,), metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
        (plan,) = writer.prepare_global_plan([plan])
        writer.finish(metadata, [writer.write_data(plan, planner).wait()])


class _LazyPlanner(SavePlanner):
    """A plan whose tensors are read when they are written."""

    objects: dict[str, ShardedObject]

    def __init__(self, layout: ShardedLayout, read: Callable[[Parameter], Tensor]) -> None:
        self._layout, self._read = layout, read
        self._owner: dict[Place, Parameter] = {}
        self._merged: tuple[str, Tensor] | None = None
        self._written: Tensor | None = None

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        raise NotImplementedError("set up by its constructor")

    def create_local_plan(self) -> SavePlan:
        items = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self.objects]
        for parameter in self._layout.family.parameters:
            dtype = parameter.dtype(self._layout.dtype)
            memory = torch.empty(parameter.merged_shape, dtype=dtype, device="meta")
            for piece in self._layout.pieces(parameter, memory):
                self._owner[piece.key, piece.global_offset] = parameter
                chunk = ChunkStorageMetadata(torch.Size(piece.global_offset), torch.Size(_extent(piece)))
                properties = TensorProperties(dtype=dtype)
                data = TensorWriteData(chunk, properties, torch.Size(piece.global_shape))
                index = MetadataIndex(piece.key, torch.Size(piece.global_offset))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        (plan,) = all_plans
        described: dict[str, Any] = {}
        for item in plan.items:
            if item.tensor_data is None:
                described[item.index.fqn] = BytesStorageMetadata()
                continue
            data = item.tensor_data
            tensor = described.setdefault(item.index.fqn, TensorStorageMetadata(data.properties, data.size, []))
            tensor.chunks.append(data.chunk)
        return all_plans, Metadata(described)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type is WriteItemType.BYTE_IO:
            stream = io.BytesIO()
            torch.save([self.objects[write_item.index.fqn].data], stream)
            return stream
        place = _place(write_item.index)
        parameter = self._owner[place]
        if self._written is not None:
            # Torch's writer keeps the last tensor of each key until the file is finished: a layer, and embedding and
            # head.
            self._written.untyped_storage().resize_(0)
        if self._merged is None or self._merged[0] != parameter.name:
            self._merged = None
            self._merged = (parameter.name, self._read(parameter))
        pieces = self._layout.pieces(parameter, self._merged[1])
        (piece,) = [piece for piece in pieces if (piece.key, tuple(piece.global_offset)) == place]
        if len(pieces) == 1:
            self._merged = None
            self._written = _data(piece).detach()
        else:
            self._written = _data(piece).detach().clone()
        return self._written.reshape(_extent(piece))


def _extent(piece: ShardedTensor) -> tuple[int, ...]:
    return (*(1,) * piece.prepend_axis_num, *piece.local_shape)


def _data(piece: ShardedTensor) -> Tensor:
    assert piece.data is not None, f"{piece.key} came without its tensor"
    return piece.data


def _place(index: MetadataIndex) -> Place:
    assert index.offset is not None, f"{index.fqn} is no piece of a tensor"
    return index.fqn, tuple(index.offset)


class _FillPieces(LoadPlanner):
    """Reads what overlaps with the pieces, however the checkpoint was cut, into the memory that they view."""

    def __init__(self, pieces: list[ShardedTensor], metadata: Metadata, directory: Path) -> None:
        self._targets = {(piece.key, tuple(piece.global_offset)): _data(piece).view(_extent(piece)) for piece in pieces}
        self._metadata, self._directory = metadata, directory

    def create_local_plan(self) -> LoadPlan:
        items = []
        for (key, offset), target in self._targets.items():
            stored = self._metadata.state_dict_metadata.get(key)
            chunk = ChunkStorageMetadata(torch.Size(offset), target.shape)
            found: list[ReadItem] = []
            if isinstance(stored, TensorStorageMetadata):
                found = create_read_items_for_chunk_list(key, stored, [chunk])
            if sum(item.lengths.numel() for item in found) != target.numel():
                raise CheckpointDamaged(f"{self._directory}: {key} at {offset} is not there, or not all of it")
            items += found
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target = self._targets[_place(read_item.dest_index)]
        for dim, (begin, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, begin, length)
        return target

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing is left to do: `resolve_tensor` gave the memory itself."""

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        raise NotImplementedError("set up by its constructor")

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise NotImplementedError("only tensors are planned")
