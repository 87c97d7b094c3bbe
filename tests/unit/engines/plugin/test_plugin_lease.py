"""The lease of an engine: who may control it, for how long, and what is said to the others."""

from __future__ import annotations

import asyncio
import json

import pytest

from rltool.engines.plugin.adapters import DROP_PATH, PUBLISH_PATH
from rltool.engines.plugin.guard import ALLOWED_ROUTES, CONTROL_ROUTES
from rltool.engines.plugin.lease import LEASE_PATH, REMEMBERED, LeaseTable, answer
from rltool.engines.plugin.routes import FINISH_PATH, PREFETCH_PATH, UPDATE_PATH
from rltool.engines.plugin.server import ServerMiddleware
from rltool.engines.types import Holder, Lease
from tests.clock import Clock
from tests.unit.engines.plugin.test_plugin_guard import KEY, App

OURS, OTHER = Holder("a" * 32, "ours", "host-a", 1), Holder("b" * 32, "other", "host-b", 2)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def table(clock):
    return LeaseTable(clock)


def test_without_a_lease_everybody_may_control(table):
    assert table.lease() is None
    assert table.refusal(None) is None and table.refusal(OURS.run) is None


def test_a_lease_shuts_out_everybody_but_its_holder(table):
    assert table.acquire(OURS, 60).granted
    assert table.refusal(OURS.run) is None
    for stranger in (None, OTHER.run):
        assert "run ours (pid 1 on host-a), for another 60 s" in table.refusal(stranger)
    refused = table.acquire(OTHER, 60)
    assert (refused.granted, refused.taken_by, refused.lease) == (False, OURS, Lease(OURS, 60))


def test_a_lease_that_is_not_renewed_expires(table, clock):
    table.acquire(OURS, 60)
    clock.now += 59.9
    assert not table.acquire(OTHER, 60).granted
    clock.now += 0.2
    assert table.lease() is None and table.refusal(OTHER.run) is None
    assert table.acquire(OTHER, 60).granted
    late = table.renew(OURS, 60)
    assert not late.granted and late.taken_by == OTHER


def test_a_renewal_counts_from_when_it_comes(table, clock):
    table.acquire(OURS, 60)
    clock.now += 50
    assert table.renew(OURS, 60).granted
    clock.now += 50
    assert not table.acquire(OTHER, 60).granted


def test_an_expired_lease_that_nobody_took_is_granted_again(table, clock):
    table.acquire(OURS, 60)
    clock.now += 3600
    assert table.renew(OURS, 60).granted and table.lease() == Lease(OURS, 60)


def test_a_lease_that_was_given_back_is_free_at_once(table):
    table.acquire(OURS, 60)
    assert not table.acquire(OTHER, 60).granted
    table.release(OTHER)
    assert table.lease() is not None, "nobody gives back what is another's"
    table.release(OURS)
    assert table.acquire(OTHER, 60).granted


def test_a_resumed_run_takes_over_its_own_lease_and_its_old_process_loses_it(table):
    table.acquire(OURS, 60)
    resumed = Holder(OURS.run, OURS.name, "host-c", 7)
    assert table.acquire(resumed, 60).granted
    assert table.renew(OURS, 60).taken_by == resumed
    table.release(OURS)
    assert table.lease() == Lease(resumed, 60), "what the old process gives back is not its own any more"


def test_a_stolen_lease_is_the_thiefs_and_the_victim_hears_of_it_even_when_the_thief_has_gone(table, clock):
    table.acquire(OURS, 60)
    assert table.acquire(OTHER, 60, steal=True).granted
    for _ in range(2):
        assert table.renew(OURS, 60).taken_by == OTHER
        assert "taken over by run other (pid 2 on host-b)" in table.refusal(OURS.run)
        table.release(OTHER)
    assert table.refusal("c" * 32) is None
    assert table.acquire(OURS, 60).granted, "a new start of the victim is a new claim"
    assert table.renew(OURS, 60).granted and table.refusal(OURS.run) is None


def test_stealing_what_nobody_has_makes_no_victim(table, clock):
    table.acquire(OURS, 60)
    clock.now += 61
    table.acquire(OTHER, 60, steal=True)
    table.release(OTHER)
    assert table.renew(OURS, 60).granted


def test_a_theft_from_one_run_takes_nothing_from_another(table):
    table.acquire(OURS, 60)
    thief = Holder("c" * 32, "thief", "host-c", 3)
    assert table.acquire(thief, 60, steal=True, only_from=OTHER.run).taken_by == OURS
    assert table.refusal(OURS.run) is None
    assert table.acquire(thief, 60, steal=True, only_from=OURS.run).granted


def test_only_the_last_victims_are_remembered(table):
    victims = [Holder(f"{number:032x}", "v", "h", number) for number in range(REMEMBERED + 2)]
    for victim in victims:
        table.acquire(victim, 60, steal=True)
    assert table.refusal(victims[0].run).startswith("this engine is leased")
    assert table.refusal(victims[1].run).startswith("this engine was taken over")


@pytest.mark.parametrize(
    "change",
    [
        {"action": "take"}, {"action": None}, {"holder": None}, {"holder": {}}, {"seconds": -1}, {"seconds": "60"},
        {"seconds": 1e9}, {"seconds": float("nan")}, {"holder": {"run": "", "name": "n", "host": "h", "pid": 1}},
        {"holder": {"run": "r", "name": "n", "host": "h", "pid": "1"}},
        {"holder": {"run": "r", "name": "n", "host": "h", "pid": 1, "more": 2}},
    ],
)  # fmt: skip
def test_what_is_no_request_for_a_lease_is_a_400_and_changes_nothing(table, change):
    body = {"action": "acquire", "holder": {"run": "r", "name": "n", "host": "h", "pid": 1}, "seconds": 60}
    status, reply = answer(table, body | change)
    assert status == 400 and LEASE_PATH in reply["error"]
    assert answer(table, None)[0] == 400 and table.lease() is None


# -- the middleware


class Server:
    """The guarded server in front of an App; `ask` is one request."""

    def __init__(self, clock):
        self.app = App()
        self.middleware = ServerMiddleware(self.app, key="secret", clock=clock)

    def ask(self, method, path, body=None, run=None):
        sent = []
        headers = [(b"authorization", KEY.encode()), *([(b"x-rltool-run", run.encode())] if run else [])]
        scope = {"type": "http", "method": method, "path": path, "headers": headers, "app": self.app}

        async def receive():
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

        async def send(message):
            sent.append(message)

        asyncio.run(self.middleware(scope | {"query_string": b""}, receive, send))
        return sent[0]["status"], json.loads(sent[1]["body"])

    def lease(self, action, holder):
        return self.ask("POST", LEASE_PATH, {"action": action, "holder": vars(holder), "seconds": 60})


@pytest.fixture
def server(clock):
    return Server(clock)


@pytest.mark.parametrize("route", sorted(CONTROL_ROUTES))
def test_control_is_the_holders_alone_until_the_lease_expires(server, clock, route):
    assert server.lease("acquire", OURS) == (
        200,
        {"granted": True, "lease": {"holder": vars(OURS), "expires_in": 60}, "taken_by": None},
    )
    for run in (None, OTHER.run):
        status, reply = server.ask(*route, {}, run=run)
        assert status == 409 and "run ours (pid 1 on host-a)" in reply["error"]
        assert reply["lease"]["holder"] == vars(OURS)
    assert server.app.calls == [], "what is refused does not reach vLLM"
    # Our own routes look at the body, which is empty here.
    served = 400 if route[1] in (PREFETCH_PATH, UPDATE_PATH, FINISH_PATH, PUBLISH_PATH, DROP_PATH) else 200
    assert server.ask(*route, {}, run=OURS.run)[0] == served
    clock.now += 61
    assert server.ask(*route, {}, run=OTHER.run)[0] == served


def test_generation_and_ending_ones_own_requests_stay_everybodys(server):
    server.lease("acquire", OURS)
    for path in ("/inference/v1/generate", "/v1/completions", "/inference/v1/abort_requests"):
        assert server.ask("POST", path, {}, run=OTHER.run)[0] == 200


def test_every_route_that_changes_the_engine_for_all_is_a_control_route():
    """A route that is added to the guard must be thought of here."""
    everybodys = {"/generate", "/rltool/generate", "/inference/v1/generate", "/v1/completions", "/v1/chat/completions"}
    everybodys |= {"/inference/v1/abort_requests", "/classify", LEASE_PATH}
    assert {path for method, path in ALLOWED_ROUTES - CONTROL_ROUTES if method == "POST"} == everybodys
