"""Replies as models of each format write them: a text, then calls. By the families' chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from rltool.chat.parsers.parsed import Call


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def plain(value: Any) -> str:
    """Strings as they are, as formats that write each argument for itself do."""
    return value if isinstance(value, str) else compact(value)


def hermes(text: str, calls: Sequence[Call]) -> str:
    return text + "".join(
        f"\n<tool_call>\n{compact({'name': call.name, 'arguments': call.arguments})}\n</tool_call>" for call in calls
    )


def qwen3_coder(text: str, calls: Sequence[Call]) -> str:
    def one(call: Call) -> str:
        given = "".join(f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in call.arguments.items())
        return f"\n<tool_call>\n<function={call.name}>\n{given}</function>\n</tool_call>"

    return text + "".join(map(one, calls))


def glm45(text: str, calls: Sequence[Call]) -> str:
    def one(call: Call) -> str:
        given = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{plain(value)}</arg_value>\n"
            for key, value in call.arguments.items()
        )
        return f"\n<tool_call>{call.name}\n{given}</tool_call>"

    return text + "".join(map(one, calls))


def glm47(text: str, calls: Sequence[Call]) -> str:
    def one(call: Call) -> str:
        given = "".join(
            f"<arg_key>{key}</arg_key><arg_value>{plain(value)}</arg_value>" for key, value in call.arguments.items()
        )
        return f"<tool_call>{call.name}{given}</tool_call>"

    return text + "".join(map(one, calls))


def deepseek_v3(text: str, calls: Sequence[Call]) -> str:
    written = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n```json\n{compact(call.arguments)}\n```<｜tool▁call▁end｜>"
        for call in calls
    )
    return f"{text}<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>" if calls else text


def deepseek_v31(text: str, calls: Sequence[Call]) -> str:
    written = "".join(
        f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{compact(call.arguments)}<｜tool▁call▁end｜>" for call in calls
    )
    return f"{text}<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>" if calls else text


def kimi_k2(text: str, calls: Sequence[Call]) -> str:
    written = "".join(
        f"<|tool_call_begin|>functions.{call.name}:{number}<|tool_call_argument_begin|>{compact(call.arguments)}"
        "<|tool_call_end|>"
        for number, call in enumerate(calls)
    )
    return f"{text}<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>" if calls else text


def mistral(text: str, calls: Sequence[Call]) -> str:
    return text + "".join(f"[TOOL_CALLS]{call.name}[ARGS]{compact(call.arguments)}" for call in calls)


def mistral_v3(text: str, calls: Sequence[Call]) -> str:
    listed = [{"name": call.name, "arguments": call.arguments} for call in calls]
    return f"{text}[TOOL_CALLS] {compact(listed)}" if calls else text


def llama3_json(text: str, calls: Sequence[Call]) -> str:
    """Without a text where it calls."""
    return "; ".join(compact({"name": call.name, "parameters": call.arguments}) for call in calls) or text


def openai(text: str, calls: Sequence[Call]) -> str:
    said = [f"<|channel|>commentary<|message|>{text}<|end|>"] if text and calls else []
    said += [
        f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>{compact(call.arguments)}<|call|>"
        for call in calls
    ]
    return "<|start|>assistant".join(said or [f"<|channel|>final<|message|>{text}"]).removesuffix("<|call|>")


WRITERS: dict[tuple[str, str], Callable[[str, Sequence[Call]], str]] = {
    ("hermes", "hermes"): hermes, ("qwen3_coder", "qwen3_coder"): qwen3_coder, ("glm45", "glm45"): glm45,
    ("glm45", "glm47"): glm47, ("deepseek_v3", "deepseek_v3"): deepseek_v3,
    ("deepseek_v3", "deepseek_v31"): deepseek_v31, ("kimi_k2", "kimi_k2"): kimi_k2, ("mistral", "mistral"): mistral,
    ("mistral", "mistral_v3"): mistral_v3, ("llama3_json", "llama3_json"): llama3_json, ("openai", "openai"): openai,
}  # fmt: skip
"""By rltool's name of the parser, and that of the way to write."""

PIECES = [*"ab ü\"'\\{}:;,<&\n", "true", "12", "[1]"]
TYPES: dict[str, Callable[[Random], Any]] = {
    "string": lambda random: "".join(random.choices(PIECES, k=random.randrange(12))),
    "integer": lambda random: random.randrange(-(10**6), 10**6),
    "number": lambda random: random.choice([random.uniform(-5, 5), 1e-9, 3]),
    "boolean": lambda random: random.random() < 0.5,
    "array": lambda random: [random.choice([1, "x y", None, True]) for _ in range(random.randrange(4))],
    "object": lambda random: {"k": random.choice(["v", 2, [3]]), "ü": {"n": "<b>"}},
}


def tool(name: str, arguments: dict[str, str]) -> dict[str, Any]:
    """arguments: name -> JSON type."""
    properties = {key: {"type": kind} for key, kind in arguments.items()}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def some_calls(random: Random, at_most: int = 3) -> tuple[list[Call], list[dict[str, Any]]]:
    """Calls, and the tools that they are of."""
    tools: list[dict[str, Any]] = []
    calls: list[Call] = []
    for number in range(random.randrange(1, at_most + 1)):
        kinds = {f"{random.choice('abc')}_{i}": random.choice(list(TYPES)) for i in range(random.randrange(4))}
        name = f"{random.choice(['add', 'get_weather', 'x-y', 'Z9'])}{number}"
        tools.append(tool(name, kinds))
        calls.append(Call(name, {key: TYPES[kind](random) for key, kind in kinds.items()}))
    return calls, tools
