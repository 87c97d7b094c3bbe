"""The worker list against a scripted router: every reply is what sglang-router 0.3.2 sends."""

from types import SimpleNamespace

import pytest

from rltool.config.router import RouterConfig
from rltool.engines.endpoints import EngineEndpoint
from rltool.errors import EngineError, EngineRejected, EngineUnreachable, UsageError
from rltool.router.launch import _probed, router_argv
from rltool.router.main import parse_arguments
from rltool.router.workers import add_worker, list_workers, parse_workers, registration, remove_worker, wait_ready

ROUTER = EngineEndpoint(url="http://router:1", dialect="sglang")
ENGINE = EngineEndpoint(url="http://engine:2", dialect="vllm")


def listing(*workers):
    items = [
        {
            "id": f"id-{url}",
            "url": url,
            "model_id": "policy",
            "is_healthy": healthy,
            "load": 0,
            "worker_type": "regular",
        }
        for url, healthy in workers
    ]
    return {"workers": items, "total": len(items)}


class ScriptedRouter:
    """Answers each route from its own list; the last answer stays. An exception is raised."""

    def __init__(self, **answers):
        self.answers = {name: list(replies) for name, replies in answers.items()}
        self.asked = []

    def send(self, base_url, request, *, key=None, timeout):
        name = {"GET /workers": "list", "POST /workers": "add", "GET /readiness": "ready"}.get(
            f"{request.method} {request.path}"
        )
        name = name or ("remove" if request.method == "DELETE" else "job")
        self.asked.append(name)
        replies = self.answers[name]
        reply = replies.pop(0) if len(replies) > 1 else replies[0]
        if isinstance(reply, Exception):
            raise reply
        return reply


@pytest.fixture
def run(monkeypatch):
    """run(function, router, *arguments): against a scripted router in place of the network."""

    def call(function, router, *arguments, timeout=60.0):
        monkeypatch.setattr("rltool.router.workers.send", router.send)
        return function(ROUTER, *arguments, timeout=timeout)

    return call


ACCEPTED = {"status": "accepted", "worker_id": "w", "url": ENGINE.url}
PENDING = {"id": "w", "job_status": {"status": "processing", "message": None}}


def test_add_returns_only_when_the_worker_is_listed_as_healthy(run):
    router = ScriptedRouter(
        add=[ACCEPTED], job=[PENDING], list=[listing(), listing((ENGINE.url, False)), listing((ENGINE.url, True))]
    )
    assert run(add_worker, router, ENGINE).healthy
    assert router.asked.count("list") == 3


def test_add_passes_on_why_the_router_could_not_register_the_worker(run):
    failed = {"id": "w", "job_status": {"status": "failed", "message": "no such model"}}
    with pytest.raises(EngineError, match=r"could not register http://engine:2: no such model"):
        run(add_worker, ScriptedRouter(add=[ACCEPTED], job=[failed], list=[listing()]), ENGINE)


def test_add_does_not_mind_that_the_job_is_not_there_yet(run):
    router = ScriptedRouter(
        add=[ACCEPTED],
        job=[EngineRejected("gone", 404), PENDING],
        list=[listing(), listing(), listing((ENGINE.url, True))],
    )
    assert run(add_worker, router, ENGINE).url == ENGINE.url


def test_remove_returns_only_when_the_worker_is_gone_from_the_list(run):
    router = ScriptedRouter(
        remove=[{"status": "accepted"}], list=[listing((ENGINE.url, True)), listing((ENGINE.url, True)), listing()]
    )
    assert run(remove_worker, router, ENGINE.url + "/") is True
    assert router.asked.count("list") == 3


def test_remove_of_a_stranger_asks_for_nothing(run):
    router = ScriptedRouter(list=[listing(("http://other:3", True))])
    assert run(remove_worker, router, ENGINE.url) is False
    assert router.asked == ["list"]


def test_remove_is_done_when_somebody_else_removed_it_meanwhile(run):
    router = ScriptedRouter(remove=[EngineRejected("not found", 404)], list=[listing((ENGINE.url, True)), listing()])
    assert run(remove_worker, router, ENGINE.url) is True


def test_a_worker_that_never_leaves_is_an_error(run):
    router = ScriptedRouter(remove=[{"status": "accepted"}], list=[listing((ENGINE.url, True))])
    with pytest.raises(EngineUnreachable, match="did not remove"):
        run(remove_worker, router, ENGINE.url, timeout=0.2)


def test_ready_needs_every_worker_and_the_routers_own_word(run):
    router = ScriptedRouter(
        list=[listing(), listing((ENGINE.url, False)), listing((ENGINE.url, True))],
        ready=[EngineError("503"), {"status": "ready"}],
    )
    run(wait_ready, router, [ENGINE.url])
    assert router.asked == ["list", "list", "list", "ready", "list", "ready"]


def test_a_reply_that_is_no_worker_list_means_no_sglang_router():
    for reply in (None, "OK", {"workers": [{"url": "http://x:1"}]}, []):
        with pytest.raises(EngineError, match="no sglang-router"):
            parse_workers(reply)


def test_the_list_is_read_whatever_the_order(monkeypatch):
    router = ScriptedRouter(list=[listing(("http://a:1/", True), ("http://b:2", False))])
    monkeypatch.setattr("rltool.router.workers.send", router.send)
    workers = list_workers(ROUTER)
    assert [(worker.url, worker.healthy) for worker in workers] == [("http://a:1", True), ("http://b:2", False)]


def test_the_routers_command_line_names_the_key_file_and_not_the_key(tmp_path):
    key_file = tmp_path / "key"
    key_file.write_text("secret-of-the-run")
    argv = router_argv(RouterConfig(), port=1, prometheus_port=2, key_file=key_file)
    assert str(key_file) in argv
    assert "secret-of-the-run" not in " ".join(argv)
    assert argv[argv.index("--host") + 1] == "127.0.0.1"


@pytest.mark.parametrize(
    ("dialect", "plugin", "refused"), [("vllm", False, True), ("vllm", True, False), ("sglang", False, False)]
)
def test_a_stock_vllm_is_refused_because_it_cannot_answer_the_router(monkeypatch, dialect, plugin, refused):
    found = SimpleNamespace(dialect=dialect, plugin=plugin)
    monkeypatch.setattr("rltool.router.launch.probe", lambda engine, *, timeout: found)
    bare = EngineEndpoint(url="http://engine:2")
    if refused:
        with pytest.raises(UsageError, match="--rollout-external"):
            _probed([bare], 1.0)
    else:
        assert _probed([bare], 1.0)[0].dialect == dialect


def test_prefill_and_decode_workers_are_registered_as_what_they_are():
    prefill = EngineEndpoint(url="http://p:1", role="prefill", bootstrap_port=8998)
    decode = EngineEndpoint(url="http://d:2", role="decode")
    assert registration(prefill, None) == {"url": "http://p:1", "worker_type": "prefill", "bootstrap_port": 8998}
    assert registration(decode, None) == {"url": "http://d:2", "worker_type": "decode"}
    assert registration(EngineEndpoint(url="http://r:3"), "key") == {"url": "http://r:3", "api_key": "key"}


def test_a_router_of_prefill_and_decode_workers_is_told_so(tmp_path):
    argv = router_argv(RouterConfig(), port=1, prometheus_port=2, key_file=tmp_path / "key", disaggregated=True)
    parsed = parse_arguments(list(argv[argv.index("rltool.router.main") + 1 :]))
    assert parsed.pd_disaggregation
    plain = router_argv(RouterConfig(), port=1, prometheus_port=2, key_file=tmp_path / "key")
    assert not parse_arguments(list(plain[plain.index("rltool.router.main") + 1 :])).pd_disaggregation
