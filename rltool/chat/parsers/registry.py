"""Parsers by the name that --tool-parser takes: vLLM's names for the same formats."""

from __future__ import annotations

from rltool.chat.parsers.harmony import HARMONY
from rltool.chat.parsers.parsed import Parser, Plain
from rltool.chat.parsers.tagged import DEEPSEEK, GLM, HERMES, KIMI, MISTRAL, QWEN3_CODER, Json

PARSERS: dict[str, Parser] = {
    "hermes": HERMES, "qwen3_coder": QWEN3_CODER, "glm45": GLM, "deepseek_v3": DEEPSEEK, "kimi_k2": KIMI,
    "mistral": MISTRAL, "llama3_json": Json(), "openai": HARMONY, "none": Plain(),
}  # fmt: skip
AUTO = "auto"
_WRITES = {
    "<function=": "qwen3_coder", "<arg_key>": "glm45", "<｜tool▁calls▁begin｜>": "deepseek_v3",
    "<|tool_calls_section_begin|>": "kimi_k2", "[TOOL_CALLS]": "mistral", "<|channel|>": "openai",
    "<|start_header_id|>": "llama3_json",
}  # fmt: skip
"""What a chat template has, and the format of its model. Others are Hermes', or call no tools."""


def parser_of(name: str, chat_template: str) -> Parser:
    """name: of PARSERS, or AUTO: what the chat template writes."""
    if name == AUTO:
        name = next((format_ for mark, format_ in _WRITES.items() if mark in chat_template), "hermes")
    return PARSERS[name]
