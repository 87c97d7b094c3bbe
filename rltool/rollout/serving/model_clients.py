"""Models beside the policy, as reward and generate functions reach them: `context.model("judge")`."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rltool.engines.types import Completion, GenerateRequest, SamplingParams, TokenScores
from rltool.errors import UsageError
from rltool.rollout.tokenizer import Tokenizer

LOOK_SECONDS = 0.5
"""How often it is looked whether a model that functions wait for serves."""

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


class Classify(Protocol):
    def __call__(self, token_ids: Sequence[int], *, use_activation: bool) -> Awaitable[tuple[float, ...]]: ...


class ModelClient:
    """One model. generate: sends a request to one of its engines, or its router; score, score_topk, classify: token ids
    to one of its engines; classify is None for a model that generates, and with it a model does nothing else.
    tokenizer: None where models.NAME.path is not set; then prompts are token ids. serves: whether an engine of it does
    now."""

    def __init__(
        self,
        name: str,
        generate: Callable[[GenerateRequest], Awaitable[list[Completion]]],
        tokenizer: Tokenizer | None,
        score: Callable[[Sequence[int]], Awaitable[tuple[float, ...]]],
        score_topk: Callable[[Sequence[int], int], Awaitable[TokenScores]],
        serves: Callable[[], bool] = lambda: True,
        classify: Classify | None = None,
    ) -> None:
        self.name, self.serves = name, serves
        self._generate, self._tokenizer, self._classify = generate, tokenizer, classify
        self._score, self._score_topk = score, score_topk

    async def generate(
        self, prompt: Prompt, *, max_tokens: int = 256, temperature: float = 1.0, top_p: float = 1.0, top_k: int = -1,
        n: int = 1, seed: int | None = None, stop_token_ids: Sequence[int] = (),
    ) -> list[Reply]:  # fmt: skip
        """n responses. temperature 0: greedy; a seed makes vLLM repeat itself. The model's own stop tokens end them.

        Raises UsageError for text without a tokenizer, an empty prompt and a classifier, EngineError where no engine
        answers it; how long that may take is the caller's deadline (deadlines.call, deadlines.group).
        """
        self._check_generates()
        ids = self._ids(prompt, ask=True)
        stops = {*stop_token_ids, *(self._tokenizer.stop_ids if self._tokenizer else ())}
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k,
            stop_token_ids=tuple(sorted(stops)),
        )  # fmt: skip
        request = GenerateRequest(tuple(ids), sampling, uuid.uuid4().hex, n=n, seed=seed)
        return [self._reply(completion) for completion in await self._generate(request)]

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-probabilities of all tokens but the first, each after those before it, at temperature 1, in nats. Errors
        of rltool.rollout.serving.scores.Scores, and UsageError for a classifier."""
        self._check_generates()
        return await self._score(token_ids)

    async def score_topk(self, token_ids: Sequence[int], topk: int) -> TokenScores:
        """`score`, and the `topk` most probable tokens in the place of each. vLLM refuses more than its --max-logprobs,
        20 unless set."""
        self._check_generates()
        return await self._score_topk(token_ids, topk)

    async def classify(self, prompt: Prompt, *, use_activation: bool = False) -> list[float]:
        """The outputs of a classifier's head for a text, one for each label; of a reward model, one in all.

        Raw logits. use_activation: behind the model's activation, by default a sigmoid for one label and a softmax for
        several (vLLM's use_activation; SGLang has none, and refuses it). Chat messages are a whole conversation: no
        answer is asked for. Errors of `generate`, and UsageError for a model that generates.
        """
        if self._classify is None:
            raise UsageError(
                f"model {self.name!r} is served for generation: for a classifier set models.{self.name}.task = "
                '"classify", or start its engines with `rltool serve-engines --task classify`'
            )
        return list(await self._classify(self._ids(prompt, ask=False), use_activation=use_activation))

    def _check_generates(self) -> None:
        if self._classify is not None:
            raise UsageError(f"model {self.name!r} is a classifier, which generates nothing: ask it with classify()")

    def _ids(self, prompt: Prompt, *, ask: bool) -> list[int]:
        """ask: messages end where the assistant's reply begins."""
        ids = self._tokens(prompt, ask=ask)
        if not ids:
            raise UsageError(f"the prompt for model {self.name!r} is empty")
        return ids

    def _tokens(self, prompt: Prompt, *, ask: bool) -> list[int]:
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
        return self._tokenizer.encode_rendered(self._tokenizer.render_messages(messages, ask=ask))

    def _reply(self, completion: Completion) -> Reply:
        text = self._tokenizer.decode(completion.token_ids) if self._tokenizer is not None else ""
        return Reply(completion.token_ids, completion.logprobs, text, completion.finish_reason)


class Models:
    """What `context.model` looks into: the models of a run beside its policy. patience: seconds for which functions may
    wait for one without an engine that serves (deadlines.engines)."""

    def __init__(self, clients: Mapping[str, Any] | None = None, *, patience: float = 300.0) -> None:
        """clients: by name, ModelClient or what a test puts in its place."""
        self._clients: dict[str, Any] = dict(clients or {})
        self._serves: dict[str, Callable[[], bool]] = {}
        self.patience = patience

    def add(self, client: ModelClient) -> None:
        self._clients[client.name], self._serves[client.name] = client, client.serves

    def away(self) -> list[str]:
        """Those without an engine that serves now."""
        return [name for name, serves in self._serves.items() if not serves()]

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


class TooSlow(Exception):
    """A function has no answer in time; the message names the deadline."""


async def ended_in_time(tasks: Collection[asyncio.Future[Any]], seconds: float, models: Models) -> str | None:
    """Wait for functions; None once all have ended, else why they have been waited for long enough.

    seconds: deadlines.call. It stands still while one of the models that they may ask has no engine that serves, for
    models.patience at a time: an engine that is started again takes longer than any reward.
    """
    left, gone_since, pending = seconds, None, set(tasks)
    while pending:
        away, now = models.away(), time.monotonic()
        gone_since = (gone_since or now) if away else None
        if gone_since is not None and now - gone_since >= models.patience:
            return f"no engine of model {', '.join(away)} has served for deadlines.engines = {models.patience:g} s"
        if left <= 0:
            return too_slow(seconds)
        _, pending = await asyncio.wait(pending, timeout=min(LOOK_SECONDS, left))
        if not away:
            left -= time.monotonic() - now
    return None


def too_slow(seconds: float) -> str:
    """The error of a reward that took longer than deadlines.call."""
    return f"no answer within deadlines.call = {seconds:g} s"
