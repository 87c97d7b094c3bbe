"""Real vLLM engines for tests, started with the dialect's own argv and environment."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass
from pathlib import Path

from rltool.config.serve import EngineLaunch
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.vllm import VllmDialect

READY_SECONDS = 240.0
"""vLLM takes 20 to 33 s on an idle two-core machine; several test suites may share it."""
STOP_SECONDS = 20.0


@dataclass
class RunningEngine:
    """A live server. `endpoint` is its entry in endpoints.json."""

    endpoint: EngineEndpoint
    launch: EngineLaunch
    process: subprocess.Popen
    log: Path

    @property
    def url(self) -> str:
        return self.endpoint.url

    @property
    def key(self) -> str:
        return self.endpoint.read_key()

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def http(self, method: str, path: str, body=None, *, key: str | None = None) -> tuple[int, object]:
        """A plain request, for what the client would refuse to do: (status, decoded reply)."""
        headers = {"Content-Type": "application/json"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                status, text = response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text

    def signal(self, number: int) -> None:
        """To the whole process group: server, engine core and worker."""
        os.killpg(self.process.pid, number)

    def start_again(self) -> None:
        """A new process with the same command and environment under the same address, as a service manager would;
        returns at once."""
        self.process.wait(STOP_SECONDS)
        self.process = _spawn(self.launch, self.log)

    def stop(self) -> None:
        """TERM, then KILL, over the whole process group; a server that is gone already is fine."""
        for sign, seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, STOP_SECONDS)):
            try:
                os.killpg(self.process.pid, sign)
            except ProcessLookupError:
                break
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                continue
        self.process.wait(STOP_SECONDS)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start_vllm(
    model_dir: Path, work_dir: Path, *, extra_args: tuple[str, ...] = (), max_model_len: int = 256
) -> RunningEngine:
    """Launch one guarded vLLM on the CPU; returns at once. `wait_ready` waits for it."""
    key_file = work_dir / "key"
    key_file.touch(mode=0o600)
    key_file.write_text(secrets.token_hex(16))
    launch = EngineLaunch(
        index=0,
        model=model_dir,
        host="127.0.0.1",
        port=free_port(),
        gpus=(),
        tp=1,
        device="cpu",
        served_name="policy",
        dtype=None,
        max_model_len=max_model_len,
        seed=0,
        trust_remote_code=False,
        python=Path(sys.executable),
        key_file=key_file,
        boot_id=uuid.uuid4().hex,
        weight_backend="rltool",
        work_dir=work_dir,
        extra_args=extra_args,
    )
    log = work_dir / "vllm.log"
    process = _spawn(launch, log)
    endpoint = EngineEndpoint(
        url=f"http://127.0.0.1:{launch.port}",
        dialect="vllm",
        weight_backend="rltool",
        plugin=True,
        boot_id=launch.boot_id,
        key_file=key_file,
        log=log,
    )
    return RunningEngine(endpoint, launch, process, log)


def _spawn(launch: EngineLaunch, log: Path) -> subprocess.Popen:
    dialect = VllmDialect()
    with log.open("ab") as file:
        return subprocess.Popen(
            dialect.argv(launch),
            env=os.environ | dialect.environment(launch),
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=launch.work_dir,
            start_new_session=True,
        )


def wait_ready(engine: RunningEngine) -> RunningEngine:
    """Until /health answers 200; fails at once, with its log, if the server dies."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if engine.process.poll() is not None:
            raise AssertionError(f"vLLM ended with exit code {engine.process.returncode}:\n{engine.log_tail()}")
        try:
            if engine.http("GET", "/health")[0] == 200:
                return engine
        except OSError:
            pass  # not listening yet
        time.sleep(0.25)
    engine.stop()
    raise AssertionError(f"vLLM was not ready after {READY_SECONDS:g} s:\n{engine.log_tail()}")
