"""Assertions about a vLLM server of a reward model started by rltool, run on the fake (contract) and on the real one
(e2e)."""

from __future__ import annotations

import math

import pytest

from rltool.engines.client import EngineClient
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.canary import canary
from rltool.errors import EngineRejected

TOKENS = (40, 41, 17, 90, 33, 5)
OTHERS = (40, 41, 17, 90, 33, 6)
SECONDS = 60.0


async def a_probe_tells_that_it_classifies(client: EngineClient, engine: EngineEndpoint) -> None:
    info = await client.probe(engine)
    assert (info.task, info.world_size, info.boot_id) == ("classify", 1, engine.boot_id)


async def a_text_has_one_logit_and_always_the_same(client: EngineClient, engine: EngineEndpoint) -> None:
    first, again, other = [
        await client.classify(engine, tokens, use_activation=False, timeout=SECONDS)
        for tokens in (TOKENS, TOKENS, OTHERS)
    ]
    assert len(first) == 1 and first == pytest.approx(again, abs=1e-5) and abs(first[0] - other[0]) > 1e-3


async def use_activation_is_the_sigmoid_of_the_logit(client: EngineClient, engine: EngineEndpoint) -> None:
    [logit] = await client.classify(engine, TOKENS, use_activation=False, timeout=SECONDS)
    [probability] = await client.classify(engine, TOKENS, use_activation=True, timeout=SECONDS)
    assert probability == pytest.approx(1 / (1 + math.exp(-logit)), abs=1e-5)


async def a_text_that_is_too_long_is_refused(client: EngineClient, engine: EngineEndpoint) -> None:
    longest = (await client.probe(engine)).max_model_len
    assert longest is not None
    with pytest.raises(EngineRejected) as refused:
        await client.classify(engine, [5] * (longest + 1), use_activation=False, timeout=SECONDS)
    assert refused.value.status == 400


async def it_does_not_generate(client: EngineClient, engine: EngineEndpoint) -> None:
    with pytest.raises(EngineRejected) as refused:
        await canary(client, engine, "generate", timeout=SECONDS)
    assert refused.value.status == 404
    await canary(client, engine, "classify", timeout=SECONDS)


CONTRACT = (
    a_probe_tells_that_it_classifies,
    a_text_has_one_logit_and_always_the_same,
    use_activation_is_the_sigmoid_of_the_logit,
    a_text_that_is_too_long_is_refused,
    it_does_not_generate,
)
