"""From one row to one prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from rltool.config.data import DataConfig
from rltool.errors import UsageError
from rltool.rollout.data.layouts import LAYOUTS
from rltool.rollout.data.prompt import Prompt
from rltool.rollout.multimodal import kinds_in, multimodal_inputs, plain_messages
from rltool.rollout.tokenizer import Tokenizer

PLAIN_KEYS = ("prompt_key", "label_key", "response_key")
"""Settings that a published layout takes the place of."""
Refusal = Callable[[Collection[str]], str | None]
"""Kinds of input beside text ("image", "video", "audio") -> why rows with them are not taken, or None."""


def takes_all(kinds: Collection[str]) -> None:
    """The Refusal where the rows are only kept."""


class RowParser:
    """Turns rows of one data set into prompts. layout: a name of LAYOUTS, or None for the configured columns."""

    def __init__(
        self, tokenizer: Tokenizer, config: DataConfig, layout: str | None = None, *, refusal: Refusal = takes_all
    ) -> None:
        self._tokenizer, self._config, self._refusal = tokenizer, config, refusal
        self._plain: Callable[[dict[str, Any]], dict[str, Any]] | None = None
        if layout is not None:
            self._plain = LAYOUTS[layout].plain
            defaults = {key: DataConfig.model_fields[key].default for key in PLAIN_KEYS}
            self._config = config.model_copy(update=defaults)
        self._layout = layout

    def prompt(self, row: Any, place: str, index: int) -> Prompt:
        """Raises UsageError, with the place in front, for a row that holds no prompt, cannot be written as JSON, or has
        inputs that are refused."""
        config = self._config
        if not isinstance(row, dict):
            raise UsageError(
                f"{place}: expected an object with {config.prompt_key!r} or 'messages', found {type(row).__name__}"
            )
        fields = row if self._plain is None else self._converted(row, place)
        source, inputs = self._multimodal(row, self._source(fields, place), place)
        text, ids = self._encode(source, _tools(lookup(row, config.tools_key), place), place)
        if not ids:
            raise UsageError(f"{place}: the prompt is empty")
        places: Sequence[int] = ()
        if "image" in inputs and self._tokenizer.pictures is not None:
            try:
                ids, inputs["image"], places = self._tokenizer.pictures.read(ids, inputs["image"])
            except ValueError as error:
                raise UsageError(f"{place}: {error}") from error
        return Prompt(
            index=index,
            prompt_ids=tuple(ids),
            text=text,
            label=_optional_text(fields, config.label_key, place),
            response=_optional_text(fields, config.response_key, place),
            metadata=self._metadata(fields, row, place),
            messages=tuple(source) if isinstance(source, list) else None,
            multimodal_inputs=inputs,
            picture_places=tuple(places),
        )

    def _multimodal(self, row: dict[str, Any], source: Any, place: str) -> tuple[Any, dict[str, list[Any]]]:
        """(the prompt, its multimodal_inputs). Before the chat template, which would refuse in words of its own."""
        columns = {kind: lookup(row, key) for kind, key in self._config.multimodal_keys.items()}
        kinds = kinds_in(source) | {kind for kind, value in columns.items() if value not in (None, [])}
        if not kinds:
            return source, {}
        refused = self._refusal(kinds)
        if refused is not None:
            raise UsageError(f"{place}: has {refused}")
        try:
            return plain_messages(source) if isinstance(source, list) else source, multimodal_inputs(columns, source)
        except ValueError as error:
            raise UsageError(f"{place}: {error}") from error

    def _converted(self, row: dict[str, Any], place: str) -> dict[str, Any]:
        assert self._plain is not None
        try:
            return self._plain(row)
        except KeyError as error:
            raise UsageError(f"{place}: the {self._layout} layout has a column {error}; set data.layout") from error
        except ValueError as error:
            raise UsageError(f"{place}: {error}; set data.layout") from error

    def _source(self, row: dict[str, Any], place: str) -> Any:
        """The prompt: text, or messages."""
        key = self._config.prompt_key
        source, messages = lookup(row, key), row.get("messages")
        if source is not None and messages is not None and key != "messages":
            raise UsageError(f"{place}: has both {key!r} and 'messages'; keep one")
        if source is None and messages is None:
            raise UsageError(
                f"{place}: has neither {key!r} nor 'messages'; its keys are {', '.join(map(repr, row)) or 'none'}"
            )
        return messages if source is None else source

    def _encode(self, source: Any, tools: list[Any], place: str) -> tuple[str, list[int]]:
        config = self._config
        if isinstance(source, str):
            if config.prompt_template is not None:
                source = config.prompt_template.replace("{prompt}", source)
            if not config.apply_chat_template:
                if tools:
                    raise UsageError(f"{place}: has tools, which only a chat template passes to the model; give "
                                     "'messages', or set data.apply_chat_template = true")  # fmt: skip
                return source, self._tokenizer.encode_prompt(source)
            source = [{"role": "user", "content": source}]
        elif config.apply_chat_template is False:
            raise UsageError(f"{place}: 'messages' need a chat template, but data.apply_chat_template is false")
        valid = (
            isinstance(source, list)
            and source
            and all(isinstance(m, dict) and "role" in m and "content" in m for m in source)
        )
        if not valid:
            raise UsageError(
                f"{place}: expected text, or a list of messages with 'role' and 'content', "
                f"found {json.dumps(source, default=str)[:80]}"
            )
        try:
            text = self._tokenizer.render_messages(source, tools=tools, arguments=config.chat_template_arguments)
        except UsageError as error:
            raise UsageError(f"{place}: {error}") from error
        except Exception as error:  # templates are programs of the model's authors and raise what they like
            raise UsageError(f"{place}: the chat template refuses these messages: {error}") from error
        return text, self._tokenizer.encode_rendered(text)

    def _metadata(self, fields: dict[str, Any], row: dict[str, Any], place: str) -> dict[str, Any]:
        value = fields.get("metadata")
        if value is not None and not isinstance(value, dict):
            raise UsageError(f"{place}: 'metadata' must be an object, found {type(value).__name__}")
        copied = {key: lookup(row, key) for key in self._config.metadata_keys}
        found: dict[str, Any] = {}
        for name, inner in {**(value or {}), **copied}.items():
            try:
                # Dumps and checkpoints are JSON: what Parquet has beyond it, and the NaN that Python reads from JSON
                # files though it is none, fails here and not after the rollout.
                found |= json.loads(json.dumps({name: inner}, allow_nan=False))
            except (TypeError, ValueError, RecursionError) as error:
                raise UsageError(
                    f"{place}: 'metadata' cannot be written as JSON: {name!r}: {error}; keep it to text, finite "
                    "numbers, lists and objects, with null for what is missing"
                ) from error
        return found


def lookup(row: Mapping[str, Any], key: str) -> Any:
    """row[key], where a dot leads into an object unless the row has a column of the whole name; None without it."""
    if key in row or "." not in key:
        return row.get(key)
    first, _, rest = key.partition(".")
    inner = row.get(first)
    return lookup(inner, rest) if isinstance(inner, Mapping) else None


def _optional_text(row: dict[str, Any], key: str, place: str) -> str | None:
    value = lookup(row, key)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise UsageError(
        f"{place}: {key!r} must be text or a number, found {type(value).__name__}; put structured data into 'metadata'"
    )


def _tools(value: Any, place: str) -> list[Any]:
    """Tools in OpenAI's form. As JSON text too: Arrow has one type for a column, and tools differ in theirs."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise UsageError(f"{place}: the tools are no valid JSON: {error}") from error
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise UsageError(f"{place}: the tools must be a list of objects in OpenAI's form")
    return value
