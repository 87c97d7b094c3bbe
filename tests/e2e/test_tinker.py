"""The released tinker client, unmodified and in its own process, trains a real Megatron model through the server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from rltool.cli import main
from rltool.tinker.paths import STATES, parse_path
from tests.contract.tinker.tested_by import check_called, routes_of
from tests.e2e.engines import clients_python, free_port
from tests.e2e.megatron_models import save_hf
from tests.e2e.tinker_server import WATCH_KEY

pytestmark = pytest.mark.e2e

KEYS = {"alice": "tml-alice", "bob": "tml-bob"}
CLIENT = Path(__file__).with_name("tinker_client.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_hf(tmp_path_factory.mktemp("qwen3"), "qwen3", tied=True)


SMALL_DISK = 'mkdir -p "$0" && mount -t tmpfs -o size=16m none "$0" || exit 99; exec "$@"'
"""For a server's journal; in a namespace that ends with it."""


class Server:
    wrapped_in: tuple[str, ...] = ()

    def __init__(self, model: Path, directory: Path, name: str) -> None:
        self.model, self.directory, self.port, self.name = model, directory, free_port(), name
        self.keys = directory / "keys"
        self.keys.mkdir(parents=True)
        for name, key in KEYS.items():
            (self.keys / name).write_text(key)
            (self.keys / name).chmod(0o600)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        arguments = [self.model, self.directory / "calls", self.keys, self.port, self.name]
        with (self.directory / "server.log").open("ab") as log:
            command = [*self.wrapped_in, sys.executable, "-m", "tests.e2e.tinker_server", *map(str, arguments)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        while True:
            assert self.process.poll() is None, (self.directory / "server.log").read_text()[-4000:]
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.1)

    def requests(self) -> dict[str, int]:
        """Of its process, by route."""
        return self.status()["requests"]

    def status(self) -> dict[str, Any]:
        asked = urllib.request.Request(f"{self.url}/status", headers={"Authorization": f"Bearer {WATCH_KEY}"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return json.load(answer)

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextmanager
def serving(model: Path, directory: Path, name: str = "tiny") -> Iterator[Server]:
    """name: of the base model."""
    server = Server(model, directory, name)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def start_client(
    server: Server, who: str, script: str, *more: str, key: str | None = None, **variables: str
) -> subprocess.Popen[str]:  # fmt: skip
    command = [str(clients_python()), str(CLIENT), server.url, key or KEYS[who], script, *more]
    environment = {"PATH": os.environ["PATH"], "HOME": str(server.directory), "TINKER_TELEMETRY": "0", **variables}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def result_of(client: subprocess.Popen[str]) -> Any:
    out, err = client.communicate(timeout=180)
    lines = [line.removeprefix("RESULT ") for line in out.splitlines() if line.startswith("RESULT ")]
    assert lines, err[-3000:]
    return json.loads(lines[-1])


@pytest.fixture(scope="module")
def server(model, tmp_path_factory) -> Iterator[Server]:
    clients_python()
    with serving(model, tmp_path_factory.mktemp("served")) as server:
        yield server


@pytest.fixture(autouse=True)
def calls_what_the_docs_say(request: pytest.FixtureRequest) -> Iterator[None]:
    if not routes_of(request.node.name):
        yield
        return
    server = request.getfixturevalue("server")
    before = server.requests()
    yield
    check_called(request.node.name, before, server.requests())


@pytest.fixture(scope="module")
def undisturbed(server) -> Any:
    return result_of(start_client(server, "alice", "steps"))


def test_the_client_trains_saves_and_loads_and_its_wrong_calls_are_refused_by_name(server):
    found = result_of(start_client(server, "alice", "surface"))
    assert "failed" not in found, found
    assert found["info"] == "tiny" and found["capabilities"] == ["tiny"]
    assert not np.allclose(found["before"], found["saved"])
    assert found["loaded"] == found["saved"]
    assert found["went_on"] == found["went_on_again"]
    assert found["other"] == found["before"]  # B is 0
    errors = found["errors"]
    for name, text in {
        "loss": "'stable_reinforce' is not supported", "inputs": "logprobs", "long": "has 80 tokens",
        "rank": "would train all weights, which the adapters", "model": "this server trains 'tiny'",
        "name": "a name is given once",
        "ttl": "ttl_seconds is 5, expected", "sampler": "is not served here",
    }.items():  # fmt: skip
        assert text in errors[name], (name, errors[name])
    rest, run, path = found["rest"], found["rest"]["run"], found["path"]
    short = f"tinker://{run}/weights/short"
    assert rest["short"] == short
    one, kept = [path, "training", True, True], [short, "training", True, True]
    assert rest["listed"] == [[one, [short, "training", False, True]], [one, kept], [kept]]
    assert rest["info"] == ["tiny", True, 4, False, True]
    assert rest["made"] == found["saved"] and rest["made_went_on"] == found["went_on"]
    assert rest["last"] == ["tiny", "alice", 4, short]
    assert rest["runs"][0] == 2 and rest["runs"][1] >= 3 and rest["runs"][2] == rest["made_model"]
    assert rest["page"] == [[short], 1]
    for error, text in zip(rest["errors"], ("no checkpoint", "no checkpoint", "is not served here"), strict=True):
        assert text in error
    stranger = result_of(start_client(server, "bob", "stranger", short))
    assert all("there is no model" in error for error in stranger["errors"]), stranger
    assert stranger["checkpoints"] == 0


def test_a_wrong_key_is_refused(server):
    assert "X-API-Key" in result_of(start_client(server, "alice", "steps", key="tml-wrong"))["failed"]


def test_a_loss_of_the_clients_own_gives_the_parameters_that_the_same_loss_here_gives(server, tmp_path):
    found = result_of(start_client(server, "alice", "custom", TORCH_AT=str(Path(torch.__file__).parents[1])))
    assert "failed" not in found, found
    for losses, norms, own in found["steps"]:
        assert losses[1] == pytest.approx(losses[0], rel=1e-6) and norms[1] == pytest.approx(norms[0], rel=1e-6)
        assert own == 2.0, "the loss's own metric"
    trained = []
    for path in found["paths"]:
        at = parse_path(path, STATES)
        saved, adapter = server.directory / "calls" / "checkpoints" / at.model / at.name, tmp_path / at.name
        with pytest.raises(SystemExit) as ended:
            main(["convert-ckpt", str(saved), str(adapter), "--to", "peft"])
        assert ended.value.code == 0
        trained.append(load_file(adapter / "adapter_model.safetensors"))
    for name, one in trained[0].items():
        np.testing.assert_allclose(trained[1][name], one, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(*found["ends"], rtol=1e-6, atol=1e-6)  # float32: rounding of numbers around 5
    assert np.abs(np.subtract(*found["moved"])).max() > 1e-2, "one that the server does not know"


def test_two_clients_beside_each_other_train_as_each_does_alone(server, undisturbed):
    alone = {"1": undisturbed, "2": result_of(start_client(server, "bob", "steps", "2"))}
    assert alone["1"]["end"] != alone["2"]["end"], "swapped states would show"
    both = {seed: start_client(server, who, "steps", seed) for who, seed in zip(("alice", "bob"), alone, strict=True)}
    assert {seed: result_of(client) for seed, client in both.items()} == alone


def test_a_server_killed_twice_in_the_middle_gives_the_client_what_it_would_have_given(model, tmp_path, undisturbed):
    with serving(model, tmp_path) as server:
        client = start_client(server, "alice", "steps")
        errors: list[str] = []
        assert client.stderr is not None
        for line in client.stderr:
            errors.append(line)
            if line.startswith(("step 1", "step 5")):
                server.kill()
                server.start()
            if line.startswith("step 7"):
                break
        reading = threading.Thread(target=client.stderr.read)
        reading.start()
        assert client.stdout is not None
        out = client.stdout.read()
        client.wait(timeout=60)
        reading.join()
    assert sum(line.startswith("step") for line in errors) == 8, errors[-20:]
    assert json.loads(out.removeprefix("RESULT ")) == undisturbed


def fill_after_a_step(client: subprocess.Popen[str], ballast: Path) -> None:
    """Fills the file's disk once the client has made step 1."""
    assert client.stderr is not None
    next(line for line in client.stderr if line.startswith("step 1"))
    with suppress(OSError), ballast.open("ab", 0) as file:
        while True:
            file.write(bytes(4096))


def test_on_a_disk_that_is_full_for_a_while_the_client_trains_as_it_would_have(model, tmp_path, undisturbed):
    """First it takes no call, then no snapshot of the rank."""
    server = Server(model, tmp_path, "tiny")
    calls = tmp_path / "calls"
    server.wrapped_in = ("unshare", "--user", "--map-root-user", "--mount", "bash", "-c", SMALL_DISK, str(calls))
    server.start()
    try:
        assert server.process is not None
        ballast = Path(f"/proc/{server.process.pid}/root{calls}/ballast")
        client = start_client(server, "alice", "steps")
        fill_after_a_step(client, ballast)
        reading = threading.Thread(target=client.stderr.read)
        reading.start()
        wait_for(lambda: "alice" in server.status()["refused"])
        os.truncate(ballast, ballast.stat().st_size - 65536)
        log = tmp_path / "server.log"
        wait_for(lambda: "a snapshot was not written to" in log.read_text())
        assert len([*ballast.parent.joinpath("snapshots").iterdir()]) <= 1, "nothing is left of it"
        ballast.unlink()
        assert client.stdout is not None
        out = client.stdout.read()
        client.wait(timeout=60)
        reading.join()
        assert json.loads(out.removeprefix("RESULT ")) == undisturbed
        assert "No space left on device" in log.read_text() and server.process.poll() is None
    finally:
        server.kill()


AGAIN_AND_AGAIN = (
    'mkdir -p "$0" && mount -t tmpfs -o size=16m none "$0" || exit 99; while true; do "$@"; done'
)
"""On a small disk, which outlives the server: it is started again when it dies."""


def test_a_server_that_is_killed_and_started_again_on_a_full_disk_serves_and_nothing_is_lost(
    model, tmp_path, undisturbed
):
    server = Server(model, tmp_path, "tiny")
    calls = tmp_path / "calls"
    server.wrapped_in = ("unshare", "--user", "--map-root-user", "--mount", "bash", "-c", AGAIN_AND_AGAIN, str(calls))
    server.start()
    assert server.process is not None
    shell = psutil.Process(server.process.pid)
    try:
        ballast = Path(f"/proc/{shell.pid}/root{calls}/ballast")
        client = start_client(server, "alice", "steps")
        fill_after_a_step(client, ballast)
        [first] = shell.children()
        first.kill()
        reading = threading.Thread(target=client.stderr.read)
        reading.start()
        wait_for(lambda: shell.children() not in ([], [first]))

        def refuses() -> bool:
            with suppress(OSError):
                return "alice" in server.status()["refused"] or bool(server.status()["stalled"])
            return False

        wait_for(refuses)
        ballast.unlink()
        assert client.stdout is not None
        out = client.stdout.read()
        client.wait(timeout=60)
        reading.join()
        assert json.loads(out.removeprefix("RESULT ")) == undisturbed
    finally:
        shell.suspend()
        for child in shell.children():
            child.kill()
        server.kill()


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("it did not come")
