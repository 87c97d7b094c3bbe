"""The real sglang-router in front of fake prefill and decode workers, beside one for regular workers."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from rltool.config.router import RouterConfig
from rltool.config.serve import EngineGroup
from rltool.engines.client import EngineClient
from rltool.engines.endpoints import Endpoints, EngineEndpoint, ModelEndpoints
from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.fleet.fleet import Fleet
from rltool.engines.launch.plan import Model
from rltool.engines.launch.start import Order
from rltool.engines.sync_client import send
from rltool.engines.types import GenerateRequest, HttpRequest, SamplingParams
from rltool.errors import EngineError, UsageError
from rltool.processes.run_directory import RunDirectory, open_run
from rltool.processes.supervise import ProcessGroup
from rltool.rollout.serving.data_plane import DataPlane
from rltool.router.launch import running_router, start_router
from rltool.router.planned import start_planned_routers
from tests import fleets
from tests.contract.fakes.sglang import EXPECTED_KEY, FakeSglang, Fault
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


def test_rollouts_through_it_are_sampled_by_both_and_aborted_at_both(run, tmp_path):
    key = tmp_path / "key"
    key.write_text(EXPECTED_KEY)
    with ExitStack() as stack:
        engines = [stack.enter_context(FakeSglang(role=role)) for role in ("prefill", "decode")]
        prefill, decode = engines
        both = tuple(
            EngineEndpoint(
                url=e.url, dialect="sglang", key_file=key, role=e.role, bootstrap_port=e.bootstrap_port
            )
            for e in engines
        )
        group = stack.enter_context(ProcessGroup(run))
        start_router(RouterConfig(ready_timeout=TIMEOUT), ModelEndpoints(engines=both), group)
        router, fleet = running_router(run).model_copy(update={"key_file": key}), Fleet()

        async def rollouts() -> None:
            for endpoint in both:
                fleets.add_probed(fleet, endpoint, takes_weights=False)
            async with EngineClient() as client:
                plane = DataPlane(EngineSet(fleet, client), router=router, requests_per_engine=1, deadline=TIMEOUT)
                request = GenerateRequest((1, 2), SamplingParams(max_tokens=6), "b" * 32, n=2, seed=3)
                done = await plane.generate(request, group=1)
                assert [len(completion.token_ids) for completion in done] == [6, 6]
                assert len(set(decode.rooms)) == 2 and sorted(prefill.rooms) == sorted(decode.rooms)
                decode.seconds = TIMEOUT
                tasks = [asyncio.create_task(plane.generate(request.again(), group=2)) for _ in range(2)]
                await asyncio.to_thread(decode.wait_in_flight, 2)
                await asyncio.sleep(0.2)
                assert plane.in_flight == 1, "of one engine that samples: the other counts for no limit"
                for task in tasks:
                    assert not task.done()
                await plane.abort()
                [first, _] = tasks
                assert [completion.finish_reason for completion in await first] == ["abort"] * 2
                tasks[1].cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run(rollouts())


def test_requests_that_were_aborted_do_not_keep_the_next_ones_away(run, tmp_path):
    key = tmp_path / "key"
    key.write_text(EXPECTED_KEY)
    with ExitStack() as stack:
        engines = [stack.enter_context(FakeSglang(role=role)) for role in ("prefill", "decode")]
        both = tuple(
            EngineEndpoint(url=e.url, dialect="sglang", key_file=key, role=e.role, bootstrap_port=e.bootstrap_port)
            for e in engines
        )
        group = stack.enter_context(ProcessGroup(run))
        start_router(RouterConfig(ready_timeout=TIMEOUT), ModelEndpoints(engines=both), group)
        router = running_router(run).model_copy(update={"key_file": key})
        for engine in engines:  # as both answer to what a sync aborts
            engine.faults["/generate"] = Fault(times=40, status=500)

        async def ask() -> int:
            """How many requests failed before one was answered."""
            async with EngineClient() as client:
                for failed in range(40):
                    request = GenerateRequest((1, 2), SamplingParams(max_tokens=2), uuid.uuid4().hex)
                    try:
                        await client.generate(router, request, timeout=TIMEOUT, attempts=1)
                        return failed
                    except EngineError as error:
                        refusals.append(str(error))
            raise AssertionError("none was answered")

        refusals: list[str] = []
        assert asyncio.run(ask()) > 0 and not [said for said in refusals if "circuits open" in said]
        assert engines[1].faults["/generate"].times == 0


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
