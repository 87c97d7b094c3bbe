"""`make chaos ARGS="--real --seed N --minutes M"`: a training run on real engines behind a real router, on this
machine's CPU, while they are killed, stopped, restarted and continued, and the driver is killed and resumed.

Two vLLM, and an SGLang where RLTOOL_SGLANG_PYTHON names its environment. What is looked at is what everybody can see:
the run's metrics and recorded rollouts, what its driver, its engines and the router answer (real_invariants.py).
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from rltool.config.router import RouterConfig
from rltool.engines.dialects.table import dialect
from rltool.engines.endpoints import Endpoints, EngineEndpoint, ModelEndpoints
from rltool.engines.sync_client import send
from rltool.engines.types import HttpRequest
from rltool.errors import RltoolError
from rltool.processes.marks import left_behind
from rltool.processes.run_directory import RunDirectory
from rltool.processes.stop import stop_processes
from rltool.router.launch import router_argv
from tests.chaos.invariants import Journal, Violation
from tests.chaos.real_invariants import CHECKPOINT_STEPS, RealInvariants
from tests.e2e.engines import STOP_SECONDS, RunningEngine, free_port, start_sglang, start_vllm, wait_ready, write_key
from tests.e2e.job import write_job
from tests.tiny_models import write_tiny_qwen2

RUN = "chaos"
VLLM_ENGINES = 2
MEAN_PAUSE = 6.0
LONGEST_STOP = 20.0
LONGEST_ABSENCE = 5.0
"""Seconds until the owner of a killed process starts it again."""
TICK = 0.2
START_SECONDS = 400.0
"""Of an engine, or of a run that resumes, on a loaded machine."""
END_SECONDS = 300.0
STALENESS = (0, 1)
SETTINGS = (
    "steps=1000000", "eval.sets={}", "sampling.stop_token_ids=[]", "sampling.max_response_tokens=120",
    "trainer.max_tokens_per_micro_batch=2048", "optimizer_steps_per_rollout=1", 'algorithm.is_weights="token"',
    f"checkpoint.every_steps={CHECKPOINT_STEPS}", "checkpoint.keep_last=2",
)  # fmt: skip
"""Generation takes long enough that engines are caught in the middle of it."""
OF_ROUTER, OF_DRIVER = 0.15, 0.06
"""Shares of the faults."""
DRIVER = "driver"

Fault = Iterator[None]
"""What happens to one process, step by step: it is asked for the next one at each tick, and yields while it waits."""


class RealChaos:
    """One seed. directory: its own, empty. seconds: after which no further fault begins."""

    def __init__(self, seed: int, directory: Path, seconds: float) -> None:
        self._rng, self._directory, self._seconds = random.Random(seed), directory, seconds
        self.staleness = self._rng.choice(STALENESS)
        self.counts: Counter[str] = Counter()
        self.journal = Journal()
        self._faults: dict[str, Fault] = {}
        self._kinds: dict[Callable[[RunningEngine, float], Fault], int] = {
            self._is_stopped: 4, self._is_killed: 2, self._is_restarted: 1,
        }  # fmt: skip

    def run(self) -> list[str]:
        """Lines of a report. Raises Violation with what is known of the moment."""
        with ExitStack() as stack:
            self._start(stack)
            try:
                self._happen()
            except Violation as violation:
                said = self._job.output(RUN)[-3000:]
                raise Violation(f"{violation}\nthe last events:\n{self.journal.text()}\n{said}") from None
            return [
                f"{self.counts.total()} events {dict(self.counts)}, max_staleness={self.staleness}, "
                f"engines {[engine.endpoint.dialect for engine in self.engines]}",
                *self._invariants.lines(),
            ]

    def listening(self) -> list[str]:
        """Addresses of its servers at which somebody still answers."""
        found = []
        for url in (*(engine.url for engine in self.engines), self._router.url):
            parts = urlsplit(url)
            with suppress(OSError), socket.create_connection((parts.hostname, parts.port), 1.0):
                found.append(url)
        return found

    # -- the parts

    def _start(self, stack: ExitStack) -> None:
        model = self._directory / "model"
        model.mkdir()
        write_tiny_qwen2(model, tied=False, seed=1)
        key = secrets.token_hex(16)
        key_file = write_key(self._directory, key)
        self.engines: list[RunningEngine] = []
        for number in range(VLLM_ENGINES):
            self._add(stack, start_vllm(model, self._place(f"vllm-{number}"), key=key))
        if os.environ.get("RLTOOL_SGLANG_PYTHON"):
            self._add(stack, start_sglang(model, self._place("sglang"), key=key))
        for engine in self.engines:
            wait_ready(engine)
        port = free_port()
        self._router_argv = router_argv(RouterConfig(), port=port, prometheus_port=free_port(), key_file=key_file)
        self._router = EngineEndpoint(url=f"http://127.0.0.1:{port}", dialect="sglang", key_file=key_file)
        self._start_router()
        stack.callback(lambda: self._end_router(signal.SIGTERM))
        file = self._directory / "endpoints.json"
        policy = ModelEndpoints(engines=tuple(e.endpoint for e in self.engines), data_url=self._router.url)
        Endpoints(models={"policy": policy}).save(file)
        _until(self._router_answers, lambda: time.sleep(TICK))
        self._job = write_job(self._directory, model, f"@{file}")
        self._run = RunDirectory(self._job.runs / RUN)
        self._start_training()
        stack.callback(self._kill_training)
        self._invariants = RealInvariants(self._job, RUN, self.engines, self._router, self.staleness)

    def _place(self, name: str) -> Path:
        (self._directory / name).mkdir()
        return self._directory / name

    def _add(self, stack: ExitStack, engine: RunningEngine) -> None:
        stack.callback(engine.stop)
        stack.callback(lambda: _signal(engine, signal.SIGCONT))
        self.engines.append(engine)

    def _start_router(self) -> None:
        """It knows no worker: who is in it is the run's matter."""
        with (self._directory / "router.log").open("ab") as log:
            self._router_process = subprocess.Popen(self._router_argv, stdout=log, stderr=log, start_new_session=True)

    def _end_router(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._router_process.pid, number)
        self._router_process.wait(STOP_SECONDS)

    def _router_answers(self) -> bool:
        return _answers(self._router, HttpRequest("GET", "/liveness"))

    def _start_training(self, *more: str) -> None:
        self._train = self._job.start("train", RUN, *more, sets=[*SETTINGS, f"rollout.max_staleness={self.staleness}"])

    def _kill_training(self) -> None:
        self._train.kill()
        self._train.wait()
        if (self._run.state_dir / "run.json").exists():
            stop_processes(left_behind(self._run), 0)

    # -- what happens

    def _happen(self) -> None:
        _until(lambda: self._invariants.steps > CHECKPOINT_STEPS, self._tick)  # a driver that is killed can resume
        ends = time.monotonic() + self._seconds
        due = time.monotonic()
        while time.monotonic() < ends:
            self._tick()
            if time.monotonic() >= due:
                self._begin()
                due = time.monotonic() + self._rng.expovariate(1 / MEAN_PAUSE)
        self._note("faults end")
        _until(lambda: not self._faults, self._tick)
        _until(self._invariants.all_serve, self._tick)
        beyond = self._invariants.steps + 2
        _until(lambda: self._invariants.steps >= beyond, self._tick)
        self._end()

    def _begin(self) -> None:
        """What is drawn depends on the seed alone: whether it can happen now is asked afterwards."""
        which, share = self._rng.random(), self._rng.random()
        [kind] = self._rng.choices(list(self._kinds), list(self._kinds.values()))
        engine = self._rng.choice(self.engines)
        if which < OF_ROUTER:
            where, name, fault = self._router.url, "router_is_killed", self._router_is_killed(share)
        elif which < OF_ROUTER + OF_DRIVER:
            where, name, fault = DRIVER, "driver_is_killed", self._driver_is_killed(share)
        else:
            where, name, fault = engine.url, kind.__name__.strip("_"), kind(engine, share)
        spares_one = len({*self._faults, where} - {self._router.url, DRIVER}) < len(self.engines)
        if where not in self._faults and spares_one:
            self._add_fault(where, name, fault)

    def _add_fault(self, url: str, name: str, fault: Fault) -> None:
        self.counts[name] += 1
        self._note(f"event: {url} {name}")
        if url != DRIVER:
            self._invariants.strikes(name)
        self._faults[url] = fault

    def _is_stopped(self, engine: RunningEngine, share: float) -> Fault:
        _signal(engine, signal.SIGSTOP)
        yield from _wait(share * LONGEST_STOP)
        _signal(engine, signal.SIGCONT)

    def _is_killed(self, engine: RunningEngine, share: float) -> Fault:
        _signal(engine, signal.SIGKILL)
        yield from _wait(share * LONGEST_ABSENCE)
        yield from self._starts(engine)

    def _is_restarted(self, engine: RunningEngine, _share: float) -> Fault:
        _signal(engine, signal.SIGTERM)
        yield from _wait(STOP_SECONDS, lambda: engine.process.poll() is not None)
        _signal(engine, signal.SIGKILL)
        yield from self._starts(engine)

    def _starts(self, engine: RunningEngine) -> Fault:
        """Under its old address, with the weights of its disk, and with the boot id that it had."""
        engine.start_again()
        health = dialect(engine.endpoint.dialect or "").health()
        yield from _wait(START_SECONDS, lambda: engine.process.poll() is not None or _answers(engine.endpoint, health))
        if engine.process.poll() is not None or not _answers(engine.endpoint, health):
            raise Violation(f"{engine.url} does not start again:\n{engine.log_tail()}")

    def _router_is_killed(self, share: float) -> Fault:
        self._end_router(signal.SIGKILL)
        yield from _wait(share * LONGEST_ABSENCE)
        self._start_router()
        yield from _wait(START_SECONDS, self._router_answers)

    def _driver_is_killed(self, share: float) -> Fault:
        """Ray, ranks and rollout manager live on without it; --resume is all that is done about them."""
        self._train.kill()
        self._train.wait()
        yield  # steps that were recorded until now are no sign of life
        self._invariants.strikes("driver_is_killed")
        attempt = self._invariants.attempt
        yield from _wait(share * LONGEST_ABSENCE)
        self._start_training("--resume")
        yield from _wait(START_SECONDS, lambda: self._invariants.attempt > attempt)
        if self._invariants.attempt == attempt:
            raise Violation(f"no step was completed within {START_SECONDS:g} s of --resume")

    # -- looking

    def _struck(self) -> Collection[str]:
        """URLs of what a fault holds now."""
        return self._faults.keys()

    def _note(self, line: str) -> None:
        self.journal.note(line)
        print(line, flush=True)

    def _tick(self) -> None:
        time.sleep(TICK)
        for url, fault in list(self._faults.items()):
            try:
                next(fault)
            except StopIteration:
                self._note(f"event: {url}: it is over")
                del self._faults[url]
        ended = self._train.poll()
        if ended is not None and not (ended == -signal.SIGKILL and DRIVER in self._faults):
            raise Violation(f"the run has ended with exit code {ended}")
        for line in self._invariants.look(struck=self._struck()):
            self._note(line)

    def _end(self) -> None:
        self._train.send_signal(signal.SIGTERM)
        try:
            code = self._train.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            raise Violation(f"the run does not end within {END_SECONDS:g} s of SIGTERM") from None
        if code != 0:
            raise Violation(f"the run ended with exit code {code}")
        self._invariants.check_end()
        left = left_behind(self._run)
        if left:
            raise Violation(f"processes of the run are left: {left}")


def _until(condition: Callable[[], bool], tick: Callable[[], None]) -> None:
    ends = time.monotonic() + START_SECONDS
    while not condition():
        if time.monotonic() > ends:
            raise Violation(f"waited for {START_SECONDS:g} s in vain")
        tick()


def _signal(engine: RunningEngine, number: int) -> None:
    with suppress(ProcessLookupError):
        engine.signal(number)


def _wait(seconds: float, condition: Callable[[], bool] = lambda: False) -> Fault:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and not condition():
        yield


def _answers(endpoint: EngineEndpoint, request: HttpRequest) -> bool:
    try:
        send(endpoint.url, request, key=endpoint.read_key(), timeout=2.0)
    except RltoolError:
        return False
    return True


def processes_in(directory: Path) -> list[str]:
    """Living processes that were started in this directory or name it: all that a run here starts."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = (process.cwd(), *process.cmdline())
            if process.pid != os.getpid() and any(str(directory) in word for word in words):
                found.append(f"{process.pid} {process.name()}")
    return found


def run_real(seed: int, minutes: float) -> list[str]:
    """Lines of a report. Raises Violation, also for what is left when all has been ended. Unless all went well, its
    directory, with the logs of all processes and the run, is kept."""
    directory = Path(tempfile.mkdtemp(prefix="chaos-")).resolve()
    try:
        lines = _run_real(seed, minutes, directory)
    except BaseException:
        print(f"logs and run are kept in {directory}", flush=True)
        raise
    shutil.rmtree(directory)
    return lines


def _run_real(seed: int, minutes: float, directory: Path) -> list[str]:
    chaos = RealChaos(seed, directory, 60 * minutes)
    lines = chaos.run()
    ends = time.monotonic() + STOP_SECONDS  # an engine's helper processes end when they see that it has
    while (left := [*processes_in(directory), *chaos.listening()]) and time.monotonic() < ends:
        time.sleep(TICK)
    if left:
        raise Violation(f"left when everything was ended: {left}")
    return lines
