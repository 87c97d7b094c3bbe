"""Real engines for tests, started with their dialects' own argv and environment."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from rltool.config.serve import EngineLaunch, Task
from rltool.engines.dialects.protocol import Launches
from rltool.engines.dialects.sglang import SglangDialect
from rltool.engines.dialects.table import dialect
from rltool.engines.dialects.vllm import VllmDialect
from rltool.engines.endpoints import EngineEndpoint
from rltool.processes.ports import reserved_ports

READY_SECONDS = 240.0
"""vLLM takes 11 s on an idle two-core machine; several test suites may share it."""
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
        self.process = _spawn(self.launch, self.log, dialect(self.endpoint.dialect or "vllm"))

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
    """Outside of the range that connections get theirs from, so that it is free still when a server that imports for
    seconds binds it."""
    with reserved_ports(1) as held:
        return held.ports[0]


def write_key(directory: Path, key: str | None) -> Path:
    """A file with this key, or one of its own."""
    key_file = directory / "key"
    key_file.touch(mode=0o600)
    key_file.write_text(key or secrets.token_hex(16))
    return key_file


def start_vllm(
    model_dir: Path,
    work_dir: Path,
    *,
    extra_args: tuple[str, ...] = (),
    max_model_len: int = 256,
    key: str | None = None,
    tp: int = 1,
    task: Task = "generate",
    quantization: dict[str, Any] | None = None,
    lora_rank: int = 0,
    lora_slots: int = 4,
) -> RunningEngine:
    """Launch one guarded vLLM on the CPU; returns at once. `wait_ready` waits for it. key: None for one of its own."""
    key_file = write_key(work_dir, key)
    launch = EngineLaunch(
        index=0,
        model=model_dir,
        host="127.0.0.1",
        port=free_port(),
        gpus=(),
        tp=tp,
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
        task=task,
        quantization=quantization,
        lora_rank=lora_rank,
        lora_slots=lora_slots,
    )
    log = work_dir / "vllm.log"
    process = _spawn(launch, log, VllmDialect())
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


@contextmanager
def serving_vllm(model: Path, work_dir: Path, **options: Any) -> Iterator[RunningEngine]:
    """As start_vllm, ready to serve, until the block ends."""
    engine = start_vllm(model, work_dir, **options)
    try:
        yield wait_ready(engine)
    finally:
        engine.stop()


def sglang_python() -> Path:
    """The interpreter of SGLang's environment. In CI its absence is a failure: a skipped test proves nothing."""
    named = os.environ.get("RLTOOL_SGLANG_PYTHON")
    how = (
        "tests/sglang_cpu/setup.sh .venv-sglang, then RLTOOL_SGLANG_PYTHON=$PWD/.venv-sglang/bin/python "
        "(`make test` does both)"
    )
    if not named and os.environ.get("CI", "").lower() not in ("true", "1"):
        pytest.skip(f"SGLang runs in an environment of its own, and RLTOOL_SGLANG_PYTHON names none: {how}")
    if not named or not Path(named).exists():
        pytest.fail(f"RLTOOL_SGLANG_PYTHON is {named!r}, which names no interpreter: {how}")
    return Path(named)


def clients_python() -> Path:
    """The interpreter of the released clients' environment (requirements/clients.txt). In CI its absence fails."""
    return _released("clients", "RLTOOL_CLIENTS_PYTHON")


def cookbook_python() -> Path:
    """That of tinker-cookbook's recipes (requirements/cookbook.txt), as clients_python."""
    return _released("cookbook", "RLTOOL_COOKBOOK_PYTHON")


def harbor_python() -> Path:
    """That of Harbor and openenv-core (requirements/harbor.txt), as clients_python."""
    return _released("harbor", "RLTOOL_HARBOR_PYTHON")


def nemo_gym_python() -> Path:
    """That of nemo-gym (requirements/nemo-gym.txt), as clients_python."""
    return _released("nemo-gym", "RLTOOL_NEMO_GYM_PYTHON")


def programs() -> Path:
    """The folder of the programs from npm (requirements/programs), as clients_python."""
    how = "make programs, then RLTOOL_PROGRAMS=$PWD/.programs (`make test-long` does both)"
    return _named("programs", "RLTOOL_PROGRAMS", how)


def _released(what: str, variable: str) -> Path:
    how = f"make venv-{what}, then {variable}=$PWD/.venv-{what}/bin/python (`make test` does both)"
    return _named(what, variable, how)


def _named(what: str, variable: str, how: str) -> Path:
    named = os.environ.get(variable)
    if not named and os.environ.get("CI", "").lower() not in ("true", "1"):
        pytest.skip(f"{what}: run in an environment of their own, and {variable} names none: {how}")
    if not named or not Path(named).exists():
        pytest.fail(f"{variable} is {named!r}, where there is nothing: {how}")
    return Path(named)


def start_sglang(
    model: Path, work_dir: Path, *, key: str | None = None, tp: int = 1, max_model_len: int = 512,
    python: Path | None = None, **options: Any,
) -> RunningEngine:  # fmt: skip
    """Launch one keyed SGLang on the CPU; returns at once. key: None for one of its own. options: of EngineLaunch."""
    key_file = write_key(work_dir, key)
    launch = EngineLaunch(
        index=0, model=model, host="127.0.0.1", port=free_port(), gpus=(), tp=tp, device="cpu",
        served_name="policy", dtype=None, max_model_len=max_model_len, seed=7, trust_remote_code=False,
        python=python or sglang_python(), key_file=key_file, boot_id=uuid.uuid4().hex, weight_backend="rltool",
        work_dir=work_dir, **options,
    )  # fmt: skip
    log = work_dir / "sglang.log"
    log.touch(mode=0o600)
    process = _spawn(launch, log, SglangDialect())
    endpoint = EngineEndpoint(url=f"http://127.0.0.1:{launch.port}", dialect="sglang", key_file=key_file)
    return RunningEngine(endpoint, launch, process, log)


@contextmanager
def serving_sglang(model: Path, work_dir: Path, **options: Any) -> Iterator[RunningEngine]:
    """As start_sglang, ready to serve, until the block ends."""
    running = start_sglang(model, work_dir, **options)
    tree = []
    try:
        wait_ready(running)
        tree = psutil.Process(running.process.pid).children(recursive=True)
        yield running
    finally:
        running.stop()
        _, alive = psutil.wait_procs(tree, timeout=10)
        for child in alive:
            child.kill()


def running(processes: Iterable[psutil.Process]) -> list[str]:
    """Those of them that run, zombies left out: pid and command."""
    left = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                left.append(f"{process.pid} {process.cmdline()}")
        except psutil.NoSuchProcess:
            continue
    return left


def _spawn(launch: EngineLaunch, log: Path, engine_dialect: Launches) -> subprocess.Popen:
    with log.open("ab") as file:
        return subprocess.Popen(
            engine_dialect.argv(launch),
            env=os.environ | engine_dialect.environment(launch),
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
            raise AssertionError(f"the engine ended with exit code {engine.process.returncode}:\n{engine.log_tail()}")
        try:
            if engine.http("GET", "/health")[0] == 200:
                return engine
        except OSError:
            pass  # not listening yet
        time.sleep(0.25)
    engine.stop()
    raise AssertionError(f"the engine was not ready after {READY_SECONDS:g} s:\n{engine.log_tail()}")
