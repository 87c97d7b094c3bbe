"""`rltool gateway` in front of the real vLLM: an agent with the openai client, two turns, a tool call."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import anthropic
import openai
import pytest
import requests

from tests import npm_programs
from tests.contract.fakes.scripted import ScriptedVllm
from tests.contract.gateway.running import Gateway
from tests.e2e.engines import programs, serving_vllm, start_vllm, wait_ready
from tests.e2e.taught import CALL, QUESTION, TOOL, taught, taught_records
from tests.gateway_models import Words, gateway_tokenizer, write_gateway_model

pytestmark = [pytest.mark.e2e, pytest.mark.long]

LONG = 900
ATTEMPTS = 10
"""The model is nearly sure of both answers, and is sampled at temperature 1."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return taught(tmp_path_factory.mktemp("gateway-model"))


@pytest.fixture(scope="module")
def engine(model_dir, tmp_path_factory):
    engine = start_vllm(model_dir, tmp_path_factory.mktemp("gateway-vllm"), max_model_len=1024)
    try:
        yield wait_ready(engine)
    finally:
        engine.stop()


@pytest.fixture
def run(engine, tmp_path):
    """The environment of a run directory with a gateway of its own; ends it."""
    environment = os.environ | {"RLTOOL_RUNS": str(tmp_path / "runs")}

    def rltool(*arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "rltool", *arguments]
        return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=180)

    key_file = engine.endpoint.key_file
    started = rltool("gateway", engine.url, "--run", "agents", "--engine-key-file", str(key_file), "--detach")
    try:
        assert started.returncode == 0, started.stdout + started.stderr
        yield tmp_path / "runs" / "agents", rltool
    finally:
        rltool("stop", "--run", "agents")


def streamed(client, messages):
    """The assistant's message of one streamed completion."""
    with client.chat.completions.stream(model="policy", messages=messages, tools=[TOOL]) as stream:
        return stream.get_final_completion().choices[0].message


def two_turns(gateway: str, key: str):
    """(tool call was made, the session's record)"""
    bearer = {"Authorization": f"Bearer {key}"}
    session = requests.post(f"{gateway}/sessions", headers=bearer, timeout=30).json()
    with openai.OpenAI(base_url=session["openai_base_url"], api_key=session["key"], max_retries=0) as client:
        said = streamed(client, [QUESTION])
        if not said.tool_calls:
            return False, None
        call = said.tool_calls[0]
        sent = {"id": call.id, "type": "function"} | {
            "function": {"name": call.function.name, "arguments": call.function.arguments}
        }
        messages = [
            QUESTION,
            {"role": "assistant", "content": said.content, "tool_calls": [sent]},
            {"role": "tool", "tool_call_id": call.id, "content": "5"},
        ]
        streamed(client, messages)
    return True, requests.delete(f"{gateway}/sessions/{session['id']}", headers=bearer, timeout=30).json()


def largest_difference(model_dir: Path, trajectory) -> float:
    """Of a recorded log-probability and the model's own in float64: transformers in fp32 is up to 2e-5 from that."""
    import torch
    from transformers import AutoModelForCausalLM

    ids, mask = torch.tensor([trajectory["token_ids"]]), trajectory["loss_mask"]
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return max(abs(logprobs[i - 1].item() - trajectory["logprobs"][i]) for i, loss in enumerate(mask) if loss)


def metric(engine, name: str) -> float:
    headers = {"Authorization": f"Bearer {engine.endpoint.key_file.read_text().strip()}"}
    lines = requests.get(f"{engine.url}/metrics", headers=headers, timeout=30).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:{name}{{"))


def hung_up(client, engine) -> float:
    """Tokens that the engine has made for a client that went away."""
    for _ in range(ATTEMPTS):  # the model may end by itself before that
        before = metric(engine, "generation_tokens_total")
        try:
            client.with_options(timeout=0.3).completions.create(model="policy", prompt="zyx" * 9, max_tokens=LONG)
        except openai.APITimeoutError:
            while metric(engine, "num_requests_running"):
                time.sleep(0.05)
            return metric(engine, "generation_tokens_total") - before
    pytest.fail("the model has always ended")


def test_a_stream_that_is_cancelled_is_recorded_with_the_model_s_log_probabilities(run, engine, model_dir):
    directory, _ = run
    gateway = json.loads((directory / "state" / "gateway.json").read_text())["url"]
    bearer = {"Authorization": f"Bearer {(directory / 'state' / 'gateway.key').read_text()}"}
    session = requests.post(f"{gateway}/sessions", headers=bearer, timeout=30).json()
    with openai.OpenAI(base_url=session["openai_base_url"], api_key=session["key"], max_retries=0) as gpt:
        for _ in range(ATTEMPTS):  # the model may end by itself before that
            before = metric(engine, "generation_tokens_total")
            stream = gpt.completions.create(model="policy", prompt="zyx" * 9, max_tokens=LONG, stream=True)
            said = "".join(next(stream).choices[0].text for _ in range(3))
            stream.close()
            while metric(engine, "num_requests_running"):
                time.sleep(0.05)
            record = requests.get(f"{gateway}/sessions/{session['id']}", headers=bearer, timeout=30).json()
            if record["turns"] and record["turns"][-1]["left_out"]:
                break
    assert metric(engine, "generation_tokens_total") - before < LONG
    assert record["turns"][-1]["raw_reply"].startswith(said)
    last = record["trajectories"][-1]
    assert 3 <= sum(last["loss_mask"]) < LONG
    assert sum(span["end"] - span["start"] for span in last["versions"]) == sum(last["loss_mask"])
    assert largest_difference(model_dir, last) < 1e-5


def test_every_api_records_the_model_s_log_probabilities_and_a_client_that_hangs_up_ends_its_turn(
    run, engine, model_dir
):
    directory, _ = run
    gateway = json.loads((directory / "state" / "gateway.json").read_text())["url"]
    bearer = {"Authorization": f"Bearer {(directory / 'state' / 'gateway.key').read_text()}"}
    session = requests.post(f"{gateway}/sessions", headers=bearer, timeout=30).json()
    gpt = openai.OpenAI(base_url=session["openai_base_url"], api_key=session["key"], max_retries=0)
    claude = anthropic.Anthropic(base_url=session["anthropic_base_url"], api_key=session["key"], max_retries=0)
    with gpt, claude:
        assert hung_up(gpt, engine) < LONG
        messages = [{"role": "user", "content": "hello there"}]
        first = gpt.chat.completions.create(model="policy", messages=messages, max_tokens=20, stop="e", logprobs=True)
        gpt.completions.create(model="policy", prompt="hello", max_tokens=20)
        gpt.responses.create(model="policy", input="and you?", max_output_tokens=20)
        answer = {"role": "assistant", "content": first.choices[0].message.content or "-"}
        go_on = [*messages, answer, {"role": "user", "content": "go"}]
        said = claude.messages.create(model="policy", max_tokens=20, messages=go_on)
        assert said.usage.output_tokens
    record = requests.delete(f"{gateway}/sessions/{session['id']}", headers=bearer, timeout=30).json()
    assert [turn["api"] for turn in record["turns"]][-4:] == ["chat", "completions", "responses", "anthropic"]
    assert max(largest_difference(model_dir, trajectory) for trajectory in record["trajectories"]) < 1e-5


def test_recorded_log_probabilities_are_those_of_the_model(run, model_dir):
    directory, rltool = run
    gateway = json.loads((directory / "state" / "gateway.json").read_text())["url"]
    key = (directory / "state" / "gateway.key").read_text()
    assert (directory / "state" / "gateway.key").stat().st_mode & 0o777 == 0o600
    status = rltool("status", "--run", "agents").stdout
    assert "gateway" in status and "ok" in status

    record = next(record for _ in range(ATTEMPTS) for called, record in [two_turns(gateway, key)] if called)
    [trajectory] = record["trajectories"]
    mask = trajectory["loss_mask"]
    assert sum(a != b for a, b in itertools.pairwise(mask)) == 3  # prompt, call, tool, answer
    assert sum(mask) > 20
    assert largest_difference(model_dir, trajectory) < 1e-4
    assert sum(span["end"] - span["start"] for span in trajectory["versions"]) == sum(mask)

    assert CALL in Words(gateway_tokenizer()).text(trajectory["token_ids"])
    assert rltool("stop", "--run", "agents").returncode == 0
    [file] = [f for f in (directory / "sessions").glob("*.jsonl") if record["id"] in f.name]
    assert json.loads(file.read_text().splitlines()[-1])["event"] == "ended"


CONTEXT = 8192
"""Bytes of a program's prompt are tokens here."""
WINDOW = 128
"""Tokens that a layer of the model sees: two layers can be taught by the last turn's end."""
API = {"claude": "anthropic", "codex": "responses", "opencode": "chat"}


def played(name: str, model_dir: Path, engine, root: Path, directory: Path) -> dict:
    """The record of one task, played in `root`, which every time is made anew."""
    shutil.rmtree(root, ignore_errors=True)
    place = npm_programs.Place(root)
    directory.mkdir()
    key = engine.endpoint.key_file if hasattr(engine, "endpoint") else None
    with Gateway(directory, model_dir, [engine], engine_key=key, max_model_len=CONTEXT) as gateway:
        session = gateway.open()
        npm_programs.play(programs(), name, session, place, *npm_programs.plain(name, root))
        record = gateway.record(session)
    record["made"] = (place.work / "sum.txt").exists() and (place.work / "sum.txt").read_text() == "5\n"
    return record


@pytest.fixture(scope="module")
def programs_root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def played_model(tmp_path_factory, programs_root) -> Path:
    """A tiny model that has learnt by heart what a scripted one has said to the programs."""
    model_dir = write_gateway_model(tmp_path_factory.mktemp("programs-model"), window=WINDOW)
    words = Words(gateway_tokenizer())
    records = []
    for name in npm_programs.PROGRAMS:
        with ScriptedVllm(vocab_size=words.size, default=words.spell("fine")) as engine:
            engine.max_model_len = CONTEXT
            engine.script.extend(map(words.spell, npm_programs.plain_replies(name)))
            record = played(name, model_dir, engine, programs_root / name, programs_root / f"{name}-scripted")
        assert record["made"]
        records.append(record)
    taught_records(model_dir, records, context=2 * WINDOW)
    return model_dir


@pytest.fixture(scope="module")
def programs_engine(played_model, tmp_path_factory):
    with serving_vllm(played_model, tmp_path_factory.mktemp("programs-vllm"), max_model_len=CONTEXT) as engine:
        yield engine


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", npm_programs.PROGRAMS)
def test_a_program_plays_its_task_and_what_is_recorded_are_the_model_s_log_probabilities(
    name, programs_engine, played_model, programs_root, tmp_path
):
    records = (
        played(name, played_model, programs_engine, programs_root / name, tmp_path / str(i)) for i in range(ATTEMPTS)
    )
    record = next(record for record in records if record["made"] and len(record["turns"]) > 1)
    [trajectory] = record["trajectories"]
    assert {turn["api"] for turn in record["turns"]} == {API[name]}
    assert sum(trajectory["loss_mask"]) == sum(turn["end"] - turn["start"] for turn in record["turns"])
    assert sum(span["end"] - span["start"] for span in trajectory["versions"]) == sum(trajectory["loss_mask"])
    assert largest_difference(played_model, trajectory) < 1e-5
