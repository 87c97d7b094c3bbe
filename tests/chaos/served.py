"""`make chaos ARGS="--served --seed N --minutes M"`: two clients, unmodified and in processes of their own, train and
sample by `rltool serve-trainer` (two Megatron ranks, a vLLM, a router), while all of these are killed (-9).

At the end the same calls are made again, and nothing disturbs them: every result and every trained weight is the same,
bit for bit, so that no acknowledged call was lost or carried out twice; every sample is of the version that was asked.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from rltool.processes.run_directory import RunDirectory, open_run
from rltool.processes.state import ProcessState, find_process, is_alive, read_state, read_states
from rltool.processes.stop_run import stop_run
from rltool.tinker.launch import ROLE
from rltool.tinker.paths import SAMPLERS, parse_path
from tests.chaos.invariants import Journal, Violation
from tests.e2e.engines import clients_python, free_port
from tests.e2e.job import Job
from tests.tiny_models import write_tiny_qwen2

RUN = "lab"
CLIENT = Path(__file__).parents[1] / "e2e" / "tinker_client.py"
CLIENTS = ("alice", "bob")
CALLS = ("forward_backward", "optim_step", "save_weights", "save_weights_for_sampler", "load_weights")
LOSE_ANSWER, LOSE_REQUEST = "acknowledgement_is_lost", "killed_while_accepting"
ROLES = {"server": (ROLE,), "engine": ("engine-0",), "router": ("router",), "server_and_engine": (ROLE, "engine-0")}
FAULTS = (*ROLES, "rank", LOSE_ANSWER, LOSE_ANSWER, LOSE_REQUEST)
TICK = 0.05
LONGEST_PAUSE = 2.0
"""Seconds from a step of a client to the next fault, at most."""
STEP_SECONDS = 240.0
"""Without a step of any client: too long, with all that is started again in between."""
END_SECONDS = 300.0
EXACT = 1e-5
"""Between log-probabilities of engine and trainer, and of two engines, in float32 on a CPU."""
RANKS = 2
BETWEEN = 0.005
"""From a request's first bytes to the kill that is to hit its acceptance, in seconds at most."""


class Wire:
    """Between clients and server: bytes, unchanged, but for one call after `arm`, in whose course the server dies."""

    def __init__(self, port: int) -> None:
        self._server, self._listener = port, socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._armed: tuple[str, bytes, Callable[[], object], float] | None = None
        threading.Thread(target=self._listen, daemon=True).start()

    def arm(self, fault: str, call: str, strike: Callable[[], object], pause: float) -> None:
        """fault: LOSE_ANSWER strikes when the server has answered, and the client does not get to know; LOSE_REQUEST
        `pause` seconds after the request has come."""
        with self._lock:
            self._armed = (fault, f"POST /api/v1/{call} ".encode(), strike, pause)

    def close(self) -> None:
        self._listener.close()

    def _listen(self) -> None:
        with suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                try:
                    server = socket.create_connection(("127.0.0.1", self._server), 2.0)
                    server.settimeout(None)
                except OSError:
                    client.close()
                    continue
                call: list[Any] = [None]
                for pump in (self._requests, self._answers):
                    threading.Thread(target=pump, args=(client, server, call), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket, call: list[Any]) -> None:
        with _both(client, server):
            while data := client.recv(2**16):
                with self._lock:
                    if self._armed is not None and data.startswith(self._armed[1]):
                        call[0], self._armed = self._armed, None
                server.sendall(data)
                if call[0] is not None and call[0][0] == LOSE_REQUEST:
                    _, _, strike, pause = call[0]
                    time.sleep(pause)
                    strike()
                    return

    def _answers(self, client: socket.socket, server: socket.socket, call: list[Any]) -> None:
        with _both(client, server):
            while data := server.recv(2**16):
                if call[0] is not None:
                    call[0][2]()
                    return
                client.sendall(data)


class _both:
    """Whatever ends one side of a connection ends the other."""

    def __init__(self, *ends: socket.socket) -> None:
        self._ends = ends

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        return isinstance(error, OSError)


class Client:
    """One of them. It goes on until `stop`, and then says what it found; steps: without a word from here."""

    def __init__(self, who: str, url: str, directory: Path, seed: int, steps: int | None = None) -> None:
        self.who, self._stop, self.steps = who, directory / f"stop-{who}", 0
        self._stop.unlink(missing_ok=True)
        words = [url, f"tml-{who}", "chaos", str(seed), str(steps or 10**6), str(self._stop)]
        environment = {"PATH": os.environ["PATH"], "HOME": str(directory), "TINKER_TELEMETRY": "0"}
        self.process = subprocess.Popen(
            [str(clients_python()), str(CLIENT), *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment, cwd=directory,
        )  # fmt: skip
        self.said: list[str] = []
        self._out: list[str] = []
        self._readers = [threading.Thread(target=self._read, daemon=True), threading.Thread(target=self._result)]
        for reader in self._readers:
            reader.start()

    def stop(self) -> None:
        self._stop.touch()

    def result(self) -> Any:
        """What it found. Violation where it has failed."""
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            raise Violation(f"{self.who} does not end:\n{self.tail()}") from None
        for reader in self._readers:
            reader.join()
        lines = [line.removeprefix("RESULT ") for line in "".join(self._out).splitlines() if line.startswith("RESULT ")]
        found = json.loads(lines[-1]) if lines else {"failed": "without a result"}
        if "failed" in found:
            raise Violation(f"{self.who}: {found['failed']}\n{self.tail()}")
        return found

    def tail(self) -> str:
        return "".join(self.said[-30:])

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            self.steps += line.startswith("step ")

    def _result(self) -> None:
        assert self.process.stdout is not None
        self._out.append(self.process.stdout.read())


class ServedChaos:
    """One seed. directory: its own, empty. seconds: after which no further round of all faults begins."""

    def __init__(self, seed: int, directory: Path, seconds: float) -> None:
        self._seed, self._rng = seed, random.Random(seed)
        self._directory, self._seconds = directory, seconds
        self.counts: Counter[str] = Counter()
        self.journal = Journal()

    def run(self) -> list[str]:
        """Lines of a report. Raises Violation with what is known of the moment."""
        with ExitStack() as stack:
            try:
                self._start(stack)
                found = self._disturbed(stack)
                self._check(found, self._calm(stack, found))
            except Violation as violation:
                raise Violation(
                    f"{violation}\nthe last events:\n{self.journal.text()}\n{self._log()[-4000:]}"
                ) from None
            steps = sum(each["steps"] for each in found.values())
            samples = sum(len(each["samples"]) for each in found.values())
            return [f"{self.counts.total()} faults {dict(self.counts)}; {steps} steps, {samples} samples"]

    # -- the parts

    def _start(self, stack: ExitStack) -> None:
        model, keys = self._directory / "tiny", self._directory / "keys"
        model.mkdir()
        write_tiny_qwen2(model, tied=True)
        keys.mkdir()
        for who in CLIENTS:
            (keys / who).touch(mode=0o600)
            (keys / who).write_text(f"tml-{who}")
        self._job, port = Job(self._directory, model), free_port()
        self._run = RunDirectory(self._job.runs / RUN)
        stack.callback(self._end)
        self._job.say(
            "serve-engines", str(model), "--device", "cpu", "--max-model-len", "128", "--lora-rank", "4",
            "--lora-slots", "3", "--max-restarts", "100", "--run", RUN, "--detach",
        )  # fmt: skip
        self._job.say("router", "--run", RUN, "--detach")
        self._job.say(
            "serve-trainer", str(model), "--rollout-external", f"@{self._run.endpoints_file}", "--keys", str(keys),
            "--port", str(port), "--lora-rank", "4", "--served-name", "tiny", "--max-restarts", "100",
            "--snapshot-every", str(self._rng.randint(3, 12)), "--set", "model.dtype=float32",
            "--set", f"trainer.world_size={RANKS}", "--set", "trainer.torch_threads=1",
            "--set", "trainer.max_tokens_per_micro_batch=256", "--detach",
        )  # fmt: skip
        self._port, self._wire = port, stack.enter_context(closing(Wire(port)))

    def _end(self) -> None:
        if self._run.is_made:
            stop_run(open_run(RUN, create=False, root=self._job.runs))

    def _log(self) -> str:
        state = read_state(self._run, ROLE) if self._run.is_made else None
        return "" if state is None or state.log is None else state.log.read_text(errors="replace")

    # -- what happens

    def _disturbed(self, stack: ExitStack) -> dict[str, Any]:
        clients = [Client(who, self._wire.url, self._directory, self._seed + i) for i, who in enumerate(CLIENTS)]
        for client in clients:
            stack.callback(client.process.kill)
        self._await_steps(clients)
        ends = time.monotonic() + self._seconds
        deck = self._rng.sample(FAULTS, len(FAULTS))
        while time.monotonic() < ends or deck:
            if not deck:
                deck = self._rng.sample(FAULTS, len(FAULTS))
            # What is drawn depends on the seed alone.
            pause, between, call = self._rng.random() * LONGEST_PAUSE, self._rng.random(), self._rng.choice(CALLS)
            patient = self._rng.random() < 0.7  # else the next one strikes while things start again
            time.sleep(pause)
            self._strike(deck.pop(), call, between * BETWEEN)
            if patient:
                self._await_steps(clients)
        self._note("faults end")
        self._await_steps(clients)
        for client in clients:
            client.stop()
        return {client.who: client.result() for client in clients}

    def _await_steps(self, clients: list[Client]) -> None:
        """Of each client one more."""
        before = [client.steps for client in clients]
        _until(
            lambda: all(client.steps > steps for client, steps in zip(clients, before, strict=True)),
            lambda: self._alive(clients), "no step of every client",
        )  # fmt: skip

    def _alive(self, clients: list[Client]) -> None:
        for client in clients:
            if client.process.poll() is not None:
                client.result()
                raise Violation(f"{client.who} has ended")
        for role in ("serve-trainer-command", "serve-engines"):
            state = read_state(self._run, role)
            if state is None or not is_alive(state):
                raise Violation(f"{role} has ended")

    def _strike(self, fault: str, call: str, pause: float) -> None:
        self.counts[fault] += 1
        self._note(f"fault: {fault}" + (f" of {call}" if fault in (LOSE_ANSWER, LOSE_REQUEST) else ""))
        if fault in (LOSE_ANSWER, LOSE_REQUEST):
            struck = threading.Event()
            self._wire.arm(fault, call, lambda: (self._kill(ROLE), struck.set()), pause)
            if not struck.wait(STEP_SECONDS):
                raise Violation(f"no client has made a call {call} for {STEP_SECONDS:g} s")
        elif fault == "rank":
            self._kill_rank()
        else:
            for role in ROLES[fault]:
                self._kill(role)

    def _kill(self, role: str) -> None:
        state = next((each for each in read_states(self._run) if each.role == role), None)
        if state is None or not _kill_process(state):
            self._note(f"{role} is not alive now")

    def _kill_rank(self) -> None:
        """As soon as there is one."""
        ranks: list[int] = []
        ends = time.monotonic() + STEP_SECONDS
        while not ranks:
            time.sleep(TICK)
            with suppress(psutil.Error):
                state = read_state(self._run, ROLE)
                server = find_process(state) if state is not None else None
                below = server.children(recursive=True) if server is not None else []
                ranks = sorted(each.pid for each in below if "TrainerActor" in " ".join(each.cmdline()))
            if time.monotonic() > ends:
                raise Violation(f"no rank for {STEP_SECONDS:g} s")
        with suppress(ProcessLookupError):
            os.kill(self._rng.choice(ranks), signal.SIGKILL)

    # -- what is to hold

    def _calm(self, stack: ExitStack, found: dict[str, Any]) -> dict[str, Any]:
        """The same calls, one client after the other, undisturbed."""
        again: dict[str, Any] = {}
        for i, who in enumerate(CLIENTS):
            url = f"http://127.0.0.1:{self._port}"
            client = Client(who, url, self._directory, self._seed + i, found[who]["steps"])
            stack.callback(client.process.kill)
            again[who] = client.result()
        return again

    def _check(self, found: dict[str, Any], calm: dict[str, Any]) -> None:
        for who in CLIENTS:
            ours, theirs = found[who], calm[who]
            for i, (one, other) in enumerate(zip(ours["results"], theirs["results"], strict=True)):
                if one != other:
                    raise Violation(f"{who}, result {i}: {str(one)[:300]} and undisturbed {str(other)[:300]}")
            for one, other in zip(ours["samples"], theirs["samples"], strict=True):
                what = f"{who}: a sample of step {one['of']} at step {one['at']}"
                if one["tokens"] != other["tokens"]:
                    raise Violation(f"{what} is {one['tokens']}, undisturbed {other['tokens']}")
                for name in ("trainer", "sampled"):
                    if not np.allclose(one["sampled"], (other if name == "sampled" else one)[name], atol=EXACT):
                        raise Violation(f"{what} has other log-probabilities than {name}: {one} {other}")
            weights = [self._weights(each["path"]) for each in (ours, theirs)]
            if weights[0] != weights[1]:
                raise Violation(f"{who}: the trained weights differ")
            if not any(each["of"] < each["at"] for each in ours["samples"]):
                self._note(f"{who} has sampled from no older version")

    def _weights(self, path: str) -> bytes:
        at = parse_path(path, SAMPLERS)
        return (self._run.path / "served" / "samplers" / at.model / at.name / "adapter_model.safetensors").read_bytes()

    def _note(self, line: str) -> None:
        self.journal.note(line)
        print(line, flush=True)


def _kill_process(state: ProcessState) -> bool:
    process = find_process(state)
    if process is None:
        return False
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    return True


def _until(condition: Callable[[], bool], tick: Callable[[], None], what: str) -> None:
    ends = time.monotonic() + STEP_SECONDS
    while not condition():
        if time.monotonic() > ends:
            raise Violation(f"{what} for {STEP_SECONDS:g} s")
        tick()
        time.sleep(TICK)


def run_served(seed: int, minutes: float) -> list[str]:
    """Lines of a report. Raises Violation. Unless all went well, its directory is kept."""
    directory = Path(tempfile.mkdtemp(prefix="chaos-")).resolve()
    try:
        lines = ServedChaos(seed, directory, 60 * minutes).run()
    except BaseException:
        print(f"logs and run are kept in {directory}", flush=True)
        raise
    shutil.rmtree(directory)
    return lines
