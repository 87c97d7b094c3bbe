"""The real vLLM as rltool starts it: generation, the guard on every one of its routes, SGLang's /generate."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from rltool.engines.client import EngineClient
from rltool.engines.dialects.table import dialect
from rltool.engines.plugin.guard import ALLOWED_ROUTES, OPEN_ROUTES
from rltool.errors import EngineError
from rltool.rollout.stop_strings import cut_at_stop
from rltool.rollout.tokenizer import load_tokenizer
from tests.contract.vllm_contract import CONTRACT
from tests.e2e.weights import Sender, hf_logprobs, mean_difference, new_request, perturbed_model, tensors_of

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("clause", CONTRACT, ids=lambda clause: clause.__name__)
def test_contract(vllm_engine_tied, clause):
    async def run():
        async with EngineClient() as client:
            await clause(client, vllm_engine_tied.endpoint)

    asyncio.run(run())


def test_logprobs_are_those_of_the_sampling_temperature(vllm_engine_tied):
    engine = vllm_engine_tied

    async def run():
        async with EngineClient() as client:
            sender = Sender(client, engine)
            model = perturbed_model(engine.launch.model, seed=20)
            await sender.gloo(tensors_of(model), "tempered")
            cold = new_request(temperature=0.7)
            sample = await sender.one(cold)
            assert mean_difference(model, sample, temperature=0.7) < 1e-4
            assert mean_difference(model, sample, temperature=1.0) > 0.05
            greedy = await sender.one(new_request(temperature=0.0, max_tokens=1))
            first = hf_logprobs(model, new_request().prompt_ids, greedy)
            assert first.item() == pytest.approx(max_logprob(model, new_request().prompt_ids), abs=1e-5)

    asyncio.run(run())


def test_a_stop_string_ends_a_response_with_the_token_that_completes_it(vllm_engine_tied):
    """On both routes the engine stops where the trainer's side would cut: the sampled tokens, whole."""
    engine = vllm_engine_tied
    tokenizer = load_tokenizer(engine.launch.model)

    async def run():
        async with EngineClient() as client:
            for plugin in (True, False):
                endpoint = engine.endpoint.model_copy(update={"plugin": plugin})
                [free] = await client.generate(endpoint, new_request(max_tokens=16), timeout=60)
                stop = tokenizer.decode(free.token_ids[5:8])
                asked = new_request(max_tokens=16)
                asked = replace(asked, sampling=replace(asked.sampling, stop=(stop,)))
                [stopped] = await client.generate(endpoint, asked, timeout=60)
                expected = cut_at_stop(free, asked, tokenizer.decode)
                assert stop and len(expected.token_ids) <= 8
                assert stopped.token_ids == expected.token_ids and stopped.finish_reason == "stop"
                assert stopped.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
                assert stopped.versions == expected.versions
                assert cut_at_stop(stopped, asked, tokenizer.decode).token_ids == stopped.token_ids

    asyncio.run(run())


def max_logprob(model, prompt) -> float:
    import torch

    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1).max().item()


def served_routes(engine) -> list[tuple[str, str]]:
    """Every (method, path) that the server registered, as vLLM logs them at its start."""
    text = engine.log.read_text()
    routes = [
        (method.strip(), path)
        for path, methods in re.findall(r"Route: (\S+), Methods: ([A-Z, ]+)", text)
        for method in methods.split(",")
    ]
    assert len(routes) > 50, "vLLM no longer logs its routes in the form that this test reads"
    return sorted(set(routes))


def test_every_route_of_the_server_is_guarded(vllm_engine_tied):
    engine = vllm_engine_tied
    routes = served_routes(engine)
    assert ("POST", "/collective_rpc") in routes
    for method, path in sorted({*routes, *ALLOWED_ROUTES}):  # vLLM does not log what the middleware serves itself
        concrete = re.sub(r"{[^}]*}", "1", path)
        if (method, path) in OPEN_ROUTES:
            assert engine.http(method, concrete)[0] == 200
            continue
        for key in (None, "wrong"):
            assert engine.http(method, concrete, {}, key=key)[0] == 401, f"{method} {path} without the key"
        if (method, path) not in ALLOWED_ROUTES:
            assert engine.http(method, concrete, {}, key=engine.key)[0] == 404, f"{method} {path} with the key"


def test_variants_of_an_allowed_path_are_no_way_around_the_guard(vllm_engine_tied):
    engine = vllm_engine_tied
    for path in (
        "/health/../pause",
        "//pause",
        "/pause/",
        "/PAUSE",
        "/%70ause?x",
        "/health%2f..%2fpause",
        "/health;/pause",
        "/health/",
    ):
        assert engine.http("POST", path)[0] == 401
    assert engine.http("POST", "/health")[0] == 401


def test_all_allowed_routes_exist(vllm_engine_tied):
    """A route that vLLM drops or renames must fail here and not in a training run."""
    added_by_us = {route for route in ALLOWED_ROUTES if route[1].startswith("/rltool/")}
    added_by_us |= {("POST", "/generate"), ("GET", "/model_info")}
    # test_reward_model asks an engine with task = "classify", test_adapter_sync one with --enable-lora.
    of_others = {("POST", "/classify"), ("POST", "/v1/load_lora_adapter"), ("POST", "/v1/unload_lora_adapter")}
    assert of_others.isdisjoint(served_routes(vllm_engine_tied))
    assert ALLOWED_ROUTES - added_by_us - of_others <= set(served_routes(vllm_engine_tied))


def test_weights_are_loaded_again_from_where_the_server_read_them(vllm_engine_untied):
    """On a CPU, which cannot drop them: after an update that they replace."""
    engine = vllm_engine_untied

    async def run():
        async with EngineClient() as client:
            sender = Sender(client, engine)
            other = perturbed_model(engine.launch.model, seed=21)
            await sender.gloo(tensors_of(other), "other")
            own = AutoModelForCausalLM.from_pretrained(engine.launch.model, dtype=torch.float32).eval()
            sample = await sender.one(new_request())
            assert mean_difference(other, sample) < 1e-4 and mean_difference(own, sample) > 0.05
            engine_dialect = dialect("vllm", plugin=True)
            requests = [*engine_dialect.pause("abort"), *engine_dialect.reload(None), *engine_dialect.resume()]
            await client.run(engine.endpoint, requests, timeout=60)
            sample = await sender.one(new_request(seed=12))
            assert mean_difference(own, sample) < 1e-4
            assert {span.version for span in sample.versions} == {"default"}

    asyncio.run(run())


def test_the_key_stands_in_no_command_line(vllm_engine_tied):
    engine = vllm_engine_tied
    import psutil

    server = psutil.Process(engine.process.pid)
    for process in [server, *server.children(recursive=True)]:
        assert engine.key not in " ".join(process.cmdline())
    assert engine.key not in engine.log.read_text()


def test_more_prompt_tokens_than_a_forward_pass_takes_do_not_kill_the_engine(vllm_engine_tied):
    """A seeded prompt that is prefilled in pieces ends vLLM 0.32 on the CPU: the launch line must keep it whole."""
    engine = vllm_engine_tied
    prompts = [tuple((i * 7 + j * (i + 1)) % 100 + 10 for j in range(230)) for i in range(48)]  # 11,040 tokens at once

    async def run():
        async with EngineClient() as client:
            requests = [new_request(prompt=prompt, max_tokens=4) for prompt in prompts]
            samples = await asyncio.gather(*(client.generate(engine.endpoint, one, timeout=120) for one in requests))
            assert [len(sample.token_ids) for (sample,) in samples] == [4] * 48
            await client.health(engine.endpoint)

    asyncio.run(run())


@pytest.mark.long
def test_a_cpu_cannot_free_the_cache_alone_and_says_so_and_the_engine_wakes_again(vllm_engine_tied):
    engine = vllm_engine_tied.endpoint

    async def run():
        async with EngineClient() as client:
            try:
                with pytest.raises(EngineError, match="not supported on CPU"):
                    await client.sleep(engine, 1, ["kv_cache"], timeout=60.0)
            finally:
                await client.wake(engine, timeout=60.0)
            [sample] = await client.generate(engine, new_request(), timeout=60.0)
            assert sample.finish_reason == "length"

    asyncio.run(run())
