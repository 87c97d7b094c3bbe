"""A gateway on a real loopback socket in a thread of its own, in front of scripted engines."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import requests

from rltool.agents.remote import RemoteAgents
from rltool.agents.sessions import GatewayClient
from rltool.agents.task import AgentTask
from rltool.config.gateway import GatewayConfig
from rltool.engines.client import EngineClient
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.fleet import FleetPolicy
from rltool.gateway.fleet import POLICY, FleetView
from rltool.gateway.main import gateway, served
from rltool.gateway.parts import Parts
from tests.contract.fakes.scripted import ScriptedVllm
from tests.contract.fakes.sglang import FakeSglang

KEY = "gateway-test-key"
START_SECONDS = 120.0
QUICK = FleetPolicy(probe_seconds=0.05, canary_seconds=0.05)
PATIENT = replace(POLICY, idle_canary_seconds=3600.0)
"""For scripts that wait long for their agent: the canary request of an idle engine would take a reply of theirs."""


@dataclass
class Gateway:
    """Context manager. `kill` is the end of a process that nobody asked: connections drop, nothing is wound up.

    parts: what its Parts have beside the usual. With `follows` it is sent its engines by `view`."""

    directory: Path
    tokenizer: Path
    engines: Sequence[ScriptedVllm | FakeSglang | EngineEndpoint]
    options: dict[str, Any] = field(default_factory=dict)
    port: int = 0
    policy: FleetPolicy = POLICY
    parts: dict[str, Any] = field(default_factory=dict)
    dialect: str = "vllm"
    plugin: bool = True
    engine_key: Path | None = None
    max_model_len: int = 4096

    def __enter__(self) -> Self:
        key_file = self.directory / "gateway.key"
        key_file.write_text(KEY)
        self._config = GatewayConfig(**self.options)
        self._parts = Parts(
            served_name="policy",
            max_model_len=self.max_model_len,
            tokenizer=self.tokenizer,
            endpoints=tuple(
                e
                if isinstance(e, EngineEndpoint)
                else EngineEndpoint(url=e.url, dialect=self.dialect, plugin=self.plugin, key_file=self.engine_key)
                for e in self.engines
            ),
            sessions=self.directory / "sessions",
            key_file=key_file,
            **self.parts,
        )
        self._loop = asyncio.new_event_loop()
        self._failure: BaseException | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._started.wait(START_SECONDS)
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *exception: object) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ending.set)
            self._thread.join(START_SECONDS)

    def kill(self) -> None:
        def end() -> None:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()

        self._loop.call_soon_threadsafe(end)
        self._thread.join(START_SECONDS)

    def _serve(self) -> None:
        try:
            self._loop.run_until_complete(self._run())
        except BaseException as error:
            self._failure = error
            self._started.set()
        finally:
            self._loop.close()

    async def _run(self) -> None:
        self._ending = asyncio.Event()
        self._views: asyncio.Queue[FleetView] = asyncio.Queue()
        views = self._sent_views() if self._parts.follows else None
        async with (
            gateway(self._config, self._parts, views, policy=self.policy) as app,
            served(app, "127.0.0.1", self.port, shutdown_seconds=0.1) as self.port,
        ):
            self._started.set()
            await self._ending.wait()

    async def _sent_views(self) -> AsyncIterator[FleetView]:
        while True:
            yield await self._views.get()

    def view(self, view: FleetView) -> None:
        """As a rollout manager writes it."""
        self._loop.call_soon_threadsafe(self._views.put_nowait, FleetView.from_json(view.to_json()))

    # -- what a trainer does

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def http(self, method: str, path: str, *, key: str | None = KEY, **options: Any) -> requests.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return requests.request(method, self.url + path, headers=headers, timeout=30, **options)

    def open(self, **metadata: Any) -> dict[str, Any]:
        reply = self.http("POST", "/sessions", json={"metadata": metadata})
        assert reply.status_code == 201, reply.text
        return reply.json()

    def record(self, session: dict[str, Any]) -> dict[str, Any]:
        return self.http("GET", f"/sessions/{session['id']}").json()

    def as_made(self, stream: Any, session: dict[str, Any], engine: Any) -> str:
        """The text of a stream whose engine makes no token after the first, "a", before that has come."""
        said = ""
        for chunk in stream:
            text = chunk.choices[0].delta.content or ""
            if text and not said:
                assert text == "a" and not self.record(session)["turns"]
                engine.hurry()
            said += text
        return said


ROOT = Path(__file__).resolve().parents[3]


def played(
    gateway: Gateway, python: Path, agent: str, rows: Sequence[dict[str, Any]], cwd: Path, **variables: str
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Their sessions' records and rewards (or errors), one after the other, by `rltool agents` with that interpreter,
    which has rltool by its path alone."""
    environment = os.environ | {"PYTHONPATH": f"{cwd}:{ROOT}"} | variables
    command = [python, "-m", "rltool", "agents", gateway.url, agent, "--workers", "1"]
    worker = subprocess.Popen(
        [*command, "--key-file", str(gateway.directory / "gateway.key")], cwd=cwd, env=environment
    )  # fmt: skip
    sessions = [gateway.open() for _ in rows]

    async def play() -> list[Any]:
        async with EngineClient() as client:
            agents = RemoteAgents(lambda: GatewayClient(client, gateway.url, KEY, seconds=10.0))
            found = []
            for session, row in zip(sessions, rows, strict=True):
                row = {"index": 0, "messages": None, "label": None, "response": None, **row}
                urls = session["openai_base_url"], session["anthropic_base_url"]
                task = AgentTask(*urls, session["key"], session["model"], row, 600, 5)
                found += await asyncio.gather(agents.run(task), return_exceptions=True)
            return found

    async def play_while_it_runs() -> list[Any]:
        playing = asyncio.create_task(play())
        while not (await asyncio.wait([playing], timeout=1.0))[0]:
            assert worker.poll() is None, f"`rltool agents` ended with exit code {worker.returncode}"
        return playing.result()

    try:
        rewards = asyncio.run(play_while_it_runs())
    finally:
        worker.terminate()
        worker.wait()
    return [gateway.record(session) for session in sessions], rewards
