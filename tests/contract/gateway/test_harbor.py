"""Tasks of Harbor through a gateway, by the package itself in its own environment (requirements/harbor.txt)."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from rltool.agents import harbor_root
from rltool.agents.harbor_env import HarborEnv, reward_of_trial
from rltool.agents.outcome import AgentFailed
from rltool.agents.recorded import samples_of
from rltool.errors import UsageError
from rltool.rollout.sample import Sample
from tests.contract.gateway.running import PATIENT, ROOT, Gateway, played
from tests.contract.gateway.test_agents import stretches
from tests.e2e.engines import harbor_python, serving_vllm
from tests.e2e.taught import taught_records
from tests.e2e.test_gateway import ATTEMPTS, WINDOW, largest_difference
from tests.gateway_models import write_gateway_model

LONGEST = 60_000
"""Tokens: of these tests' tokenizer, which has few words, Terminus' instructions are many."""
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""Or litellm asks for prices, again and again."""
LOCAL = {"import_path": "rltool.agents.harbor_local:LocalEnvironment"}
AGENT = {
    "name": "terminus-2",
    "kwargs": {
        "record_terminal_session": False, "enable_summarize": False, "model_info": {"max_input_tokens": LONGEST},
        "max_turns": 6,
    },
}  # fmt: skip


def result_of(rewards: dict[str, float] | None, *errors: str, valid: bool = True) -> Any:
    recorded = [SimpleNamespace(exception_type=error, exception_message="it says") for error in errors]
    return SimpleNamespace(
        recorded_exceptions=lambda: recorded,
        reward_valid=valid and rewards is not None,
        verifier_result=SimpleNamespace(rewards=rewards),
    )


def test_a_reward_is_the_verifier_s_and_harbor_says_whether_it_is_valid():
    assert reward_of_trial(result_of({"reward": 0.5, "speed": 3}, "AgentTimeoutError"), "reward") == 0.5
    assert reward_of_trial(result_of({"reward": 0.5, "speed": 3}), "speed") == 3.0
    assert reward_of_trial(result_of({"score": 0.25}), "reward") == 0.25
    with pytest.raises(AgentFailed, match="gave speed, style, and no 'reward'"):
        reward_of_trial(result_of({"style": 1, "speed": 3}), "reward")
    with pytest.raises(AgentFailed, match="APIError: it says; Late: it says"):
        reward_of_trial(result_of({"reward": 1.0}, "APIError", "Late", valid=False), "reward")
    with pytest.raises(AgentFailed, match="no reward"):
        reward_of_trial(result_of(None), "reward")


def test_without_the_package_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "harbor", None)
    with pytest.raises(UsageError, match=r"pip install rltool\[harbor\]"):
        HarborEnv({"path": "tasks"}, {})


def test_settings_that_harbor_refuses_are_not_repeated_for_they_may_hold_keys(monkeypatch):
    class TrialConfig:
        model_fields = ("agent",)

        @staticmethod
        def model_validate(settings: Any) -> None:
            raise ValueError("n_concurrent: must be positive")

    stand_in(monkeypatch, "agents.factory", AgentFactory=None)
    stand_in(monkeypatch, "environments.factory", EnvironmentFactory=None)
    stand_in(monkeypatch, "models.job.config", DatasetConfig=SimpleNamespace(model_validate=dict))
    stand_in(monkeypatch, "models.trial.config", TrialConfig=TrialConfig)
    with pytest.raises(UsageError, match="Harbor refuses its settings: ValueError: n_concurrent") as refused:
        HarborEnv({"path": "."}, {"agent": {"n_concurrent": 0, "env": {"OTHER_KEY": "sk-1234"}}})
    assert "sk-1234" not in str(refused.value)


# -- its local environment, with a stand-in for the package


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    monkeypatch.setitem(sys.modules, f"harbor.{name}", SimpleNamespace(**contents))


class Base:
    """Of BaseEnvironment what LocalEnvironment asks of it."""

    environment_dir = Path("/nowhere")
    task_env_config = SimpleNamespace(workdir="/app")
    options_model: Any

    @property
    def options(self) -> Any:
        return self.options_model()

    def _mount_targets(self) -> list[str]:
        return ["/logs"]

    async def _upload_environment_dir_after_start(self) -> None:
        pass


class BuildFailed(Exception):
    pass


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def extract_dir(archive: Any, target: Path) -> list[str]:
        with tarfile.open(fileobj=archive) as opened:
            opened.extractall(target, filter="data")
        return []

    def plan(base_image: str) -> Any:
        return SimpleNamespace(steps=(), env={}, workdir="/")

    base = {"BaseEnvironment": Base, "ExecResult": None, "SandboxBuildFailedError": BuildFailed}
    stand_in(monkeypatch, "environments.base", **base)
    stand_in(monkeypatch, "environments.options", EnvironmentOptions=BaseModel)
    replay = {"CopyStep": object, "ReplayPlan": plan, "Step": None, "plan_from_dockerfile": None}
    stand_in(monkeypatch, "environments.snowflake.dockerfile_replay", **replay)
    stand_in(monkeypatch, "environments.tar_transfer", extract_dir=extract_dir, pack_dir=None)
    name = "rltool.agents.harbor_local"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name)


def unconfined(monkeypatch: pytest.MonkeyPatch, local: Any, ran: list[Any]) -> Any:
    """A LocalEnvironment whose programs run as they are."""

    async def run(self: Any, words: Any, output: Any, errors: Any, **_: Any) -> int:
        ran.append(words)
        return await asyncio.to_thread(subprocess.call, words, stdout=output, stderr=errors)

    monkeypatch.setattr(local.LocalEnvironment, "_run", run)
    return local.LocalEnvironment()


@pytest.mark.parametrize("lines", ["4242 +", "+ 4242", "4242 -no_namespaces", "-no_namespaces", "4242", "+"])
def test_the_first_process_of_a_root_may_say_its_two_lines_in_any_order(local, monkeypatch, tmp_path, lines):
    first, ran = tmp_path / "first", []
    first.write_text(f"#!/bin/sh\nprintf '%s\\n' {lines}\n" + ("cat\n" if len(lines.split()) == 2 else ""))
    first.chmod(0o700)
    environment = unconfined(monkeypatch, local, ran)
    environment._mount_targets = lambda: [str(tmp_path / "logs")]
    environment.task_env_config = SimpleNamespace(workdir=str(tmp_path / "app"))

    async def start() -> Any:
        with monkeypatch.context() as patched:
            patched.setattr(sys, "executable", str(first))
            try:
                await environment.start(force_build=False)
                return environment._init
            finally:
                await environment.stop(delete=True)

    if "+" in lines and "4242" in lines:
        assert asyncio.run(start()) == 4242 and ran[0][0] == "mkdir"
        return
    why = "no_namespaces" if "-" in lines else "its first process ended"
    with pytest.raises(BuildFailed, match=f"{why}: LocalEnvironment needs Linux namespaces"):
        asyncio.run(start())
    assert ran == []


def test_what_is_to_be_shared_and_is_no_directory_is_refused_before_anything_is_mounted(monkeypatch, tmp_path):
    def mount(*_: Any, **__: Any) -> None:
        raise AssertionError("a mount in the process of the tests")

    monkeypatch.setattr(harbor_root, "mount", mount)
    with pytest.raises(FileNotFoundError, match="no-such"):
        harbor_root.build(str(tmp_path), [str(tmp_path), str(tmp_path / "no-such")])
    with pytest.raises(AssertionError, match="a mount"):
        harbor_root.build(str(tmp_path), [str(tmp_path)])


def test_directories_that_a_program_made_read_only_go_with_the_trial(local):
    with as_nobody(), tempfile.TemporaryDirectory() as outside:
        os.chmod(outside, 0o500)
        root = Path(tempfile.mkdtemp())
        module = root / "go/pkg/mod/a@v1"
        module.mkdir(parents=True)
        (module / "a.go").touch()
        (root / "out").symlink_to(outside)
        for path in (module, *list(module.parents)[:3], root):
            path.chmod(0o500)
        local._remove(root)
        assert not root.exists() and Path(outside).stat().st_mode & 0o777 == 0o500
        os.chmod(outside, 0o700)


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Root removes what is read-only."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("code", [0, 1, 2])
def test_logs_that_grow_while_they_are_fetched_are_fetched(local, monkeypatch, tmp_path, code):
    """GNU tar ends with 1 where a file changed as it read it."""
    source, target, programs = (tmp_path / name for name in ("source", "target", "programs"))
    for directory in (source, target, programs):
        directory.mkdir()
    (source / "a.log").write_text("line")
    (programs / "tar").write_text(f'#!/bin/sh\nPATH=/usr/bin:/bin tar "$@"\nexit {code}\n')
    (programs / "tar").chmod(0o700)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    fetching = unconfined(monkeypatch, local, []).download_dir(str(source), target)
    if code == 2:
        with pytest.raises(RuntimeError, match="tar -c"):
            asyncio.run(fetching)
    else:
        asyncio.run(fetching)
        assert (target / "a.log").read_text() == "line"


# -- the package itself

GRADE = """
mkdir -p /logs/verifier
[ "$(cat /app/sum.txt)" = "$EXPECTED" ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
"""
PARTS = """
found=$(cat parts.txt | wc -l)
echo "{\\"reward\\": 0.$found, \\"lines\\": $found}" > /logs/verifier/reward.json
"""


def write_task(tasks: Path, name: str, instruction: str, test: str, *, dockerfile: str = "", **files: str) -> None:
    config = '[verifier]\ntimeout_sec = 60\n[verifier.env]\nEXPECTED = "5"\n[agent]\ntimeout_sec = 60\n[environment]\n'
    contents = {
        "task.toml": config,
        "instruction.md": instruction,
        "environment/Dockerfile": f"FROM debian:12\nWORKDIR /app\nENV COLOR=green\n{dockerfile}",
        "tests/test.sh": f"#!/bin/bash\n{test}",
        **{f"environment/{file}": text for file, text in files.items()},
    }
    for path, text in contents.items():
        (tasks / name / path).parent.mkdir(parents=True, exist_ok=True)
        (tasks / name / path).write_text(text)


def says(*keystrokes: str, done: bool = False) -> str:
    commands = [{"keystrokes": f"{keys}\n", "duration": 1.0} for keys in keystrokes]
    return json.dumps({"analysis": "a", "plan": "b", "commands": commands, "task_complete": done})


DONE = [says(done=True), says(done=True)]
"""Terminus asks whether it is sure."""
SCRIPT = [
    says("cat two.txt $COLOR.txt; pwd"), says("echo 5 > sum.txt"), *DONE,
    says("printf 'a\\nb\\n' > parts.txt; touch /usr/escaped; echo $((40+2)) > /tmp/left"), *DONE,
    says("ls /tmp/left; echo 6 > sum.txt; (sleep 1000 &)"), *DONE,
]  # fmt: skip


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    tasks = tmp_path / "tasks"
    copied = {"two.txt": "2\n", "green.txt": "three\n"}
    built = "COPY *.txt ./\nRUN echo 1 > ran\n"
    write_task(tasks, "a-sum", "Write the sum to sum.txt.", GRADE, dockerfile=built, **copied)
    write_task(tasks, "b-parts", "Write parts.txt.", PARTS)
    write_task(tasks, "c-wrong", "Write the sum to sum.txt.", GRADE)
    write_task(tasks, "d-no-reward", "Do nothing.", "true")
    write_task(tasks, "e-needs-an-image", "Do nothing.", "true", dockerfile="RUN touch /usr/installed\n")
    module = f"""
import json
from rltool.agents.harbor_env import HarborEnv
env = HarborEnv({{"path": {str(tasks)!r}}}, {{"agent": {AGENT!r}, "environment": {LOCAL!r}}})
run = env.run
if __name__ == "__main__":
    for row in env.rows():
        print(json.dumps(row))
"""
    (tmp_path / "tasks_env.py").write_text(module)
    return tasks


def rows_of(python: Path, module: Path) -> list[dict[str, Any]]:
    variables = os.environ | {"PYTHONPATH": str(ROOT), **OFFLINE}
    printed = subprocess.run([python, module], env=variables, check=True, stdout=subprocess.PIPE)
    return [json.loads(line) for line in printed.stdout.splitlines()]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_real_package_plays_its_agent_and_its_verifier_judges(engine, tokenizer_dir, words, tasks, tmp_path):
    """Terminus 2 in a root of its own; and the same replies give `harbor run`, without rltool's agent, the same."""
    python, before = harbor_python(), roots()
    with Gateway(tmp_path, tokenizer_dir, [engine], max_model_len=LONGEST, policy=PATIENT) as gateway:
        rows = rows_of(python, tmp_path / "tasks_env.py")
        assert [row["prompt"] for row in rows][:2] == ["Write the sum to sum.txt.", "Write parts.txt."]
        engine.script += [words.spell(text) for text in (*SCRIPT, *DONE)]
        records, rewards = played(gateway, python, "tasks_env:run", rows, tmp_path, **OFFLINE)
        assert rewards[:3] == [1.0, 0.2, 0.0]
        assert isinstance(rewards[3], AgentFailed) and "RewardFileNotFoundError" in str(rewards[3])
        assert isinstance(rewards[4], AgentFailed) and "RUN touch /usr/installed" in str(rewards[4])
        assert [len(record["turns"]) for record in records] == [4, 3, 3, 2, 0]
        [sample] = samples_of(records[0], Sample(0, 0, 0, [1]), result=1.0, max_tokens=LONGEST)
        assert stretches(sample, words) == [f"{text}<|im_end|>" for text in SCRIPT[:4]]
        seen = words.text(sample.response_ids)
        assert "\n2\n" in seen and "three\n" in seen and "\n/app\n" in seen
        assert "Read-only file system" in words.text(_only(records[1]).response_ids)
        assert "No such file" in words.text(_only(records[2]).response_ids)  # of another trial
        assert roots() <= before and not Path("/usr/escaped").exists()

        engine.script += [words.spell(text) for text in SCRIPT]
        assert alone(python, gateway, tasks, tmp_path) == {"a-sum": 1.0, "b-parts": 0.2, "c-wrong": 0.0}


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.timeout(1500)
def test_a_real_vllm_does_a_task_that_it_has_learnt(engine, words, tasks, tmp_path):
    """By heart, from the scripted episode; what is recorded are the model's own log-probabilities."""
    python, model, context = harbor_python(), write_gateway_model(tmp_path / "model", window=WINDOW), 8192
    rows = rows_of(python, tmp_path / "tasks_env.py")[:1]
    engine.max_model_len = context
    with Gateway(tmp_path, model, [engine], max_model_len=context, policy=PATIENT) as gateway:
        engine.script += [words.spell(text) for text in SCRIPT[:4]]
        records, rewards = played(gateway, python, "tasks_env:run", rows, tmp_path, **OFFLINE)
    assert rewards == [1.0]
    taught_records(model, records, context=2 * WINDOW)
    directory = tmp_path / "real"
    directory.mkdir()
    with (
        serving_vllm(model, directory, max_model_len=context) as real,
        Gateway(directory, model, [real], engine_key=real.endpoint.key_file, max_model_len=context) as gateway,
    ):
        records, rewards = played(gateway, python, "tasks_env:run", rows * ATTEMPTS, tmp_path, **OFFLINE)
    assert 1.0 in rewards, rewards
    record = records[rewards.index(1.0)]
    [trajectory] = record["trajectories"]
    assert sum(trajectory["loss_mask"]) == sum(turn["end"] - turn["start"] for turn in record["turns"])
    assert largest_difference(model, trajectory) < 1e-5


def roots() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("rltool-harbor-*"))


def _only(record: dict[str, Any]) -> Sample:
    [sample] = samples_of(record, Sample(0, 0, 0, [1]), result=1.0, max_tokens=LONGEST)
    return sample


def alone(python: Path, gateway: Gateway, tasks: Path, directory: Path) -> dict[str, float]:
    """Harbor's own program, one trial at a time."""
    session = gateway.open()
    variables = {"OPENAI_API_KEY": session["key"], "PYTHONPATH": str(ROOT), "HOME": str(directory), **OFFLINE}
    job = {
        "jobs_dir": str(directory / "jobs"), "job_name": "alone", "n_concurrent_trials": 1,
        "agents": [AGENT | {"model_name": "openai/policy", "base_url": session["openai_base_url"]}],
        "environment": LOCAL,
        "datasets": [{"path": str(tasks), "task_names": ["a-sum", "b-parts", "c-wrong"]}],
    }  # fmt: skip
    config = directory / "job.json"
    config.write_text(json.dumps(job))
    harbor = [python.with_name("harbor"), "run", "--config", config, "--yes"]
    subprocess.run(harbor, env=os.environ | variables, check=True, timeout=600, stdin=subprocess.DEVNULL)
    results = [json.loads(path.read_text()) for path in (directory / "jobs").glob("*/*/result.json")]
    return {result["task_name"]: result["verifier_result"]["rewards"]["reward"] for result in results}


@pytest.mark.long
def test_settings_that_cannot_run_are_refused(tmp_path):
    other = {**AGENT, "base_url": "http://other"}
    refused = {
        "no color": {"color": 1},
        "Harbor refuses": {"agent": {"n_concurrent": 0}},
        "agent.base_url: the model is the policy": {"agent": other, "environment": LOCAL},
        "Unknown option 'color'": {"environment": {**LOCAL, "kwargs": {"color": 1}}},
        "is no sandbox": {"environment": {"type": "docker"}},  # for there is no daemon, or its refusal would not come
    }
    program = """
import json, sys
from rltool.agents.harbor_env import HarborEnv
from rltool.errors import UsageError
for settings in json.loads(sys.argv[1]):
    try:
        HarborEnv({"path": "."}, settings)
        print("taken")
    except UsageError as error:
        print(str(error).replace(chr(10), " "))
"""
    variables = os.environ | {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "DOCKER_HOST": f"unix://{tmp_path}/none"}
    command = [harbor_python(), "-c", program, json.dumps(list(refused.values()))]
    said = subprocess.run(command, env=variables, check=True, capture_output=True, text=True).stdout.splitlines()
    for expected, found in zip(refused, said, strict=True):
        assert expected in found
