"""The events of a streamed response of OpenAI Responses, item by item. Pure.

Source: https://platform.openai.com/docs/api-reference/responses-streaming.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

TEXTS = {"reasoning": "response.reasoning_text", "message": "response.output_text"}
"""Type of an item -> beginning of the names of its text's events."""
CALLS = {
    "function_call": ("arguments", "response.function_call_arguments"),
    "custom_tool_call": ("input", "response.custom_tool_call_input"),
}
"""Type of an item -> the field that it is called with, and the beginning of the names of its events."""


class ItemWriter:
    """items: those that are whole, in the order in which they were begun."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._number = 0
        self._open: dict[str, Any] | None = None
        self._text = ""

    def numbered(self, events: Iterable[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
        for event in events:
            yield event["type"], event | {"sequence_number": self._number}
            self._number += 1

    def text(self, item: dict[str, Any], delta: str) -> Iterator[dict[str, Any]]:
        """More text of the item that is open; of `item`, whose text is empty, where none of its type is."""
        if self._open is None or self._open["type"] != item["type"]:
            yield from self.close()
            self._open = item
            yield self._added(item | {"status": "in_progress", "content": []})
            yield {"type": "response.content_part.added", **self._where(item), "part": item["content"][0]}
        self._text += delta
        yield self._of_text("delta", delta=delta)

    def call(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self.close()
        where = {"output_index": len(self.items), "item_id": item["id"]}
        field, name = CALLS[item["type"]]
        yield self._added(item | {"status": "in_progress", field: ""})
        yield {"type": f"{name}.delta", **where, "delta": item[field]}
        yield {"type": f"{name}.done", **where, field: item[field], "name": item["name"]}
        yield self._done(item)

    def close(self) -> Iterator[dict[str, Any]]:
        """The item that is open has all its text."""
        item, text = self._open, self._text
        if item is None:
            return
        part = item["content"][0] | {"text": text}
        yield self._of_text("done", text=text)
        yield {"type": "response.content_part.done", **self._where(item), "part": part}
        yield self._done(item | {"content": [part]})
        self._open, self._text = None, ""

    def _of_text(self, event: str, **fields: Any) -> dict[str, Any]:
        assert self._open is not None
        more = {"logprobs": []} if self._open["type"] == "message" else {}
        return {"type": f"{TEXTS[self._open['type']]}.{event}", **self._where(self._open), **fields, **more}

    def _where(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"output_index": len(self.items), "item_id": item["id"], "content_index": 0}

    def _added(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"type": "response.output_item.added", "output_index": len(self.items), "item": item}

    def _done(self, item: dict[str, Any]) -> dict[str, Any]:
        event = {"type": "response.output_item.done", "output_index": len(self.items), "item": item}
        self.items.append(item)
        return event
