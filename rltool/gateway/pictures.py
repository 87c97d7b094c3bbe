"""Pictures that agents send: read off the event loop, and kept once a session, beside its file, by their digests.

What is kept is what engine and trainer see (rollout.pictures.plain_file). Turns name digests and places alone.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rltool.chat.conversation import Conversation, RawPrompt, SentPicture
from rltool.config.gateway import GatewayConfig
from rltool.engines.types import Picture
from rltool.gateway.errors import BadRequest
from rltool.gateway.session import Session
from rltool.gateway.store import SessionStore
from rltool.gateway.trajectory import Seen
from rltool.models.pictures import Pictures, has_stray, spread
from rltool.rollout.pictures import PictureReader, plain_file, url_of

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Of files: those of OpenAI's and Anthropic's APIs."""


@dataclass(frozen=True)
class Sizes:
    """Of the pictures of one prompt. model: how it takes them, None: the prompt has none; of: digest -> (rows, columns,
    bytes)."""

    model: Pictures | None = None
    of: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)

    def spread(self, ids: Sequence[int], pictures: Sequence[SentPicture], start: int) -> tuple[list[int], list[Seen]]:
        """(ids with a placeholder for each token of a picture, the pictures with their places). ids: those from `start`
        of the sequence on. BadRequest where the chat template has written placeholders for others than `pictures`."""
        if not pictures or self.model is None:
            return list(ids), []
        try:
            found, places = spread(ids, self.model.token, [self.of[picture.source] for picture in pictures], start)
        except ValueError as error:
            raise BadRequest(f"the conversation {error}", field="messages", code="template_failed") from error
        return found, [Seen(picture.source, place) for picture, place in zip(pictures, places, strict=True)]

    def check(self, ids: Sequence[int], pictures: Sequence[Seen]) -> None:
        """BadRequest for a placeholder that is no picture's: an engine would put one there."""
        if pictures and self.model is not None and has_stray(ids, self.model, [seen.place for seen in pictures]):
            raise BadRequest(
                f"the model has written the placeholder of a picture or video itself (token {self.model.token} or "
                f"{self.model.video}): the engine could not tell it from those of pictures, so this conversation "
                "cannot go on with them",
                field="messages",
                code="sampled_placeholder",
            )


class SentPictures:
    """reader: of the model; or why it gets no pictures."""

    def __init__(self, config: GatewayConfig, reader: PictureReader | str, store: SessionStore) -> None:
        self._config, self._reader, self._store = config, reader, store

    async def read(
        self, session: Session, prompt: Conversation | RawPrompt
    ) -> tuple[Conversation | RawPrompt, Sizes]:
        """The prompt with digests in the place of data URLs, whose pictures are kept by then. Raises BadRequest,
        NotRecorded."""
        if isinstance(prompt, RawPrompt) or not prompt.pictures:
            return prompt, Sizes()
        if isinstance(self._reader, str):
            raise BadRequest(f"images are not served: {self._reader}", field="messages", code="unsupported_content")
        return await asyncio.to_thread(self._read, self._reader, session.id, prompt, session.picture_sizes)

    def _read(
        self, reader: PictureReader, session_id: str, prompt: Conversation, sizes: dict[str, tuple[int, int, int]]
    ) -> tuple[Conversation, Sizes]:
        messages = list(prompt.messages)
        for i, message in enumerate(messages):
            found = list(message.pictures)
            for number, picture in enumerate(found):
                try:
                    digest = self._known(reader, session_id, picture.source, sizes)
                except ValueError as error:
                    where = f"messages[{i}], picture {number}"
                    raise BadRequest(f"{where}: {error}", field="messages", code="invalid_image") from error
                found[number] = replace(picture, source=digest)
            messages[i] = replace(message, pictures=tuple(found))
        return replace(prompt, messages=tuple(messages)), Sizes(reader.pictures, sizes)

    def _known(
        self, reader: PictureReader, session_id: str, url: str, sizes: dict[str, tuple[int, int, int]]
    ) -> str:
        """Its digest, with its size among `sizes`. ValueError for a picture that is not taken."""
        config = self._config
        head, _, text = url.partition(",")
        if not head.endswith(";base64"):
            raise ValueError("a data URL is data:image/png;base64,... here")
        if len(text) > config.max_picture_bytes * 4 // 3 + 4:
            raise ValueError(f"its file is larger than {config.max_picture_bytes} bytes (--max-picture-bytes)")
        data = base64.b64decode(text, validate=True)
        digest = hashlib.sha256(data).hexdigest()
        if digest not in sizes:
            kept = self._store.kept_pictures(session_id)
            if digest not in kept and len(kept) >= config.max_session_pictures:
                most = f"{config.max_session_pictures} pictures (--max-session-pictures)"
                raise BadRequest(f"this session has had its {most}", field="messages", code="session_limit")
            self._check_pixels(data)
            plain = plain_file(data, "sent")
            sizes[digest] = reader.size(plain)
            self._store.keep_picture(session_id, digest, plain)
        return digest

    def _check_pixels(self, data: bytes) -> None:
        """Before anything is unpacked."""
        from PIL import Image

        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
        except (OSError, Image.DecompressionBombError) as error:
            raise ValueError(f"it is no {', '.join(FORMATS)} file: {error}") from error
        if width * height > self._config.max_picture_pixels:
            raise ValueError(
                f"{width} x {height} pixels are more than {self._config.max_picture_pixels} (--max-picture-pixels)"
            )

    async def for_engine(self, session: Session, pictures: Sequence[Seen]) -> tuple[Picture, ...]:
        """Of a prompt. Raises RltoolError where a file is gone."""
        if not pictures:
            return ()
        urls = await asyncio.to_thread(self.urls, session.id, pictures)
        return tuple(Picture(seen.place.at, seen.place.tokens, urls[seen.digest]) for seen in pictures)

    def urls(self, session_id: str, pictures: Sequence[Seen]) -> dict[str, str]:
        """Digest -> data URL. Raises RltoolError where a file is gone."""
        return {
            digest: url_of(self._store.picture(session_id, digest)) for digest in {seen.digest for seen in pictures}
        }
