"""The events of a streamed response of OpenAI Responses, in their order. Pure.

Source: https://platform.openai.com/docs/api-reference/responses-streaming.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def events(started: dict[str, Any], whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """started: the response as it is before it has any output; whole: as it is at its end."""
    yield {"type": "response.created", "response": started}
    yield {"type": "response.in_progress", "response": started}
    for index, item in enumerate(whole["output"]):
        yield from _item(index, item)
    last = "response.incomplete" if whole["status"] == "incomplete" else "response.completed"
    yield {"type": last, "response": whole}


def _item(index: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    where = {"output_index": index, "item_id": item["id"]}
    field = "arguments" if item["type"] == "function_call" else "content"
    empty = item | {"status": "in_progress", field: "" if field == "arguments" else []}
    yield {"type": "response.output_item.added", "output_index": index, "item": empty}
    match item["type"]:
        case "function_call":
            name = "response.function_call_arguments"
            yield {"type": f"{name}.delta", **where, "delta": item["arguments"]}
            yield {"type": f"{name}.done", **where, "arguments": item["arguments"], "name": item["name"]}
        case "reasoning":
            yield from _part(where, item["content"][0], "response.reasoning_text")
        case _:
            yield from _part(where, item["content"][0], "response.output_text", logprobs=[])
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _part(where: dict[str, Any], part: dict[str, Any], name: str, **more: Any) -> Iterator[dict[str, Any]]:
    where = where | {"content_index": 0}
    yield {"type": "response.content_part.added", **where, "part": part | {"text": ""}}
    yield {"type": f"{name}.delta", **where, "delta": part["text"], **more}
    yield {"type": f"{name}.done", **where, "text": part["text"], **more}
    yield {"type": "response.content_part.done", **where, "part": part}
