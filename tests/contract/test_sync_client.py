"""One-shot calls against fake engines on real sockets, and against servers that do not answer."""

from __future__ import annotations

import asyncio
import socket
import threading
from types import SimpleNamespace

import pytest
from aiohttp import web

from rltool.engines.client import EngineClient
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.sync_client import probe, send
from rltool.engines.types import HttpRequest
from rltool.errors import EngineError, EngineRejected, EngineUnreachable, UsageError
from tests.contract.fakes.server import FakeServer
from tests.contract.fakes.sglang import FakeSglang


def asked_by_the_other_client(endpoint):
    async def ask():
        async with EngineClient() as client:
            return await client.probe(endpoint, timeout=60.0)

    return asyncio.run(ask())


def test_a_probe_finds_what_the_asynchronous_client_finds(fake_vllm, fake_stock_vllm, key_file, tmp_path):
    (tmp_path / "sglang-key").write_text("fake-key")
    with FakeSglang() as sglang:
        for endpoint in (
            EngineEndpoint(url=fake_vllm.url, key_file=key_file),
            EngineEndpoint(url=fake_vllm.url, dialect="vllm", key_file=key_file),
            EngineEndpoint(url=fake_stock_vllm.url),
            EngineEndpoint(url=sglang.url, key_file=tmp_path / "sglang-key"),
        ):
            assert probe(endpoint, timeout=60.0) == asked_by_the_other_client(endpoint)


def test_a_server_that_is_no_engine_is_said_to_be_none():
    class Stranger(FakeServer):
        async def handle(self, recorded):
            return web.json_response({"hello": 1}, status=200 if recorded.path == "/version" else 404)

    with Stranger() as server, pytest.raises(UsageError, match="neither /version nor /model_info"):
        probe(EngineEndpoint(url=server.url), timeout=60.0)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_failure_that_may_pass_is_sent_once_and_is_no_rejection(fake_vllm, status):
    fake_vllm.fail("/health", status)
    with pytest.raises(EngineError, match=f"answered {status}") as caught:
        send(fake_vllm.url, HttpRequest("GET", "/health"), timeout=60.0)
    assert not isinstance(caught.value, EngineRejected)
    assert fake_vllm.paths() == ["/health"]


def test_a_rejection_has_its_status_and_never_shows_a_key_that_was_sent(fake_stock_vllm):
    with pytest.raises(EngineRejected, match="api_key") as caught:
        send(
            fake_stock_vllm.url, HttpRequest("POST", "/workers", {"url": "http://a:1", "api_key": "secret"}), timeout=5
        )
    assert caught.value.status == 404
    assert "secret" not in str(caught.value)


def test_a_wrong_key_is_told_from_a_missing_route(fake_vllm):
    with pytest.raises(EngineRejected, match="the bearer key is missing, wrong") as caught:
        send(fake_vllm.url, HttpRequest("GET", "/is_paused"), key="wrong", timeout=60.0)
    assert caught.value.status == 401


def test_a_refused_connection_is_told_in_few_words():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, but not listening
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(EngineUnreachable, match=f"^GET {url}/health: Connection refused$"):
            send(url, HttpRequest("GET", "/health"), timeout=60.0)


@pytest.mark.parametrize("begun", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"])
def test_a_server_that_hangs_before_or_inside_its_reply_is_given_up(begun):
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        if begun:

            def answer():
                connection, _ = server.accept()
                connection.recv(65536)
                connection.sendall(begun)
                held.append(connection)

            held: list[socket.socket] = []
            threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(EngineUnreachable, match="no answer within 0.2 s"):
            send(url, HttpRequest("GET", "/health"), timeout=0.2)


def test_neither_a_proxy_nor_a_netrc_of_the_user_comes_between(fake_vllm, key_file, tmp_path, monkeypatch):
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password wrong\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert send(fake_vllm.url, HttpRequest("GET", "/is_paused"), key="test-key", timeout=60.0) == {"is_paused": False}
    assert fake_vllm.requests[-1].authorization == "Bearer test-key"


def test_the_time_of_a_probe_is_for_all_of_its_questions(fake_vllm, key_file, monkeypatch):
    given = []

    def slow_send(base_url, request, *, key, timeout):
        given.append(timeout)
        clock.now += 2.0
        return send(base_url, request, key=key, timeout=60.0)

    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("rltool.engines.sync_client.time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr("rltool.engines.sync_client.send", slow_send)
    probe(EngineEndpoint(url=fake_vllm.url, dialect="vllm", key_file=key_file), timeout=5.0)
    assert given[:4] == [5.0, 3.0, 1.0, 0.001]


def test_a_redirect_is_not_followed_with_the_key(fake_vllm):
    class Elsewhere(FakeServer):
        async def handle(self, recorded):
            return web.Response(status=307, headers={"Location": fake_vllm.url + "/is_paused"})

    with Elsewhere() as server, pytest.raises(EngineRejected, match="307"):
        send(server.url, HttpRequest("GET", "/is_paused"), key="test-key", timeout=60.0)
    assert fake_vllm.requests == []
