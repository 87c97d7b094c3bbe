"""`make chaos ARGS="--hosts 3 --seed N --minutes M"`: `--real`'s run over hosts of namespaces (tests/hosts), as root.

a trains, b has the router, and b and each further one has a vLLM. What happens is the wire's (partitions, loss, delay,
slow links), power cuts of engines' hosts, and the end of the driver (-9) with --resume. `--real`'s invariants are
looked at from a; a ledger has every event, step and change of an engine's state, one JSON object a line.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltool.engines.dialects.table import dialect
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.run_client import DRIVER_ROLE, Driver
from rltool.engines.types import HttpRequest
from rltool.processes.run_directory import RunDirectory
from rltool.processes.state import read_state
from tests.chaos.invariants import Violation
from tests.chaos.real import (
    END_SECONDS,
    RUN,
    SETTINGS,
    START_SECONDS,
    STOP_SECONDS,
    TICK,
    Fault,
    RealChaos,
    _answers,
    _until,
    _wait,
)
from tests.chaos.real_invariants import RealInvariants
from tests.e2e.job import write_job
from tests.e2e.several_hosts import ENGINE_PORT, rltool, serve, write_key
from tests.hosts import Host, Hosts, missing
from tests.tiny_models import write_tiny_qwen2

ROUTER_PORT = 8200
WIRE, POWER, DRIVER = "the wire", "power", "driver"
LONGEST = 40.0
"""Seconds of one fault. Engines' deadlines are set below, so that faults are noticed within it."""
OF_POWER, OF_DRIVER = 0.2, 0.06
FAST = 10**10
_CLONE_NEWNET = 0x40000000


class Ledger:
    """What happened, for whoever looks at a run afterwards: one JSON object a line."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._began = path.open("w"), time.monotonic()
        self.path = path
        self._open: dict[str, str] = {}
        self._steps = 0

    def add(self, kind: str, **what: Any) -> None:
        self._steps += kind == "step"
        self._file.write(json.dumps({"at": round(time.monotonic() - self._began, 3), "kind": kind, **what}) + "\n")
        self._file.flush()

    def begin(self, lane: str, name: str, **what: Any) -> None:
        self._open[lane] = name
        self.add("begins", lane=lane, event=name, **what)

    def end(self, lane: str) -> None:
        self.add("ends", lane=lane, event=self._open.pop(lane))

    def check(self, completed: int) -> None:
        """At the end: what began has ended, and all steps of the run are there."""
        if self._open:
            raise Violation(f"the ledger has events that did not end: {self._open}")
        if self._steps != completed:
            raise Violation(f"the ledger has {self._steps} steps, the run {completed}")


@dataclass
class HostEngine:
    """What real_invariants.py asks of an engine."""

    endpoint: EngineEndpoint
    host: Host

    @property
    def url(self) -> str:
        return self.endpoint.url


class HostInvariants(RealInvariants):
    """Its driver is a process of another host, whose loopback this process shares."""

    lives: Callable[[], bool]

    def _driver(self) -> Driver | None:
        run = RunDirectory(self._job.runs / self._name)
        state = read_state(run, DRIVER_ROLE)
        if state is None or state.url is None or not self.lives():
            return None
        return Driver(state.url, run.key_file, DRIVER_ROLE)


class HostsChaos(RealChaos):
    def __init__(self, seed: int, directory: Path, seconds: float, *, count: int, ledger: Path) -> None:
        super().__init__(seed, directory, seconds)
        self._count, self.ledger = count, Ledger(ledger)
        self._states: dict[str, str] = {}

    # -- the parts

    def _start(self, stack: ExitStack) -> None:
        model, job_at = self._directory / "model", self._directory / "job"
        model.mkdir()
        write_tiny_qwen2(model, tied=False, seed=1)
        self._job = write_job(job_at, model, None)
        self._key = secrets.token_hex(16)
        self._key_file = write_key(job_at, self._key)
        self._model = model
        self._hosts = stack.enter_context(Hosts(self._count, shared=[job_at, model]))
        self._a, self._b, *_ = self._hosts
        _enter_network(self._a)
        stack.callback(self._kill_training)
        self.engines = []
        for host in [*self._hosts][1:]:
            url = f"http://{host.address}:{ENGINE_PORT}"
            self.engines.append(HostEngine(EngineEndpoint(url=url, dialect="vllm", key_file=self._key_file), host))
            self._serve(host)
        url = f"http://{self._b.address}:{ROUTER_PORT}"
        self._router = EngineEndpoint(url=url, dialect="sglang", key_file=self._key_file)
        _until(lambda: all(map(self._serves, self.engines)), lambda: time.sleep(TICK))
        self._start_router()
        _until(self._router_answers, lambda: time.sleep(TICK))
        self._run = RunDirectory(self._job.runs / RUN)
        self._start_training()
        self._invariants = HostInvariants(self._job, RUN, self.engines, self._router, self.staleness)
        self._invariants.lives = lambda: self._train.poll() is None

    def _serve(self, host: Host) -> None:
        serve(host, self._model, self._directory / f"{host.name}.out", "--max-model-len", "256", key=self._key)

    def _serves(self, engine: HostEngine) -> bool:
        return _answers(engine.endpoint, dialect("vllm").health())

    def _start_router(self) -> None:
        """Its workers are the run's matter."""
        from rltool.config.router import RouterConfig
        from rltool.router.launch import router_argv

        key = write_key(self._b.outside(self._b.here / "router"), self._key)
        key_there = self._b.here / "router" / key.name
        config = RouterConfig(host=self._b.address)
        argv = router_argv(config, port=ROUTER_PORT, prometheus_port=ROUTER_PORT + 1, key_file=key_there)
        self._b.start(argv, out=self._directory / "router.log")

    def _router_answers(self) -> bool:
        return _answers(self._router, HttpRequest("GET", "/liveness"))

    def _start_training(self, *more: str) -> None:
        sets = (
            *SETTINGS, f"rollout.max_staleness={self.staleness}", "deadlines.sync=8", "deadlines.generate=30",
            f"engines.api_key_file={self._key_file}",
        )  # fmt: skip
        words = [
            "train", "--config", str(self._job.root / "run.toml"), "--run", RUN, *more, "--router", self._router.url,
            "--rollout-external", ",".join(engine.url for engine in self.engines),
            *(word for item in sets for word in ("--set", item)),
        ]  # fmt: skip
        environment = {"RLTOOL_RUNS": str(self._job.runs), "COLUMNS": "250", "OMP_NUM_THREADS": "1"}
        self._train = self._a.start(
            rltool(*words), env=environment, cwd=self._job.root, out=self._job.root / f"{RUN}.out"
        )

    def _kill_training(self) -> None:
        """The driver; the rest of the run lives on, and ends with its host."""
        if hasattr(self, "_train"):
            with suppress(ProcessLookupError):
                os.killpg(self._train.pid, signal.SIGKILL)
            self._train.wait()

    # -- what happens

    def _begin(self) -> None:
        which, share = self._rng.random(), self._rng.random()
        wire = self._rng.choice(["partition", "loss", "delay", "slow"])
        one, other = self._rng.sample([*self._hosts], 2)
        victim = self._rng.choice(self.engines).host
        seconds = 2.0 + share * LONGEST
        if which < OF_POWER:
            self._add(POWER, "power_cut", self._power_cut(victim, seconds / 4), host=victim.name)
        elif which < OF_POWER + OF_DRIVER:
            self._add(DRIVER, "driver_is_killed", self._driver_is_killed(share))
        else:
            pair = [one.name, other.name] if wire == "partition" else [victim.name] if wire == "slow" else []
            fault = self._on_the_wire(wire, seconds, one, other, victim)
            self._add(WIRE, wire, fault, hosts=pair, seconds=round(seconds, 1))

    def _add(self, lane: str, name: str, fault: Fault, **what: Any) -> None:
        if lane in self._faults or (lane == POWER and WIRE in self._faults):
            return  # what boots has to reach the others
        self.counts[name] += 1
        self._note(f"event: {lane}: {name} {what}")
        self.ledger.begin(lane, name, **what)
        self._invariants.strikes(name)
        self._faults[lane] = fault

    def _on_the_wire(self, kind: str, seconds: float, one: Host, other: Host, victim: Host) -> Fault:
        match kind:
            case "partition":
                self._hosts.partition(one, other)
            case "loss":
                self._hosts.loss(0.01)
            case "delay":
                self._hosts.delay(0.02)
            case _:
                self._hosts.rate(400_000, victim)
        yield from _wait(seconds)
        if kind == "slow":
            if victim.alive:
                self._hosts.rate(FAST, victim)
        else:
            self._hosts.heal()

    def _power_cut(self, host: Host, seconds: float) -> Fault:
        """Its disk is empty afterwards; who owns it starts what ran there."""
        self._hosts.kill(host)
        yield from _wait(seconds)
        self._hosts.boot(host)
        self._serve(host)
        if host is self._b:
            self._start_router()
        [engine] = [engine for engine in self.engines if engine.host is host]
        yield from _wait(START_SECONDS, lambda: self._serves(engine))
        if not self._serves(engine):
            raise Violation(f"{engine.url} does not start again:\n{(self._directory / f'{host.name}.out').read_text()}")

    def _driver_is_killed(self, share: float) -> Fault:
        self._kill_training()
        yield from super()._driver_is_killed(share)

    # -- looking

    def _note(self, line: str) -> None:
        super()._note(line)
        if line.startswith("step "):
            self.ledger.add("step", step=int(line.split()[1]))

    def _tick(self) -> None:
        before = set(self._faults)
        super()._tick()
        for lane in before - set(self._faults):
            self.ledger.end(lane)
        states: dict[str, str] = {row["url"]: row["state"] for row in self._invariants.rows}
        for url, state in states.items():
            if self._states.get(url) != state:
                self.ledger.add("engine", url=url, state=state)
        self._states |= states

    def _struck(self) -> set[str]:
        """While the wire or the power is off nothing is expected of anybody."""
        everybody = {self._router.url, *(engine.url for engine in self.engines)}
        return everybody if {WIRE, POWER} & set(self._faults) else set()

    def _end(self) -> None:
        said = self._a.run(
            rltool("stop", "--run", RUN), env={"RLTOOL_RUNS": str(self._job.runs)}, cwd=self._job.root,
            timeout=END_SECONDS, code=None,
        )  # fmt: skip
        code = self._train.wait(END_SECONDS)
        if code != 0:
            raise Violation(f"the run ended with exit code {code}: {said}")
        for line in self._invariants.check_end():
            self._note(line)
        self.ledger.check(self._invariants.completed)
        ends = time.monotonic() + STOP_SECONDS
        while left := self._processes_of_ray():
            if time.monotonic() > ends:
                raise Violation(f"processes of the run are left: {left}")
            time.sleep(TICK)

    def _processes_of_ray(self) -> list[str]:
        """That live: the first process of a host buries nobody."""
        lines = self._a.run(["ps", "ax", "-o", "stat,args"]).splitlines()
        return [line for line in lines if "ray" in line and not line.startswith("Z")]


def _enter_network(host: Host) -> None:
    """This process from here on asks engines, router and driver as `host` does. Its files stay this machine's."""
    with Path(f"/proc/{host.pid}/ns/net").open() as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def run_hosts(seed: int, minutes: float, count: int) -> list[str]:
    """Lines of a report. Raises Violation; then its directory, with the logs, is kept."""
    if (why := missing()) is not None:
        raise SystemExit(f"error: {why}")
    if count < 3:
        raise SystemExit("error: --hosts 3 or more: one trains, the others serve")
    directory = Path(tempfile.mkdtemp(prefix="chaos-")).resolve()
    chaos = HostsChaos(seed, directory, 60 * minutes, count=count, ledger=Path(f"build/chaos-hosts-{seed}.jsonl"))
    try:
        lines = chaos.run()
    except BaseException:
        print(f"logs and run are kept in {directory}, the ledger in {chaos.ledger.path}", flush=True)
        raise
    shutil.rmtree(directory)
    return [*lines, f"ledger: {chaos.ledger.path}"]
