"""The real sglang-router in front of fake prefill and decode workers, beside one for regular workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from rltool.config.router import RouterConfig
from rltool.config.serve import EngineGroup
from rltool.engines.client import EngineClient
from rltool.engines.endpoints import Endpoints, EngineEndpoint, ModelEndpoints
from rltool.engines.launch import Order
from rltool.engines.plan import Model
from rltool.engines.sync_client import send
from rltool.engines.types import GenerateRequest, HttpRequest, SamplingParams
from rltool.errors import UsageError
from rltool.processes.run_directory import RunDirectory, open_run
from rltool.processes.supervise import ProcessGroup
from rltool.router.launch import running_router, start_planned_routers, start_router
from tests.contract.router_workers import FakeWorker

TIMEOUT = 60.0
BOOTSTRAP_PORT = 8998


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    run = open_run("pd", create=True, root=tmp_path / "runs")
    run.ensure_key()
    return run


@pytest.fixture
def workers(run) -> Iterator[list[FakeWorker]]:
    with ExitStack() as stack:
        made = []
        for _ in range(2):
            made.append(FakeWorker(run.key_file.read_text(), run.key_file))
            stack.callback(made[-1].close)
        yield made


@pytest.fixture
def pair(workers) -> tuple[EngineEndpoint, EngineEndpoint]:
    prefill = {"role": "prefill", "bootstrap_port": BOOTSTRAP_PORT}
    return (
        workers[0].endpoint.model_copy(update=prefill),
        workers[1].endpoint.model_copy(update={"role": "decode"}),
    )


def test_a_request_goes_to_both_halves_which_are_told_how_to_find_each_other(run, workers, pair):
    with ProcessGroup(run) as group:
        start_router(RouterConfig(ready_timeout=TIMEOUT), ModelEndpoints(engines=pair), group, name="judge")
        router = running_router(run, "judge")
        listed = send(router.url, HttpRequest("GET", "/workers"), key=router.read_key(), timeout=TIMEOUT)["workers"]
        assert {worker["worker_type"] for worker in listed} == {"prefill", "decode"}

        async def generate():
            async with EngineClient() as client:
                request = GenerateRequest((1, 2), SamplingParams(max_tokens=1), "a" * 32)
                return await client.generate(router, request, timeout=TIMEOUT)

        [completion] = asyncio.run(generate())
        assert completion.token_ids == (7,)
        prefill, decode = (worker.served[-1] for worker in workers)
        assert prefill["input_ids"] == decode["input_ids"] == [1, 2]
        assert prefill["bootstrap_port"] == decode["bootstrap_port"] == BOOTSTRAP_PORT
        assert prefill["bootstrap_room"] == decode["bootstrap_room"]
        with pytest.raises(UsageError, match="no running router"):
            running_router(run)  # of the policy


def test_the_routers_of_a_plan_are_started_and_written_beside_their_models(run, workers, pair):
    model = Model(run.path, update_weights=False)
    groups = (
        EngineGroup(name="p", engine="sglang", role="prefill", model="judge"),
        EngineGroup(name="d", engine="sglang", role="decode", model="judge"),
        EngineGroup(name="main"),
    )
    order = Order(groups, {"judge": model, "policy": Model(run.path)})
    policy = EngineEndpoint(url="http://127.0.0.1:1")
    entries = {"judge": ModelEndpoints(engines=pair), "policy": ModelEndpoints(engines=(policy,))}
    Endpoints(models=entries).save(run.endpoints_file)
    with ProcessGroup(run) as group:
        urls = start_planned_routers(order, {"judge": pair, "policy": [policy]}, group)
        written = Endpoints.load(run.endpoints_file).models
        assert list(urls) == ["judge"] and written["judge"].data_url == urls["judge"]
        assert written["policy"].data_url is None
        assert [process.role for process in group.processes] == ["router-judge"]
