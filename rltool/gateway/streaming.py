"""A turn that is shown while it is generated: what of its tokens is text already, and how far the agent has it.

The record does not depend on it: it is made of the engine's tokens when the turn has ended, as without a stream.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rltool.chat.conversation import Conversation, Message, Reply
from rltool.chat.parsers.parsed import without_begun
from rltool.chat.rendering import Renderer
from rltool.engines.types import Completion, TokenStream
from rltool.gateway.apis.base import NOTHING, Answer, Asked
from rltool.gateway.planning import Plan, Rendering

UNFINISHED = "\ufffd"
"""What tokenizers decode bytes to that are no character yet."""


@dataclass
class Decoder:
    """Token ids to text, piece by piece. Each piece is decoded behind the one before, so that tokenizers whose tokens
    have another text at the beginning give the same as at once; one that ends within a character waits for its end."""

    text: str = ""
    _before: int = 0
    _read: int = 0

    def add(self, token_ids: Sequence[int], renderer: Renderer) -> None:
        """token_ids: all so far."""
        if len(token_ids) <= self._read:
            return
        known = renderer.text(token_ids[self._before : self._read])
        longer = renderer.text(token_ids[self._before :])
        if len(longer) > len(known) and not longer.endswith(UNFINISHED):
            self.text += longer[len(known) :]
            self._before, self._read = self._read, len(token_ids)


@dataclass
class Live:
    """One turn, from its server's view. `changed` is set with every change; who waits clears it.

    delivered: of its tokens, those that the agent has been sent the text of. stream: of the request that is at an
    engine now.
    """

    changed: asyncio.Event = field(default_factory=asyncio.Event)
    delivered: int = 0
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: list[float] = field(default_factory=list)
    stream: TokenStream | None = None
    _opening: Answer | None = None
    _rendering: Rendering | None = None
    _plan: Plan | None = None
    _shown: int = 0
    _decoder: Decoder = field(default_factory=Decoder)
    _texts: list[str] = field(default_factory=list)

    def open(self, answer: Answer, plan: Plan, rendering: Rendering) -> None:
        """answer: with a reply that has the number of the prompt's tokens, and nothing else."""
        self._opening, self._plan, self._rendering = answer, plan, rendering

    def heard(self, piece: Completion) -> None:
        self.token_ids.extend(piece.token_ids)
        self.logprobs.extend(piece.logprobs)
        self.changed.set()

    @property
    def opening(self) -> Answer | None:
        return self._opening

    @property
    def has_news(self) -> bool:
        """Whether tokens have come that no answer has shown."""
        return len(self.token_ids) > self._shown

    async def wait(self, seconds: float) -> bool:
        """Until there is a change, which is True, or so long."""
        try:
            async with asyncio.timeout(seconds):
                await self.changed.wait()
        except TimeoutError:
            return False
        self.changed.clear()
        return True

    async def answer(self) -> tuple[Answer, int]:
        """The answer as far as it is certain, and how many tokens have been read for it."""
        opening, plan, rendering = self._opening, self._plan, self._rendering
        assert opening is not None and plan is not None and rendering is not None, "tokens come after the opening"
        ids = self.token_ids[:]
        self._shown = len(ids)
        reply = await rendering.run(opening.asked.prompt, lambda own: self._read(own, ids, opening, plan))
        return replace(opening, reply=reply), len(ids)

    def _read(self, renderer: Renderer, ids: array[int], opening: Answer, plan: Plan) -> Reply:
        asked, said = opening.asked, ids[:-1] if ids[-1] in renderer.stop_ids else ids
        self._decoder.add(said, renderer)
        shown = up_to_stop(self._decoder.text, asked.stop)
        message = _message(renderer, shown, opening.id, asked, plan)
        logprobs: tuple[tuple[str, float], ...] = ()
        if asked.logprobs:
            self._texts += renderer.texts(ids[len(self._texts) :])
            logprobs = tuple(zip(self._texts, self.logprobs, strict=False))
        return replace(opening.reply, message=message, raw=shown, sampled_tokens=len(ids), logprobs=logprobs)


def up_to_stop(text: str, stops: Sequence[str]) -> str:
    """Up to the first stop text, and without an end that may be the beginning of one."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found)] if found else without_begun(text, stops)


def _message(renderer: Renderer, text: str, turn: str, asked: Asked, plan: Plan) -> Message:
    if not isinstance(asked.prompt, Conversation):
        return NOTHING  # OpenAI Completions show the raw text
    tools, is_open = asked.prompt.tools, plan.reasoning_open
    certain = renderer.certain(text, tools=tools, reasoning_open=is_open)
    return renderer.message(certain, turn=turn, tools=tools, reasoning_open=is_open)
