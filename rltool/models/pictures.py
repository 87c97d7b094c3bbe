"""Where a sample has its pictures, and the rotary positions of their tokens. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rltool.models.base import Pictures


class Place(NamedTuple):
    """Of one picture. at: index in its sample of the first of its tokens, of which it has rows x columns, one row after
    the other; size: bytes of its file."""

    at: int
    rows: int
    columns: int
    size: int

    @property
    def tokens(self) -> int:
        return self.rows * self.columns


def places_of(numbers: Sequence[int]) -> list[Place]:
    """Of a sample's TrainBatch.picture_places."""
    width = len(Place._fields)
    return [Place(*numbers[i : i + width]) for i in range(0, len(numbers), width)]


def token_grid(height: int, width: int, pictures: Pictures, *, least: int, most: int) -> tuple[int, int]:
    """(rows, columns) of tokens of a picture of so many pixels, which is resized so that both sides are whole tokens
    and its pixels are between `least` and `most`, at nearly its aspect ratio (transformers' smart_resize). ValueError
    where one side is more than 200 times the other."""
    if max(height, width) > 200 * min(height, width):
        raise ValueError(f"a picture of {height} x {width} pixels: one side is more than 200 times the other")
    side = pictures.patch * pictures.merge
    rows, columns = round(height / side), round(width / side)
    if rows * columns * side**2 > most:
        smaller = math.sqrt(height * width / most)
        rows, columns = (max(1, math.floor(x / smaller / side)) for x in (height, width))
    elif rows * columns * side**2 < least:
        larger = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(x * larger / side) for x in (height, width))
    return rows, columns


def check_places(tokens: list[int], places: Iterable[Place], pictures: Pictures) -> None:
    """ValueError unless each picture has a placeholder in the place of each of its tokens, and none beside them: the
    features of a picture would lie where another one is, or nothing."""
    end = 0
    for number, place in enumerate(places):
        has = [token == pictures.token for token in tokens[place.at : place.at + place.tokens]]
        beside = tokens[place.at - 1 : place.at] + tokens[place.at + place.tokens :][:1]
        if place.at < end or len(has) < place.tokens or not all(has) or pictures.token in beside:
            raise ValueError(
                f"picture {number} is {place.rows} x {place.columns} tokens from token {place.at} on, and of those "
                f"{sum(has)} are its placeholders ({pictures.token})"
            )
        end = place.at + place.tokens


def token_axes(lengths: Sequence[int], places: Sequence[Sequence[Place]]) -> Tensor:
    """[T, 3] int64, position of each token in time, row and column. A picture stands at one time; what follows it goes
    on behind the greater of its rows and columns (Qwen2-VL, arXiv 2409.12191, section 2.1; transformers'
    get_rope_index)."""
    found: list[Tensor] = []
    for length, own in zip(lengths, places, strict=True):
        axes, shift = torch.arange(length)[:, None].repeat(1, 3), 0
        for place in own:
            first, end = place.at + shift, place.at + place.tokens
            axes[place.at : end, 0] = first
            axes[place.at : end, 1] = first + torch.arange(place.rows).repeat_interleave(place.columns)
            axes[place.at : end, 2] = first + torch.arange(place.columns).repeat(place.rows)
            shift += max(place.rows, place.columns) - place.tokens
            axes[end:] = torch.arange(end, length)[:, None] + shift
        found.append(axes)
    return torch.cat(found)
