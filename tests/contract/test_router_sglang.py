"""The real sglang-router in front of fake SGLang workers on real sockets."""

import asyncio
import json
import socket
import sys
import time
import urllib.error
import urllib.request

import pytest

from rltool.config.router import RouterConfig
from rltool.engines.client import EngineClient
from rltool.engines.endpoints import Endpoints, EngineEndpoint, ModelEndpoints
from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.fleet.fleet import Fleet, State
from rltool.engines.types import GenerateRequest, SamplingParams
from rltool.errors import EngineError, EngineUnreachable, UsageError
from rltool.processes.run_directory import open_run
from rltool.processes.spawn import ProcessFailed
from rltool.processes.state import is_alive, read_states
from rltool.processes.stop import process_tree
from rltool.processes.supervise import ProcessGroup
from rltool.rollout.serving.data_plane import DataPlane
from rltool.rollout.serving.router_members import RouterMembers
from rltool.router.launch import forget_router, running_router, start_router
from rltool.router.workers import RouterWorkers, add_worker, list_workers, remove_worker, wait_ready
from tests import fleets
from tests.contract.router_workers import FakeWorker

TIMEOUT = 60.0


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return open_run("router", create=True, root=tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def key(run):
    return run.ensure_key().read_text()


@pytest.fixture
def worker(run, key):
    worker = FakeWorker(key, run.key_file)
    yield worker
    worker.close()


@pytest.fixture
def other(run, key):
    worker = FakeWorker(key, run.key_file)
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def router(run, key):
    """One router for all tests of this file; each adds and removes its own workers."""
    seed = FakeWorker(key, run.key_file)
    file = run.endpoints_file
    Endpoints(models={"policy": ModelEndpoints(engines=(seed.endpoint,))}).save(file)
    with ProcessGroup(run) as group:
        start_router(
            RouterConfig(policy="round_robin", health_check_interval=1.0),
            ModelEndpoints(engines=(seed.endpoint,)),
            group,
            endpoints_file=file,
        )
        router = running_router(run)
        call(remove_worker, router, seed.url)
        seed.close()
        yield router


def call(function, router, *arguments):
    return function(router, *arguments, timeout=TIMEOUT)


def workers_of(router):
    return {worker.url: worker.healthy for worker in list_workers(router)}


def http(method, url, body=None, key=None):
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, data=data, headers=headers, method=method), timeout=TIMEOUT
        ) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


GENERATE = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}}


def test_generation_reaches_the_worker_with_the_key_and_comes_back(router, worker, key):
    call(add_worker, router, worker.endpoint)

    async def work():
        async with EngineClient() as client:
            request = GenerateRequest(
                prompt_ids=(1, 2), sampling=SamplingParams(max_tokens=1), request_id="a" * 32, n=2, seed=5
            )
            return await client.generate(router, request, timeout=TIMEOUT)

    completions = asyncio.run(work())
    assert [c.token_ids for c in completions] == [(7,), (7,)]
    assert worker.keys["/generate"] == {f"Bearer {key}"}
    assert {body["sampling_params"]["sampling_seed"] for body in worker.served} == {5, 6}
    call(remove_worker, router, worker.url)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [("POST", "/generate", GENERATE), ("GET", "/workers", None), ("POST", "/workers", {"url": "http://127.0.0.1:1"})],
)
@pytest.mark.parametrize("key_given", [None, "wrong"])
def test_the_router_demands_the_key_of_clients(router, method, path, body, key_given):
    assert http(method, router.url + path, body, key_given) == 401


def test_the_router_presents_the_key_to_the_worker_when_it_registers_it(router, worker, key):
    call(add_worker, router, worker.endpoint)
    assert worker.keys["/server_info"] == {f"Bearer {key}"}
    assert None in worker.keys["/health"]  # so /health is what a guard has to leave open
    call(remove_worker, router, worker.url)


def test_the_key_is_not_in_any_command_line(router, run, key):
    for state in read_states(run):
        for process in process_tree(state):
            assert key not in " ".join(process.cmdline())
        assert key not in state.model_dump_json()


def test_router_and_metrics_listen_on_loopback_only(router, run):
    state = next(state for state in read_states(run) if state.role == "router")
    listening = [c.laddr for p in process_tree(state) for c in p.net_connections("tcp") if c.status == "LISTEN"]
    assert len(listening) == 2
    assert {address.ip for address in listening} == {"127.0.0.1"}


def test_added_means_served_and_removed_means_no_request_any_more(router, worker, other):
    call(add_worker, router, worker.endpoint)
    call(add_worker, router, other.endpoint)
    assert workers_of(router) == {worker.url: True, other.url: True}
    call(wait_ready, router, [worker.url, other.url])
    key = router.read_key()
    assert [http("POST", router.url + "/generate", GENERATE, key) for _ in range(6)] == [200] * 6
    assert worker.served and other.served
    assert call(remove_worker, router, worker.url) is True
    before = len(worker.served)
    assert [http("POST", router.url + "/generate", GENERATE, key) for _ in range(6)] == [200] * 6
    assert len(worker.served) == before
    assert call(remove_worker, router, worker.url) is False
    call(remove_worker, router, other.url)


def test_a_request_in_flight_is_not_cut_off_by_the_removal_of_its_worker(router, worker):
    worker.delay = 1.5
    call(add_worker, router, worker.endpoint)

    async def work():
        async with EngineClient() as client:
            request = GenerateRequest(prompt_ids=(1, 2), sampling=SamplingParams(max_tokens=1), request_id="b" * 32)
            generating = asyncio.create_task(client.generate(router, request, timeout=TIMEOUT))
            while not worker.in_flight:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(call, remove_worker, router, worker.url)
            assert not generating.done()
            return await generating

    assert asyncio.run(work())[0].token_ids == (7,)


def test_adding_a_worker_twice_leaves_one(router, worker):
    call(add_worker, router, worker.endpoint)
    call(add_worker, router, worker.endpoint)
    assert workers_of(router) == {worker.url: True}
    call(remove_worker, router, worker.url)


def test_a_worker_that_never_answers_is_an_error_with_a_deadline_and_does_not_block_others(router, worker, run):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dead = EngineEndpoint(
            url=f"http://127.0.0.1:{silent.getsockname()[1]}", dialect="sglang", key_file=run.key_file
        )
        with pytest.raises(EngineUnreachable, match=dead.url):
            add_worker(router, dead, timeout=1.0)
        call(add_worker, router, worker.endpoint)
        call(remove_worker, router, worker.url)


def test_a_server_that_is_silent_is_named_with_the_deadline_before_and_after_the_wait(run):
    lines = []
    with socket.create_server(("127.0.0.1", 0)) as silent, ProcessGroup(run) as group:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(EngineUnreachable, match=rf"{url}.*: no answer within .*--ready-timeout"):
            start_router(
                RouterConfig(ready_timeout=0.3),
                ModelEndpoints(engines=(EngineEndpoint(url=url, key_file=run.key_file),)),
                group,
                report=lines.append,
            )
        assert not group.processes
    assert lines == ["asking 1 engine for model and version (--ready-timeout = 0.3 s)"]


class Membership:
    """A fleet of engines with weights of their own, and the router's members, as the rollout manager has them."""

    def __init__(self, client, router, *workers, **options):
        self.lines = []
        self.fleet = Fleet()
        for worker in workers:
            fleets.add_probed(self.fleet, worker.endpoint, takes_weights=False)
        self.fleet.take_transitions()
        engines = EngineSet(self.fleet, client, self.lines.append)
        self.members = RouterMembers(RouterWorkers(client, router), engines, **options)

    async def look(self):
        for transition in self.fleet.take_transitions():
            self.members.note(transition)
        await self.members.reconcile()


def with_membership(router, *workers, **options):
    """A decorator: run the coroutine function with a Membership; what is left in the router is taken out."""

    def call_it(work):
        async def main():
            async with EngineClient() as client:
                await work(Membership(client, router, *workers, **options))

        try:
            asyncio.run(main())
        finally:
            for url in workers_of(router):
                call(remove_worker, router, url)

    return call_it


def test_the_list_follows_the_fleet_whoever_has_changed_it(router, worker, other):
    @with_membership(router, worker)
    async def work(membership):
        await asyncio.to_thread(call, add_worker, router, other.endpoint)
        await membership.look()
        assert workers_of(router) == {worker.url: True}, "ours is put in, the foreign one taken out"
        assert any(other.url in line for line in membership.lines)
        await asyncio.to_thread(call, remove_worker, router, worker.url)
        await membership.look()
        assert workers_of(router) == {worker.url: True}, "and put back"
        membership.fleet.process_exited(worker.url, "killed")
        await membership.look()
        assert workers_of(router) == {}


def test_a_foreign_worker_is_left_there_and_refused_where_that_is_configured(router, worker, other):
    errors = []

    @with_membership(router, worker, foreign="refuse", on_refused=errors.append)
    async def work(membership):
        await asyncio.to_thread(call, add_worker, router, other.endpoint)
        await membership.look()
        assert set(workers_of(router)) == {worker.url, other.url}
        assert len(errors) == 1 and other.url in str(errors[0])


def test_the_routers_circuit_breaker_does_not_hold_a_recovered_engine_back(router, worker, other):
    key = router.read_key()

    def requests_served_by(which, count):
        before = len(which.served)
        assert [http("POST", router.url + "/generate", GENERATE, key) for _ in range(count)] == [200] * count
        return len(which.served) - before

    @with_membership(router, worker, other)
    async def work(membership):
        await membership.look()
        worker.broken = True
        requests_served_by(worker, 40)
        worker.broken = False
        assert requests_served_by(worker, 8) == 0, "the breaker is open, though the worker works again"
        assert workers_of(router)[worker.url] is True, "and nothing in the list says so"
        for _ in range(2):
            membership.fleet.request_failed(worker.url, "500", sent_at=time.monotonic())
        assert membership.fleet.member(worker.url).state is State.SUSPECT
        membership.fleet.request_succeeded(worker.url, sent_at=time.monotonic())
        assert membership.fleet.member(worker.url).state is State.READY, "before anybody has looked"
        await membership.look()
        assert requests_served_by(worker, 8) == 4


def test_a_router_that_is_killed_and_started_again_at_its_address_gets_its_workers_back(run, worker, tmp_path):
    own = open_run("killed", create=True, root=tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    config = RouterConfig(key_file=run.key_file, port=port)

    async def work(again):
        async with EngineClient() as client:
            router = running_router(own)
            membership = Membership(client, router, worker)
            await membership.look()
            await asyncio.to_thread(again)
            assert workers_of(router) == {}, "a new process knows nobody"
            await membership.look()
            assert workers_of(router) == {worker.url: True}

    with ProcessGroup(own) as group:
        start_router(config, ModelEndpoints(engines=(worker.endpoint,)), group)

        def again():
            group.processes[0].popen.kill()
            group.processes[0].popen.wait()
            group.processes.clear()
            start_router(config, ModelEndpoints(engines=(worker.endpoint,)), group)
            call(remove_worker, running_router(own), worker.url)

        asyncio.run(work(again))


def test_many_requests_are_spread_over_the_workers(run, key, worker, other):
    """With the default policy and token ids: it must not send everything to one worker."""
    worker.delay = other.delay = 0.2
    by_address = EngineEndpoint(url=other.endpoint.url)  # its key is the router's (--key-file)
    with ProcessGroup(open_run("spread", create=True, root=run.path.parent)) as group:
        url = start_router(
            RouterConfig(key_file=run.key_file), ModelEndpoints(engines=(worker.endpoint, by_address)), group
        )
        router = EngineEndpoint(url=url, dialect="sglang", key_file=run.key_file)

        async def work():
            async with EngineClient() as client:
                requests = [
                    GenerateRequest(
                        prompt_ids=(1, i + 1, i * 7), sampling=SamplingParams(max_tokens=1), request_id=f"{i:032}"
                    )
                    for i in range(64)
                ]
                await asyncio.gather(*(client.generate(router, request, timeout=TIMEOUT) for request in requests))

        asyncio.run(work())
    assert min(len(worker.served), len(other.served)) >= 24


def test_with_the_policy_manual_a_session_of_the_data_plane_stays_at_one_worker(run, key, worker, other):
    """Prompts that share nothing, so that no prefix decides."""
    with ProcessGroup(open_run("manual", create=True, root=run.path.parent)) as group:
        config = RouterConfig(key_file=run.key_file, policy="manual")
        url = start_router(config, ModelEndpoints(engines=(worker.endpoint, other.endpoint)), group)
        router = EngineEndpoint(url=url, dialect="sglang", key_file=run.key_file)
        sessions = {1000 + i: f"{i}-0" for i in range(16)}

        async def work():
            fleet = Fleet()
            for one in (worker, other):
                fleets.add_probed(fleet, one.endpoint, takes_weights=False)
            async with EngineClient() as client:
                plane = DataPlane(
                    EngineSet(fleet, client), router=router, requests_per_engine=64, deadline=TIMEOUT, judge=None
                )
                for turn in range(4):
                    for first, session in sessions.items():
                        sampling = SamplingParams(max_tokens=1)
                        await plane.generate(
                            GenerateRequest((first, turn + 1), sampling, f"{turn:016}{first:016}", session=session)
                        )

        asyncio.run(work())
    here, there = ({body["input_ids"][0] for body in one.served} for one in (worker, other))
    assert not here & there and here and there and here | there == {*sessions}


def test_start_writes_the_data_url_and_the_end_takes_it_out(run, key, worker, tmp_path):
    own = open_run("data-url", create=True, root=tmp_path)
    engines = ModelEndpoints(engines=(worker.endpoint,))
    Endpoints(models={"policy": engines, "judge": ModelEndpoints(engines=(EngineEndpoint(url="http://127.0.0.1:1"),))}).save(own.endpoints_file)
    with ProcessGroup(own) as group:
        url = start_router(RouterConfig(), engines, group, endpoints_file=own.endpoints_file)
        models = Endpoints.load(own.endpoints_file).models
        assert models["policy"].data_url == url
        assert models["judge"].data_url is None
        state = read_states(own)[0]
    assert not is_alive(state)
    forget_router(own.endpoints_file, url)
    assert Endpoints.load(own.endpoints_file).models["policy"].data_url is None


def test_engines_with_different_keys_are_refused_before_a_router_starts(run, worker, tmp_path):
    other_key = tmp_path / "key"
    other_key.write_text("another")
    stranger = FakeWorker("another", other_key)
    try:
        own = open_run("keys", create=True, root=tmp_path)
        with ProcessGroup(own) as group, pytest.raises(UsageError, match="different keys"):
            start_router(RouterConfig(), ModelEndpoints(engines=(worker.endpoint, stranger.endpoint)), group)
        assert read_states(own) == []
    finally:
        stranger.close()


def test_an_engine_that_is_down_is_named_before_a_router_starts(run, worker, tmp_path):
    worker.close()
    own = open_run("down", create=True, root=tmp_path)
    with ProcessGroup(own) as group, pytest.raises(EngineError, match=worker.url):
        start_router(RouterConfig(ready_timeout=2.0), ModelEndpoints(engines=(worker.endpoint,)), group)
    assert read_states(own) == []


LISTENS_THEN_DIES = """
import http.server, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{"workers": []}'
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        print("no memory left", flush=True); os._exit(4)
http.server.HTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
"""


DIES_AT_ONCE = "print('no such library'); raise SystemExit(3)"


@pytest.mark.parametrize(("code", "said"), [(DIES_AT_ONCE, "no such library"), (LISTENS_THEN_DIES, "no memory left")])
def test_a_router_that_dies_while_it_starts_is_reported_with_its_log(run, worker, tmp_path, monkeypatch, code, said):
    def argv(config, *, port, prometheus_port, key_file, disaggregated):
        return (sys.executable, "-c", code.replace("PORT", str(port)))

    monkeypatch.setattr("rltool.router.launch.router_argv", argv)
    own = open_run("dies", create=True, root=tmp_path)
    ended = rf"(?s)router ended with exit code [34] while starting.*{said}"
    with ProcessGroup(own) as group, pytest.raises(ProcessFailed, match=ended):
        start_router(RouterConfig(), ModelEndpoints(engines=(worker.endpoint,)), group)


def test_a_worker_that_dies_is_taken_out_by_the_health_checks(router, worker):
    call(add_worker, router, worker.endpoint)
    worker.close()
    deadline = time.monotonic() + TIMEOUT
    while workers_of(router)[worker.url]:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert http("GET", router.url + "/readiness") == 503
    call(remove_worker, router, worker.url)
