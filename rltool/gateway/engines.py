"""Turns at the engines: token ids in, token ids with log-probabilities out, by the engines themselves or a router."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rltool.engines.client import EngineClient
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.types import ROUTING_KEY_HEADER, Completion, GenerateRequest, SamplingParams, VersionSpan
from rltool.errors import EngineError, EngineRejected
from rltool.gateway.balance import Balance
from rltool.gateway.errors import EnginesFailed

MAX_CONTINUATIONS = 16
"""How often a response that an engine aborted, for a weight sync, is taken up again."""
RETRY_SECONDS = 0.2
"""Pause after a failure, doubled with each up to sixteen times."""


@dataclass(frozen=True)
class Sampled:
    """engine: the address that gave it, the last one where there were several."""

    completion: Completion
    engine: str


class Engines:
    """endpoints: the engines, or the router alone. deadline: seconds for a turn over all attempts."""

    def __init__(self, client: EngineClient, endpoints: Sequence[EngineEndpoint], *, deadline: float) -> None:
        self._client, self._deadline = client, deadline
        self._endpoints = {endpoint.url: endpoint for endpoint in endpoints}
        self.balance = Balance(list(self._endpoints))
        self.counts: Counter[str] = Counter()
        """Events since the start: failed_requests, continued_requests."""

    async def generate(self, session: str, prompt_ids: Sequence[int], sampling: SamplingParams) -> Sampled:
        """One response. A failure is tried again, elsewhere where there is another engine, within the deadline: the
        agent has seen nothing of it. Raises EnginesFailed with the last failure."""
        whole = Completion((), (), "abort")
        failures: list[EngineError] = []
        try:
            async with asyncio.timeout(self._deadline):
                for _ in range(1 + MAX_CONTINUATIONS):
                    left = sampling.max_tokens - len(whole.token_ids)
                    request = GenerateRequest(
                        (*prompt_ids, *whole.token_ids), replace(sampling, max_tokens=left), uuid.uuid4().hex
                    )
                    part, engine = await self._until_one_answers(session, request, failures)
                    whole = joined(whole, part)
                    if whole.finish_reason != "abort":
                        return Sampled(whole, engine)
                    self.counts["continued_requests"] += 1
                    if len(whole.token_ids) >= sampling.max_tokens:
                        return Sampled(replace(whole, finish_reason="length"), engine)
        except TimeoutError:
            raise EnginesFailed(
                f"no engine has finished this turn within {self._deadline:g} s (--turn-timeout)"
                + (f"; the last failure: {failures[-1]}" if failures else ""),
                code="turn_timeout",
            ) from None
        except EngineRejected as error:
            raise EnginesFailed(f"the engine refuses the request: {error}") from error
        raise EnginesFailed(f"the engines aborted this turn {1 + MAX_CONTINUATIONS} times")

    async def _until_one_answers(
        self, session: str, request: GenerateRequest, failures: list[EngineError]
    ) -> tuple[Completion, str]:
        avoid: set[str] = set()
        tries = 0
        while True:
            engine = self.balance.begin(session, avoid)
            failed = False
            try:
                [completion] = await self._client.generate(
                    self._endpoints[engine],
                    request,
                    timeout=self._deadline,
                    attempts=1,
                    headers={ROUTING_KEY_HEADER: session},
                )
                return completion, engine
            except EngineRejected:
                raise
            except EngineError as error:
                failed = True
                failures.append(error)
                self.counts["failed_requests"] += 1
                avoid.add(engine)
                if len(avoid) == len(self._endpoints):
                    avoid.clear()
            finally:
                self.balance.finish(engine, failed=failed)
            await asyncio.sleep(RETRY_SECONDS * 2 ** min(tries, 4))
            tries += 1
            request = request.again()


def joined(first: Completion, second: Completion) -> Completion:
    """One response of two parts, the second sampled behind the first; each token keeps its weight version."""
    shift = len(first.token_ids)
    versions = (VersionSpan(span.version, span.start + shift, span.end + shift) for span in second.versions)
    return Completion(
        first.token_ids + second.token_ids,
        first.logprobs + second.logprobs,
        second.finish_reason,
        (*first.versions, *versions),
    )
