"""The format of Hermes and Qwen: `<think>` reasoning, and each tool call as JSON between `<tool_call>` tags.

<think>...</think>text<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
"""

from __future__ import annotations

import json
import re
from typing import Any

from rltool.chat.parsers.parsed import Call, Parsed, without_begun

_TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_OPEN, _CLOSE = "<think>", "</think>"
_CALL, _CALL_END = "<tool_call>", "</tool_call>"


class Hermes:
    """See Parser."""

    def parse(self, text: str, *, tools: bool, reasoning_open: bool) -> Parsed:
        """Without tools their tags are text.

        Reasoning that was cut has no end, and is all there is. What stands between the tags and is no call (not JSON,
        no name) stays in the text: the agent sees what the model wrote.
        """
        reasoning, rest = _split_reasoning(text, reasoning_open)
        if not tools:
            return Parsed(rest, reasoning)
        calls: list[Call] = []

        def take(match: re.Match[str]) -> str:
            call = _call(match[1])
            if call is None:
                return match[0]
            calls.append(call)
            return ""

        remaining = _TOOL_CALL.sub(take, rest)
        # White space before the text stays: a stream has sent it before it knows of any call.
        return Parsed(remaining.rstrip() if calls else remaining, reasoning, tuple(calls))

    def certain(self, text: str, *, tools: bool, reasoning_open: bool) -> str:
        begun, at = text.lstrip(), 0
        if _OPEN.startswith(begun):
            return ""
        if begun.startswith(_OPEN) or reasoning_open:
            end = text.find(_CLOSE)
            if end < 0:
                return without_begun(text, (_CLOSE,))
            at = end + len(_CLOSE)
        if not tools:
            return text
        while (begin := text.find(_CALL, at)) >= 0:
            end = text.find(_CALL_END, begin)
            if end < 0:
                return text[:begin].rstrip()
            at = end + len(_CALL_END)
        return without_begun(text, (_CALL,), at).rstrip()


def _split_reasoning(text: str, reasoning_open: bool) -> tuple[str, str]:
    """(reasoning, the rest), without the blank lines that the format puts around both."""
    if text.lstrip().startswith(_OPEN):
        text = text.lstrip()[len(_OPEN) :]
    elif not reasoning_open:
        return "", text
    reasoning, closed, rest = text.partition(_CLOSE)
    return reasoning.strip("\n"), rest.lstrip("\n") if closed else ""


def _call(text: str) -> Call | None:
    try:
        found: Any = json.loads(text, parse_constant=_refuse)
        arguments = found.get("arguments", {}) if isinstance(found, dict) else None
        if isinstance(arguments, str):
            arguments = json.loads(arguments, parse_constant=_refuse)
        json.dumps(found, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except (ValueError, RecursionError):
        return None
    if not isinstance(arguments, dict) or not isinstance(found.get("name"), str) or not found["name"]:
        return None
    return Call(found["name"], arguments)


def _refuse(constant: str) -> None:
    """NaN and Infinity, which Python reads and no other JSON does."""
    raise ValueError(constant)
