"""A fake vLLM that says what a test tells it to, token by token."""

from __future__ import annotations

from collections import deque
from typing import Any

from tests.contract.fakes.vllm import FakeVllm


class ScriptedVllm(FakeVllm):
    """script: responses as token ids, each for the next request; without one a response is `default`. What does not fit
    max_tokens is cut."""

    def __init__(self, *, vocab_size: int, default: list[int], key: str | None = None) -> None:
        super().__init__(key=key)
        self.vocab_size, self.default, self.max_model_len = vocab_size, default, 4096
        self.script: deque[list[int]] = deque()

    def _plan(self, index: int, ids: list[int], sampling: dict[str, Any], limit: int) -> list[int]:
        said = self.script.popleft() if self.script else self.default
        return list(said[:limit])

    def hurry(self) -> None:
        """From a test: what is being generated ends at once."""
        assert self._loop is not None
        self.seconds = 0.0
        self._loop.call_soon_threadsafe(self.batch.hurry)

    def asked(self) -> list[list[int]]:
        """The prompts of all generation requests so far, in order."""
        return [r.body["token_ids"] for r in self.requests if r.path == "/rltool/generate"]
