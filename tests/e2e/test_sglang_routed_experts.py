"""The experts that a real SGLang's router chose, as it returns them: those that transformers' routers choose."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace

import pytest
import torch

from rltool.engines.client import EngineClient
from rltool.engines.endpoints import Endpoints, ModelEndpoints
from rltool.engines.types import GenerateRequest, Routing, SamplingParams
from rltool.errors import EngineError
from rltool.rollout.measure.dump import read_dump
from rltool.rollout.sample import Sample
from tests.e2e.engines import serving_sglang
from tests.e2e.job import write_job
from tests.e2e.test_routing_replay import LAYERS, own_experts
from tests.e2e.test_sglang_experts import KINDS, model_in

pytestmark = [pytest.mark.e2e, pytest.mark.long]

TOP_K = 2
ROUTING = Routing(LAYERS, TOP_K, 4)
DENSE = {"glm4_moe": (0,)}
"""Layers without experts, by family."""
WITH_EXPERTS = (*KINDS, "glm4_moe")
"""The last one's routers are sigmoid, with a correction bias, behind a dense layer."""
PROMPT = tuple(range(40, 52))


def request(prompt=PROMPT, n=1, dense=()):
    routing = replace(ROUTING, dense=dense)
    return GenerateRequest(prompt, SamplingParams(max_tokens=16), uuid.uuid4().hex, n=n, routing=routing)


def assert_routed_as_transformers(model, sample: Sample, dense=()) -> torch.Tensor:
    """Returns the experts of all tokens, [tokens, layers, top_k]."""
    tokens = torch.tensor(sample.prompt_ids + sample.response_ids)
    batch = type("Batch", (), {"tokens": tokens, "lengths": torch.tensor([len(tokens)])})
    expected = own_experts(model, batch).sort(-1).values
    expected[:, list(dense)] = 255
    found = torch.frombuffer(sample.routed_experts, dtype=torch.uint8).view(-1, LAYERS, TOP_K)
    assert len(found) == len(tokens) and bool((found[-1] == 255).all())
    assert torch.equal(found[:-1].long().sort(-1).values, expected[:-1])
    return expected


@pytest.mark.parametrize("kind", WITH_EXPERTS)
def test_each_tokens_experts_are_those_of_transformers_routers(kind, tmp_path):
    model, dense = model_in(tmp_path / "model", kind, 0), DENSE.get(kind, ())

    async def scenario() -> None:
        async with EngineClient() as client:
            info = await client.probe(engine.endpoint, timeout=30)
            assert info.routed_experts is True
            # The second sample finds the prompt in the prefix cache, and its experts with it.
            for completion in await client.generate(engine.endpoint, request(n=2, dense=dense), timeout=60):
                sample = Sample(0, 0, 0, list(PROMPT))
                sample.append_response_tokens(completion)
                assert_routed_as_transformers(model, sample, dense)
            sample.append_environment_tokens([60, 61, 62])
            whole = (*sample.prompt_ids, *sample.response_ids)
            [again] = await client.generate(engine.endpoint, request(whole, dense=dense), timeout=60)
            sample.append_response_tokens(again)
            routed = assert_routed_as_transformers(model, sample, dense)
            assert all(len(set(map(tuple, of_layer.tolist()))) > 2 for of_layer in routed.unbind(1)[len(dense) :])

    with serving_sglang(tmp_path / "model", tmp_path, return_routed_experts=True) as engine:
        asyncio.run(scenario())


def test_a_server_without_the_flag_is_named_with_it(tmp_path):
    model_in(tmp_path / "model", "qwen3_moe", 0)

    async def scenario() -> None:
        async with EngineClient() as client:
            assert (await client.probe(engine.endpoint, timeout=30)).routed_experts is False
            with pytest.raises(EngineError, match="--enable-return-routed-experts"):
                await client.generate(engine.endpoint, request(), timeout=60, attempts=1)
            assert await client.generate(engine.endpoint, replace(request(), routing=None), timeout=60)

    with serving_sglang(tmp_path / "model", tmp_path) as engine:
        asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe"])
def test_a_run_trains_with_the_experts_that_sglang_chose(kind, tmp_path):
    model = model_in(tmp_path / "model", kind, 0)
    with serving_sglang(tmp_path / "model", tmp_path, return_routed_experts=True) as engine:
        engines = tmp_path / "endpoints.json"
        Endpoints(models={"policy": ModelEndpoints(engines=(engine.endpoint,))}).save(engines)
        job = write_job(tmp_path, tmp_path / "model", f"@{engines}")
        # One optimizer step a rollout: after it the trainer's routers are others than those that chose.
        sets = ["steps=2", "algorithm.routing_replay=true", "optimizer_steps_per_rollout=1", "eval.sets={}"]
        job("train", "replay", sets=sets)
    steps = job.steps("replay")
    assert [record["step"] for record in steps] == [0, 1]
    for record in steps:
        assert 0 < record["train/logprob_abs_diff_mean"] < 1e-4
        # In fp32 both routers choose alike, but for ties of rounding.
        assert 0.99 < record["train/routing_agreement"] <= 1.0
    for step in (0, 1):
        for sample in read_dump(job.runs / "replay" / "rollouts", step).samples:
            assert len(sample.routed_experts) == sample.num_tokens * ROUTING.per_token
            if step == 0:  # before the first optimizer step
                assert_routed_as_transformers(model, sample, DENSE.get(kind, ()))
    # A recording is trained on as the rollout was.
    job("debug train-only", "again", "--rollouts", str(job.runs / "replay" / "rollouts"), sets=sets)
    again = job.steps("again")
    assert again[0]["train/loss"] == pytest.approx(steps[0]["train/loss"], rel=1e-5)
    assert again[0]["train/routing_agreement"] == steps[0]["train/routing_agreement"]
