"""Pictures of rows: read as files that every reader decodes alike, and their tokens in a prompt."""

from __future__ import annotations

import base64
import binascii
import io
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from rltool.engines.types import Picture
from rltool.errors import UsageError
from rltool.models.pictures import Pictures, places_of, spread, token_grid

KEPT_FILES = 512
"""Files in memory: the samples of a group share one, and of a batch few more are in use at a time."""
SHOWN_BYTES, SHOWN_PIXELS = 16 * 1024, 256
"""Of what reports show: larger files are made smaller."""
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""Files of a model directory, one of which says how its pictures are made smaller and cut."""
ORIENTATION = 0x0112
"""EXIF's tag of how a camera was held."""


def source_of(value: Any, root: Path | None) -> str:
    """A row's picture as text that names it alone: an absolute path, or a data URL.

    value: a path, a file or data URL, base64 text, or an object with one of these under `url`, `path`, `base64` or
    `bytes`. root: what paths are relative to, and must lie in; None: relative to the working directory. ValueError for
    anything else, such as an address of the web: rows would be others in each run.
    """
    if isinstance(value, Mapping):
        found = next((value[key] for key in ("bytes", "base64", "url", "path") if value.get(key) is not None), None)
        return source_of(found, root)
    if not isinstance(value, str) or not value:
        raise ValueError(f"a picture is a path, a data URL or base64 text, not {type(value).__name__}")
    if value.startswith("data:"):
        return value
    scheme = urlsplit(value).scheme if "://" in value else ""
    if scheme not in ("", "file"):
        raise ValueError(f"{value[:80]}: pictures are not fetched ({scheme}://); give paths or data URLs")
    if not scheme and len(value) > 256 and _decoded(value) is not None:
        return "data:;base64," + value
    path = Path(unquote(urlsplit(value).path) if scheme else value)
    path = ((root or Path()) / path).resolve()
    if root is not None and not path.is_relative_to(root.resolve()):
        raise ValueError(f"{value}: not in data.media_root = {root}")
    if not path.is_file() and not scheme and _decoded(value) is not None:
        return "data:;base64," + value
    return str(path)


def _decoded(text: str) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None


@lru_cache(KEPT_FILES)
def picture_file(source: str) -> bytes:
    """The `plain_file` of a picture, by `source_of`. ValueError where it cannot be read."""
    try:
        if source.startswith("data:"):
            data = base64.b64decode(source.partition(",")[2], validate=True)
        else:
            data = Path(source).read_bytes()
    except (OSError, ValueError) as error:
        raise ValueError(f"the picture {source[:80]} cannot be read: {error}") from error
    return plain_file(data, source[:80])


def plain_file(data: bytes, name: str) -> bytes:
    """A picture's file as it is where it is a PNG or JPEG of three colours, else as a PNG of these. Engine and trainer
    would differ in what they make of transparency, palettes and turned photographs. ValueError, with its name, where it
    cannot be read."""
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
            plain = image.mode == "RGB" and "transparency" not in image.info
            if image.format in ("PNG", "JPEG") and plain and image.getexif().get(ORIENTATION, 1) == 1:
                return data
            upright = ImageOps.exif_transpose(image)
            if upright.has_transparency_data:
                white = Image.new("RGBA", upright.size, "white")
                upright = Image.alpha_composite(white, upright.convert("RGBA"))
            stream = io.BytesIO()
            upright.convert("RGB").save(stream, "png")
            return stream.getvalue()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"the picture {name} cannot be read: {error}") from error


def files_of(inputs: Mapping[str, Sequence[str]]) -> bytes:
    """Of a sample's or prompt's multimodal_inputs, one after the other."""
    return b"".join(map(picture_file, inputs.get("image", ())))


def for_engine(inputs: Mapping[str, Sequence[str]], places: Sequence[int]) -> tuple[Picture, ...]:
    """places: a sample's picture_places."""
    found = zip(inputs.get("image", ()), places_of(places), strict=True)
    return tuple(Picture(place.at, place.tokens, _url(picture_file(source))) for source, place in found)


def shown_pictures(inputs: Mapping[str, Sequence[str]]) -> tuple[tuple[str, str], ...]:
    """For people: (what the row calls it, data URL of a picture of at most SHOWN_PIXELS a side) of each. A file that is
    no longer there has an empty URL."""
    return tuple(("data" if x.startswith("data:") else x, _shown(x)) for x in inputs.get("image", ()))


@lru_cache(KEPT_FILES)
def _shown(source: str) -> str:
    from PIL import Image

    try:
        data = picture_file(source)
    except ValueError:
        return ""
    if len(data) <= SHOWN_BYTES:
        return _url(data)
    stream = io.BytesIO()
    with Image.open(io.BytesIO(data)) as image:
        image.thumbnail((SHOWN_PIXELS, SHOWN_PIXELS))
        image.save(stream, "jpeg")
    return _url(stream.getvalue())


def url_of(data: bytes) -> str:
    """Data URL of a `plain_file`."""
    kind = "png" if data.startswith(b"\x89PNG") else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


_url = lru_cache(KEPT_FILES)(url_of)
"""Of files that many samples share; a gateway's sessions do not."""


class PictureReader:
    """How many tokens each picture is, by a model directory's own image processor."""

    def __init__(
        self, pictures: Pictures, directory: Path, root: Path | None = None, *, shown_later: bool = False
    ) -> None:
        """root: see `source_of`; shown_later: pictures of a prompt without any place for one are kept for who shows
        them. UsageError for a directory without an image processor, or with one that is not Qwen's."""
        from transformers import AutoImageProcessor

        try:
            self._processor: Any = AutoImageProcessor.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError, ImportError) as error:
            raise UsageError(f"{directory} has no image processor that loads: {error}") from error
        processor = self._processor
        if not hasattr(processor, "merge_size") or (
            (processor.patch_size, processor.merge_size) != (pictures.patch, pictures.merge)
        ):
            raise UsageError(
                f"{directory}: {type(processor).__name__} does not cut pictures into the patches of config.json's "
                f"vision_config ({pictures.patch} pixels, {pictures.merge} to a side of a token)"
            )
        self.pictures, self._root, self._shown_later = pictures, root, shown_later

    def read(
        self, ids: Sequence[int], values: Sequence[Any], start: int = 0
    ) -> tuple[list[int], list[str], array[int]]:
        """(ids with a placeholder for each token of a picture, the pictures by `source_of`, their picture_places).

        ids: those from `start` of the sequence on, with one placeholder for each of `values`, in order. ValueError
        where these are others in number, and for a picture that cannot be read."""
        sources = [self.source(value) for value in values]
        token = self.pictures.token
        if self._shown_later and token not in ids:
            return list(ids), sources, array("q")
        out, places = spread(ids, token, [self.size(picture_file(source)) for source in sources], start)
        return out, sources, array("q", [number for place in places for number in place])

    def source(self, value: Any) -> str:
        """`source_of`, within the reader's root."""
        return source_of(value, self._root)

    def size(self, data: bytes) -> tuple[int, int, int]:
        """(rows, columns, bytes) of a picture's file. ValueError for one that the model does not take."""
        from PIL import Image

        with Image.open(io.BytesIO(data)) as image:
            width, height = image.size
        size = self._processor.size
        grid = token_grid(
            height, width, self.pictures, least=size["shortest_edge"], most=size["longest_edge"]
        )
        patches = self._processor.get_number_of_image_patches(height, width)
        if grid[0] * grid[1] * self.pictures.merge**2 != patches:
            raise ValueError(f"{height} x {width} pixels are {grid} tokens, and {patches} patches by transformers")
        return *grid, len(data)
