"""Pictures in a micro-batch: positions on three axes, and features of a frozen vision tower."""

from __future__ import annotations

import hashlib
import io
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rltool.algorithms.batch import TrainBatch
from rltool.algorithms.ragged import numbers
from rltool.errors import TrainingStopped
from rltool.megatron.packing import PackedSequences, PlacedFeatures
from rltool.megatron.runtime import Coordinates, to_device
from rltool.models.base import Family
from rltool.models.hf_directory import HFTensors
from rltool.models.pictures import Pictures, Place, check_places, places_of, token_axes
from rltool.models.weight_files import files_with_carried

CACHED_BYTES = 2**31
"""Of features that a rank keeps in the host's memory: those of some thousand pictures."""


class VisionTower:
    """Features of pictures by transformers' module, from the file alone: pixels by the directory's own image processor,
    as an engine makes them. No gradient. A picture is computed alone and once, as long as its features are kept."""

    def __init__(self, directory: Path, family: Family, dtype: torch.dtype, device: torch.device) -> None:
        """UsageError for a directory without the tower's weights or an image processor."""
        from transformers import AutoConfig, AutoImageProcessor, AutoModel

        assert family.pictures is not None
        self._pictures, self._device = family.pictures, device
        self._processor: Any = AutoImageProcessor.from_pretrained(directory)
        vision = AutoConfig.from_pretrained(directory).vision_config
        self._model: Any = AutoModel.from_config(vision, dtype=dtype, attn_implementation="sdpa").eval()
        [beginning] = [each for each in family.carried if each.endswith("visual.")]
        with HFTensors(directory, files_with_carried(directory)) as tensors:
            names = [name for name in tensors.names if name.startswith(beginning)]
            self._model.load_state_dict({name.removeprefix(beginning): tensors.read(name) for name in names})
        self._model.to(device).requires_grad_(False)
        self._kept: OrderedDict[bytes, tuple[tuple[int, int], tuple[Tensor, ...]]] = OrderedDict()
        self._bytes = 0

    def features(self, file: bytes) -> tuple[tuple[int, int], tuple[Tensor, ...]]:
        """((rows, columns) of its tokens, [tokens, hidden] each on the CPU: in the place of the embedding, then for the
        first layers)."""
        key = hashlib.sha256(file).digest()
        if key not in self._kept:
            self._kept[key] = self._compute(file)
            self._bytes += _bytes_of(self._kept[key][1])
            while self._bytes > CACHED_BYTES and len(self._kept) > 1:
                self._bytes -= _bytes_of(self._kept.popitem(last=False)[1][1])
        self._kept.move_to_end(key)
        return self._kept[key]

    @torch.no_grad()
    def _compute(self, file: bytes) -> tuple[tuple[int, int], tuple[Tensor, ...]]:
        from PIL import Image

        with Image.open(io.BytesIO(file)) as image:
            made = self._processor(images=[image.convert("RGB")], return_tensors="pt")
        pixels, grid = made["pixel_values"].to(self._device, self._model.dtype), made["image_grid_thw"]
        out = self._model(pixels, grid_thw=grid.to(self._device), return_dict=True)
        rows, columns = (int(side) // self._pictures.merge for side in grid[0, 1:])
        return (rows, columns), tuple(x.cpu() for x in (out.pooler_output, *out.deepstack_features))


def _bytes_of(features: tuple[Tensor, ...]) -> int:
    return sum(x.numel() * x.element_size() for x in features)


def place_pictures(
    batch: TrainBatch, packed: PackedSequences, family: Family, at: Coordinates, tower: VisionTower | None,
    *, sequence_parallel: bool,
) -> None:  # fmt: skip
    """Gives `packed` the positions and features of the batch's pictures. tower: of a rank whose layers read features.

    TrainingStopped for a sample whose tokens, places and pictures disagree.
    """
    device = packed.positions.device
    assert batch.picture_places is not None and family.pictures is not None
    if at.layout.cp > 1 or packed.blocks is not None:
        raise ValueError("pictures are implemented without context parallelism and shared prefixes")
    lengths, given = numbers(batch.lengths), batch.picture_places
    places = [places_of(numbers(own)) for own in torch.split(given.values, numbers(given.lengths))]
    for number, (tokens, own) in enumerate(zip(torch.split(batch.tokens, lengths), places, strict=True)):
        _check(numbers(tokens), own, family.pictures, number)
    packed.positions = to_device(packed.place_row(token_axes(lengths, places), 0), device)
    if tower is None or not any(places):
        return
    rows, features = _features(batch, lengths, places, tower)
    if packed.place is not None:
        rows = packed.place[rows]
    if sequence_parallel:
        share = len(packed.positions) // at.layout.tp
        here = rows // share == at.tp_rank
        rows, features = rows[here] - at.tp_rank * share, [each[here] for each in features]
    packed.pictures = PlacedFeatures(to_device(rows, device), tuple(to_device(each, device) for each in features))


def _check(tokens: list[int], places: list[Place], pictures: Pictures, number: int) -> None:
    try:
        check_places(tokens, places, pictures)
    except ValueError as error:
        raise TrainingStopped(f"sample {number} of a micro-batch: {error}") from error


def _features(
    batch: TrainBatch, lengths: list[int], places: list[list[Place]], tower: VisionTower
) -> tuple[Tensor, list[Tensor]]:
    """([P] places in the batch's row, [P, hidden] each on the CPU) of all pictures."""
    if batch.picture_files is None:
        raise ValueError("TrainBatch.picture_files is None, and there are places of pictures")
    files = torch.split(batch.picture_files.values, numbers(batch.picture_files.lengths))
    rows: list[Tensor] = []
    features: list[tuple[Tensor, ...]] = []
    start = 0
    for number, (length, own, file) in enumerate(zip(lengths, places, files, strict=True)):
        end = 0
        for place in own:
            data = file[end : end + place.size].numpy().tobytes()
            end += place.size
            found, of_picture = tower.features(data)
            if found != (place.rows, place.columns):
                raise TrainingStopped(
                    f"sample {number} of a micro-batch: a picture is {place.rows} x {place.columns} tokens in the "
                    f"rollout, and {found[0]} x {found[1]} by the image processor of model.path: engines and trainer "
                    "have other settings (preprocessor_config.json, --mm-processor-kwargs)"
                )
            rows.append(start + place.at + torch.arange(place.tokens))
            features.append(of_picture)
        if end != len(file):
            raise TrainingStopped(f"sample {number} of a micro-batch: {len(file)} bytes of pictures for {end}")
        start += length
    return torch.cat(rows), [torch.cat(each) for each in zip(*features, strict=True)]
