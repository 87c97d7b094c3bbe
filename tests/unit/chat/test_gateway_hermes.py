"""Qwen's and Hermes' form of reasoning and tool calls."""

from __future__ import annotations

from random import Random

import pytest

from rltool.chat.parsers.hermes import Hermes
from rltool.chat.parsers.parsed import Call


def read(text, *, tools=True, reasoning_open=False):
    found = Hermes().parse(text, tools=tools, reasoning_open=reasoning_open)
    return found.reasoning, found.text, list(found.calls)


ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>'
CALL = Call("add", {"a": 1, "b": "ü"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", ("", "plain", [])),
        (" plain\n", ("", " plain\n", [])),
        (ADD, ("", "", [CALL])),
        (f"Let me see.\n{ADD}\n{ADD}", ("", "Let me see.", [CALL, CALL])),
        (f"<think>\nhm\n</think>\n\nso\n{ADD}", ("hm", "so", [CALL])),
        ("<think>\nhm", ("hm", "", [])),
        ("<think></think>two", ("", "two", [])),
        ('<tool_call>{"name": "add"}</tool_call>', ("", "", [Call("add", {})])),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", "", [Call("add", {"a": 1})])),
        ('<tool_call>{"name": "add", "arguments": {}}', ("", "", [Call("add", {})])),
    ],
)
def test_what_is_read(text, expected):
    assert read(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{not json}</tool_call>",
        "<tool_call>[]</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "add", "argu',
        "<tool_call>" + "[" * 100_000,
    ],
)
def test_what_is_no_call_stays_text(text):
    assert read(text) == ("", text, [])


def test_without_tools_nothing_is_a_call():
    assert read(ADD, tools=False) == ("", ADD, [])


def test_reasoning_that_the_template_has_opened():
    assert read("hm\n</think>\n\ntwo", reasoning_open=True) == ("hm", "two", [])
    assert read("hm, cut", reasoning_open=True) == ("hm, cut", "", [])


PIECES = ["<think>", "</think>", "<tool_call>", "</tool_call>", ADD, *"\n a<{}ü", "tool", "think>"]


def test_what_is_certain_of_a_text_never_changes():
    """Whatever the model writes, and wherever it is cut."""
    random = Random(5)
    for _ in range(1000):
        text = "".join(random.choices(PIECES, k=random.randrange(1, 12)))
        options = {"tools": random.random() < 0.7, "reasoning_open": random.random() < 0.3}
        reasoning, said, calls = read(text, **options)
        for end in range(len(text) + 1):
            so_far = read(Hermes().certain(text[:end], **options), **options)
            assert reasoning.startswith(so_far[0]) and said.startswith(so_far[1]), (text, end)
            assert calls[: len(so_far[2])] == so_far[2], (text, end)
