"""Bad requests, limits, engines and gateways that die."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import requests
from aiohttp import web

from rltool.chat.rendering import Renderer
from rltool.engines.client import EngineClient
from rltool.engines.types import ROUTING_KEY_HEADER
from rltool.gateway import planning
from rltool.gateway.errors import NotRecorded
from rltool.gateway.server import TURN_HEADER
from rltool.gateway.store import SessionFile
from rltool.processes import connections
from tests.contract.fakes.scripted import ScriptedVllm
from tests.contract.fakes.sglang import EXPECTED_KEY, FakeSglang
from tests.contract.gateway.running import QUICK, Gateway

HI = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
CLAUDE_HI = {**HI, "max_tokens": 9}


def post(gateway, session, path="/chat/completions", *, key=None, **options):
    return gateway.http("POST", f"/sessions/{session['id']}/v1{path}", key=key or session["key"], **options)


def abort_all(engine, version=None):
    """As a weight sync that aborts: what the engine has of its requests it gives back, then it goes on."""
    requests.post(f"{engine.url}/pause", params={"mode": "abort"}, timeout=30)
    if version is not None:
        engine.version = version
    requests.post(f"{engine.url}/resume", timeout=30)


def error_of(reply):
    return reply.json()["error"]


@pytest.fixture
def session(gateway):
    return gateway.open()


@pytest.mark.parametrize("path", ["/chat/completions", "/completions", "/responses", "/messages"])
def test_unknown_sessions_foreign_keys_and_broken_bodies_in_each_apis_form(gateway, session, path):
    other = gateway.open()
    unknown = {"id": "0" * 32, "key": "x"}
    replies = [
        (post(gateway, unknown, path, json=HI), 404),
        (post(gateway, session, path, key=other["key"], json=HI), 401),
        (gateway.http("POST", f"/sessions/{session['id']}/v1{path}", key=None, json=HI), 401),
        (post(gateway, session, path, data=b"{"), 400),
        (post(gateway, session, path, data=b"[]"), 400),
        (
            post(
                gateway,
                session,
                path,
                data=b'{"model": "policy", "messages": [{"role": "user", "content": "\\ud800"}]}',
            ),
            400,
        ),
        (post(gateway, session, path, data=b'{"model": "policy", "temperature": NaN}'), 400),
        (post(gateway, session, path, json={}), 400),
    ]
    for reply, status in replies:
        assert reply.status_code == status, reply.text
        if path == "/messages":
            assert reply.json()["type"] == "error"
        assert error_of(reply)["message"] and error_of(reply)["type"]
    assert gateway.record(session)["turns"] == []


def test_the_gateways_key_opens_and_the_sessions_does_not(gateway, session):
    assert gateway.http("POST", "/sessions", key=session["key"]).status_code == 401
    assert gateway.http("POST", "/sessions", key=None).status_code == 401
    assert gateway.http("POST", "/sessions").status_code == 201
    assert gateway.http("POST", "/sessions", json={"rewards": 1}).status_code == 400
    assert gateway.http("GET", "/status", key=session["key"]).status_code == 401
    assert gateway.http("GET", f"/sessions/{session['id']}", key=session["key"]).status_code == 200
    assert gateway.http("GET", f"/sessions/{session['id']}", key="x").status_code == 401
    assert gateway.http("GET", "/nothing").status_code == 404
    assert gateway.http("GET", "/health", key=None).status_code == 200


def test_a_deleted_session_gives_its_record_once_and_for_all(gateway, session):
    post(gateway, session, json=HI)
    record = gateway.http("DELETE", f"/sessions/{session['id']}").json()
    assert len(record["turns"]) == 1
    refused = post(gateway, session, json=HI)
    assert (refused.status_code, "has ended: deleted" in refused.text) == (404, True)
    assert gateway.http("DELETE", f"/sessions/{session['id']}").json() == gateway.record(session)
    assert gateway.record(session)["trajectories"] == record["trajectories"]
    assert gateway.http("GET", "/status").json()["sessions_open"] == 0


def test_a_body_that_is_too_large_and_a_prompt_that_is_too_long(engine, tokenizer_dir, tmp_path):
    with Gateway(tmp_path, tokenizer_dir, [engine], {"max_body_bytes": 20_000}) as gateway:
        session = gateway.open()
        large = {**CLAUDE_HI, "messages": [{"role": "user", "content": "x" * 30_000}]}
        for path in ("/chat/completions", "/messages"):
            assert post(gateway, session, path, json=large).status_code == 413
        long = {**HI, "messages": [{"role": "user", "content": "x" * 5000}]}
        refused = post(gateway, session, json=long)
        assert (refused.status_code, error_of(refused)["code"]) == (400, "context_length_exceeded")
        assert engine.asked() == []


def test_a_template_that_fails_says_why(gateway, session):
    messages = [{"role": "tool", "tool_call_id": "a", "content": "5"}, *HI["messages"]]
    refused = post(gateway, session, json={**HI, "messages": messages})
    assert (refused.status_code, error_of(refused)["code"]) == (400, "template_failed")
    assert "a tool answers a call" in error_of(refused)["message"]


def test_a_prefilled_answer_is_refused(gateway, session):
    messages = [*HI["messages"], {"role": "assistant", "content": "Sure,"}]
    refused = post(gateway, session, json={**HI, "messages": messages})
    assert (refused.status_code, "prefill" in refused.text) == (400, True)


def test_an_agent_that_never_ends_or_floods_is_stopped(engine, tokenizer_dir, tmp_path):
    limits = {"max_turns": 3, "max_turns_at_once": 2, "max_sessions": 1}
    with Gateway(tmp_path, tokenizer_dir, [engine], limits) as gateway:
        session = gateway.open()
        assert gateway.http("POST", "/sessions").status_code == 429
        engine.seconds = 60.0
        waiting = [threading.Thread(target=post, args=(gateway, session), kwargs={"json": HI}) for _ in range(2)]
        for thread in waiting:
            thread.start()
        engine.wait_in_flight(2)
        assert post(gateway, session, json=HI).status_code == 429
        engine.seconds = 0.0
        abort_all(engine)
        for thread in waiting:
            thread.join()
        assert post(gateway, session, json=HI).status_code == 200
        refused = post(gateway, session, json=HI)
        assert (refused.status_code, error_of(refused)["code"]) == (400, "session_limit")
        assert len(gateway.record(session)["turns"]) == 3


def test_a_session_has_only_so_many_tokens(engine, tokenizer_dir, tmp_path):
    with Gateway(tmp_path, tokenizer_dir, [engine], {"max_session_tokens": 10}) as gateway:
        session = gateway.open()
        assert post(gateway, session, json=HI).status_code == 200
        assert error_of(post(gateway, session, json=HI))["code"] == "session_limit"


def test_another_temperature_than_the_run_s_is_refused(engine, tokenizer_dir, tmp_path):
    with Gateway(tmp_path, tokenizer_dir, [engine], {"temperature": 0.8}) as gateway:
        session = gateway.open()
        assert post(gateway, session, json=HI | {"temperature": 0.8}).status_code == 200
        refused = post(gateway, session, json=HI | {"temperature": 0.9})
        assert (refused.status_code, error_of(refused)["param"]) == (400, "temperature")


def test_another_name_for_the_model(engine, tokenizer_dir, tmp_path):
    with Gateway(tmp_path, tokenizer_dir, [engine], {"aliases": ("gpt-5",)}) as gateway:
        assert post(gateway, gateway.open(), json=HI | {"model": "gpt-5"}).status_code == 200


# -- engines


@pytest.fixture
def engines(words):
    with (
        ScriptedVllm(vocab_size=words.size, default=words.spell("one")) as one,
        ScriptedVllm(vocab_size=words.size, default=words.spell("two")) as two,
    ):
        yield [one, two]


def test_a_session_stays_on_its_engine_and_moves_when_that_dies(engines, tokenizer_dir, tmp_path):
    with Gateway(tmp_path, tokenizer_dir, engines) as gateway:
        sessions = [gateway.open() for _ in range(4)]
        first = [post(gateway, s, json=HI).json()["choices"][0]["message"]["content"] for s in sessions]
        again = [post(gateway, s, json=HI).json()["choices"][0]["message"]["content"] for s in sessions]
        assert (sorted(first), again) == (["one", "one", "two", "two"], first)
        engines[0].die()
        assert {post(gateway, s, json=HI).json()["choices"][0]["message"]["content"] for s in sessions} == {"two"}
        assert gateway.record(sessions[first.index("one")])["turns"][-1]["engine"] == engines[1].url


def test_an_engine_that_dies_in_a_turn_costs_the_agent_nothing(engines, tokenizer_dir, tmp_path):
    one, two = engines
    with Gateway(tmp_path, tokenizer_dir, engines) as gateway:
        session = gateway.open()
        one.seconds = 60.0
        replies = []
        agent = threading.Thread(target=lambda: replies.append(post(gateway, session, json=HI).json()))
        agent.start()
        one.wait_in_flight(1)
        one.die()
        agent.join(30)
        assert replies[0]["choices"][0]["message"]["content"] == "two"
        [trajectory] = gateway.record(session)["trajectories"]
        assert sum(trajectory["loss_mask"]) == len(two.default)


def test_an_engine_that_dies_within_a_stream_is_followed_by_another_from_there(engines, tokenizer_dir, tmp_path, words):
    one, two = engines
    one.default, one.version, two.version = words.spell("a long answer"), "first", "second"
    one.seconds = 1e6
    with (
        Gateway(tmp_path, tokenizer_dir, engines) as gateway,
        openai.OpenAI(api_key="-", base_url=gateway.url, max_retries=0) as client,
    ):
        session = gateway.open()
        client = client.with_options(api_key=session["key"], base_url=session["openai_base_url"])
        said = ""
        for chunk in client.chat.completions.create(**HI, stream=True):
            text = chunk.choices[0].delta.content or ""
            if text and not said:  # the first token is here, so it cannot be sampled again
                one.die()
            said += text
        assert said == "atwo"
        [trajectory] = gateway.record(session)["trajectories"]
        assert sum(trajectory["loss_mask"]) == 1 + len(two.default)
        assert [(s["version"], s["end"] - s["start"]) for s in trajectory["versions"]] == [
            ("first", 1), ("second", len(two.default)),
        ]  # fmt: skip


@pytest.mark.parametrize("trained", [False, True])
def test_what_an_agent_was_sent_of_a_stream_that_it_cancelled_is_recorded(
    engine, tokenizer_dir, tmp_path, words, trained
):
    engine.default = words.spell("a long answer")
    engine.seconds = 1e6
    with Gateway(tmp_path, tokenizer_dir, [engine], {"train_cancelled": trained}) as gateway:
        session = gateway.open()
        url = session["openai_base_url"]
        with openai.OpenAI(base_url=url, api_key=session["key"], max_retries=0) as client:
            stream = client.chat.completions.create(**HI, stream=True)
            assert "".join(next(stream).choices[0].delta.content for _ in range(2)) == "a"
            stream.close()
        until(lambda: gateway.record(session)["turns"] and not engine.batch.running)
        record = gateway.record(session)
        [turn], [trajectory] = record["turns"], record["trajectories"]
        assert (turn["left_out"], turn["finish_reason"]) == ("" if trained else "unreceived", "length")
        assert turn["reply"]["text"] == "a" and trajectory["token_ids"][-1:] == words.spell("a")[:1]
        assert (sum(trajectory["loss_mask"]), trajectory["versions"][0]["version"]) == (1, "default")
        engine.seconds = 0.0
        messages = [*HI["messages"], {"role": "assistant", "content": "a"}, {"role": "user", "content": "Go on."}]
        assert post(gateway, session, json=HI | {"messages": messages}).status_code == 200
        assert len(gateway.record(session)["trajectories"]) == 1


@pytest.fixture(params=[True, False], ids=["incremental", "cumulative"])
def sglang(request, words, tokenizer_dir, tmp_path):
    """(an engine, a gateway, a session's client)"""
    (tmp_path / "engine.key").write_text(EXPECTED_KEY)
    said = words.spell("a long answer")
    options = dict(dialect="sglang", plugin=False, engine_key=tmp_path / "engine.key")
    with (
        FakeSglang(says=said, vocab_size=words.size, incremental=request.param, seconds=1e6) as engine,
        Gateway(tmp_path, tokenizer_dir, [engine], **options) as gateway,
    ):
        session = gateway.open()
        with openai.OpenAI(base_url=session["openai_base_url"], api_key=session["key"], max_retries=0) as client:
            yield engine, gateway, session, client


def test_sglang_streams_and_its_tokens_are_recorded_as_it_made_them(sglang):
    engine, gateway, session, client = sglang
    said = gateway.as_made(client.chat.completions.create(**HI, stream=True), session, engine)
    [trajectory] = gateway.record(session)["trajectories"]
    size = len(engine.says)
    assert said == "a long answer" and trajectory["token_ids"][-size:] == engine.says
    assert trajectory["logprobs"][-size:] == [engine.logprob(42, position) for position in range(size)]
    assert [(span["version"], span["end"] - span["start"]) for span in trajectory["versions"]] == [("default", size)]


@pytest.mark.parametrize("synced", [False, True])
def test_of_a_cancelled_stream_of_sglang_is_recorded_what_is_known(sglang, synced):
    engine, gateway, session, client = sglang
    engine.seconds = 1e6 if not synced else 0.2 * len(engine.says)
    stream = client.chat.completions.create(**HI, stream=True)
    assert "".join(next(stream).choices[0].delta.content for _ in range(2)) == "a"
    if synced:
        engine.weight_version = "next"
        assert "".join(next(stream).choices[0].delta.content for _ in range(4))
    stream.close()
    until(lambda: gateway.http("GET", "/status").json()["turns"].get("abandoned") == 1)
    until(lambda: not engine.batch.running)
    record = gateway.record(session)
    if synced:  # which of its tokens are of which weights is not
        assert record["turns"] == []
        return
    [turn], [trajectory] = record["turns"], record["trajectories"]
    assert (turn["left_out"], turn["reply"]["text"], sum(trajectory["loss_mask"])) == ("unreceived", "a", 1)
    assert (trajectory["versions"][0]["version"], trajectory["logprobs"][-1]) == ("default", engine.logprob(42, 0))


def test_what_an_engine_aborted_is_taken_up_with_both_versions(gateway, session, engine, words):
    engine.default = words.spell("a long answer that is cut in two")
    engine.seconds = 400.0  # for 1024 tokens
    replies = []
    agent = threading.Thread(target=lambda: replies.append(post(gateway, session, json=HI).json()))
    agent.start()
    engine.wait_in_flight(1)
    engine.script.append(words.spell("and here is the rest"))
    engine.seconds = 0.0
    abort_all(engine, version="next")
    agent.join(30)
    [trajectory] = gateway.record(session)["trajectories"]
    versions = [(span["version"], span["end"] - span["start"]) for span in trajectory["versions"]]
    assert [version for version, _ in versions] == ["default", "next"]
    assert replies[0]["choices"][0]["message"]["content"].endswith("and here is the rest")
    prompt, rest = engine.asked()
    assert trajectory["token_ids"][: len(rest)] == rest
    assert len(rest) - len(prompt) == versions[0][1] >= 1


def test_without_an_engine_a_turn_fails_within_its_time(engine, tokenizer_dir, tmp_path):
    with Gateway(tmp_path, tokenizer_dir, [engine], {"turn_timeout": 0.5}, policy=QUICK) as gateway:
        session = gateway.open()
        engine.die()
        for path, body in (
            ("/chat/completions", HI),
            ("/messages", CLAUDE_HI),
            ("/chat/completions", HI | {"stream": True}),
        ):
            reply = post(gateway, session, path, json=body)
            assert (reply.status_code, "turn-timeout" in reply.text) == (503, True)
        assert gateway.record(session)["turns"] == []
        engine.start()
        assert post(gateway, session, json=HI).status_code == 200


def test_log_probabilities_that_are_missing_are_no_answer(engine, tokenizer_dir, tmp_path):
    engine.missing_logprobs = True
    with Gateway(tmp_path, tokenizer_dir, [engine], {"turn_timeout": 0.5}) as gateway:
        session = gateway.open()
        reply = post(gateway, session, json=HI)
        assert (reply.status_code, "without log-probabilities" in reply.text) == (503, True)


def test_the_session_is_the_routing_key(gateway, session, monkeypatch):
    sent = []
    generate = EngineClient.generate

    async def spy(self, *arguments, **options):
        sent.append(options["headers"])
        return await generate(self, *arguments, **options)

    monkeypatch.setattr(EngineClient, "generate", spy)
    post(gateway, session, json=HI)
    assert sent == [{ROUTING_KEY_HEADER: session["id"]}]


# -- the agent and the gateway


def gone(session, **options) -> None:
    """A client that asks, and hangs up after a tenth of a second."""
    with (
        openai.OpenAI(
            base_url=session["openai_base_url"], api_key=session["key"], max_retries=0, timeout=0.1
        ) as client,
        pytest.raises(openai.APITimeoutError),
    ):
        client.chat.completions.create(**HI, **options)


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_whose_client_hangs_up_is_ended_at_the_engine_and_not_recorded(gateway, session, engine, stream):
    engine.seconds = 60_000.0  # for 1024 tokens: minutes for these
    if stream:  # before its first token: what an agent has had is recorded
        engine.delay("/rltool/generate", 60)
    gone(session, stream=stream)
    until(lambda: gateway.http("GET", "/status").json()["turns"].get("abandoned") == 1)
    until(lambda: not engine.batch.running)
    engine.seconds = 0.0
    engine.heal()
    assert post(gateway, session, json=HI).status_code == 200
    assert [turn["left_out"] for turn in gateway.record(session)["turns"]] == [""]


def test_a_turn_that_ended_and_could_not_be_written_is_marked(gateway, session, monkeypatch):
    plain = web.Response.write_eof

    async def fails(self, *arguments):
        if TURN_HEADER in self.headers:
            raise ConnectionResetError
        await plain(self, *arguments)

    monkeypatch.setattr(web.Response, "write_eof", fails)
    with (
        openai.OpenAI(base_url=session["openai_base_url"], api_key=session["key"], max_retries=0, timeout=2) as client,
        pytest.raises(openai.APIError),
    ):
        client.chat.completions.create(**HI)
    monkeypatch.undo()
    until(lambda: [turn["left_out"] for turn in gateway.record(session)["turns"]] == ["unreceived"])
    assert post(gateway, session, json=HI).status_code == 200
    assert [turn["left_out"] for turn in gateway.record(session)["turns"]] == ["unreceived", ""]


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised(gateway, session, monkeypatch):
    monkeypatch.setattr(Renderer, "prompt", None)
    huge = [{"role": "user", "content": "x" * 7_000_000}]
    refused = post(gateway, session, json=HI | {"messages": huge})
    assert (refused.status_code, error_of(refused)["code"]) == (400, "context_length_exceeded")
    said = {"model": "policy", "max_tokens": 9, "messages": huge}
    assert "prompt is too long" in post(gateway, session, "/messages", json=said).json()["error"]["message"]


def test_a_long_prompt_holds_up_no_other_session(engine, tokenizer_dir, tmp_path, monkeypatch):
    plain, inside, go_on = Renderer.prompt, threading.Event(), threading.Event()

    def slow(self, conversation):
        if conversation.characters > 1000:
            inside.set()
            assert go_on.wait(60)
        return plain(self, conversation)

    monkeypatch.setattr(Renderer, "prompt", slow)
    monkeypatch.setattr(planning, "LONG", 1000)
    with Gateway(tmp_path, tokenizer_dir, [engine]) as gateway, ThreadPoolExecutor(1) as beside:
        long = HI | {"messages": [{"role": "user", "content": "hello" * 300}]}
        waiting = beside.submit(post, gateway, gateway.open(), json=long)
        assert inside.wait(60)
        assert post(gateway, gateway.open(), json=HI).status_code == 200
        go_on.set()
        assert waiting.result().status_code == 200


def test_turns_are_marked_by_header_by_base_url_and_by_a_route(gateway, session, engine, words):
    url = session["openai_base_url"]
    untrained = url.replace("/v1", "/untrained/v1")
    for base, headers in ((url, {"X-Rltool-Train": "false"}), (untrained, {}), (url, {}), (url, {})):
        with openai.OpenAI(base_url=base, api_key=session["key"], default_headers=headers) as client:
            number = engine.asked().__len__()
            client.chat.completions.create(model="policy", messages=[{"role": "user", "content": f"task {number}"}])
    turns = gateway.record(session)["turns"]
    assert [turn["left_out"] for turn in turns] == ["asked", "asked", "", ""]
    route = f"/sessions/{session['id']}/turns/"
    assert gateway.http("POST", route + turns[2]["id"], key=session["key"], json={"reward": 0.5}).status_code == 200
    assert gateway.http("POST", route + turns[3]["id"], json={"trained": False, "reward": 2}).status_code == 200
    assert gateway.http("POST", route + turns[0]["id"], json={"trained": True}).status_code == 200
    assert gateway.http("POST", route + "0" * 32, json={"trained": True}).status_code == 404
    for wrong in ({"trained": "no"}, {"reward": "high"}, {"rewards": 1}):
        assert gateway.http("POST", route + turns[0]["id"], json=wrong).status_code == 400
    found = [(turn["left_out"], turn["reward"]) for turn in gateway.record(session)["turns"]]
    assert found == [("", None), ("asked", None), ("", 0.5), ("asked", 2)]


def test_a_gateway_that_was_killed_resumes_its_sessions(engine, tokenizer_dir, tmp_path, words):
    first = Gateway(tmp_path, tokenizer_dir, [engine])
    with first:
        session = first.open(row=3)
        engine.script.append(words.spell("hello"))
        said = post(first, session, json=HI).json()["choices"][0]["message"]
        record = first.record(session)
        first.kill()
    with Gateway(tmp_path, tokenizer_dir, [engine], port=first.port) as second:
        assert second.http("GET", "/status").json()["sessions"]["resumable"] == 1
        assert second.record(session) == record
        messages = [
            *HI["messages"],
            {"role": "assistant", "content": said["content"]},
            {"role": "user", "content": "on"},
        ]
        reply = post(second, session, json=HI | {"messages": messages})
        assert reply.headers["X-Rltool-Trajectory"] == "0"
        [trajectory] = second.record(session)["trajectories"]
        assert (
            trajectory["token_ids"][: len(record["trajectories"][0]["token_ids"])]
            == record["trajectories"][0]["token_ids"]
        )
        assert engine.asked()[-1][: len(engine.asked()[0])] == engine.asked()[0]


def test_a_turn_that_cannot_be_recorded_is_not_given_out(gateway, session, monkeypatch):
    def full(*_):
        raise NotRecorded("sessions cannot be written: No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(SessionFile, "turn", full)
        reply = post(gateway, session, json=HI)
    assert (reply.status_code, error_of(reply)["code"]) == (500, "not_recorded")
    assert gateway.record(session)["turns"] == []
    assert post(gateway, session, json=HI).status_code == 200


def test_long_turns_keep_their_stream_open(gateway, session, engine, monkeypatch):
    monkeypatch.setattr("rltool.gateway.server.PING_SECONDS", 0.05)
    engine.delay("/rltool/generate", 0.5)
    reply = post(gateway, session, "/messages", json=CLAUDE_HI | {"stream": True})
    events = [line for line in reply.text.splitlines() if line.startswith("event:")]
    assert events[0] == "event: ping"
    assert events[-1] == "event: message_stop"


def test_a_failure_within_a_stream_is_an_event_of_it(engine, tokenizer_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("rltool.gateway.server.PING_SECONDS", 0.05)
    with Gateway(tmp_path, tokenizer_dir, [engine], {"turn_timeout": 0.3}) as gateway:
        session = gateway.open()
        engine.seconds = 1e6
        reply = post(gateway, session, "/messages", json=CLAUDE_HI | {"stream": True})
        last = reply.text.strip().split("\n\n")[-1]
        assert last.startswith("event: error")
        assert json.loads(last.partition("data: ")[2])["error"]["type"] == "overloaded_error"
        with (
            openai.OpenAI(base_url=session["openai_base_url"], api_key=session["key"], max_retries=0) as client,
            pytest.raises(openai.APIError, match="no engine has finished this turn"),
        ):
            list(client.chat.completions.create(**HI, stream=True))


def test_a_turn_that_is_sent_again_has_another_request_id(gateway, session, engine):
    engine.fail("/rltool/generate", 500, times=1)
    assert post(gateway, session, json=HI).status_code == 200
    ids = [recorded.body["request_id"] for recorded in engine.requests if recorded.path == "/rltool/generate"]
    assert len(ids) == len(set(ids)) == 2, "an SGLang refuses one that it still works on"


def half_sent(port: int) -> socket.socket:
    """A connection that has sent half of the head of a request."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    connection.sendall(b"POST /sessions HTTP/1.1\r\nHost: x\r\nAuthoriz")
    return connection


def test_requests_that_are_half_sent_are_ended_in_time(engine, tokenizer_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.3)
    with Gateway(tmp_path, tokenizer_dir, [engine]) as gateway, contextlib.ExitStack() as stack:
        kept = [stack.enter_context(half_sent(gateway.port)) for _ in range(20)]
        assert [connection.recv(1) for connection in kept] == [b""] * 20, "the gateway has closed each"
        assert gateway.http("GET", "/health").status_code == 200


def is_refused(port: int) -> bool:
    """Whether a further connection is closed before it has sent anything."""
    with socket.create_connection(("127.0.0.1", port), timeout=0.5) as connection:
        try:
            return connection.recv(1) == b""
        except TimeoutError:
            return False
        except ConnectionResetError:
            return True


def until(holds) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline


def test_connections_that_leave_too_few_descriptors_are_closed_at_once(engine, tokenizer_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "most_connections", lambda: 3)
    with Gateway(tmp_path, tokenizer_dir, [engine]) as gateway:
        with contextlib.ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(half_sent(gateway.port))
            until(lambda: is_refused(gateway.port))
        until(lambda: not is_refused(gateway.port))
        assert gateway.http("GET", "/health").status_code == 200


def test_metadata_of_a_session_is_bounded(gateway):
    assert gateway.http("POST", "/sessions", json={"metadata": {"row": "x" * 60_000}}).status_code == 201
    refused = gateway.http("POST", "/sessions", json={"metadata": {"row": "x" * 66_000}})
    assert refused.status_code == 413 and "65536 characters" in refused.text
