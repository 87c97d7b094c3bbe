"""Environments of verifiers through a gateway: with a stand-in for the package, and with the package itself."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rltool.agents.outcome import AgentFailed
from rltool.agents.recorded import samples_of
from rltool.agents.task import AgentTask
from rltool.agents.verifiers_env import VerifiersEnv
from rltool.errors import UsageError
from rltool.rollout.sample import Sample
from tests.contract.fakes import verifiers_v1
from tests.contract.gateway.running import PATIENT, ROOT, Gateway, played
from tests.contract.gateway.test_agents import stretches

TASKS = ROOT / "tests" / "verifiers_tasks"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", SimpleNamespace(v1=verifiers_v1))
    monkeypatch.setitem(sys.modules, "verifiers.v1", verifiers_v1)


def task_of(session: dict[str, Any], row: dict[str, Any], *, key: str | None = None) -> AgentTask:
    row = {"index": 0, "messages": None, "label": None, "response": None, **row}
    return AgentTask(
        session["openai_base_url"], session["anthropic_base_url"], key or session["key"], session["model"], row, 600, 5
    )


def left_behind() -> list[str]:
    return [name for name in os.environ if name.startswith("RLTOOL_API_KEY")]


def test_its_tasks_are_rows_and_a_row_is_played_in_its_session(gateway, stand_in, words):
    env = VerifiersEnv({})
    rows = list(env.rows())
    assert rows == [
        {"prompt": "hello", "metadata": {"task": {"idx": 0, "prompt": "hello", "answer": "fine"}}},
        {"prompt": "the user begins", "metadata": {"task": {"idx": 1, "name": "the user begins"}}},
    ]
    session = gateway.open()
    assert asyncio.run(env.run(task_of(session, rows[0]))) == 0.5
    [sample] = samples_of(gateway.record(session), Sample(0, 0, 0, [1]), result=0.5, max_tokens=4096)
    assert stretches(sample, words) == ["fine<|im_end|>"]
    assert not left_behind() and not verifiers_v1.SingleAgentEnv.serving_now


def test_episodes_side_by_side_have_keys_of_their_own(gateway, stand_in):
    env = VerifiersEnv({})
    [row, _] = env.rows()

    async def both() -> list[Any]:
        tasks = [task_of(gateway.open(), row), task_of(gateway.open(), row, key="another session's")]
        return await asyncio.gather(*map(env.run, tasks), return_exceptions=True)

    right, wrong = asyncio.run(both())
    assert right == 0.5 and isinstance(wrong, AgentFailed) and "ProviderError: Error code: 401" in str(wrong)
    assert not left_behind() and not verifiers_v1.SingleAgentEnv.serving_now


def test_a_row_of_another_data_set_is_a_failure_that_says_so(gateway, stand_in):
    with pytest.raises(AgentFailed, match="VerifiersEnv.rows"):
        asyncio.run(VerifiersEnv({}).run(task_of(gateway.open(), {"prompt": "hello", "metadata": {}})))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"agent": {"color": 2}}, "agent.color: Extra inputs are not permitted"),
        ({"id": "best-of-n"}, "BestOfN of verifiers plays a task with several agents"),
        ({"id": "judged"}, "SingleAgentEnv of verifiers plays a task with several agents"),
        ({"retries": 1}, "^retries of verifiers .* rollout.agent_retries"),
        ({"agent": {"rules": ["one"]}}, "^agent.retries of verifiers"),
    ],
)
def test_settings_that_cannot_be_trained_are_refused(stand_in, settings, said):
    with pytest.raises(UsageError, match=said) as refused:
        VerifiersEnv({**settings, "client": {"headers": "sk-1234"}})
    assert "sk-1234" not in str(refused.value), "settings may hold keys"


def test_without_the_package_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(UsageError, match=r"pip install rltool\[verifiers\]"):
        VerifiersEnv({})


# -- the package itself, in an environment of its own: it wants other versions of openai and mcp than the tests


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Path:
    """The bin directory of an environment with rltool, verifiers and uv, which its harnesses start programs with."""
    root = tmp_path_factory.mktemp("verifiers")
    subprocess.run([sys.executable, "-m", "venv", root], check=True)
    install = [root / "bin/python", "-m", "pip", "install", "--quiet", "-e", f"{ROOT}[verifiers]", "uv"]
    subprocess.run(install, check=True)
    return root / "bin"


@pytest.fixture
def variables(real, tmp_path) -> dict[str, str]:
    """Its caches go where HOME says."""
    path = f"{real}:{os.environ['PATH']}"
    return {"PATH": path, "HOME": str(tmp_path), "PYTHONPATH": f"{TASKS}:{ROOT}"}


def rows_of(real: Path, program: str, variables: dict[str, str]) -> list[dict[str, Any]]:
    command, environment = [real / "python", program], os.environ | variables
    printed = subprocess.run(command, cwd=TASKS, env=environment, check=True, stdout=subprocess.PIPE)
    return [json.loads(line) for line in printed.stdout.splitlines()]


def alone(real: Path, gateway: Gateway, taskset: str, agent: str, variables: dict[str, str]) -> list[float | None]:
    """Rewards by `vf-eval`, task after task; None for one that failed."""
    session, directory = gateway.open(), Path(variables["HOME"])
    settings = f"""
model = "policy"
max_concurrent = 1
push = false
output_dir = "{directory}"
run = {{ name = "alone", dir = "{taskset}" }}
client = {{ base_url = "{session["openai_base_url"]}", api_key_var = "SESSION_KEY" }}
[env]
taskset = {{ id = "{taskset}" }}
{agent} = {{ harness = {{ id = "null" }}, runtime = {{ type = "subprocess" }} }}
"""
    (directory / "eval.toml").write_text(settings)
    command = [real / "vf-eval", "@", directory / "eval.toml", "--no-rich"]
    environment = os.environ | variables | {"SESSION_KEY": session["key"]}
    subprocess.run(command, cwd=TASKS, env=environment, check=True, stdin=subprocess.DEVNULL)
    episodes = [json.loads(line) for line in (directory / taskset / "traces.jsonl").read_text().splitlines()]
    episodes.sort(key=lambda episode: episode["task"]["data"]["idx"])
    return [
        sum(reward["score"] * reward["weight"] for reward in episode["traces"][0]["rewards"].values())
        if episode["ok"] else None
        for episode in episodes
    ]  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_real_package_plays_with_its_tools_and_judges(real, engine, tokenizer_dir, words, tmp_path, variables):
    """Rewards are those of `vf-eval` on the same replies."""
    rows = rows_of(real, "sums_env.py", variables)
    script = [words.spell(text) for text in (CALL, "5", "3", "what?")]  # one episode after the other
    with Gateway(tmp_path, tokenizer_dir, [engine], policy=PATIENT) as gateway:
        engine.script += script
        records, rewards = played(gateway, real / "python", "sums_env:run", rows, TASKS, **variables)
        right, wrong, unjudged = rewards
        assert (right, wrong) == (0.5, 0.0)
        assert isinstance(unjudged, AgentFailed) and "TaskError" in str(unjudged) and "nobody knows" in str(unjudged)
        assert [turn["left_out"] for turn in records[0]["turns"]] == ["", ""], records[0]["turns"]
        [sample] = samples_of(records[0], Sample(0, 0, 0, [1]), result=right, max_tokens=4096)
        assert stretches(sample, words) == [f"{CALL}<|im_end|>", "5<|im_end|>"]
        assert "<tool_response>\n5\n" in words.text(sample.response_ids)
        engine.script += script
        assert alone(real, gateway, "rltool-sums", "agent", variables) == [0.5, 0.0, None]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_an_env_of_a_taskset_s_own_plays_with_one_agent(real, engine, tokenizer_dir, words, tmp_path, variables):
    rows = rows_of(real, "guess_env.py", variables)
    script = [words.spell(text) for text in ("5", "7", "1", "9", "2")]
    with Gateway(tmp_path, tokenizer_dir, [engine], policy=PATIENT) as gateway:
        engine.script += script
        records, rewards = played(gateway, real / "python", "guess_env:run", rows, TASKS, **variables)
        assert rewards == [0.75, 0.0]
        samples = [samples_of(record, Sample(0, 0, 0, [1]), result=0.0, max_tokens=4096) for record in records]
        assert [[stretches(sample, words) for sample in made] for made in samples] == [
            [["5<|im_end|>", "7<|im_end|>"]], [["1<|im_end|>", "9<|im_end|>", "2<|im_end|>"]],
        ]  # fmt: skip
        assert "higher" in words.text(samples[0][0].response_ids)
        engine.script += script
        assert alone(real, gateway, "rltool-guess", "player", variables) == rewards
