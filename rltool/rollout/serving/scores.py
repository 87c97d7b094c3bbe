"""Scores of given tokens by engines of a model beside the policy: log-probabilities of a teacher that is larger than
the policy, scores of a reward model.

Asked directly at an engine, also where a router stands in front: sglang-router passes on neither such a request nor
vLLM's use_activation.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.fleet.fleet import Member, State
from rltool.engines.types import TokenScores
from rltool.errors import EngineError, EngineRejected, EngineUnreachable
from rltool.processes.tasks import all_of
from rltool.rollout.sample import Sample
from rltool.rollout.serving.data_plane import PoisonousRequest
from rltool.rollout.serving.model_clients import ModelClient

T = TypeVar("T")
ATTEMPTS = 3
"""At engines that serve; then the tokens may be what breaks them."""
LOOK_SECONDS = 0.5
"""How often it is looked for an engine while none serves."""


class Scores:
    """Owned by one event loop. engines: the model's. at_once: requests in flight; deadline: seconds for one of them
    (deadlines.generate), and for an engine to serve."""

    def __init__(self, name: str, engines: EngineSet, *, at_once: int, deadline: float) -> None:
        self._name, self._client, self._fleet, self._clock = name, engines.client, engines.fleet, engines.clock
        self._slots, self._deadline = asyncio.Semaphore(at_once), deadline
        self._in_flight: Counter[str] = Counter()

    async def score(self, token_ids: Sequence[int], adapter: str = "") -> tuple[float, ...]:
        """Of all tokens but the first, each after those before it, at temperature 1, in nats. adapter: as of a
        GenerateRequest. Errors of `_answer`."""
        return await self._answer(
            lambda engine: self._client.score(engine, token_ids, timeout=self._deadline, adapter=adapter),
            f"scoring {len(token_ids)} tokens",
        )

    async def score_topk(self, token_ids: Sequence[int], topk: int, adapter: str = "") -> TokenScores:
        """`score`, and the `topk` most probable tokens in the place of each."""
        return await self._answer(
            lambda engine: self._client.score_topk(
                engine, token_ids, topk, timeout=self._deadline, adapter=adapter
            ),
            f"scoring {len(token_ids)} tokens",
        )

    async def classify(self, token_ids: Sequence[int], *, use_activation: bool) -> tuple[float, ...]:
        """One for each label of a classifier; see Inspects.classify. Errors of `_answer`, and UsageError."""
        return await self._answer(
            lambda engine: self._client.classify(
                engine, token_ids, use_activation=use_activation, timeout=self._deadline
            ),
            f"classifying {len(token_ids)} tokens",
        )

    async def _answer(self, ask: Callable[[EngineEndpoint], Awaitable[T]], what: str) -> T:
        """`ask` of one engine after another. EngineRejected for a 4xx; PoisonousRequest after three failures;
        EngineUnreachable where no engine serves."""
        async with self._slots:
            failed: list[str] = []
            last: EngineError | None = None
            for _ in range(ATTEMPTS):
                engine, sent_at = await self._serving(failed), self._clock()
                url = engine.url
                self._in_flight[url] += 1
                try:
                    found = await ask(engine.endpoint)
                except EngineRejected:
                    raise
                except EngineError as error:
                    self._fleet.request_failed(url, str(error), sent_at=sent_at)
                    failed.append(url)
                    last = error
                else:
                    self._fleet.request_succeeded(url, sent_at=sent_at)
                    return found
                finally:
                    self._in_flight[url] -= 1
            raise PoisonousRequest(
                f"model {self._name}: {what} failed {ATTEMPTS} times; last failure: {last}"
            ) from last

    async def _serving(self, failed: Sequence[str]) -> Member:
        """The engine with the fewest requests; one that has failed on these tokens only if it is alone."""
        ends = self._clock() + self._deadline
        while not (there := self._fleet.members(State.READY)):
            if self._clock() >= ends:
                raise EngineUnreachable(
                    f"no engine of model {self._name} has served for deadlines.generate = {self._deadline:g} s; look "
                    "at its log, and start it again"
                )
            await asyncio.sleep(LOOK_SECONDS)
        return min(there, key=lambda engine: (engine.url in failed, self._in_flight[engine.url]))


async def add_teacher_logprobs(
    samples: Sequence[Sample], teacher: ModelClient, *, topk: int, vocab_size: int
) -> None:
    """Set each sample's teacher_logprobs; 0 at tokens that the policy did not sample. With topk its teacher_topk_ids
    and teacher_topk_logprobs too, of the topk tokens at each, without those that a policy of vocab_size tokens does not
    have. Errors of `Scores.score`."""

    async def one(sample: Sample) -> None:
        count, token_ids = len(sample.response_ids), [*sample.prompt_ids, *sample.response_ids]
        if not count:
            return
        if topk:
            scores = await teacher.score_topk(token_ids, topk)
            found = scores.topk_ids[-count * topk :], scores.topk_logprobs[-count * topk :]
            sample.teacher_topk_ids, sample.teacher_topk_logprobs = _within(vocab_size, *found)
            logprobs = scores.logprobs
        else:
            logprobs = await teacher.score(token_ids)
        sample.teacher_logprobs = [
            value if sampled else 0.0 for value, sampled in zip(logprobs[-count:], sample.response_mask, strict=True)
        ]

    await all_of(one(sample) for sample in samples)


def _within(vocab_size: int, ids: array[int], logprobs: array[float]) -> tuple[array[int], array[float]]:
    """-1 and -inf in place of tokens from vocab_size on: a teacher's vocabulary may be padded to another size."""
    for place, token in enumerate(ids):
        if token >= vocab_size:
            ids[place], logprobs[place] = -1, -math.inf
    return ids, logprobs
