"""Models beside the policy, as reward and generate functions reach them: `context.model("judge")`."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rltool.engines.types import Completion, GenerateRequest, SamplingParams
from rltool.errors import UsageError
from rltool.rollout.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or chat messages ({"role": ..., "content": ...}), which the model's own template writes out."""


@dataclass(frozen=True)
class Reply:
    """One response. text: without special tokens; "" where the model's tokenizer is not known (models.NAME.path).
    finish_reason: stop, length or abort."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: str


class ModelClient:
    """One model. generate: sends a request to one of its engines, or its router; score: token ids to one of its
    engines. tokenizer: None where models.NAME.path is not set; then prompts are token ids."""

    def __init__(
        self,
        name: str,
        generate: Callable[[GenerateRequest], Awaitable[list[Completion]]],
        tokenizer: Tokenizer | None,
        score: Callable[[Sequence[int]], Awaitable[tuple[float, ...]]],
    ) -> None:
        self.name = name
        self._generate, self._tokenizer, self._score = generate, tokenizer, score

    async def generate(
        self, prompt: Prompt, *, max_tokens: int = 256, temperature: float = 1.0, top_p: float = 1.0, top_k: int = -1,
        n: int = 1, seed: int | None = None, stop_token_ids: Sequence[int] = (),
    ) -> list[Reply]:  # fmt: skip
        """n responses. temperature 0: greedy; a seed makes vLLM repeat itself. The model's own stop tokens end them.

        Raises UsageError for text without a tokenizer and an empty prompt, EngineError where no engine answers it; how
        long that may take is the caller's deadline (deadlines.reward, deadlines.group).
        """
        ids = self._ids(prompt)
        if not ids:
            raise UsageError(f"the prompt for model {self.name!r} is empty")
        stops = {*stop_token_ids, *(self._tokenizer.stop_ids if self._tokenizer else ())}
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k,
            stop_token_ids=tuple(sorted(stops)),
        )  # fmt: skip
        request = GenerateRequest(tuple(ids), sampling, uuid.uuid4().hex, n=n, seed=seed)
        return [self._reply(completion) for completion in await self._generate(request)]

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-probabilities of all tokens but the first, each after those before it, at temperature 1, in nats. Errors
        of rltool.rollout.scores.Scores."""
        return await self._score(token_ids)

    def _ids(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str) and all(isinstance(token, int) for token in prompt):
            return [token for token in prompt if isinstance(token, int)]
        if self._tokenizer is None:
            raise UsageError(
                f"model {self.name!r} was asked with text, and its tokenizer is not known: set models.{self.name}.path,"
                " or send token ids"
            )
        if isinstance(prompt, str):
            return self._tokenizer.encode_prompt(prompt)
        messages = [dict(message) for message in prompt if isinstance(message, Mapping)]
        return self._tokenizer.encode_rendered(self._tokenizer.render_messages(messages))

    def _reply(self, completion: Completion) -> Reply:
        text = self._tokenizer.decode(completion.token_ids) if self._tokenizer is not None else ""
        return Reply(completion.token_ids, completion.logprobs, text, completion.finish_reason)


class Models:
    """What `context.model` looks into: the models of a run beside its policy."""

    def __init__(self, clients: Mapping[str, Any] | None = None) -> None:
        """clients: by name, ModelClient or what a test puts in its place."""
        self._clients: dict[str, Any] = dict(clients or {})

    def add(self, client: ModelClient) -> None:
        self._clients[client.name] = client

    def model(self, name: str) -> ModelClient:
        """Raises UsageError for a model that the run does not have."""
        if name not in self._clients:
            known = ", ".join(self._clients) or "none"
            raise UsageError(
                f"context.model({name!r}): the run has no such model (it has: {known}); name it in [models.{name}], or "
                "start its engines with `rltool serve-engines --served-name`"
            )
        return self._clients[name]


@dataclass(frozen=True)
class RewardContext:
    """What an async reward function gets as `context`."""

    models: Models

    def model(self, name: str) -> ModelClient:
        """A client of a model with update_weights = false. Raises UsageError for one that the run does not have."""
        return self.models.model(name)
