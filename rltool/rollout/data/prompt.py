"""One prompt, and many of them kept outside of memory."""

from __future__ import annotations

import json
import os
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload


@dataclass(frozen=True)
class Prompt:
    """One row. index: its number among all rows of the data set, from 0;
    text: what was tokenised, chat template applied; messages: the row's, where it has some; multimodal_inputs and
    picture_places: as in Sample."""

    index: int
    prompt_ids: tuple[int, ...]
    text: str
    label: str | None = None
    response: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    messages: tuple[dict[str, Any], ...] | None = None
    multimodal_inputs: dict[str, list[Any]] = field(default_factory=dict)
    picture_places: tuple[int, ...] = ()

    def to_json(self) -> list[Any]:
        """The inverse of `from_json`: nothing but JSON's own types."""
        messages = None if self.messages is None else list(self.messages)
        values = [self.index, list(self.prompt_ids), self.text, self.label, self.response, self.metadata, messages]
        return [*values, self.multimodal_inputs, self.picture_places] if self.multimodal_inputs else values

    @classmethod
    def from_json(cls, value: list[Any]) -> Prompt:
        index, prompt_ids, text, label, response, metadata, messages, *more = value
        messages = None if messages is None else tuple(messages)
        inputs, places = more or ({}, ())
        return cls(index, tuple(prompt_ids), text, label, response, metadata, messages, inputs, tuple(places))


class PromptStore(Sequence[Prompt]):
    """Prompts in a temporary file without a name, so that a data set may be larger than memory: eight bytes of each are
    held, and one costs a read of the page cache. The file lies in TMPDIR and ends with the process.

    `append` first, read later; reading is safe from several threads.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="rltool-prompts-")  # noqa: SIM115  # closed with the store
        self._ends = array("Q", [0])

    def append(self, prompt: Prompt) -> None:
        line = json.dumps(prompt.to_json()).encode()
        self._file.write(line)
        self._ends.append(self._ends[-1] + len(line))

    def flush(self) -> None:
        """To be called once after the last `append`."""
        self._file.flush()

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, position: int) -> Prompt: ...
    @overload
    def __getitem__(self, position: slice) -> list[Prompt]: ...
    def __getitem__(self, position: int | slice) -> Prompt | list[Prompt]:
        if isinstance(position, slice):
            return [self[i] for i in range(*position.indices(len(self)))]
        if not 0 <= position < len(self):
            raise IndexError(position)
        start, end = self._ends[position], self._ends[position + 1]
        return Prompt.from_json(json.loads(os.pread(self._file.fileno(), end - start, start)))

    def __iter__(self) -> Iterator[Prompt]:
        return (self[position] for position in range(len(self)))

    def __del__(self) -> None:
        self._file.close()
