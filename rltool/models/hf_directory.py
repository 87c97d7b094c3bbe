"""The weights of a Hugging Face directory: every tensor by its name, and whether they are those of its config.json."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from rltool.errors import UsageError
from rltool.models.base import Family, Parameter, check_shape
from rltool.models.quantized import BLOCKS, FP8_SCALE, SCALES, Fp8Tensor, Mxfp4Tensor
from rltool.models.tensor_files import TensorFile
from rltool.models.weight_files import weight_files


class NonFiniteWeights(UsageError):
    """A tensor of a model holds NaN or infinities: nothing can be computed with it."""


def check_finite(name: str, tensor: Tensor) -> None:
    """Raises NonFiniteWeights, with how many values of which kind."""
    # One pass without a copy: a sum is finite where no value is not, unless it overflows; then the values are counted.
    if not tensor.is_floating_point() or torch.isfinite(tensor.sum(dtype=torch.float32)):
        return
    nan, infinite = int(tensor.isnan().sum()), int(tensor.isinf().sum())
    if nan or infinite:
        raise NonFiniteWeights(
            f"{name} holds {nan} NaN and {infinite} infinite values of {tensor.numel()}: the file is damaged, or it "
            "was saved by a training that had diverged; use another one"
        )


GATE_AND_UP, DOWN = "gate_up_proj", "down_proj"
"""Of all experts of a layer: [experts, 2 * size, hidden] and [experts, hidden, size]."""


class ExpertOfAll:
    """Rows of one expert's part of a tensor of all. The interface of a `TensorFile`."""

    def __init__(self, file: TensorFile, name: str, expert: int, rows: slice = slice(None)) -> None:
        self._file, self._name, self._expert, self._rows = file, name, expert, rows

    @property
    def path(self) -> Path:
        return self._file.path

    def shape(self, name: str) -> tuple[int, ...]:
        _, rows, columns = self._file.shape(self._name)
        return len(range(rows)[self._rows]), columns

    def dtype(self, name: str) -> torch.dtype:
        return self._file.dtype(self._name)

    def read(self, name: str, part: int | None = None) -> Tensor:
        """part: of no use, there is one expert."""
        return self._file.read(self._name, self._expert)[self._rows]


class HFTensors:
    """Read access to the tensors of a Hugging Face directory, sharded or not; a tensor is read when it is asked for."""

    def __init__(self, directory: Path, files: Sequence[Path] | None = None, *, fp8: bool = False) -> None:
        """files: those to read; None: what the directory's index names. fp8: matrices in FP8, and their scales, are as
        they are stored.

        UsageError when there are no safetensors, or the index names a file that is missing; TensorFileDamaged."""
        self._stack = ExitStack()
        self._owner: dict[str, TensorFile | Mxfp4Tensor | Fp8Tensor | ExpertOfAll] = {}
        with self._stack:
            for path in weight_files(Path(directory)) if files is None else files:
                file = TensorFile(path)
                self._stack.callback(file.close)
                for name in file.names:
                    if name in self._owner:
                        raise UsageError(f"{directory}: tensor {name} stands in more than one file")
                    self._owner[name] = file
            self._join_mxfp4()
            if not fp8:
                self._join_fp8()
            self._split_experts()
            # Open until `close`: everything is in order.
            self._stack = self._stack.pop_all()

    def __enter__(self) -> HFTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _join_mxfp4(self) -> None:
        """In place of blocks and scales there is the tensor that they are."""
        for name in [name.removesuffix(BLOCKS) for name in self._owner if name.endswith(BLOCKS)]:
            blocks, scales = self._owner.get(name + BLOCKS), self._owner.get(name + SCALES)
            if isinstance(blocks, TensorFile) and isinstance(scales, TensorFile):
                self._owner[name] = Mxfp4Tensor(name, blocks, scales)
                del self._owner[name + BLOCKS], self._owner[name + SCALES]

    def _join_fp8(self) -> None:
        """In place of a matrix in FP8 and its scales there is the matrix that they are."""
        for name in [name.removesuffix(FP8_SCALE) for name in self._owner if name.endswith(FP8_SCALE)]:
            values, scales = self._owner.get(name), self._owner[name + FP8_SCALE]
            if isinstance(values, TensorFile) and isinstance(scales, TensorFile):
                self._owner[name] = Fp8Tensor(name, values, scales)
                del self._owner[name + FP8_SCALE]

    def _split_experts(self) -> None:
        """In place of a layer's two tensors of all experts (files of Qwen3.5) there are those of each. Those with
        matrices as [inputs, outputs] stay (gpt-oss, Qwen3-VL)."""
        for name in [name for name in self._owner if name.endswith(f".experts.{GATE_AND_UP}")]:
            block, both = name.removesuffix(GATE_AND_UP), self._owner[name]
            down = self._owner.get(f"{block}{DOWN}")
            if not isinstance(both, TensorFile) or not isinstance(down, TensorFile):
                continue
            experts, rows, _ = both.shape(name)
            if rows != 2 * down.shape(f"{block}{DOWN}")[2]:
                continue
            halves = {"gate_proj": slice(0, rows // 2), "up_proj": slice(rows // 2, rows)}
            for expert in range(experts):
                for part, here in halves.items():
                    self._owner[f"{block}{expert}.{part}.weight"] = ExpertOfAll(both, name, expert, here)
                self._owner[f"{block}{expert}.down_proj.weight"] = ExpertOfAll(down, f"{block}{DOWN}", expert)
            del self._owner[name], self._owner[f"{block}{DOWN}"]

    @property
    def names(self) -> set[str]:
        return set(self._owner)

    def read(self, name: str, part: int | None = None) -> Tensor:
        """The tensor, in memory of its own; part: of its first dimension that one alone. Raises TensorFileDamaged,
        NonFiniteWeights."""
        file = self._owner[name]
        tensor = file.read(name, part)
        check_finite(f"{file.path}: {name}", tensor)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        return self._owner[name].shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._owner[name].dtype(name)

    def merged(self, parameter: Parameter) -> Tensor:
        """The unsharded Megatron tensor of this parameter. Raises ShapeMismatch."""
        if parameter.merge_as != "stack" or parameter.split_copies:
            part = parameter.expert if parameter.experts else None
            return parameter.merge([self.read(name, part) for name, _ in parameter.hf])
        # Block by block, so that the two largest matrices of a layer are not in memory twice.
        merged: Tensor | None = None
        for block, (name, shape) in enumerate(parameter.hf):
            tensor = self.read(name)
            check_shape(name, tuple(tensor.shape), shape)
            merged = torch.empty(parameter.merged_shape, dtype=tensor.dtype) if merged is None else merged
            parameter.split(merged)[block].copy_(tensor)
        assert merged is not None  # a stack has blocks
        return merged


def check_tensors(family: Family, tensors: HFTensors, directory: Path) -> None:
    """UsageError naming the tensors that config.json does not imply and those that are missing; ShapeMismatch."""
    expected = {name for name, _ in family.hf_tensors()}
    extra = {name for name in tensors.names - expected if not name.endswith(".rotary_emb.inv_freq")}
    extra = {name for name in extra if not name.startswith(family.carried)}
    if family.tied_embeddings and "lm_head.weight" in extra:
        # Some writers store the tied head as well. It is ignored by everyone, so a different one would be a trap.
        if not torch.equal(tensors.read("lm_head.weight"), tensors.read(f"{family.prefix}embed_tokens.weight")):
            raise UsageError(
                f"{directory}: config.json ties lm_head.weight to the embedding, "
                "but the stored lm_head.weight differs; set tie_word_embeddings to false or remove the tensor"
            )
        extra.discard("lm_head.weight")
    missing = expected - tensors.names
    for what, names in (("unknown", extra), ("missing", missing)):
        if names:
            shown = ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise UsageError(f"{directory}: {what} tensors for {family.architecture}: {shown}")
    for name, shape in family.hf_tensors():
        check_shape(name, tensors.shape(name), shape)
