"""Agents as real processes against a real gateway and scripted engines; and a run of them whose gateway is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from rltool.agents import pool
from rltool.agents.gateway_process import GatewayPlace
from rltool.agents.outcome import AgentFailed
from rltool.agents.pool import Agents, CommandAgents, FunctionAgents
from rltool.agents.task import AgentTask
from rltool.config.train import TrainConfig
from rltool.engines.client import EngineClient
from rltool.engines.endpoints import EngineEndpoint
from rltool.errors import UsageError
from rltool.processes.worker_pool import WorkerLost
from rltool.rollout.measure.dump import read_dump
from rltool.rollout.sample import Sample
from rltool.training import record
from rltool.training.manager.rollout_engines import Engines
from rltool.training.manager.service import RolloutService
from tests.contract.fakes.scripted import ScriptedVllm
from tests.gateway_models import Words

PLACE = "tests.contract.agents"
ROOT = Path(__file__).resolve().parents[3]
COMMAND = [sys.executable, "-m", "tests.contract.agent_command"]


def task_of(session: dict[str, Any], prompt: str = "hello", *, deadline: float = 60.0, **metadata: Any) -> AgentTask:
    row = {"index": 0, "prompt": prompt, "messages": None, "label": "fine", "response": None, "metadata": metadata}
    return AgentTask(
        session["openai_base_url"], session["anthropic_base_url"], session["key"], session["model"], row, deadline, 5
    )


async def outcome(agents: Agents, task: AgentTask) -> float | str | None:
    try:
        return await agents.run(task)
    except AgentFailed as error:
        return str(error)


def outcomes(agents_of: Any, *tasks: AgentTask) -> list[Any]:
    """Side by side."""

    async def run() -> list[Any]:
        agents = agents_of()
        try:
            return list(await asyncio.gather(*(outcome(agents, task) for task in tasks)))
        finally:
            await agents.close()

    return asyncio.run(run())


# -- an async function


def test_episodes_of_a_function_share_a_worker_and_none_another_s_failure(gateway):
    session = gateway.open()
    tasks = [
        task_of(session, prompt, deadline=1.0 if prompt == "hangs" else 60.0)
        for prompt in ("raises", "hangs", "not a number", "is fine")
    ]
    found = outcomes(lambda: FunctionAgents(f"{PLACE}:misbehaves", workers=1), *tasks)
    assert found[0] == "KeyError: 'lost'" and found[3] == 1.0
    assert "deadlines.agent = 1 s" in found[1] and "returned text" in found[2]


def test_a_worker_that_dies_fails_its_episodes_and_is_replaced(gateway):
    async def run() -> list[Any]:
        agents, session = FunctionAgents(f"{PLACE}:misbehaves", workers=1), gateway.open()
        try:
            died = await outcome(agents, task_of(session, "dies"))
            return [died, await outcome(agents, task_of(session, "is fine"))]
        finally:
            await agents.close()

    assert asyncio.run(run()) == ["the agent's process ended (exit code 3)", 1.0]


def test_the_event_loop_takes_the_descriptor_of_a_worker_that_has_ended(gateway):
    async def run() -> None:
        agents, session = FunctionAgents(f"{PLACE}:misbehaves", workers=1), gateway.open()
        try:
            await outcome(agents, task_of(session, "is fine"))
            worker = agents._pool.workers[0]
            assert worker is not None
            descriptor = worker._socket.fileno()
            worker.lose(WorkerLost("the test wants so"))
            while worker._socket.fileno() == descriptor:
                await asyncio.sleep(0)
            pairs = [socket.socketpair() for _ in range(8)]  # the kernel gives out the lowest free numbers
            try:
                [(again, other)] = [
                    p if p[0].fileno() == descriptor else p[::-1]
                    for p in pairs
                    if descriptor in (p[0].fileno(), p[1].fileno())
                ]
                again.setblocking(False)
                receiving = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(again, 1))
                await asyncio.sleep(0)  # so that the loop has to watch it
                other.sendall(b"x")
                assert await receiving == b"x"
            finally:
                for one in (one for pair in pairs for one in pair):
                    one.close()
        finally:
            await agents.close()

    asyncio.run(run())


def test_episodes_are_shared_out_before_the_workers_are_ready(gateway):
    async def run() -> list[int]:
        agents, session = FunctionAgents(f"{PLACE}:misbehaves", workers=2), gateway.open()
        running = [asyncio.ensure_future(outcome(agents, task_of(session, "hangs"))) for _ in range(4)]
        await asyncio.sleep(0)
        shares = [len(worker.jobs) for worker in agents._pool.workers if worker is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        left = [len(worker.jobs) for worker in agents._pool.workers if worker is not None]
        await agents.close()
        return shares + left

    assert asyncio.run(run()) == [2, 2, 0, 0]


def test_a_function_that_cannot_be_imported_in_its_process_is_an_error(gateway):
    with pytest.raises(UsageError, match="no_such_function"):
        outcomes(lambda: FunctionAgents(f"{PLACE}:no_such_function", workers=1), task_of(gateway.open()))


def test_the_openai_client_in_an_agent(gateway):
    assert outcomes(lambda: FunctionAgents(f"{PLACE}:with_openai", workers=1), task_of(gateway.open())) == [1.0]


# -- a command line


@pytest.fixture
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_a_command_line_gives_a_reward_or_leaves_it(gateway, at_root):
    session = gateway.open()
    tasks = [task_of(session, how="has an opinion"), task_of(session), task_of(session, how="has a bad reward")]
    given, left, bad = outcomes(lambda: CommandAgents(COMMAND), *tasks)
    assert (given, left) == (4.0, None) and "its result: returned text" in bad


def test_a_command_line_that_fails_says_why(gateway, at_root):
    [found] = outcomes(lambda: CommandAgents(COMMAND), task_of(gateway.open(), how="fails"))
    assert found == "ended with exit code 4: cannot find my tools"
    with pytest.raises(UsageError, match="no-such-program cannot be started"):
        outcomes(lambda: CommandAgents(["no-such-program"]), task_of(gateway.open()))


def test_of_a_command_line_that_floods_the_end_is_kept(gateway, at_root, monkeypatch):
    monkeypatch.setattr(pool, "KEPT_BYTES", 100)
    flood = "import sys; print('x' * 4_000_000); print('{\"reward\": 2}'); sys.exit(len(sys.argv) - 1)"
    tasks = [task_of(gateway.open(), "y" * 1_000_000)]  # which it does not read
    assert outcomes(lambda: CommandAgents([sys.executable, "-c", flood]), *tasks) == [2.0]
    [failed] = outcomes(lambda: CommandAgents([sys.executable, "-c", flood, "fails"]), *tasks)
    assert failed.startswith("ended with exit code 1: xxx") and len(failed) < 150


def test_a_command_line_that_is_late_is_ended_with_what_it_started(gateway, at_root):
    [found] = outcomes(lambda: CommandAgents(COMMAND), task_of(gateway.open(), how="hangs", deadline=3.0))
    assert "deadlines.agent = 3 s" in found
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "43210"]]


LEAVES = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", "43211"], start_new_session=True, **CLOSED)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: time.sleep(43212)
    os._exit(0)
os.wait()
"""


@pytest.mark.parametrize("closed", ["{}", "dict.fromkeys(('stdin', 'stdout', 'stderr'), subprocess.DEVNULL)"])
def test_daemons_of_a_command_line_keep_neither_its_deadline_nor_its_reward_and_end_with_it(gateway, at_root, closed):
    leaves = LEAVES.replace("CLOSED", closed)
    ends = [sys.executable, "-c", leaves + "print('{\"reward\": 2}')"]
    late = [sys.executable, "-c", leaves + "time.sleep(43213)"]
    began = time.monotonic()
    [found] = outcomes(lambda: CommandAgents(ends), task_of(gateway.open(), deadline=600.0))
    assert found == 2.0 and time.monotonic() - began < 60.0
    [found] = outcomes(lambda: CommandAgents(late), task_of(gateway.open(), deadline=3.0))
    assert "deadlines.agent = 3 s" in found and time.monotonic() - began < 120.0
    left = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"])]
    assert not [line for line in left if line in (["sleep", "43211"], ends, late)]


# -- a run


def config_of(model_dir: Path, data: Path, agent: str, **rollout: Any) -> TrainConfig:
    data.write_text("".join(json.dumps({"prompt": f"question {i}", "label": "fine"}) + "\n" for i in range(8)))
    return TrainConfig.model_validate(
        {
            "model": {"path": model_dir},
            "steps": 1,
            "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "agent": agent, **rollout},
            "sampling": {"max_prompt_tokens": 100, "max_response_tokens": 200},
            "data": {"train": [data]},
        }
    )


async def engines_of(engine: ScriptedVllm) -> Engines:
    endpoint = EngineEndpoint(url=engine.url, dialect="vllm", plugin=True)
    async with EngineClient() as client:
        return Engines((endpoint,), {endpoint.url: await client.probe(endpoint)})


def first_batch(engine: ScriptedVllm, *arguments: Any, **more: Any) -> Any:
    """Of a run with this configuration, whose gateway is somebody's."""

    async def go() -> Any:
        config = config_of(*arguments, **more)
        service = RolloutService(config, await engines_of(engine), log=lambda line: None)
        try:
            await service.start()
            return await service.next_batch(0)
        finally:
            await service.close()

    return asyncio.run(go())


def stretches(sample: Sample, words: Words) -> list[str]:
    """Texts of what was sampled."""
    found, last = [], 0
    for token, mask in zip(sample.response_ids, sample.response_mask, strict=True):
        if mask and not last:
            found.append([])
        if mask:
            found[-1].append(token)
        last = mask
    return [words.text(ids) for ids in found]


def test_rollouts_without_a_trainer_end_with_their_gateway_when_they_are_terminated(engine, model_dir, tmp_path):
    engine.seconds = 60_000.0
    config = config_of(model_dir, tmp_path / "rows.jsonl", f"{PLACE}:two_questions")

    def end() -> None:
        deadline = time.monotonic() + 120
        while not list((tmp_path / "out" / "sessions").glob("*.jsonl")) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    ending = threading.Thread(target=end)
    ending.start()
    with pytest.raises(SystemExit) as ended:
        record.record_rollouts(config, asyncio.run(engines_of(engine)), tmp_path / "out", log=print)
    ending.join()
    assert ended.value.code == 128 + signal.SIGTERM
    assert not [p for p in psutil.Process().children(recursive=True) if "rltool.gateway.main" in p.cmdline()]


@pytest.mark.long
def test_a_run_starts_a_gateway_and_its_sessions_become_samples(engine, model_dir, words, tmp_path, capsys):
    config = config_of(model_dir, tmp_path / "rows.jsonl", f"{PLACE}:two_questions")
    record.record_rollouts(config, asyncio.run(engines_of(engine)), tmp_path / "out", log=print)
    samples = read_dump(tmp_path / "out", 0).samples
    assert len(samples) == 4 and {sample.reward for sample in samples} == {8.0}
    for sample in samples:
        assert stretches(sample, words) == ["fine<|im_end|>", "fine<|im_end|>"]
        assert words.text(sample.prompt_ids) == (
            f"<|im_start|>user\nquestion {sample.prompt_index}<|im_end|>\n<|im_start|>assistant\n"
        )
    assert len(list((tmp_path / "out" / "sessions").glob("*.jsonl"))) == 4
    assert not [p for p in psutil.Process().children(recursive=True) if "rltool.gateway.main" in p.cmdline()]


@pytest.mark.long
def test_a_gateway_that_is_killed_is_started_again_and_the_run_goes_on(engine, model_dir, words, tmp_path):
    """Turns are in progress when it dies; the agents' clients try again, and the sessions are what they were."""

    async def go() -> Any:
        place = GatewayPlace(tmp_path / "sessions", tmp_path / "key", tmp_path / "gateway.log")
        config = config_of(model_dir, tmp_path / "rows.jsonl", f"{PLACE}:two_questions", dump=True)
        service = RolloutService(config, await engines_of(engine), log=lambda line: None, gateway=place)
        engine.delay("/rltool/generate", 0.5)
        try:
            await service.start()
            batch = asyncio.ensure_future(service.next_batch(0))
            while not any(path.read_text().count('"event":"turn"') for path in place.sessions.glob("*.jsonl")):
                await asyncio.sleep(0.01)
            [process] = [p for p in psutil.Process().children() if "rltool.gateway.main" in p.cmdline()]
            os.kill(process.pid, signal.SIGKILL)
            return await batch
        finally:
            await service.close()

    rollout = asyncio.run(go())
    assert rollout.metrics["rollout/gateway_restarts_total"] == 1.0
    assert rollout.metrics["rollout/agent_failures_total"] == 0.0 and len(rollout.samples) == 4
    for sample in rollout.samples:
        assert stretches(sample, words) == ["fine<|im_end|>", "fine<|im_end|>"] and sample.reward == 8.0


def test_a_run_with_a_gateway_of_somebody_s_and_branches_of_one_episode(engine, gateway, model_dir, tmp_path):
    rollout = first_batch(
        engine, model_dir, tmp_path / "rows.jsonl", f"{PLACE}:forgets", dump=True, agent_workers=1,
        gateway=gateway.url, gateway_key_file=tmp_path / "gateway.key",
    )  # fmt: skip
    episode = [(0, 1), (1, 2)]  # trajectory, turns
    assert [(s.trajectory, s.turns) for s in rollout.samples] == 4 * episode
    assert rollout.batch.episode_ids.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert rollout.metrics["rollout/agent_branches_total"] == 4.0
    assert gateway.http("GET", "/status").json()["sessions_open"] == 0
