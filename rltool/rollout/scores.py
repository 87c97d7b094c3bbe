"""Log-probabilities of given tokens by the engines of a model beside the policy: a teacher that is larger than it.

Asked directly at an engine, also where a router stands in front: none passes such a request on.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from rltool.engines.client import EngineClient
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet import Fleet
from rltool.engines.tasks import all_of
from rltool.errors import EngineError, EngineRejected, EngineUnreachable
from rltool.rollout.data_plane import PoisonousRequest
from rltool.rollout.model_clients import ModelClient
from rltool.rollout.sample import Sample

ATTEMPTS = 3
"""At engines that serve; then the tokens may be what breaks them."""
LOOK_SECONDS = 0.5
"""How often it is looked for an engine while none serves."""


class Scores:
    """Owned by one event loop. fleet, endpoints: of the model's engines, live views. at_once: requests in flight;
    deadline: seconds for one of them (deadlines.generate), and for an engine to serve."""

    def __init__(
        self, name: str, client: EngineClient, fleet: Fleet, endpoints: Mapping[str, EngineEndpoint], *, at_once: int,
        deadline: float, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._name, self._client, self._fleet, self._endpoints = name, client, fleet, endpoints
        self._slots, self._deadline, self._clock = asyncio.Semaphore(at_once), deadline, clock
        self._in_flight: Counter[str] = Counter()

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Of all tokens but the first, each after those before it, at temperature 1, in nats.

        EngineRejected for a 4xx; PoisonousRequest after three failures; EngineUnreachable where no engine serves.
        """
        async with self._slots:
            failed: list[str] = []
            last: EngineError | None = None
            for _ in range(ATTEMPTS):
                url, sent_at = await self._serving(failed), self._clock()
                self._in_flight[url] += 1
                try:
                    found = await self._client.score(self._endpoints[url], token_ids, timeout=self._deadline)
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
                f"model {self._name}: scoring {len(token_ids)} tokens was given up after {ATTEMPTS} failures; last "
                f"failure: {last}"
            ) from last

    async def _serving(self, failed: Sequence[str]) -> str:
        """The engine with the fewest requests; one that has failed on these tokens only if it is alone."""
        ends = self._clock() + self._deadline
        while not (urls := self._fleet.serving()):
            if self._clock() >= ends:
                raise EngineUnreachable(
                    f"no engine of model {self._name} has served for deadlines.generate = {self._deadline:g} s; look "
                    "at its log, and start it again"
                )
            await asyncio.sleep(LOOK_SECONDS)
        return min(urls, key=lambda url: (url in failed, self._in_flight[url]))


async def add_teacher_logprobs(samples: Sequence[Sample], teacher: ModelClient) -> None:
    """Set each sample's teacher_logprobs; 0 at tokens that the policy did not sample. Errors of `Scores.score`."""

    async def one(sample: Sample) -> None:
        if sample.response_ids:
            scored = await teacher.score([*sample.prompt_ids, *sample.response_ids])
            of_response = scored[-len(sample.response_ids) :]
            sample.teacher_logprobs = [
                value if sampled else 0.0 for value, sampled in zip(of_response, sample.response_mask, strict=True)
            ]

    await all_of(one(sample) for sample in samples)
