"""How models write reasoning and tool calls. tests/e2e/test_tool_parsers.py compares with vLLM's parsers."""

from __future__ import annotations

from random import Random

import pytest

from rltool.chat.parsers.parsed import Call
from rltool.chat.parsers.registry import PARSERS, parser_of
from rltool.config.gateway import GatewayConfig
from tests.unit.chat.parsers.tool_formats import WRITERS, some_calls, tool

TOOLS = (tool("add", {"a": "integer", "b": "string"}),)


def read(text, *, format_="hermes", tools=TOOLS, reasoning_open=False):
    found = PARSERS[format_].parse(text, tools=tools, reasoning_open=reasoning_open)
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
    assert read(ADD, tools=()) == ("", ADD, [])


def test_reasoning_that_the_template_has_opened():
    assert read("hm\n</think>\n\ntwo", reasoning_open=True) == ("hm", "two", [])
    assert read("hm, cut", reasoning_open=True) == ("hm, cut", "", [])


@pytest.mark.parametrize(("format_", "written"), WRITERS)
def test_calls_are_read_as_they_were_made_in_every_format(format_, written):
    random = Random(2)
    for _ in range(300):
        calls, tools = some_calls(random)
        text = random.choice(["", "Let me see.", "ü\n<b>"])
        found = read(WRITERS[format_, written](text, calls), format_=format_, tools=tools)
        assert found == ("", "" if format_ == "llama3_json" else text, calls)
        assert read(WRITERS[format_, written](text, []), format_=format_, tools=tools) == ("", text, [])


@pytest.mark.parametrize(("format_", "written"), [one for one in WRITERS if one[0] != "openai"])
def test_reasoning_stands_before_them(format_, written):
    begin, end = ("[THINK]", "[/THINK]") if format_ == "mistral" else ("<think>", "</think>")
    calls, tools = some_calls(Random(3))
    text, said = WRITERS[format_, written]("so", calls), "" if format_ == "llama3_json" else "so"
    assert read(f"\n{begin}\nhm\n{end}\n\n{text}", format_=format_, tools=tools) == ("hm", said, calls)
    assert read(f"hm{end}{text}", format_=format_, tools=tools, reasoning_open=True) == ("hm", said, calls)
    assert PARSERS[format_].opens_reasoning(f"assistant\n{begin}\n") and not PARSERS[format_].opens_reasoning(end)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>two", ("hm", "two", [])),
        ("<|channel|>analysis<|message|>hm", ("hm", "", [])),
        ("plain", ("", "plain", [])),
        (" to=functions.add<|channel|>commentary json<|message|>{}", ("", "", [Call("add", {})])),
        ("<|channel|>commentary to=functions.add<|message|>{not", None),
        ("<|channel|>analysis to=python<|message|>1 + 1", None),
        ("<|channel|>fin", None),
    ],
)
def test_channels_of_gpt_oss(text, expected):
    """None: all stays text."""
    assert read(text, format_="openai") == (expected or ("", text, []))


@pytest.mark.parametrize(
    ("kinds", "written", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "integer"}, "12", 12),
        ({"type": "integer"}, "twelve", "twelve"),
        ({"type": "boolean"}, "True", True),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "integer"]}, "[1]", "[1]"),
        ({"anyOf": [{"type": "array"}, {"type": "null"}]}, "[1]", [1]),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"type": "number"}, "NaN", "NaN"),
        ({}, "12", "12"),
        (None, "12", "12"),
    ],
)
@pytest.mark.parametrize("format_", ["qwen3_coder", "glm45"])
def test_an_argument_without_quotes_has_the_declared_type(format_, kinds, written, value):
    declared = {"function": {"name": "f", "parameters": {"properties": {} if kinds is None else {"k": kinds}}}}
    text = WRITERS[format_, format_]("", [Call("f", {"k": written})])
    assert read(text, format_=format_, tools=[declared])[2] == [Call("f", {"k": value})]


@pytest.mark.parametrize(
    ("format_", "text"),
    [
        ("qwen3_coder", "<tool_call>\nadd(1)\n</tool_call>"),
        ("glm45", "<tool_call>{not a name}</tool_call>"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>add<｜tool▁calls▁end｜>"),
        ("kimi_k2", "<|tool_calls_section_begin|>add<|tool_calls_section_end|>"),
        ("mistral", "[TOOL_CALLS]add(1)"),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1}} so'),
        ("llama3_json", '{"a": 1}'),
        ("llama3_json", '{"name": "add", "parameters": {"a": "\\ud800"}}'),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>two words<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>add<|tool_call_argument_begin|>{}"),
    ],
)
def test_what_is_no_call_of_its_format_stays_text(format_, text):
    assert read(text, format_=format_) == ("", text, [])


def test_a_call_that_was_begun_and_left_does_not_take_the_next_one_with_it():
    begun = "<|tool_call_begin|>functions.a<|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>{}"
    assert read(f"<|tool_calls_section_begin|>{begun}", format_="kimi_k2")[2] == [Call("add", {})]


PARAMETERS = [None, 5, [], {"properties": None}, {"properties": []}, {"properties": {"k": True}}]
PARAMETERS += [{"properties": {"k": {"type": kind, "anyOf": kind, "enum": kind}}} for kind in (5, None, [{}], {})]


@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
@pytest.mark.parametrize("format_", ["qwen3_coder", "glm45"])
def test_an_agents_schema_may_be_anything(format_, parameters):
    tools = [{"function": None}, {"function": {"name": "f", "parameters": parameters}}]
    text = WRITERS[format_, format_]("", [Call("f", {"k": "12"})])
    [call] = read(text, format_=format_, tools=tools)[2]
    assert str(call.arguments["k"]) == "12"


REPEATED = {
    "qwen3_coder": ["<parameter=", "</parameter> ", "</function> "], "glm45": ["<arg_key>", "</arg_key><arg_value>"],
    "deepseek_v3": ["<｜tool▁call▁begin｜>", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>```json \n"],
    "kimi_k2": ["<|tool_call_begin|>", "<|tool_call_begin|>a:1"], "mistral": ["[CALL_ID]", "a"],
    "hermes": ["<tool_call>"], "llama3_json": ["{"], "openai": ["<|channel|>", "to=", "<|start|>"],
}  # fmt: skip
BEGINS = {
    "qwen3_coder": "<tool_call><function=f>", "glm45": "<tool_call>f", "deepseek_v3": "<｜tool▁calls▁begin｜>",
    "kimi_k2": "<|tool_calls_section_begin|>", "mistral": "[TOOL_CALLS]",
}  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("format_", "mark"), [(name, mark) for name, marks in REPEATED.items() for mark in marks])
def test_a_model_that_repeats_itself_does_not_hold_the_reader_up(format_, mark):
    """Ten million characters; looking at all of them from every mark would take hours."""
    text = BEGINS.get(format_, "") + mark * (10_000_000 // len(mark)) + " " * 1000
    found = PARSERS[format_].parse(text, tools=TOOLS, reasoning_open=False)
    assert len(found.text) + sum(len(str(call.arguments)) for call in found.calls) > 0


MARKS = {
    "openai": ["<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|start|>assistant", "analysis", "final", "to=f "],
    "mistral": ["[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"], "llama3_json": ["<|python_tag|>", "; "],
    "deepseek_v3": ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"],
    "kimi_k2": ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"],
    "qwen3_coder": ["<function=add>", "</function>", "<parameter=a>"], "glm45": ["<arg_key>", "</arg_value>"],
}  # fmt: skip
PIECES = ["<think>", "</think>", "<tool_call>", "</tool_call>", *"\n a<{}[ü", "tool", "think>"]


@pytest.mark.parametrize("format_", [name for name in PARSERS if name != "none"])
def test_what_is_certain_of_a_text_never_changes(format_):
    """Whatever the model writes, and wherever it is cut."""
    random, parser = Random(5), PARSERS[format_]
    calls = [write("", some_calls(random, 1)[0]) for (of, _), write in WRITERS.items() if of == format_] * 2
    pieces = [*PIECES, *MARKS.get(format_, ()), *calls]
    tools = [tool(f"{name}0", {}) for name in ("add", "get_weather", "x-y", "Z9")]
    shown = 0
    for _ in range(400):
        text = "".join(random.choices(pieces, k=random.randrange(1, 12)))
        options = {"tools": tools if random.random() < 0.7 else (), "reasoning_open": random.random() < 0.3}
        reasoning, said, found = read(text, format_=format_, **options)
        for end in range(len(text) + 1):
            certain = parser.certain(text[:end], **options)
            so_far = read(certain, format_=format_, **options)
            assert text.startswith(certain)
            assert reasoning.startswith(so_far[0]) and said.startswith(so_far[1]), (text, end)
            assert found[: len(so_far[2])] == so_far[2], (text, end)
            shown += bool(certain) and end < len(text)
    assert shown > 400


@pytest.mark.parametrize(
    ("template", "format_"),
    [
        ("{{ '<tool_call>\n{\"name\": ' }}", "hermes"),
        ("", "hermes"),
        ("<tool_call>\n<function={{ name }}>", "qwen3_coder"),
        ("<tool_call>{{ name }}\n<arg_key>", "glm45"),
        ("'<｜tool▁calls▁begin｜>'", "deepseek_v3"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|start_header_id|>", "llama3_json"),
        ("<|start|>assistant<|channel|>final", "openai"),
    ],
)
def test_the_format_is_that_of_the_chat_template_unless_it_is_named(template, format_):
    assert parser_of("auto", template) is PARSERS[format_]
    assert parser_of("none", template) is PARSERS["none"]


@pytest.mark.parametrize("name", ["auto", *PARSERS])
def test_every_format_can_be_configured(name):
    assert GatewayConfig(tool_parser=name).tool_parser == name
