"""The guard's policy, and the middleware around a pretended vLLM app."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from rltool.engines.plugin.guard import ALLOWED_ROUTES, OPEN_ROUTES, Decision, GuardPolicy, read_key
from rltool.engines.plugin.server import ServerMiddleware

POLICY = GuardPolicy("secret")
KEY = "Bearer secret"


def test_health_needs_no_key():
    assert POLICY.decide("GET", "/health", None) is Decision.ALLOW


@pytest.mark.parametrize("route", sorted(ALLOWED_ROUTES - {("GET", "/health")}))
def test_every_other_route_needs_the_key(route):
    assert POLICY.decide(*route, None) is Decision.UNAUTHORIZED
    assert POLICY.decide(*route, KEY) is Decision.ALLOW


@pytest.mark.parametrize(
    "value",
    [
        "",
        "secret",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Bearer secret2",
        "Bearer secre",
        "Basic secret",
        "Bearer Secret",
    ],
)
def test_only_the_right_key_as_bearer_is_the_key(value):
    assert POLICY.decide("POST", "/pause", value) is Decision.UNAUTHORIZED


def test_the_scheme_is_read_in_any_case():
    assert POLICY.decide("POST", "/pause", "bearer secret") is Decision.ALLOW


@pytest.mark.parametrize(
    "route",
    [
        ("POST", "/collective_rpc"), ("GET", "/is_sleeping"), ("GET", "/v1/load_lora_adapter"), ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("POST", "/update_weight_version"), ("POST", "/weight_checker"), ("GET", "/pause"), ("POST", "/pause/"),
        ("POST", "//pause"),
        ("POST", "/PAUSE"), ("POST", "/abort_requests"), ("OPTIONS", "/pause"), ("HEAD", "/version"),
    ],
)  # fmt: skip
def test_what_rltool_does_not_use_does_not_exist_and_without_the_key_nobody_learns_that(route):
    assert POLICY.decide(*route, KEY) is Decision.NOT_FOUND
    assert POLICY.decide(*route, None) is Decision.UNAUTHORIZED


def test_other_methods_of_health_are_not_open():
    assert POLICY.decide("POST", "/health", None) is Decision.UNAUTHORIZED


def test_a_server_without_a_key_does_not_start(tmp_path):
    with pytest.raises(RuntimeError, match="RLTOOL_KEY_FILE"):
        read_key({})
    (tmp_path / "key").write_text(" \n")
    with pytest.raises(RuntimeError, match="is empty"):
        read_key({"RLTOOL_KEY_FILE": str(tmp_path / "key")})
    with pytest.raises(OSError, match="absent"):
        read_key({"RLTOOL_KEY_FILE": str(tmp_path / "absent")})


class App:
    """Stands for vLLM's app: answers `status` and `reply` to everything, remembers scopes and bodies, and the calls to
    its engine."""

    def __init__(self, status=200, reply=b"{}", mixed=False):
        self.status, self.reply, self.mixed = status, reply, mixed
        self.calls, self.engine_calls, self.versions = [], [], []
        self.answers: dict[str, list[str]] = {}
        self.state = SimpleNamespace(engine_client=self, vllm_config=SimpleNamespace(weight_transfer_config=object()))

    async def __call__(self, scope, receive, send):
        message = await receive()
        self.calls.append((scope["method"], scope["path"], message.get("body")))
        self.headers = dict(scope["headers"])
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": self.reply})

    async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        self.engine_calls.append(method)
        return self.answers.get(method, [self.mixed])

    async def reset_prefix_cache(self, reset_running_requests):
        return True

    async def pause_generation(self, *, mode): ...

    async def update_weight_version(self, version):
        self.versions.append(version)


def ask(app, method, path, body=b"", key=KEY, kind="http", headers=(), query=""):
    """(status, decoded reply) of one request to the guarded `app`."""
    sent = []
    headers = [*headers, *([(b"authorization", key.encode())] if key else [])]
    scope = {"type": kind, "method": method, "path": path, "headers": headers, "app": app}
    scope["query_string"] = query.encode()

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message)

    asyncio.run(ServerMiddleware(app, key="secret", boot_id="boot")(scope, receive, send))
    if kind == "websocket":
        return sent
    return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent[1:]))


def test_a_refused_request_does_not_reach_the_server():
    app = App()
    assert ask(app, "POST", "/pause", key=None)[0] == 401
    assert ask(app, "POST", "/collective_rpc")[0] == 404
    assert app.calls == []


@pytest.mark.parametrize("key", [None, "Bearer wrong"])
@pytest.mark.parametrize("route", sorted(ALLOWED_ROUTES - OPEN_ROUTES))
def test_without_the_key_neither_the_servers_routes_nor_the_middlewares_own_are_reached(route, key):
    app = App()
    assert ask(app, *route, b"{}", key=key) == (401, {"error": "this server demands its bearer key"})
    assert app.calls == [] and app.engine_calls == [] and app.versions == []


def test_an_allowed_request_passes_untouched():
    app = App(reply=b'{"status": "paused"}')
    assert ask(app, "POST", "/pause", b"{}") == (200, {"status": "paused"})
    assert app.calls == [("POST", "/pause", b"{}")]


def test_websockets_are_refused_even_with_the_key():
    app = App()
    (message,) = ask(app, "GET", "/v1/realtime", kind="websocket")
    assert message["type"] == "websocket.close"
    assert app.calls == []


VLLM_REPLY = {
    "request_id": "x",
    "choices": [
        {
            "index": 0, "token_ids": [7], "finish_reason": "length", "stop_reason": None,
            "logprobs": {"content": [{"token_id": 7, "logprob": -0.5}]},
            "weight_versions": [{"version": "v", "start": 0, "end": 1}],
        }
    ],
}  # fmt: skip


def test_generate_is_answered_by_the_servers_own_route():
    app = App(reply=json.dumps(VLLM_REPLY).encode())
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}, "return_logprob": True, "rid": "r"}
    status, reply = ask(app, "POST", "/generate", json.dumps(body).encode())
    ((method, path, inner),) = app.calls
    assert (status, method, path) == (200, "POST", "/inference/v1/generate")
    assert json.loads(inner)["token_ids"] == [5]
    assert reply["output_ids"] == [7] and reply["meta_info"]["id"] == "r"


def test_the_rid_names_the_request_whatever_id_a_header_gives_it():
    app = App(reply=json.dumps(VLLM_REPLY).encode())
    ask(
        app,
        "POST",
        "/generate",
        b'{"input_ids": [5], "rid": "r"}',
        headers=[(b"x-request-id", b"the-routers"), (b"traceparent", b"t")],
    )
    assert b"x-request-id" not in app.headers and app.headers[b"traceparent"] == b"t"


def test_a_refusal_of_the_servers_own_route_passes_through_generate():
    app = App(status=400, reply=b'{"error": "too long"}')
    assert ask(app, "POST", "/generate", b'{"input_ids": [5]}') == (400, {"error": "too long"})


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"text": "hello"}'])
def test_a_generate_that_is_no_request_is_a_400(body):
    app = App()
    assert ask(app, "POST", "/generate", body)[0] == 400
    assert app.calls == []


def test_a_client_that_leaves_before_its_request_is_complete_is_given_no_answer():
    app, sent = App(), []
    messages = iter([{"type": "http.request", "body": b'{"inp', "more_body": True}, {"type": "http.disconnect"}])
    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": [(b"authorization", KEY.encode())]}

    async def receive():
        return next(messages)

    async def send(message):
        sent.append(message)

    asyncio.run(ServerMiddleware(app, key="secret")(scope | {"app": app}, receive, send))
    assert sent == [] and app.calls == []


def test_what_vllm_keeps_of_aborted_requests_is_dropped_and_no_more():
    app = App()
    running = SimpleNamespace(child_requests={"0_b", "1_b"})
    app.output_processor = SimpleNamespace(parent_requests={"a": SimpleNamespace(child_requests=set()), "b": running})
    ask(app, "POST", "/pause")
    assert list(app.output_processor.parent_requests) == ["a", "b"]
    assert ask(app, "POST", "/inference/v1/abort_requests", b'{"request_ids": ["x"]}')[0] == 200
    assert app.output_processor.parent_requests == {"b": running}
    del app.output_processor  # a vLLM without it
    assert ask(app, "POST", "/inference/v1/abort_requests", b'{"request_ids": ["x"]}')[0] == 200


@pytest.mark.parametrize(
    "path",
    ["/start_weight_update", "/shutdown_weight_transfer_engine", "/init_weight_transfer_engine", "/resume", "/wake_up"],
)
def test_an_update_left_open_is_ended_before_the_next_step(path):
    app = App(mixed=True)
    ask(app, "POST", path)
    assert app.engine_calls == ["rltool_end_unfinished_update"]
    assert app.versions == ["incomplete"]
    is_of_weights = path not in ("/resume", "/wake_up")
    assert ("collective_rpc" in vars(app)) == is_of_weights, "vLLM's weight methods: see hear_all_workers"


@pytest.mark.parametrize("path", ["/update_weights", "/finish_weight_update"])
def test_a_failed_update_is_ended_and_takes_the_version_away(path):
    app = App(status=500, mixed=True)
    assert ask(app, "POST", path)[0] == 500
    assert app.versions == ["incomplete"]


@pytest.mark.parametrize("path", ["/update_weights", "/finish_weight_update"])
def test_a_good_update_keeps_the_version_that_vllm_sets(path):
    app = App(mixed=True)
    assert ask(app, "POST", path)[0] == 200
    assert app.engine_calls == [] and app.versions == []


UPDATE = ("/rltool/update_weights", b'{"update_info": {}}', "rltool_update_weights")
FINISH = ("/rltool/finish_weight_update", b'{"weight_version": "v"}', "rltool_finish_update")


@pytest.mark.parametrize(("path", "body", "method"), [UPDATE, FINISH])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_step_of_the_plugins_own_that_fails_takes_the_version_away_where_weights_may_be_a_mixture(
    path, body, method, mixed
):
    """Workers that have finished beside one that could not say that nothing is open there."""
    app = App(mixed=mixed)
    app.answers[method] = ["", "a.weight is missing"]
    status, reply = ask(app, "POST", path, body)
    assert status == 500 and "a.weight is missing" in reply["error"]
    assert app.engine_calls == [method, "rltool_end_unfinished_update"]
    assert app.versions == (["incomplete"] if mixed or path == FINISH[0] else [])


def test_a_version_is_given_where_every_worker_has_finished():
    app = App()
    app.answers[FINISH[2]] = ["", ""]
    assert ask(app, "POST", *FINISH[:2]) == (200, {"weight_version": "v"})
    assert app.versions == ["v"]


def test_weights_that_did_not_change_keep_their_version():
    app = App(status=500, mixed=False)
    ask(app, "POST", "/update_weights")
    assert app.engine_calls and app.versions == []


class Core:
    def __init__(self) -> None:
        self.paused = []

    async def pause_scheduler_async(self, mode, clear_cache):
        self.paused.append((mode, clear_cache))

    async def clear_mm_cache_async(self):
        pass


@pytest.mark.parametrize(
    ("query", "own"), [("mode=keep", True), ("mode=abort", False), ("mode=keep&clear_cache=0", False), ("", False)]
)
def test_a_pause_that_keeps_its_requests_does_not_sleep(query, own):
    app, core = App(reply=b'{"status": "paused"}'), Core()
    app.engine_core = app.renderer = core
    assert ask(app, "POST", "/pause", query=query) == (200, {"status": "paused"})
    assert core.paused == ([("keep", True)] if own else [])
    assert bool(app.calls) is not own


def test_another_vllm_pauses_by_its_own_route():
    app = App(reply=b'{"status": "paused"}')
    assert ask(app, "POST", "/pause", query="mode=keep") == (200, {"status": "paused"})
    assert [path for _, path, _ in app.calls] == ["/pause"]


def test_a_pause_that_fails_says_so():
    app, core = App(), Core()
    app.engine_core = app.renderer = core

    async def fail(mode, clear_cache):
        raise RuntimeError("planned")

    core.pause_scheduler_async = fail
    status, reply = ask(app, "POST", "/pause", query="mode=keep")
    assert status == 500 and "planned" in reply["error"]
