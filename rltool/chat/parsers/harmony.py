"""gpt-oss's format (harmony): a reply is a row of messages, each on a channel.

<|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>text
<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>
"""

from __future__ import annotations

import re

from rltool.chat.parsers.arguments import object_in
from rltool.chat.parsers.parsed import Call, Parsed, Tools, without_begun

_START, _MESSAGE, _CHANNEL = "<|start|>", "<|message|>", "<|channel|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_END = re.compile("|".join(map(re.escape, (*_ENDS, _START))))
_RECIPIENT = re.compile(r"\bto=(\S+?)(?=\s|<|\Z)")
_CHANNEL_NAME = re.compile(re.escape(_CHANNEL) + r"\s*(\w+)")
_FUNCTIONS = "functions."


class Harmony:
    """See Parser. The prompt ends with `<|start|>assistant`. A call that is none (no JSON object, of a tool that is no
    function) and a message without a channel stay in the text."""

    def parse(self, text: str, *, tools: Tools, reasoning_open: bool) -> Parsed:
        reasoning: list[str] = []
        said: list[str] = []
        calls: list[Call] = []
        for whole, header, body in _messages(text):
            channel, recipient = _read(header)
            if body is None:
                said.append(whole)
            elif recipient is not None and tools:
                call = _call(recipient, body)
                if call is None:
                    said.append(whole)
                else:
                    calls.append(call)
            elif recipient is not None or channel is None:
                said.append(whole)
            else:
                (reasoning if channel == "analysis" else said).append(body)
        return Parsed("\n".join(said), "\n".join(reasoning), tuple(calls))

    def certain(self, text: str, *, tools: Tools, reasoning_open: bool) -> str:
        at = 0
        for whole, header, body in _messages(text):
            channel, recipient = _read(header)
            end = at + len(whole)
            if end < len(text) or whole.endswith(_ENDS):
                at = end
            elif not body or recipient is not None or channel is None:
                return text[:at]
            else:
                return without_begun(text, (*_ENDS, _START), end - len(body))
        return text[:at]

    def opens_reasoning(self, prompt: str) -> bool:
        return False


def _messages(text: str) -> list[tuple[str, str, str | None]]:
    """Of each message all of it, its header, and its body; None where it has none."""
    found: list[tuple[str, str, str | None]] = []
    at = 0
    while at < len(text):
        ends = _END.search(text, at + len(_START) if text.startswith(_START, at) else at)
        stop = len(text) if ends is None else (ends.start() if ends[0] == _START else ends.end())
        whole = text[at:stop]
        header, has_body, body = (whole[: ends.start() - at] if ends else whole).partition(_MESSAGE)
        found.append((whole, header, body if has_body else None))
        at = stop
    return found


def _read(header: str) -> tuple[str | None, str | None]:
    """(channel, recipient)."""
    channel, recipient = _CHANNEL_NAME.search(header), _RECIPIENT.search(header)
    return channel[1] if channel else None, recipient[1] if recipient else None


def _call(recipient: str, body: str) -> Call | None:
    arguments = object_in(body)
    name = recipient.removeprefix(_FUNCTIONS)
    if arguments is None or not name or name == recipient:
        return None
    return Call(name, arguments)


HARMONY = Harmony()
