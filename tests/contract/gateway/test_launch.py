"""`rltool gateway` as a process: what it finds out of the engines, its key, its end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import psutil
import pytest
import requests

from rltool.config.gateway import GatewayConfig
from rltool.engines.endpoints import Endpoints, EngineEndpoint, ModelEndpoints
from rltool.engines.run_status import run_status
from rltool.errors import UsageError
from rltool.gateway import launch
from rltool.gateway.launch import GatewayPlan, plan_gateway, start_gateway
from rltool.processes.ports import reserved_ports
from rltool.processes.readiness import NotReady, wait_until_ready
from rltool.processes.run_directory import open_run
from rltool.processes.spawn import ProcessFailed, ProcessSpec, RunningProcess
from rltool.processes.supervise import ProcessGroup
from tests.contract.fakes.scripted import ScriptedVllm
from tests.contract.supervised import Over, Supervised

HI = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("RLTOOL_RUNS", str(tmp_path / "runs"))
    return open_run("agents", create=True)


def plan_of(run, engine, **fields):
    return GatewayPlan(run, (EngineEndpoint(url=engine.url, **fields),), None)


def test_a_gateway_serves_is_seen_and_ends(run, engine, tokenizer_dir):
    config = GatewayConfig(model=tokenizer_dir)
    with ProcessGroup(run) as group:
        url, parts = start_gateway(config, plan_of(run, engine), group)
        assert (parts.served_name, parts.max_model_len, parts.endpoints[0].plugin) == ("policy", 4096, True)
        assert parts.key_file.stat().st_mode & 0o777 == 0o600
        [row] = run_status(run).processes
        assert (row.role, row.health) == ("gateway", "ok")
        bearer = {"Authorization": f"Bearer {parts.key_file.read_text()}"}
        session = requests.post(f"{url}/sessions", headers=bearer, timeout=30).json()
        reply = requests.post(
            f"{session['openai_base_url']}/chat/completions",
            json=HI,
            headers={"Authorization": f"Bearer {session['key']}"},
            timeout=30,
        )
        assert reply.json()["choices"][0]["message"]["content"] == "fine"
        [process] = group.processes
        assert parts.key_file.read_text() not in " ".join(process.state.argv)
        os.kill(process.state.pid, signal.SIGTERM)
        assert process.wait(60) == 0
    assert len(list(run.sessions_dir.glob("*.jsonl"))) == 1


def test_a_gateway_that_dies_is_started_again_at_its_port_with_its_sessions_and_is_small(run, engine, tokenizer_dir):
    with ProcessGroup(run) as group:
        url, parts = start_gateway(GatewayConfig(model=tokenizer_dir), plan_of(run, engine), group)
        bearer = {"Authorization": f"Bearer {parts.key_file.read_text()}"}
        session = requests.post(f"{url}/sessions", headers=bearer, timeout=30).json()
        watched = Supervised(group)

        def ask() -> int:
            key = {"Authorization": f"Bearer {session['key']}"}
            try:
                return requests.post(
                    f"{session['openai_base_url']}/chat/completions", json=HI, headers=key, timeout=30
                ).status_code
            except requests.ConnectionError:
                return 0

        def scenario():
            assert ask() == 200
            # torch, which transformers imports where it is there, is four fifths of what it was.
            assert psutil.Process(watched.process("gateway").pid).memory_info().rss < 200 * 2**20
            watched.kill_process("gateway")
            yield lambda: bool(watched.said) and ask() == 200

        with pytest.raises(Over):
            watched.play(scenario)
        assert any("is started again" in line for line in watched.said)
        record = requests.get(f"{url}/sessions/{session['id']}", headers=bearer, timeout=30).json()
        assert len(record["turns"]) == 2


@contextmanager
def two_processes(run, engine, tokenizer_dir) -> Iterator[list[tuple[str, RunningProcess]]]:
    """Two gateways with one directory of sessions, each at a port of its own, so that a test can choose."""
    with ProcessGroup(run) as group:
        url, parts = start_gateway(GatewayConfig(model=tokenizer_dir), plan_of(run, engine), group)
        with reserved_ports(1) as reserved:
            config = GatewayConfig(port=reserved.ports[0])
        argv = (sys.executable, "-P", "-m", "rltool.gateway.main", "--config", config.model_dump_json())
        other = group.start(ProcessSpec(role="other", argv=(*argv, "--parts", parts.model_dump_json())))

        async def serves() -> None:
            if "serving on" not in other.log.read_text():
                raise NotReady("not yet")

        asyncio.run(wait_until_ready(other, serves, timeout=120))
        yield [(url, group.processes[0]), (f"http://127.0.0.1:{config.port}", other)]


def ask(url, session, messages, **fields):
    return requests.post(
        f"{url}/sessions/{session['id']}/v1/chat/completions",
        json=HI | {"messages": messages} | fields,
        headers={"Authorization": f"Bearer {session['key']}"},
        timeout=30,
        stream=bool(fields),
    )


def record_of(url, session):
    key = {"Authorization": f"Bearer {session['key']}"}
    return requests.get(f"{url}/sessions/{session['id']}", headers=key, timeout=30).json()


def test_processes_share_sessions_and_one_that_is_killed_loses_none(run, engine, tokenizer_dir, words):
    with two_processes(run, engine, tokenizer_dir) as [(one, first), (two, _)]:
        bearer = {"Authorization": f"Bearer {run.gateway_key_file.read_text()}"}
        sessions = [requests.post(f"{one}/sessions", headers=bearer, timeout=30).json() for _ in range(4)]
        talks = [[{"role": "user", "content": f"hi {number}"}] for number in range(4)]

        def turns(urls):
            for url in urls:
                for session, messages in zip(sessions, talks, strict=True):
                    reply = ask(url, session, messages)
                    assert reply.status_code == 200, reply.text
                    messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": "on"}]

        turns([one, two, two, one])
        for session in sessions:
            assert record_of(one, session) == record_of(two, session)
        session, messages = sessions[0], talks[0]

        # Both at once, of one session: one of them is a branch, and each knows the other's.
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda url: ask(url, session, messages), [one, two] * 8))
        assert record_of(one, session) == record_of(two, session)
        assert len(record_of(two, session)["turns"]) == 20
        sampled = sum(sum(trajectory["loss_mask"]) for trajectory in record_of(two, session)["trajectories"])
        assert sampled == 20 * len(words.spell("fine"))

        # Killed within a turn, and within a stream of which the agent has had the first token.
        engine.seconds, engine.default = 1e6, words.spell("a long answer")
        with ThreadPoolExecutor() as pool:
            turn = pool.submit(ask, one, sessions[1], talks[1])
            stream = ask(one, sessions[2], talks[2], stream=True)
            lines = stream.iter_lines()
            assert any(b'"content": "a"' in line for line in lines)
            engine.wait_in_flight(2)
            before = [record_of(two, each) for each in sessions]
            os.kill(first.state.pid, signal.SIGKILL)
            with pytest.raises(requests.ConnectionError):
                turn.result(30)
            with pytest.raises(requests.RequestException):
                list(lines)
        engine.hurry()
        assert [record_of(two, each) for each in sessions] == before
        turns([two, two])
        for each in sessions[1:]:  # the killed turn and stream are no part of the record, so nothing branches
            record = record_of(two, each)
            assert [turn["trajectory"] for turn in record["turns"]] == [0] * 6
            assert {turn["left_out"] for turn in record["turns"]} == {""}


def test_processes_behind_one_port_are_started_again_one_by_one(run, engine, tokenizer_dir):
    config = GatewayConfig(model=tokenizer_dir, processes=2)
    with ProcessGroup(run) as group:
        url, parts = start_gateway(config, plan_of(run, engine), group)
        bearer = {"Authorization": f"Bearer {parts.key_file.read_text()}"}
        session = requests.post(f"{url}/sessions", headers=bearer, timeout=30).json()
        watched = Supervised(group)
        messages = [{"role": "user", "content": "hi"}]

        def served_by() -> set[int]:
            """Each request has a connection of its own, which the kernel gives to either."""
            asked = (requests.get(f"{url}/status", headers=bearer, timeout=30).json() for _ in range(64))
            return {status["pid"] for status in asked}

        def scenario():
            pids = [watched.process(role).pid for role in ("gateway", "gateway-1")]
            assert served_by() == set(pids)
            watched.kill_process("gateway-1")
            yield lambda: bool(watched.said)
            yield lambda: len(served_by()) == 2
            assert pids[0] in served_by() and pids[1] not in served_by()
            for _ in range(16):
                reply = ask(url, session, messages)
                messages.extend([reply.json()["choices"][0]["message"], {"role": "user", "content": "on"}])

        with pytest.raises(Over):
            watched.play(scenario)
        [trajectory] = record_of(url, session)["trajectories"]
        assert len(trajectory["finish_reasons"]) == 16
        refused = requests.post(f"{url}/episodes/1", headers=bearer, json={"task": {}}, timeout=30)
        assert (refused.status_code, "--processes" in refused.text) == (400, True)


@pytest.mark.parametrize(
    ("platform", "processes", "message"),
    [
        ("darwin", 2, "--processes 2: only Linux deals out connections of one port to several"),
        ("darwin", 1, "/models/fake is not on this host"), ("linux", 2, "/models/fake is not on this host"),
    ],
)  # fmt: skip
def test_several_processes_are_refused_where_a_port_is_not_shared(
    run, engine, monkeypatch, platform, processes, message
):
    """What else is wrong is found behind it: the model's tokenizer is not here."""
    monkeypatch.setattr(launch, "sys", SimpleNamespace(platform=platform, executable=sys.executable))
    with ProcessGroup(run) as group:
        with pytest.raises(UsageError, match=message):
            start_gateway(GatewayConfig(processes=processes), plan_of(run, engine), group)
        assert group.processes == []


def test_a_model_without_a_tokenizer_here_is_refused_before_anything_starts(run, engine, tmp_path):
    with ProcessGroup(run) as group:
        with pytest.raises(UsageError, match="/models/fake is not on this host: give --model"):
            start_gateway(GatewayConfig(), plan_of(run, engine), group)
        with pytest.raises(UsageError, match="--max-model-len"):
            start_gateway(GatewayConfig(model=tmp_path), GatewayPlan(run, (), "http://127.0.0.1:1"), group)
        assert group.processes == []


def test_engines_of_two_models_are_refused(run, engine, words, tokenizer_dir):
    with ScriptedVllm(vocab_size=words.size, default=[1]) as other, ProcessGroup(run) as group:
        other.model_id = "judge"
        plan = GatewayPlan(run, (EngineEndpoint(url=engine.url), EngineEndpoint(url=other.url)), None)
        with pytest.raises(UsageError, match="judge, policy"):
            start_gateway(GatewayConfig(model=tokenizer_dir), plan, group)


def test_a_gateway_that_dies_while_starting_says_why(run, engine, tmp_path):
    (empty := tmp_path / "empty").mkdir()
    with ProcessGroup(run) as group, pytest.raises(ProcessFailed, match="has no tokenizer"):
        start_gateway(GatewayConfig(model=empty), plan_of(run, engine), group)


def test_the_router_of_endpoints_json_or_of_the_flag_is_where_turns_go(run, engine):
    engines = (EngineEndpoint(url=engine.url),)
    Endpoints(models={"policy": ModelEndpoints(engines=engines, data_url="http://127.0.0.1:9")}).save(
        run.endpoints_file
    )
    assert plan_gateway([], None, "agents").router_url == "http://127.0.0.1:9"
    assert plan_gateway([f"@{run.endpoints_file}"], "127.0.0.1:8", None) == GatewayPlan(
        run, engines, "http://127.0.0.1:8"
    )
    assert plan_gateway([engine.url], None, "agents").router_url is None
    assert plan_gateway([], "127.0.0.1:8", "agents").engines == ()
    with pytest.raises(UsageError, match="--router is one URL"):
        plan_gateway([], "127.0.0.1:8,127.0.0.1:9", "agents")
