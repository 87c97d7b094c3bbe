"""Seconds from a fault of an engine to the next completed step, what a lost engine costs, and what probing costs.

    python -m benchmarks.faults --work runs/faults --picture docs/faults.svg

Trains the tests' tiny model on two vLLM engines on this machine's CPU, with the deadlines as they come. Each kind of
fault in turn: caught at its moment, timed to the next line of metrics.jsonl, undone, and timed until a batch was
completed with both engines again. The faults of engines happen to one run, that of the router to another.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.pictures import standalone
from rltool.engines.dialects.vllm import VllmDialect
from rltool.engines.endpoints import EngineEndpoint, resolve
from rltool.processes.ports import reserved_ports
from rltool.processes.run_directory import open_run
from rltool.processes.state import read_states
from rltool.processes.stop import process_tree
from rltool.report.charts import Point, Series, line_chart
from tests.e2e.job import write_job
from tests.tiny_models import write_tiny_qwen2

SETTINGS = [
    "steps=1000000", "eval.sets={}", "sampling.stop_token_ids=[]", "sampling.max_response_tokens=120",
    "trainer.max_tokens_per_micro_batch=2048", "optimizer_steps_per_rollout=1", "rollout.dump=false",
]  # fmt: skip
TIMED_ROUTES = ("/v1/models", "/get_world_size", "/weight_info", "/is_paused")
"""Of a probe's requests, those that vLLM counts and times in its metrics; each probe sends one to each."""
PATIENCE_SECONDS = 400.0
STEADY_STEPS = 5
"""Between two faults."""
FOLLOWING_STEPS = 4
"""Timed after a fault: what the first one leaves over may hold up a later one."""


class Bench:
    """Two engines on neighbouring ports in the run `engines`; what they are asked and told."""

    def __init__(self, work: Path) -> None:
        self.work = work.resolve()
        model = self.work / "model"
        model.mkdir(parents=True, exist_ok=True)
        self.model = write_tiny_qwen2(model, tied=False, seed=1)
        self.job = write_job(self.work, self.model, None)
        self.file = self.job.runs / "engines" / "endpoints.json"
        with reserved_ports(3) as free:
            *self.ports, self.router_port = free.ports

    def rltool(self, *words: str) -> None:
        words_of = [sys.executable, "-m", "rltool", *words, "--run", "engines"]
        subprocess.run(words_of, env=self.job.environment(), check=True, stdout=subprocess.DEVNULL, cwd=self.work)

    def serve(self, port: int) -> None:
        self.rltool(
            "serve-engines", str(self.model), "--device", "cpu", "--max-model-len", "256", "--port", str(port),
            "--detach", "--no-join", "--max-restarts", "0",
        )  # fmt: skip

    def start_router(self) -> None:
        self.rltool("router", "start", "--port", str(self.router_port), "--detach")

    def engines(self) -> dict[str, EngineEndpoint]:
        return {engine.url: engine for engine in resolve([f"@{self.file}"]).engines}

    def victim(self) -> EngineEndpoint:
        return self.engines()[f"http://127.0.0.1:{self.ports[1]}"]

    def signal_role(self, number: int, owns: Callable[[str], bool]) -> None:
        """To every process of the living roles of the run `engines` for which `owns` holds."""
        states = read_states(open_run("engines", create=False, root=self.job.runs))
        for process in [process for state in states if owns(state.role) for process in process_tree(state)]:
            process.send_signal(number)

    def counters(self, engine: EngineEndpoint) -> dict[str, float]:
        """Its Prometheus counters and gauges, by name with labels."""
        request = urllib.request.Request(
            engine.url + "/metrics", headers={"Authorization": f"Bearer {engine.read_key()}"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as reply:
            lines = [line for line in reply.read().decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def generates(self, engine: EngineEndpoint) -> bool:
        return any(
            value > 0 for name, value in self.counters(engine).items() if name.startswith("vllm:num_requests_running")
        )


class Training:
    """A run that trains on the bench's engines until the block ends."""

    def __init__(self, bench: Bench, run: str) -> None:
        self.bench, self.run = bench, run
        words = bench.job.argv("train", run, "--rollout-external", f"@{bench.file}", sets=SETTINGS)
        with (bench.work / f"{run}.out").open("w") as out:
            self.process = subprocess.Popen(
                words, env=bench.job.environment(), stdout=out, stderr=subprocess.STDOUT, cwd=bench.work
            )

    def until(self, condition: Callable[[], bool]) -> float:
        """Seconds that it took."""
        started = time.monotonic()
        while not condition():
            if self.process.poll() is not None or time.monotonic() - started > PATIENCE_SECONDS:
                raise SystemExit(f"run {self.run} does not go on; see {self.bench.work / self.run}.out")
            time.sleep(0.01)
        return time.monotonic() - started

    def steps(self) -> list[dict]:
        exists = (self.bench.job.runs / self.run / "metrics.jsonl").exists()
        return self.bench.job.steps(self.run) if exists else []

    def until_steps(self, more: int) -> float:
        wanted = len(self.steps()) + more
        return self.until(lambda: len(self.steps()) >= wanted)

    def in_generation(self) -> None:
        victim = self.bench.victim()
        self.until(lambda: self.bench.generates(victim))

    def in_training(self) -> None:
        """Generation of a step is over: the trainer works, and the sync comes next."""
        self.in_generation()
        engines = list(self.bench.engines().values())
        self.until(lambda: not any(self.bench.generates(engine) for engine in engines))

    def until_serving(self, engines: int) -> float:
        """Until so many served when a batch was complete."""
        return self.until(lambda: self.steps()[-1]["rollout/engines_serving"] == engines)


@contextmanager
def training(bench: Bench, run: str) -> Iterator[Training]:
    found = Training(bench, run)
    try:
        found.until_steps(STEADY_STEPS)
        yield found
    finally:
        found.process.terminate()
        found.process.wait(PATIENCE_SECONDS)


def fault(run: Training, moment: Callable[[], None], strike: Callable[[], None], undo: Callable[[], None]) -> dict:
    """Of one fault: when it struck, how long the next steps took, and how long until both engines served again."""
    moment()
    at = run.steps()[-1]["step"] + 1
    strike()
    waits = [run.until_steps(1) for _ in range(FOLLOWING_STEPS)]
    run.until_serving(1)
    started = time.monotonic()
    undo()
    undone = time.monotonic() - started
    back = run.until_serving(2)
    run.until_steps(STEADY_STEPS)
    return {
        "at step": at, "seconds to each next step": [round(seconds, 1) for seconds in waits],
        "seconds to undo": round(undone, 1),
        "seconds until both serve": round(back, 1),
    }  # fmt: skip


def engine_faults(bench: Bench, run: Training) -> Iterator[tuple[str, dict]]:
    def owns(role: str) -> bool:
        return role.startswith("engine-") and role != "engine-0"

    def kill() -> None:
        bench.signal_role(signal.SIGKILL, owns)

    def stop() -> None:
        bench.signal_role(signal.SIGSTOP, owns)

    def go_on() -> None:
        bench.signal_role(signal.SIGCONT, owns)

    def serve() -> None:
        bench.serve(bench.ports[1])

    yield "kill -9 in generation", fault(run, run.in_generation, kill, serve)
    yield "kill -9 between steps", fault(run, run.in_training, kill, serve)
    yield "SIGSTOP in generation", fault(run, run.in_generation, stop, go_on)
    yield "SIGSTOP just before a sync", fault(run, run.in_training, stop, go_on)


def router_fault(bench: Bench, run: Training) -> dict:
    """Killed in generation and started again at once by its owner: the run cannot go on without it."""
    run.in_generation()
    started = time.monotonic()
    bench.signal_role(signal.SIGKILL, lambda role: role == "router")
    bench.start_router()
    undone = time.monotonic() - started
    wanted = len(run.steps()) + 1
    run.until(lambda: len(run.steps()) >= wanted)
    return {"seconds to undo": round(undone, 1), "seconds to the next step": round(time.monotonic() - started, 1)}


def probing(bench: Bench, run: Training, seconds: float) -> dict:
    """Probe requests a second at one engine of a run that trains, and the share of time in which it answered those of
    TIMED_ROUTES, by the engine's own HTTP metrics between two looks.

    That is the time to an answer, waiting for the server's event loop included, and side by side for those of a probe.
    """
    engine = bench.victim()
    before, started = bench.counters(engine), time.monotonic()
    run.until(lambda: time.monotonic() - started >= seconds)
    after, passed = bench.counters(engine), time.monotonic() - started

    def timed(metric: str) -> float:
        routes = tuple(f'{metric}{{handler="{route}"' for route in TIMED_ROUTES)
        return sum(value - before.get(name, 0.0) for name, value in after.items() if name.startswith(routes))

    probes = timed("http_requests_total") / len(TIMED_ROUTES)
    health = 1
    return {
        "seconds": round(passed, 1),
        "probe requests a second": round(probes * (health + len(VllmDialect().probe())) / passed, 2),
        "share of time, timed routes": round(timed("http_request_duration_seconds_sum") / passed, 5),
        "canary requests of the run": run.steps()[-1].get("engines/canary_requests_total", 0.0),
    }


def picture(steps: list[dict]) -> str:
    """Steps per minute over steps, in one colour with both engines and in another with one; a standalone SVG."""
    series: list[Series] = []
    points: list[Point] = []
    serving = steps[0]["rollout/engines_serving"]
    for record in steps:
        points.append((record["step"], 60 / record["time/step_seconds"]))
        if record["rollout/engines_serving"] != serving or record is steps[-1]:
            series.append(Series(f"{serving:g} engines", points, "line", color=0 if serving == 2 else 1))
            points, serving = points[-1:], record["rollout/engines_serving"]
    chart = line_chart(series, label="steps per minute", y_range=(0, max(y for item in series for _, y in item.points)))
    return standalone(chart)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--picture", type=Path, help="an SVG of the steps around the first fault")
    parser.add_argument("--probing-seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    bench = Bench(arguments.work)

    def log(**found: object) -> None:
        print(json.dumps(found), flush=True)

    try:
        for port in bench.ports:
            bench.serve(port)
        with training(bench, "engine-faults") as run:
            log(probing=probing(bench, run, arguments.probing_seconds))
            for number, (kind, found) in enumerate(engine_faults(bench, run)):
                log(**{kind: found})
                if number == 0 and arguments.picture is not None:
                    arguments.picture.write_text(picture(run.steps()))
        bench.start_router()
        with training(bench, "router-fault") as run:
            log(**{"router killed and started again": router_fault(bench, run)})
    finally:
        bench.signal_role(signal.SIGCONT, lambda role: True)
        bench.rltool("stop")


if __name__ == "__main__":
    main()
