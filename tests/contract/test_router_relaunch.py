"""What whoever has started a planned router does when that dies: real processes, of sglang-router and of a fake one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rltool.config.serve import EngineGroup
from rltool.engines.endpoints import Endpoints, EngineEndpoint, ModelEndpoints
from rltool.engines.launch.plan import Model
from rltool.engines.launch.start import Order, launch_engines
from rltool.engines.sync_client import send
from rltool.engines.types import HttpRequest
from rltool.errors import EngineError
from rltool.processes.restarts import RestartPolicy
from rltool.processes.run_directory import RunDirectory, open_run
from rltool.processes.spawn import ProcessFailed
from rltool.processes.state import ProcessState, is_alive, read_state
from rltool.processes.stop_run import stop_run
from rltool.processes.supervise import ProcessGroup, Watching
from rltool.router import planned
from rltool.router.launch import running_router
from rltool.router.planned import RouterRelaunch, start_planned_routers
from rltool.router.workers import list_workers
from tests.contract.fakes import router_process
from tests.contract.fakes.engine_process import REPOSITORY, write_python
from tests.contract.router_workers import FakeWorker
from tests.contract.supervised import SECONDS, Over, Supervised

ONE = EngineGroup(device="cpu", ready_timeout=SECONDS)
GENERATE = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return open_run("demo", create=True, root=tmp_path / "runs")


@pytest.fixture
def fake_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of sglang-router."""

    def argv(config, *, port, prometheus_port, key_file, disaggregated):
        return (sys.executable, "-m", router_process.MODULE, "--port", str(port), "--key-file", str(key_file))

    monkeypatch.setattr("rltool.router.launch.router_argv", argv)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


@pytest.fixture
def workers(run: RunDirectory) -> Iterator[list[FakeWorker]]:
    key = run.ensure_key().read_text()
    workers = [FakeWorker(key, run.key_file) for _ in range(2)]
    yield workers
    for worker in workers:
        worker.close()


class Routed(Supervised):
    """A planned router in front of these engines, which somebody else started. said: also what it says itself."""

    def __init__(
        self, group: ProcessGroup, engines: list[EngineEndpoint], *, most: int = 5, backoff: float = 0.05,
        required: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(group)
        Endpoints(models={"policy": ModelEndpoints(engines=tuple(engines))}).save(self.run.endpoints_file)
        order = Order((ONE,), {"policy": Model(Path("/m"), start_router=True)}, RestartPolicy(most, backoff))
        [self.url] = start_planned_routers(
            order, {"policy": engines}, group, required=required, report=self.said.append
        ).values()
        self.said.clear()

    def data_url(self) -> str | None:
        return Endpoints.load(self.run.endpoints_file).models["policy"].data_url

    def workers(self) -> list[str]:
        """Whom it has; none while it does not answer."""
        try:
            return sorted(worker.url for worker in list_workers(running_router(self.run)) if worker.healthy)
        except EngineError:
            return []

    def is_back(self, before: ProcessState, urls: list[str]) -> Callable[[], bool]:
        def there() -> bool:
            state = read_state(self.run, "router")
            return state is not None and state.pid != before.pid and self.workers() == sorted(urls)

        return there


def until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.02)


def generated(url: str, key: str | None) -> dict:
    """The answer to a request through a router."""
    return send(url, HttpRequest("POST", "/generate", GENERATE), key=key, timeout=SECONDS)


def test_a_router_that_is_killed_serves_again_at_its_address_with_its_workers(run, workers):
    """The real sglang-router, twice."""
    urls = [worker.url for worker in workers]
    with ProcessGroup(run) as group:
        routed = Routed(group, [worker.endpoint for worker in workers])
        log = routed.process("router").log

        def scenario() -> Iterator[Callable[[], bool]]:
            for _ in range(2):
                yield routed.is_back(routed.kill_process("router"), urls)
                assert generated(routed.url, workers[0].key)["worker"] in urls
                yield lambda: f"router of policy serves again: {routed.url}, 2 worker(s)" in routed.said
                routed.said.remove(f"router of policy serves again: {routed.url}, 2 worker(s)")

        with pytest.raises(Over):
            routed.play(scenario)
        assert routed.process("router").log == log and routed.data_url() == routed.url
        first, second = routed.said
        assert "router was killed by signal 9; it is started again in 0.05 s" in first and "in 0.1 s" in second


def test_an_engine_that_does_not_serve_yet_becomes_a_worker_when_it_does(run, workers, fake_router, monkeypatch):
    there, away = (worker.endpoint for worker in workers)
    loading = {away.url}
    monkeypatch.setattr(planned, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(planned, "serves", lambda url: url not in loading)
    with ProcessGroup(run) as group:
        routed = Routed(group, [there, away])

        def scenario() -> Iterator[Callable[[], bool]]:
            before = routed.kill_process("router")
            yield routed.is_back(before, [there.url])
            assert not any("serves again" in line for line in routed.said)
            loading.clear()
            yield routed.is_back(before, [there.url, away.url])
            yield lambda: any("serves again" in line for line in routed.said)

        with pytest.raises(Over):
            routed.play(scenario)


def test_who_trains_through_it_registers_the_engines_itself(run, workers, fake_router, monkeypatch):
    """It knows which of them hold its weights; one that was just started again must not be asked."""
    asked = []

    def users(of: RunDirectory, url: str):
        asked.append((of, url))
        return [SimpleNamespace(run=SimpleNamespace(name="training"))]

    monkeypatch.setattr(planned, "users_of_router", users)
    with ProcessGroup(run) as group:
        routed = Routed(group, [worker.endpoint for worker in workers])

        def scenario() -> Iterator[Callable[[], bool]]:
            before = routed.kill_process("router")
            yield lambda: any("run training registers engines" in line for line in routed.said)
            yield routed.is_back(before, [])

        with pytest.raises(Over):
            routed.play(scenario)
    assert asked == [(run, routed.url)]


def test_one_that_never_listens_uses_its_restarts_up(run, workers, fake_router, monkeypatch):
    monkeypatch.setattr(planned, "_listens", lambda url: False)
    with ProcessGroup(run) as group:
        routed = Routed(group, [worker.endpoint for worker in workers], most=1)

        def hangs() -> bool:
            check = group.checks.get("router")
            if check is not None:
                check._started -= 1000.0
            return check is not None

        def scenario() -> Iterator[Callable[[], bool]]:
            routed.kill_process("router")
            yield hangs
            yield lambda: any("did not serve within 120 s; it stays dead" in line for line in routed.said)

        with pytest.raises(Over):
            routed.play(scenario)
    assert read_state(run, "router") is None, "it holds its port no more"


def test_one_that_is_stopped_by_hand_is_not_started_again(run, workers, fake_router):
    with ProcessGroup(run) as group:
        routed = Routed(group, [worker.endpoint for worker in workers])

        def scenario() -> Iterator[Callable[[], bool]]:
            stop_run(run, ["router"], grace=5.0)
            yield lambda: False

        routed.play(scenario)
        assert routed.said == ["router was stopped"] and read_state(run, "router") is None


# -- beside the engines of the same command


def write_model(directory: Path) -> Path:
    model = directory / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"]}))
    (model / "pytorch_model.bin").touch()
    (model / "tokenizer.json").touch()
    return model


class Serving(Routed):
    """A fake vLLM and a fake router in front of it, as `serve-engines --config` starts them."""

    def __init__(self, group: ProcessGroup, directory: Path, *, most: int) -> None:
        Supervised.__init__(self, group)
        model = write_model(directory)
        engines = ONE.model_copy(update={"engine_python": write_python(directory)})
        order = Order((engines,), {"policy": Model(model, start_router=True)}, RestartPolicy(most, 0.05))
        found = launch_engines(order, group)
        [self.url] = start_planned_routers(order, found, group, report=self.said.append).values()
        self.said.clear()


def test_engines_outlive_a_router_that_is_given_up_and_its_address_is_taken_out(run, tmp_path, fake_router):
    with ProcessGroup(run) as group:
        serving = Serving(group, tmp_path, most=1)
        engine, port = serving.process("engine-0"), serving.url.rpartition(":")[2]
        assert serving.data_url() == serving.url

        def scenario() -> Iterator[Callable[[], bool]]:
            yield serving.is_back(serving.kill_process("router"), [str(engine.url)])
            serving.kill_process("router")
            yield lambda: serving.data_url() is None

        with pytest.raises(Over):
            serving.play(scenario)
        assert serving.process("engine-0") == engine and is_alive(engine)
        assert read_state(run, "router") is None
        assert any("router was killed by signal 9; it stays dead: too many restarts" in line for line in serving.said)
        assert serving.said[-1].startswith("the engines of policy serve on without a router; `rltool router --run demo")
        assert f"--model policy --port {port}`" in serving.said[-1]


def test_without_restarts_the_end_of_the_router_is_the_end_of_all(run, tmp_path, fake_router):
    with ProcessGroup(run) as group:
        serving = Serving(group, tmp_path, most=0)
        serving.kill_process("router")
        with pytest.raises(ProcessFailed, match="router was killed by signal 9"):
            serving.play(lambda: iter([lambda: False]))


def test_a_router_keeps_nobody_when_the_last_engine_is_given_up(run, tmp_path, fake_router):
    with ProcessGroup(run) as group:
        serving = Serving(group, tmp_path, most=1)
        first = serving.process("engine-0")

        def scenario() -> Iterator[Callable[[], bool]]:
            serving.kill_process("engine-0")
            yield lambda: (now := read_state(run, "engine-0")) is not None and now.pid != first.pid
            serving.kill_process("engine-0")
            yield lambda: False

        with pytest.raises(ProcessFailed, match="engine-0 was killed by signal 9"):
            serving.play(scenario)
        assert is_alive(serving.process("router"))


def test_detached_engines_and_their_router_are_watched_from_the_background(tmp_path):
    """The command as a user types it, a fake vLLM, the real sglang-router."""
    config, root = tmp_path / "run.toml", tmp_path / "runs"
    config.write_text(
        f'[model]\npath = "{write_model(tmp_path)}"\n[engines]\nstart_router = true\nrestart_backoff = 0.1\n'
        f'[[engines.groups]]\ndevice = "cpu"\nengine_python = "{write_python(tmp_path)}"\n'
    )
    command = [sys.executable, "-m", "rltool", "serve-engines", "--config", str(config), "--run", "demo", "--detach"]
    environment = os.environ | {"RLTOOL_RUNS": str(root), "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=2 * SECONDS, check=False)
    run = RunDirectory(root / "demo")
    try:
        assert done.returncode == 0, done.stdout + done.stderr
        router, key = running_router(run), run.key_file.read_text()
        before, watcher = read_state(run, "router"), read_state(run, "serve-engines")
        assert before is not None and watcher is not None and watcher.log is not None
        log = watcher.log
        os.kill(before.pid, signal.SIGKILL)
        until(lambda: f"router of policy serves again: {router.url}, 1 worker(s)" in log.read_text())
        after = read_state(run, "router")
        assert after is not None and (after.url, after.log) == (before.url, before.log) and after.pid != before.pid
        assert generated(router.url, key)["output_ids"]
    finally:
        stop_run(run)


# -- in a thread, as `train` does


def test_beside_other_work_it_is_started_again_until_the_watch_ends(run, workers, fake_router):
    with ProcessGroup(run) as group:
        routed = Routed(group, [worker.endpoint for worker in workers])
        with Watching(group, routed.said.append):
            until(routed.is_back(routed.kill_process("router"), [worker.url for worker in workers]))
        last = routed.kill_process("router")
        os.waitpid(last.pid, 0)
    assert not is_alive(last) and len([line for line in routed.said if "killed by signal 9" in line]) == 1


def test_where_it_is_not_required_one_without_restarts_is_given_up_at_its_first_death(run, workers, fake_router):
    with ProcessGroup(run) as group:
        routed = Routed(group, [worker.endpoint for worker in workers], most=0, required=False)
        with Watching(group, routed.said.append):
            routed.kill_process("router")
            until(lambda: any("serve on without a router" in line for line in routed.said))
    assert routed.data_url() is None and not any("ProcessFailed" in line for line in routed.said)


def test_an_interrupt_at_the_end_waits_for_what_is_being_started(run, workers, fake_router, monkeypatch):
    begun, done = threading.Event(), threading.Event()
    with ProcessGroup(run) as group:
        routed = Routed(group, [worker.endpoint for worker in workers])
        start = RouterRelaunch.start

        def slowly(self, process):
            begun.set()
            time.sleep(1.0)
            started = start(self, process)
            done.set()
            return started

        monkeypatch.setattr(RouterRelaunch, "start", slowly)
        with pytest.raises(KeyboardInterrupt), Watching(group, routed.said.append):  # noqa: PT012  # at the block's end
            routed.kill_process("router")
            assert begun.wait(SECONDS)
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        assert done.is_set(), "what was started is known to the group, which ends it"


def test_what_a_watch_cannot_mend_is_said(run, workers, fake_router):
    with ProcessGroup(run) as group:
        routed = Routed(group, [worker.endpoint for worker in workers], most=0)
        with Watching(group, routed.said.append):
            routed.kill_process("router")
            until(lambda: any("ProcessFailed: router was killed by signal 9" in line for line in routed.said))
