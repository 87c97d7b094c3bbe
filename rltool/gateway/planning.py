"""Which token ids a request is sent as, and how much of them is recorded already."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from rltool.chat.conversation import Conversation, Message, RawPrompt
from rltool.chat.rendering import Renderer
from rltool.errors import UsageError
from rltool.gateway.errors import BadRequest
from rltool.gateway.pictures import Sizes
from rltool.gateway.session import Session
from rltool.gateway.trajectory import Seen, Turn

EDITED = "the messages do not continue any recorded turn: the agent edited its history, or another one writes"
REWRITTEN = "the chat template writes earlier turns differently now, as templates that drop reasoning do"
AGAIN = "the messages of a recorded turn came once more, without its reply"
ANOTHER = "another continuation of a turn that was continued already"
AFTER_STOP = "the prompt goes on where the model had stopped: its stop token is not part of it"


LONG = 100_000
"""Characters of a prompt above which it is tokenised beside the others: the gateway's other sessions do not wait."""
T = TypeVar("T")


class Rendering:
    """Where templates and tokenizers run, off the event loop: one call at a time, and the long ones in a line of their
    own. make: a renderer; one is not for two threads."""

    def __init__(self, make: Callable[[], Renderer], short: Executor, long: Executor) -> None:
        self._make, self._short, self._long = make, short, long
        self.renderer = make()

    @cached_property
    def _for_long(self) -> Renderer:
        return self._make()

    async def run(self, prompt: Conversation | RawPrompt, work: Callable[[Renderer], T]) -> T:
        loop = asyncio.get_running_loop()
        if prompt.characters > LONG:
            return await loop.run_in_executor(self._long, lambda: work(self._for_long))
        return await loop.run_in_executor(self._short, work, self.renderer)


@dataclass(frozen=True)
class Plan:
    """prompt_ids: what the engine is sent; the first `cut` of them are recorded tokens of `base`. reason: why this is
    no plain extension, or "". pictures: all of the prompt's."""

    prompt_ids: array[int]
    base: Turn | None
    cut: int
    reason: str
    reasoning_open: bool = False
    new_messages: tuple[Message, ...] = ()
    raw_prompt: str | None = None
    pictures: tuple[Seen, ...] = ()


def plan_turn(session: Session, prompt: Conversation | RawPrompt, renderer: Renderer, sizes: Sizes) -> Plan:
    """Takes time with long conversations, and changes nothing. sizes: of the prompt's pictures. Raises BadRequest."""
    if isinstance(prompt, RawPrompt):
        plan = _plan_raw(session, prompt, renderer)
    else:
        try:
            plan = _plan(session, prompt, renderer, sizes)
        except UsageError as error:
            raise BadRequest(str(error), field="messages", code="template_failed") from error
    sizes.check(plan.prompt_ids, plan.pictures)
    if not plan.prompt_ids:
        raise BadRequest("the prompt has no token: an engine needs at least one")
    return plan


def _plan(session: Session, sent: Conversation, renderer: Renderer, sizes: Sizes) -> Plan:
    if sent.messages[-1].role == "assistant":
        raise BadRequest(
            "the last message is the assistant's: an answer that the agent has begun itself (prefill) is not served",
            field="messages",
        )
    base = session.continued_by(sent)
    if base is None:
        whole = renderer.prompt(sent)
        reason = "" if not session.turns else AGAIN if session.was_asked(sent) else EDITED
        ids, pictures = sizes.spread(whole.token_ids, sent.pictures, 0)
        return Plan(array("i", ids), None, 0, reason, whole.reasoning_open, sent.messages, None, tuple(pictures))
    recorded = base.history or ()
    new = sent.messages[len(recorded) :]
    # The model's messages are taken from the record: the agent's copy lacks its reasoning, perhaps.
    known = replace(sent, messages=(*recorded, *new))
    suffix = renderer.extension(recorded, known, base.stop_id)
    if suffix is None:
        whole = renderer.prompt(known)
        # Not based on that turn's tokens, but on its messages.
        ids, pictures = sizes.spread(whole.token_ids, known.pictures, 0)
        return Plan(array("i", ids), base, 0, REWRITTEN, whole.reasoning_open, new, None, tuple(pictures))
    ids, pictures = sizes.spread(suffix.token_ids, Conversation(new).pictures, base.end)
    prompt_ids = session.prefix(base, base.end) + array("i", ids)
    reason = "" if session.is_leaf(base) else ANOTHER
    all_of_them = (*session.pictures(base, base.end), *pictures)
    return Plan(prompt_ids, base, base.end, reason, suffix.reasoning_open, new, None, all_of_them)


def _plan_raw(session: Session, sent: RawPrompt, renderer: Renderer) -> Plan:
    if not isinstance(sent.prompt, str):
        outside = next((token for token in sent.prompt if not 0 <= token < renderer.vocab_size), None)
        if outside is not None:
            raise BadRequest(
                f"token id {outside} is outside the model's vocabulary of {renderer.vocab_size}", field="prompt"
            )
        return Plan(array("i", sent.prompt), None, 0, EDITED if session.turns else "")
    base = session.continued_by_text(sent.prompt)
    if base is None:
        ids = array("i", renderer.raw(sent.prompt, first=True))
        return Plan(ids, None, 0, EDITED if session.turns else "", raw_prompt=sent.prompt)
    text = sent.prompt[len(base.raw or "") :]
    cut = base.end if base.stop_id is None else base.end - 1
    reason = AFTER_STOP if base.stop_id is not None else "" if session.is_leaf(base) else ANOTHER
    ids = session.prefix(base, cut) + array("i", renderer.raw(text, first=False))
    return Plan(ids, base, cut, reason, raw_prompt=text)
