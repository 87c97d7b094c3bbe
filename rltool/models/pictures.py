"""How a model takes pictures, where a sample has them, and the rotary positions of their tokens. Pure, and without
torch but for the last: gateways read pictures, too."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Pictures:
    """How a model takes pictures. A tower makes features of each, which stand in the places of placeholders.

    token: id of a placeholder; patch: pixels of a side of what the tower reads at once; merge: patches of a side that
        become one token; deep: so many of the first layers get further features added to their output (DeepStack, Meng
        et al. 2024, arXiv 2406.04334, section 3); video: id of a placeholder of videos, -1: there is none
    """

    token: int
    patch: int
    merge: int
    deep: int
    video: int = -1


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


def spread(
    ids: Sequence[int], token: int, sizes: Sequence[tuple[int, int, int]], start: int = 0
) -> tuple[list[int], list[Place]]:
    """(ids with a placeholder for each token of a picture, where these are). ids: those from `start` of the sequence
    on, with one placeholder, `token`, for each picture, in order; sizes: (rows, columns, bytes of its file) of each.
    ValueError where these are others in number."""
    marks = [at for at, found in enumerate(ids) if found == token]
    if len(marks) != len(sizes):
        raise ValueError(
            f"has {len(sizes)} pictures, and its prompt has {len(marks)} places for one (the token {token}, which the "
            "chat template writes for a part of the type image)"
        )
    out, places, end = list[int](), list[Place](), 0
    for at, (rows, columns, size) in zip(marks, sizes, strict=True):
        out += ids[end:at]
        places.append(Place(start + len(out), rows, columns, size))
        out += [token] * places[-1].tokens
        end = at + 1
    return [*out, *ids[end:]], places


def has_stray(ids: Sequence[int], pictures: Pictures, places: Iterable[Place]) -> bool:
    """Whether a placeholder is no picture's: an engine would put one there, or look for a video."""
    return ids.count(pictures.token) != sum(place.tokens for place in places) or pictures.video in ids


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
    import torch

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
