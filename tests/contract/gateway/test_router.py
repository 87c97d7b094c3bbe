"""Through the real sglang-router with policy `manual`: a session stays on one worker."""

from __future__ import annotations

from contextlib import ExitStack

import openai
import pytest
import requests

from rltool.config.gateway import GatewayConfig
from rltool.config.router import RouterConfig
from rltool.engines.endpoints import Endpoints, EngineEndpoint, ModelEndpoints
from rltool.gateway.launch import plan_gateway, start_gateway
from rltool.processes.run_directory import open_run
from rltool.processes.supervise import ProcessGroup
from rltool.router.launch import start_router
from tests.contract.fakes.scripted import ScriptedVllm

SESSIONS = 12
TURNS = 4


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("RLTOOL_RUNS", str(tmp_path / "runs"))
    return open_run("agents", create=True)


def talk(session):
    """What the session was answered, turn by turn."""
    messages, said = [], []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": str(turn)})
        reply = requests.post(
            f"{session['openai_base_url']}/chat/completions",
            json={"model": "policy", "messages": messages},
            headers={"Authorization": f"Bearer {session['key']}"},
            timeout=60,
        )
        messages.append(reply.json()["choices"][0]["message"])
        said.append(messages[-1]["content"])
    return said


def test_a_session_stays_on_one_worker(run, words, tokenizer_dir):
    key = run.ensure_key().read_text().strip()
    with ExitStack() as stack:
        engines = [
            stack.enter_context(ScriptedVllm(vocab_size=words.size, default=words.spell(name), key=key))
            for name in ("one", "two")
        ]
        endpoints = tuple(
            EngineEndpoint(url=engine.url, dialect="vllm", plugin=True, key_file=run.key_file) for engine in engines
        )
        Endpoints(models={"policy": ModelEndpoints(engines=endpoints)}).save(run.endpoints_file)
        group = stack.enter_context(ProcessGroup(run))
        start_router(
            RouterConfig(policy="manual", health_check_interval=1.0),
            ModelEndpoints(engines=endpoints),
            group,
            endpoints_file=run.endpoints_file,
        )
        plan = plan_gateway([], None, run.name)
        url, parts = start_gateway(GatewayConfig(model=tokenizer_dir), plan, group)
        assert [endpoint.url for endpoint in parts.endpoints] == [plan.router_url]
        bearer = {"Authorization": f"Bearer {parts.key_file.read_text()}"}
        sessions = [requests.post(f"{url}/sessions", headers=bearer, timeout=30).json() for _ in range(SESSIONS)]
        answers = [talk(session) for session in sessions]
        assert all(said == [said[0]] * TURNS for said in answers)
        assert {said[0] for said in answers} == {"one", "two"}
        for session in sessions:
            [trajectory] = requests.get(f"{url}/sessions/{session['id']}", headers=bearer, timeout=30).json()[
                "trajectories"
            ]
            assert sum(trajectory["loss_mask"]) == TURNS * len(words.spell("one"))
        assert_streams(sessions[0], engines, words)


def assert_streams(session, engines, words):
    for engine in engines:
        engine.default, engine.seconds = words.spell("a long answer"), 1e6  # no token after the first
    said, asked = "", {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    with openai.OpenAI(base_url=session["openai_base_url"], api_key=session["key"], max_retries=0) as client:
        for chunk in client.chat.completions.create(**asked):
            text = chunk.choices[0].delta.content or ""
            if text and not said:
                assert text == "a"
                for engine in engines:
                    engine.hurry()
            said += text
    assert said == "a long answer"
