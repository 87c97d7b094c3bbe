"""From a conversation to token ids, by the model's chat template, and from token ids to the model's text.

A turn that goes on never tokenises what was recorded. The chat template is asked for two texts: the recorded
conversation, and that conversation with what is new. Where the second begins with the first, the difference is what
follows the recorded tokens. Where it does not (templates that drop earlier reasoning write the past differently once a
user message follows), there is no such continuation, and the turn opens a new trajectory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rltool.chat.conversation import Conversation, Message, ToolCall, template_messages
from rltool.chat.parsers.parsed import Parser, Tools
from rltool.errors import UsageError
from rltool.rollout.tokenizer import TemplateFailed, Tokenizer

SENTINEL = "Xq7sentinel7qX"
"""A word that no template writes by itself and none changes: what stands behind it closes an assistant's turn."""


class StandIns:
    """For texts in a user's or a tool's words that would become special tokens, so that none can close a turn: each is
    tokenised as the letters that it is. What no template writes and none changes stands for it until then."""

    MARK = "\U0010fffd"

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        texts = sorted(special_tokens, key=len, reverse=True)  # of two that begin alike the longer one
        either = "|".join(map(re.escape, texts)) or r"(?!)"
        self._put = re.compile(f"{self.MARK}|{either}")
        self._texts = [self.MARK, *texts]  # one for the mark itself, too
        numbers = "|".join(map(str, range(len(self._texts))))
        self._taken = re.compile(f"{self.MARK}({numbers}){self.MARK}|{either}")

    def put(self, message: Message) -> Message:
        if message.role not in ("user", "tool"):
            return message

        def words(text: str) -> str:
            return self._put.sub(lambda found: f"{self.MARK}{self._texts.index(found[0])}{self.MARK}", text)

        return message.with_pieces([words(piece) for piece in message.pieces])

    def taken(self, rendered: str) -> tuple[str, set[int]]:
        """(the text with what was in their places, which of its special tokens these are, counted from 0)."""
        specials, spelled = 0, set[int]()

        def back(found: re.Match[str]) -> str:
            nonlocal specials
            text = found[0] if found[1] is None else self._texts[int(found[1])]
            if text != self.MARK:
                if found[1] is not None:
                    spelled.add(specials)
                specials += 1
            return text

        return self._taken.sub(back, rendered), spelled


@dataclass(frozen=True)
class Suffix:
    """What follows recorded tokens, with one placeholder for each picture. reasoning_open: the template has opened the
    model's reasoning itself."""

    token_ids: tuple[int, ...]
    reasoning_open: bool


class Renderer:
    """Not thread-safe, as transformers' tokenizers are not. Its methods that render raise UsageError for messages that
    the chat template refuses."""

    def __init__(self, tokenizer: Tokenizer, parser: Parser, template_arguments: Mapping[str, Any]) -> None:
        self.stop_ids = frozenset(tokenizer.stop_ids)
        self.vocab_size = tokenizer.vocab_size
        self._tokenizer, self._parser, self._arguments = tokenizer, parser, dict(template_arguments)
        self.longest_token = tokenizer.longest_token()
        self._stand_ins = StandIns(tokenizer.special_tokens)
        self._arguments_as_text = tokenizer.has_template and self._wants_arguments_as_text()
        self._systems_anywhere = not tokenizer.has_template or self._takes_systems_anywhere()
        self._closing = self._find_closing() if tokenizer.has_template else None

    def prompt(self, conversation: Conversation) -> Suffix:
        """The whole conversation, ending where the assistant's reply begins."""
        text = self._render(conversation.messages, conversation.tools, ask=True)
        return Suffix(tuple(self._encode(text)), self._parser.opens_reasoning(text))

    def extension(self, recorded: Sequence[Message], conversation: Conversation, stop_id: int | None) -> Suffix | None:
        """What follows the tokens of `recorded`, with which the conversation begins; None where the template does not
        continue them. stop_id: the stop token that the recorded tokens end with, None where the reply was cut."""
        given = self._prepared(conversation.messages)
        joined = len(conversation.messages) - len(given)  # all of them before the first reply
        before = self._write(given[: len(recorded) - joined], conversation.tools, ask=False)
        whole = self._write(given, conversation.tools, ask=True)
        if self._closing is None or not whole.startswith(before) or not before.endswith(self._closing):
            return None
        ids = self._encode(self._closing + whole[len(before) :])
        return Suffix(tuple(_without_stop(ids, stop_id)), self._parser.opens_reasoning(whole))

    def observation(self, recorded: Sequence[Message], conversation: Conversation, stop_id: int | None) -> Suffix:
        """As `extension`, keeping the recorded tokens whatever the template would make of the past now: where
        it drops earlier reasoning, what follows is what it writes behind a reply that has none.

        UsageError where neither way shows what follows.
        """
        found = self.extension(recorded, conversation, stop_id)
        if found is not None:
            return found
        stand_in = (*recorded[:-1], Message("assistant", SENTINEL))
        text = self._render((*stand_in, *conversation.messages[len(recorded) :]), conversation.tools, ask=True)
        if text.count(SENTINEL) != 1:
            raise UsageError(
                "the chat template of this model writes earlier turns differently once a message follows them: it "
                "cannot be continued without tokenising the model's replies again"
            )
        following = text.partition(SENTINEL)[2]
        ids = self._encode(following)
        return Suffix(tuple(_without_stop(ids, stop_id)), self._parser.opens_reasoning(text))

    def raw(self, text: str, *, first: bool) -> tuple[int, ...]:
        """Ids of a plain text; with BOS, where the tokenizer adds one, if it is the `first` of its sequence."""
        encode = self._tokenizer.encode_prompt if first else self._tokenizer.encode_rendered
        return tuple(encode(text))

    def said(self, token_ids: Sequence[int]) -> str:
        """All that was sampled as text, special tokens too, without the final stop token."""
        stopped = bool(token_ids) and token_ids[-1] in self.stop_ids
        return self._tokenizer.decode_everything(token_ids[:-1] if stopped else token_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens, in which stop texts are looked for."""
        return self._tokenizer.decode(token_ids)

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        """Of each token alone."""
        return [self._tokenizer.decode_everything([token]) for token in token_ids]

    def message(self, text: str, *, turn: str, tools: Tools, reasoning_open: bool) -> Message:
        """The assistant's message in `text`; the ids of its tool calls are made of the turn's."""
        parsed = self._parser.parse(text, tools=tools, reasoning_open=reasoning_open)
        calls = tuple(
            ToolCall(f"call_{turn[:24]}{index}", call.name, call.arguments) for index, call in enumerate(parsed.calls)
        )
        return Message("assistant", parsed.text, parsed.reasoning, calls)

    def certain(self, text: str, *, tools: Tools, reasoning_open: bool) -> str:
        """The beginning of a reply that is still being written whose `message` is the beginning of the whole one's."""
        return self._parser.certain(text, tools=tools, reasoning_open=reasoning_open)

    def text(self, token_ids: Sequence[int]) -> str:
        """All of these tokens, special ones too."""
        return self._tokenizer.decode_everything(token_ids)

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, ask: bool) -> str:
        return self._write(self._prepared(messages), tools, ask=ask)

    def _prepared(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        spelled = [self._stand_ins.put(message) for message in messages]
        if not self._systems_anywhere:
            spelled = _one_system(spelled)
        return template_messages(spelled, arguments_as_text=self._arguments_as_text)

    def _write(self, given: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]], *, ask: bool) -> str:
        return self._tokenizer.render_messages(given, tools=tools, ask=ask, arguments=self._arguments)

    def _encode(self, rendered: str) -> list[int]:
        text, spelled = self._stand_ins.taken(rendered)
        return self._tokenizer.encode_rendered(text, spelled)

    def _wants_arguments_as_text(self) -> bool:
        """Of calls. Some templates (DeepSeek's) put them behind other text: they fail on an object, or write Python's
        form of it."""
        call = ToolCall("call00000", "example", {"key": "value"})
        messages = template_messages((Message("user", "Hello."), Message("assistant", "", tool_calls=(call,))))
        try:
            return "{'key'" in self._tokenizer.render_messages(messages, ask=False, arguments=self._arguments)
        except TemplateFailed:
            return True

    def _takes_systems_anywhere(self) -> bool:
        """Whether the template writes a system message where it stands, and does not refuse or drop one behind others,
        or put it before them, which would rewrite what was recorded."""
        said = Message("user", "Hello."), Message("assistant", "Hello."), Message("system", SENTINEL)
        messages = template_messages((*said, Message("user", "And?")))
        try:
            text = self._tokenizer.render_messages(messages, ask=True, arguments=self._arguments)
        except TemplateFailed:
            return False
        return text.rfind("Hello.") < text.find(SENTINEL)

    def _find_closing(self) -> str:
        """What the template writes behind an assistant's text, such as "<|im_end|>\\n"."""
        example = (Message("user", "Hello."), Message("assistant", SENTINEL))
        try:
            text = self._render(example, (), ask=False)
        except UsageError as error:
            raise UsageError(f"the chat template of this model fails on the simplest conversation: {error}") from error
        if text.count(SENTINEL) != 1:
            raise UsageError(
                f"the chat template of this model writes an assistant's text {text.count(SENTINEL)} times, not once: "
                "the end of a reply is unknown"
            )
        return text.partition(SENTINEL)[2]


def _one_system(messages: list[Message]) -> list[Message]:
    """The first system messages as one, and later ones as a user's."""
    first = next((i for i, one in enumerate(messages) if one.role != "system"), len(messages))
    leading = [replace(messages[0], text="\n\n".join(one.text for one in messages[:first]))] if first else []
    return leading + [replace(one, role="user") if one.role == "system" else one for one in messages[first:]]


def _without_stop(ids: list[int], stop_id: int | None) -> list[int]:
    """Without the stop token that the model has sampled itself."""
    return ids[1:] if stop_id is not None and ids[:1] == [stop_id] else ids
