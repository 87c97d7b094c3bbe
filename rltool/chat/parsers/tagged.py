"""Formats with marks around a reply's tool calls, and around the reasoning before them."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from rltool.chat.parsers.arguments import call_in, call_of, calls_in, json_in, object_in, typed
from rltool.chat.parsers.parsed import Call, Parsed, Tools, without_begun

Read = Callable[[str, Tools], list[Call]]
"""From what stands between the marks to the calls in it; none where it is not of the format."""
THINK = "<think>", "</think>"
_TOOL_CALL = "<tool_call>", "</tool_call>"


class Reasoned(ABC):
    """See Parser. Reasoning between two marks, then what a subclass reads.

    reasoning: the marks
    """

    def __init__(self, reasoning: tuple[str, str] = THINK) -> None:
        self._think, self._thought = reasoning

    def parse(self, text: str, *, tools: Tools, reasoning_open: bool) -> Parsed:
        """Reasoning that was cut has no end, and is all there is."""
        reasoning, rest = self._split(text, reasoning_open)
        text, calls = self._read_rest(rest, tools) if tools else (rest, [])
        return Parsed(text, reasoning, tuple(calls))

    def certain(self, text: str, *, tools: Tools, reasoning_open: bool) -> str:
        begun, at = text.lstrip(), 0
        if self._think.startswith(begun):
            return ""
        if begun.startswith(self._think) or reasoning_open:
            end = text.find(self._thought)
            if end < 0:
                return without_begun(text, (self._thought,))
            at = end + len(self._thought)
        return text[: self._certain_rest(text, at)] if tools else text

    def opens_reasoning(self, prompt: str) -> bool:
        return prompt.rstrip().endswith(self._think)

    @abstractmethod
    def _read_rest(self, rest: str, tools: Tools) -> tuple[str, list[Call]]:
        """(text, calls) of what stands behind the reasoning."""

    @abstractmethod
    def _certain_rest(self, text: str, at: int) -> int:
        """How much of `text` is certain, of which `at` characters are reasoning."""

    def _split(self, text: str, reasoning_open: bool) -> tuple[str, str]:
        """(reasoning, the rest), without the blank lines that the format puts around both."""
        if text.lstrip().startswith(self._think):
            text = text.lstrip()[len(self._think) :]
        elif not reasoning_open:
            return "", text
        reasoning, closed, rest = text.partition(self._thought)
        return reasoning.strip("\n"), rest.lstrip("\n") if closed else ""


class Tagged(Reasoned):
    """Calls between two marks. What stands there and is no call stays in the text: the agent sees what the model wrote.

    end: None where calls are the last of a reply
    """

    def __init__(self, begin: str, end: str | None, read: Read, reasoning: tuple[str, str] = THINK) -> None:
        super().__init__(reasoning)
        self._begin, self._end, self._read = begin, end, read
        close = r"\Z" if end is None else rf"(?:{re.escape(end)}|\Z)"
        self._calls = re.compile(f"{re.escape(begin)}(.*?){close}", re.DOTALL)

    def _read_rest(self, rest: str, tools: Tools) -> tuple[str, list[Call]]:
        calls: list[Call] = []

        def take(match: re.Match[str]) -> str:
            found = self._read(match[1], tools)
            calls.extend(found)
            return "" if found else match[0]

        remaining = self._calls.sub(take, rest)
        # White space before the text stays: a stream has sent it before it knows of any call.
        return remaining.rstrip() if calls else remaining, calls

    def _certain_rest(self, text: str, at: int) -> int:
        while (begin := text.find(self._begin, at)) >= 0:
            end = -1 if self._end is None else text.find(self._end, begin)
            if self._end is None or end < 0:
                return len(text[:begin].rstrip())
            at = end + len(self._end)
        return len(without_begun(text, (self._begin,), at).rstrip())


class Json(Reasoned):
    """The reply is a call, or several with semicolons between them: {"name": ..., "parameters": {...}} (Llama 3.1 and
    later, which may write <|python_tag|> before it). Any other reply is text."""

    TAG = "<|python_tag|>"

    def _read_rest(self, rest: str, tools: Tools) -> tuple[str, list[Call]]:
        begun = rest.strip().removeprefix(self.TAG).lstrip()
        calls = calls_in(begun, "parameters", "arguments") if begun.startswith("{") else []
        return ("", calls) if calls else (rest, [])

    def _certain_rest(self, text: str, at: int) -> int:
        begun = text[at:].lstrip()
        return at if self.TAG.startswith(begun) or begun.startswith((self.TAG, "{")) else len(text)


def _parts(text: str, *marks: str) -> Iterator[list[str]]:
    """What stands between each two of `marks` in their order, again and again; at the end the last may be missing. One
    way through the text, whatever a model repeats: a pattern would look to its end from every first mark."""
    at = 0
    while (at := text.find(marks[0], at)) >= 0:
        at += len(marks[0])
        found: list[str] = []
        for mark in marks[1:]:
            end = text.find(mark, at)
            if end < 0 and mark is not marks[-1]:
                return
            found.append(text[at:] if end < 0 else text[at:end])
            at = len(text) if end < 0 else end + len(mark)
        found[0] = found[0].rpartition(marks[0])[2]  # one that was begun and left
        yield found


def _hermes(text: str, tools: Tools) -> list[Call]:
    found = call_in(text, "arguments")
    return [] if found is None else [found]


_FUNCTION = re.compile(r"\s*<function=([^>\s]+)\s*>(.*?)(?:</function>\s*)?\Z", re.DOTALL)
_PARAMETER = re.compile(
    r"<parameter=([^<>\n]+)>(.*?)(?:</parameter>\s*(?=<parameter=|\Z)|(?=<parameter=)|\Z)", re.DOTALL
)


def _qwen3_coder(text: str, tools: Tools) -> list[Call]:
    """<function=NAME><parameter=KEY>VALUE</parameter>...</function>, a line break around each value."""
    function = _FUNCTION.match(text)
    if function is None:
        return []
    name = function[1]
    found = {key: value.removeprefix("\n").removesuffix("\n") for key, value in _PARAMETER.findall(function[2])}
    return [Call(name, {key: typed(value, name, key, tools) for key, value in found.items()})]


def _glm(text: str, tools: Tools) -> list[Call]:
    """NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>..., with line breaks between them or without."""
    name = text.partition("<arg_key>")[0].strip()
    if len(name.split()) != 1 or "<" in name:
        return []
    rows = _parts(text, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    found = {key.strip(): value for key, between, value in rows if not between.strip()}
    return [Call(name, {key: typed(value, name, key, tools) for key, value in found.items()})]


def _deepseek(text: str, tools: Tools) -> list[Call]:
    """V3.1: NAME, a separator, the arguments. V3, R1: "function", a separator, the name, arguments in a fence."""
    calls: list[Call] = []
    for head, body in _parts(text, "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"):
        name, fence, fenced = body.partition("```json")
        name, given = (name, fenced.strip().removesuffix("```")) if fence else (head, body)
        arguments = object_in(given)
        if arguments is not None and len(name.split()) == 1:
            calls.append(Call(name.strip(), arguments))
    return calls


_KIMI_ID = re.compile(r"\s*(?:functions\.)?([^\s<]+):[0-9]+\s*")


def _kimi(text: str, tools: Tools) -> list[Call]:
    """functions.NAME:NUMBER, a mark, the arguments."""
    calls: list[Call] = []
    for head, body in _parts(text, "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"):
        named, arguments = _KIMI_ID.fullmatch(head), object_in(body)
        if named is not None and arguments is not None:
            calls.append(Call(named[1], arguments))
    return calls


_MISTRAL_CALL = re.compile(r"\s*([^\s\[{]+)(?:\[CALL_ID\][^\[]*)?\[ARGS\](.*)\Z", re.DOTALL)


def _mistral(text: str, tools: Tools) -> list[Call]:
    """A JSON list of calls; of later tokenizers NAME[ARGS]ARGUMENTS, and the mark again before the next one."""
    listed = json_in(text)
    if isinstance(listed, list):
        return [call for call in (call_of(one, "arguments") for one in listed) if call is not None]
    calls: list[Call] = []
    for part in text.split("[TOOL_CALLS]"):
        found = _MISTRAL_CALL.match(part)
        arguments = None if found is None else object_in(found[2])
        if found is not None and arguments is not None:
            calls.append(Call(found[1], arguments))
    return calls


HERMES = Tagged(*_TOOL_CALL, _hermes)
QWEN3_CODER = Tagged(*_TOOL_CALL, _qwen3_coder)
GLM = Tagged(*_TOOL_CALL, _glm)
DEEPSEEK = Tagged("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _deepseek)
KIMI = Tagged("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", _kimi)
MISTRAL = Tagged("[TOOL_CALLS]", None, _mistral, reasoning=("[THINK]", "[/THINK]"))
