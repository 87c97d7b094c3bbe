"""The smallest request that shows that an engine works: one token of a generator, the scores of one token of a
classifier."""

from __future__ import annotations

import uuid

from rltool.config.serve import Task
from rltool.engines.client import EngineClient
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.disaggregation import generate_from_nothing, samples_alone
from rltool.engines.types import GenerateRequest, SamplingParams

TOKENS = (1,)
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=1.0)


async def canary(client: EngineClient, endpoint: EngineEndpoint, task: Task, *, timeout: float) -> None:
    """Return once it is answered, else raise what the client raises. Sent once."""
    if task == "classify":
        await client.classify(endpoint, TOKENS, use_activation=False, timeout=timeout, attempts=1)
        return
    request = GenerateRequest(TOKENS, ONE_TOKEN, uuid.uuid4().hex, seed=0)
    if samples_alone(endpoint):
        await client.generate(endpoint, request, timeout=timeout, attempts=1)
    else:
        await generate_from_nothing(client, endpoint, request, timeout=timeout)
