"""`rltool gateway` as a process: what it finds out of the engines, its key, its end."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
import requests

from rltool.config.gateway import GatewayConfig
from rltool.engines.endpoints import Endpoints, EngineEndpoint, ModelEndpoints
from rltool.engines.run_status import run_status
from rltool.errors import UsageError
from rltool.gateway.launch import GatewayPlan, plan_gateway, start_gateway
from rltool.processes.run_directory import open_run
from rltool.processes.spawn import ProcessFailed
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
        assert process.wait(20) == 0
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
