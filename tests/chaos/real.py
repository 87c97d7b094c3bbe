"""`make chaos ARGS="--real --seed N --minutes M"`: a training run on real engines behind a real router, on this
machine's CPU, while they are killed, stopped, restarted and continued.

Two vLLM, and an SGLang where RLTOOL_SGLANG_PYTHON names its environment. What is looked at is what everybody can see:
the run's metrics and recorded rollouts, what its driver, its engines and the router answer (real_invariants.py).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from rltool.config.router import RouterConfig
from rltool.engines.dialects import dialect
from rltool.engines.endpoints import Endpoints, EngineEndpoint, ModelEndpoints
from rltool.engines.sync_client import send
from rltool.engines.types import HttpRequest
from rltool.errors import RltoolError
from rltool.processes.marks import left_behind
from rltool.processes.run_directory import open_run
from rltool.processes.state import read_states
from rltool.processes.stop import process_tree
from rltool.router.launch import router_argv
from tests.chaos.invariants import Journal, Violation
from tests.chaos.real_invariants import RealInvariants
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
"""Of an engine on a loaded machine."""
END_SECONDS = 300.0
STALENESS = (0, 1)
SETTINGS = (
    "steps=1000000", "eval.sets={}", "sampling.stop_token_ids=[]", "sampling.max_response_tokens=120",
    "trainer.max_tokens_per_micro_batch=2048", "optimizer_steps_per_rollout=1", 'algorithm.is_weights="token"',
)  # fmt: skip
"""Generation takes long enough that engines are caught in the middle of it."""

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
        self._kinds: dict[Callable[[RunningEngine], Fault], int] = {
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

    # -- the parts

    def _start(self, stack: ExitStack) -> None:
        model = self._directory / "model"
        model.mkdir()
        write_tiny_qwen2(model, tied=False, seed=1)
        key_file = write_key(self._directory)
        self.engines: list[RunningEngine] = []
        for number in range(VLLM_ENGINES):
            self._add(stack, start_vllm(model, self._place(f"vllm-{number}"), key_file=key_file))
        if python := os.environ.get("RLTOOL_SGLANG_PYTHON"):
            place = self._place("sglang")
            self._add(stack, start_sglang(model, place, python=Path(python), key_file=key_file))
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
        self._train = self._job.start("train", RUN, sets=[*SETTINGS, f"rollout.max_staleness={self.staleness}"])
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

    def _kill_training(self) -> None:
        if (self._job.runs / RUN / "state" / "run.json").exists():
            for state in read_states(open_run(RUN, create=False, root=self._job.runs)):
                for process in process_tree(state):
                    process.kill()
        self._train.kill()
        self._train.wait()

    # -- what happens

    def _happen(self) -> None:
        _until(lambda: self._invariants.steps > 1, self._tick)
        ends = time.monotonic() + self._seconds
        due = time.monotonic()
        while time.monotonic() < ends:
            self._tick()
            if time.monotonic() >= due:
                self._begin()
                due = time.monotonic() + self._rng.expovariate(1 / MEAN_PAUSE)
        self.journal.note("faults end")
        _until(lambda: not self._faults, self._tick)
        _until(self._invariants.all_serve, self._tick)
        beyond = self._invariants.steps + 2
        _until(lambda: self._invariants.steps >= beyond, self._tick)
        self._end()

    def _begin(self) -> None:
        """What is drawn depends on the seed alone: whether it can happen now is asked afterwards."""
        of_router = self._rng.random() < 0.2
        [kind] = self._rng.choices(list(self._kinds), list(self._kinds.values()))
        engine = self._rng.choice(self.engines)
        if of_router and self._router.url not in self._faults:
            self._add_fault(self._router.url, "router_is_killed", self._router_is_killed())
        elif not of_router and engine.url not in self._faults and self._faulty_engines() < len(self.engines) - 1:
            self._add_fault(engine.url, kind.__name__.strip("_"), kind(engine))

    def _faulty_engines(self) -> int:
        return len(self._faults.keys() - {self._router.url})

    def _add_fault(self, url: str, name: str, fault: Fault) -> None:
        self.counts[name] += 1
        self.journal.note(f"event: {url} {name}")
        self._invariants.strikes(name)
        self._faults[url] = fault

    def _is_stopped(self, engine: RunningEngine) -> Fault:
        seconds = self._rng.uniform(0.5, LONGEST_STOP)
        _signal(engine, signal.SIGSTOP)
        yield from _wait(seconds)
        _signal(engine, signal.SIGCONT)

    def _is_killed(self, engine: RunningEngine) -> Fault:
        seconds = self._rng.uniform(0, LONGEST_ABSENCE)
        _signal(engine, signal.SIGKILL)
        yield from _wait(seconds)
        yield from self._starts(engine)

    def _is_restarted(self, engine: RunningEngine) -> Fault:
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

    def _router_is_killed(self) -> Fault:
        seconds = self._rng.uniform(0, LONGEST_ABSENCE)
        self._end_router(signal.SIGKILL)
        yield from _wait(seconds)
        self._start_router()
        yield from _wait(START_SECONDS, self._router_answers)

    # -- looking

    def _tick(self) -> None:
        time.sleep(TICK)
        for url, fault in list(self._faults.items()):
            try:
                next(fault)
            except StopIteration:
                self.journal.note(f"event: {url}: it is over")
                del self._faults[url]
        if self._train.poll() is not None:
            raise Violation(f"the run has ended with exit code {self._train.returncode}")
        for line in self._invariants.look(struck=self._faults.keys()):
            self.journal.note(line)

    def _end(self) -> None:
        self._train.send_signal(signal.SIGTERM)
        try:
            code = self._train.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            raise Violation(f"the run does not end within {END_SECONDS:g} s of SIGTERM") from None
        if code != 0:
            raise Violation(f"the run ended with exit code {code}")
        self._invariants.check_end()
        left = left_behind(open_run(RUN, create=False, root=self._job.runs))
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


def run_real(seed: int, minutes: float) -> list[str]:
    """Lines of a report. Raises Violation."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        return RealChaos(seed, Path(directory), 60 * minutes).run()
