"""`rltool gateway` in front of the real vLLM: an agent with the openai client, two turns, a tool call."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import openai
import pytest
import requests

from tests.e2e.engines import start_vllm, wait_ready
from tests.e2e.taught import CALL, QUESTION, TOOL, taught
from tests.gateway_models import Words, gateway_tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.long]

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


def test_recorded_log_probabilities_are_those_of_the_model(run, model_dir):
    import torch
    from transformers import Qwen2ForCausalLM

    directory, rltool = run
    gateway = json.loads((directory / "state" / "gateway.json").read_text())["url"]
    key = (directory / "state" / "gateway.key").read_text()
    assert (directory / "state" / "gateway.key").stat().st_mode & 0o777 == 0o600
    status = rltool("status", "--run", "agents").stdout
    assert "gateway" in status and "ok" in status

    record = next(record for _ in range(ATTEMPTS) for called, record in [two_turns(gateway, key)] if called)
    [trajectory] = record["trajectories"]
    ids, mask = torch.tensor([trajectory["token_ids"]]), trajectory["loss_mask"]
    assert sum(a != b for a, b in itertools.pairwise(mask)) == 3  # prompt, call, tool, answer
    model = Qwen2ForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].float().log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    differences = [abs(logprobs[i - 1].item() - trajectory["logprobs"][i]) for i, loss in enumerate(mask) if loss]
    assert len(differences) > 20
    assert max(differences) < 1e-4
    assert sum(span["end"] - span["start"] for span in trajectory["versions"]) == sum(mask)

    assert CALL in Words(gateway_tokenizer()).text(trajectory["token_ids"])
    assert rltool("stop", "--run", "agents").returncode == 0
    [file] = [f for f in (directory / "sessions").glob("*.jsonl") if record["id"] in f.name]
    assert json.loads(file.read_text().splitlines()[-1])["event"] == "ended"
