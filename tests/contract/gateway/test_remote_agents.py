"""Agents on another host, here in other processes: they dial the gateway, and the run works as with its own."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rltool.agents import remote
from rltool.agents.outcome import AgentFailed
from rltool.agents.pool import CommandAgents
from rltool.agents.remote import AgentWorker, RemoteAgents
from rltool.agents.sessions import GatewayClient
from rltool.agents.task import AgentTask
from rltool.engines.client import EngineClient
from rltool.errors import EngineRejected
from tests.contract.gateway.running import KEY, Gateway
from tests.contract.gateway.test_agents import PLACE, ROOT, first_batch, stretches


@contextlib.contextmanager
def worker(gateway: Gateway, agent: str) -> Iterator[subprocess.Popen[str]]:
    """`rltool agents` as its own process; ended with SIGTERM, as a service manager does."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rltool", "agents", gateway.url, agent, "--key-file",
         str(gateway.directory / "gateway.key"), "--at-once", "4", "--workers", "1"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    killer = threading.Timer(120, process.kill)
    killer.start()
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()
        killer.cancel()


def test_a_run_whose_agents_are_elsewhere(engine, gateway, model_dir, words, tmp_path):
    with worker(gateway, f"{PLACE}:two_questions"):
        rollout = first_batch(
            engine, model_dir, tmp_path / "rows.jsonl", "remote", dump=True, gateway=gateway.url,
            gateway_key_file=tmp_path / "gateway.key",
        )  # fmt: skip
    assert len(rollout.samples) == 4 and {sample.reward for sample in rollout.samples} == {8.0}
    for sample in rollout.samples:
        assert stretches(sample, words) == ["fine<|im_end|>", "fine<|im_end|>"]
    status = gateway.http("GET", "/status").json()
    assert status["remote_episodes"] == {"waiting": 0, "queued": 4, "taken": 4, "finished": 4, "dropped": 0}
    assert status["sessions_open"] == 0


# -- failures, with both sides in this process


class Scripted:
    """Agents that do as the prompt says."""

    def __init__(self) -> None:
        self.tasks: list[AgentTask] = []
        self.cancelled = 0

    async def run(self, task: AgentTask) -> Any:
        self.tasks.append(task)
        match task.row["prompt"]:
            case "fails":
                raise AgentFailed("cannot find my tools")
            case "hangs":
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    self.cancelled += 1
                    raise
        return [0.5, 0.25]

    async def close(self) -> None: ...


def task(prompt: str, *, deadline: float = 60.0) -> AgentTask:
    base = "http://127.0.0.1:1/sessions/abc"
    return AgentTask(f"{base}/v1", base, "k", "policy", {"prompt": prompt}, deadline, 5)


def together(
    gateway: Gateway, agents: Any, what: Any, *, key: str = KEY, log: Callable[[str], None] = lambda line: None
) -> Any:
    """what(RemoteAgents) while a worker with these agents works."""

    async def go() -> Any:
        async with EngineClient() as client:
            trainer = RemoteAgents(lambda: GatewayClient(client, gateway.url, KEY, seconds=10.0))
            working = asyncio.ensure_future(
                AgentWorker(client, gateway.url, key, agents, name="here", log=log).work(2)
            )
            try:
                return await what(trainer, working)
            finally:
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)

    return asyncio.run(go())


async def outcome(trainer: RemoteAgents, given: AgentTask) -> Any:
    try:
        return await trainer.run(given)
    except AgentFailed as error:
        return str(error)


def test_rewards_and_failures_come_back_are_said_and_urls_are_those_of_the_worker(gateway, monkeypatch):
    agents = Scripted()

    said: list[str] = []
    monkeypatch.setattr(remote, "REPORT_SECONDS", 0.02)

    async def what(trainer: RemoteAgents, _: Any) -> Any:
        found = await asyncio.gather(outcome(trainer, task("fine")), outcome(trainer, task("fails")))
        while "1 episodes ended, 1 failed, 0 running" not in said:
            await asyncio.sleep(0.01)
        return found

    assert together(gateway, agents, what, log=said.append) == [[0.5, 0.25], "cannot find my tools"]
    assert any(line.endswith("failed: cannot find my tools") for line in said)
    assert {given.base_url for given in agents.tasks} == {f"{gateway.url}/sessions/abc/v1"}
    assert {given.anthropic_base_url for given in agents.tasks} == {f"{gateway.url}/sessions/abc"}


def test_an_episode_that_the_trainer_gives_up_is_ended_where_it_runs(gateway, monkeypatch):
    monkeypatch.setattr(remote, "ALIVE_SECONDS", 0.02)
    agents = Scripted()

    async def what(trainer: RemoteAgents, _: Any) -> None:
        running = asyncio.ensure_future(trainer.run(task("hangs")))
        while not agents.tasks:
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        while not agents.cancelled:
            await asyncio.sleep(0.01)

    together(gateway, agents, what)


def test_a_worker_that_is_stopped_says_so(gateway):
    agents = Scripted()

    async def what(trainer: RemoteAgents, working: Any) -> Any:
        running = asyncio.ensure_future(outcome(trainer, task("hangs")))
        while not agents.tasks:
            await asyncio.sleep(0.01)
        working.cancel()
        return await running

    assert together(gateway, agents, what) == "its worker here was stopped"


def test_a_worker_that_has_gone_takes_no_episode_with_it(gateway):
    """Its last long poll is still open at the gateway when it dies."""
    agents = Scripted()

    async def what(trainer: RemoteAgents, working: Any) -> Any:
        assert await trainer.run(task("fine")) == [0.5, 0.25]  # one of its two polls got this, the other waits
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        running = asyncio.ensure_future(trainer.run(task("fine")))
        async with EngineClient() as client:
            alive = AgentWorker(client, gateway.url, KEY, agents, name="there", log=lambda line: None)
            second = asyncio.ensure_future(alive.work(1))
            try:
                return await running
            finally:
                second.cancel()
                await asyncio.gather(second, return_exceptions=True)

    assert together(gateway, agents, what) == [0.5, 0.25]


def test_without_a_worker_it_fails_in_time_and_says_what_to_do(gateway, monkeypatch):
    monkeypatch.setattr(remote, "POLL_SECONDS", 0.1)

    async def go() -> Any:
        async with EngineClient() as client:
            trainer = RemoteAgents(lambda: GatewayClient(client, gateway.url, KEY, seconds=10.0))
            return await outcome(trainer, task("fine", deadline=0.1))

    assert "`rltool agents`" in asyncio.run(go())
    assert gateway.http("GET", "/status").json()["remote_episodes"]["waiting"] == 0


def test_a_worker_with_another_key_ends_with_that(gateway):
    async def what(_: Any, working: Any) -> None:
        await working

    with pytest.raises(EngineRejected, match="key is missing or wrong"):
        together(gateway, CommandAgents(["true"]), what, key="wrong")


def test_the_queue_s_routes_refuse_what_is_wrong(gateway):
    assert gateway.http("POST", "/episodes/next", json={}, key=None).status_code == 401
    assert gateway.http("POST", "/episodes/a", json={}).status_code == 400
    assert gateway.http("POST", "/episodes/next?wait=long", json={}).status_code == 400
    assert gateway.http("GET", "/episodes/a").status_code == 404
    assert gateway.http("POST", "/episodes/a", json={"task": {}}).status_code == 200
    assert gateway.http("POST", "/episodes/a/outcome", json={"reward": 1, "failed": "x"}).status_code == 400
    assert gateway.http("POST", "/episodes/a/outcome", json={"reward": "high"}).status_code == 400
    assert gateway.http("POST", "/episodes/next", json={"worker": "w"}).json() == {"id": "a", "task": {}}
