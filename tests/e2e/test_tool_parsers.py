"""rltool's parsers of tool calls against vLLM's own, which run in a process of their own (this file as a program)."""

from __future__ import annotations

import json
import subprocess
import sys
from random import Random
from typing import Any

import pytest

from rltool.chat.parsers.registry import PARSERS
from tests.unit.chat.parsers.tool_formats import WRITERS, some_calls

pytestmark = pytest.mark.e2e

REPLIES = 1000
HARMONY = ("openai", "openai")
"""vLLM reads it from token ids, with a vocabulary that has to be downloaded."""
COMPARED = [one for one in WRITERS if one != HARMONY]
MARKS = (
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
    "<|tool_call_argument_begin|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>",
)  # fmt: skip
"""Tokens that a model's vocabulary has, and vLLM's parsers look for."""


def replies(written: tuple[str, str]) -> list[dict[str, Any]]:
    random = Random(7)
    found = []
    for _ in range(REPLIES):
        calls, tools = some_calls(random)
        text = random.choice(["", "Let me see.", "ü\n<b>"])
        found.append({"text": WRITERS[written](text, calls), "tools": tools})
    return found


@pytest.fixture(scope="module")
def theirs() -> dict[str, list[list[Any]]]:
    """By the format's way to write, of each reply [content, [[name, arguments], ...]]."""
    asked = {of: replies((parser, of)) for parser, of in COMPARED}
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.test_tool_parsers"], input=json.dumps(asked), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("parser", "written"), COMPARED)
def test_what_is_read_is_what_vllm_reads(theirs, parser, written):
    different = []
    for reply, (content, calls) in zip(replies((parser, written)), theirs[written], strict=True):
        found = PARSERS[parser].parse(reply["text"], tools=reply["tools"], reasoning_open=False)
        mine = [[call.name, dict(call.arguments)] for call in found.calls]
        if (found.text.strip(), mine) != ((content or "").strip(), calls):
            different.append((reply["text"], mine, calls))
    assert not different, (len(different), different[:3])


def main() -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    class Tokenizer:
        all_special_tokens = all_special_ids = ()

        def __init__(self, written: str) -> None:
            marks = [mark for mark in MARKS if (mark, written) != ("[ARGS]", "mistral_v3")]  # by which it knows the two
            self.vocab = dict(zip(marks, range(len(marks)), strict=True))

        def get_vocab(self) -> dict[str, int]:
            return self.vocab

        def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
            return [self.vocab.get(text, len(MARKS))]

    found: dict[str, list[Any]] = {}
    for written, asked in json.load(sys.stdin).items():
        parser = ToolParserManager.get_tool_parser({"mistral_v3": "mistral"}.get(written, written))
        for one in asked:
            request = ChatCompletionRequest(
                model="m", messages=[{"role": "user", "content": "Hello."}], tools=one["tools"]
            )
            read = parser(Tokenizer(written), request.tools).extract_tool_calls(one["text"], request)
            calls = [[call.function.name, json.loads(call.function.arguments)] for call in read.tool_calls]
            found.setdefault(written, []).append([read.content, calls])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
