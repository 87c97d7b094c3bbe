"""A Ray cluster and engines over the hosts of tests/hosts, as docs/hosts.md sets them up."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.hosts import Host, Hosts

RAY = Path(sys.executable).with_name("ray")
RAY_PORT = 6379
ENGINE_PORT = 8101
READY_SECONDS = 240.0
MEMORY = 80_000_000
"""Bytes of a node's object store."""


def rltool(*words: str) -> list[str]:
    return [sys.executable, "-m", "rltool", *words]


@dataclass
class Cluster:
    """Ray nodes on `nodes`, the first of which is the head; `runs`: RLTOOL_RUNS of every command; more: of `ray start`
    of the head."""

    hosts: Hosts
    nodes: Sequence[Host]
    runs: Path
    environment: dict[str, str] = field(default_factory=dict)
    more: Sequence[str] = ()

    def __post_init__(self) -> None:
        token = secrets.token_hex(32)
        self.environment |= {
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0", "RLTOOL_RUNS": str(self.runs), "COLUMNS": "250", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        for node in self.nodes:
            self.join(node, *(self.more if node is self.nodes[0] else ()))

    @property
    def address(self) -> str:
        return f"{self.nodes[0].address}:{RAY_PORT}"

    def join(self, node: Host, *more: str) -> None:
        where = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
        if node is not self.nodes[0]:
            where = [f"--address={self.address}"]
        argv = [
            str(RAY), "start", *where, f"--node-ip-address={node.address}", "--num-cpus=2",
            f"--object-store-memory={MEMORY}", "--disable-usage-stats", *more,
        ]  # fmt: skip
        node.run(argv, env=self.environment)

    def rejoin(self, node: Host, *more: str) -> None:
        """A node that was killed, or that Ray has given up."""
        if not node.alive:
            self.hosts.boot(node)
        node.run([str(RAY), "stop", "--force"], env=self.environment)
        self.join(node, *more)

    def run(self, host: Host, *words: str, code: int = 0, timeout: float = 240.0) -> str:
        """`rltool WORDS` on a host, to its end."""
        return host.run(rltool(*words), env=self.environment, cwd=self.runs.parent, code=code, timeout=timeout)

    def start(self, host: Host, *words: str, out: Path) -> subprocess.Popen[bytes]:
        return host.start(rltool(*words), env=self.environment, cwd=self.runs.parent, out=out)


@dataclass
class RemoteEngine:
    """A vLLM that `serve-engines` keeps on a host, which shares no run directory with others."""

    host: Host
    process: subprocess.Popen[bytes]
    out: Path
    at: str
    run: str
    port: int = ENGINE_PORT

    @property
    def address(self) -> str:
        return f"[{self.at}]:{self.port}" if ":" in self.at else f"{self.at}:{self.port}"

    @property
    def key(self) -> str:
        return self.host.outside(self.host.here / "runs" / self.run / "state" / "key").read_text()

    def wait(self, seconds: float = READY_SECONDS) -> RemoteEngine:
        ends = time.monotonic() + seconds
        ask = [sys.executable, "-c", "import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=5)"]
        while "Error" in self.host.run([*ask, f"http://{self.address}/health"], code=None):
            if self.process.poll() is not None or time.monotonic() > ends:
                raise AssertionError(f"the engine on {self.host.name} does not serve:\n{self.out.read_text()[-6000:]}")
            time.sleep(0.5)
        return self


def serve(
    host: Host, model: Path, out: Path, *more: str, at: str = "", run: str = "fleet",
    environment: Mapping[str, str] | None = None, key: str | None = None,
    port: int = ENGINE_PORT,
) -> RemoteEngine:  # fmt: skip
    """Begin to serve, at one of the host's addresses, by default its first; `wait` waits. key: None for one of its
    own."""
    if key is not None:
        write_key(host.outside(host.here / "runs" / run / "state"), key)
    at = at or host.address
    words = ["serve-engines", str(model), "--device", "cpu", "--host", at, "--port", str(port)]
    argv = rltool(*words, "--run", run, *more)
    own = {"COLUMNS": "250", "RLTOOL_RUNS": str(host.here / "runs"), **(environment or {})}
    return RemoteEngine(host, host.start(argv, env=own, out=out), out, at, run, port)


def write_key(directory: Path, key: str) -> Path:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    (directory / "key").touch(mode=0o600)
    (directory / "key").write_text(key)
    return directory / "key"


def metrics(runs: Path, run: str) -> list[dict]:
    """Records of training steps."""
    lines = (runs / run / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "train/grad_norm" in record]


def steps_of(runs: Path, run: str) -> list[dict]:
    """`metrics`, none where the run has written no step yet."""
    return metrics(runs, run) if (runs / run / "metrics.jsonl").exists() else []


@dataclass
class BackgroundRun:
    """runs: the directory of runs; out: where what it prints goes."""

    runs: Path
    run: str
    process: subprocess.Popen[bytes]
    out: Path

    def said(self) -> str:
        return " ".join(self.out.read_text().split())

    def steps(self) -> list[dict]:
        return steps_of(self.runs, self.run)
