"""Engines that a run starts on a host, as real processes of a fake vLLM: started, watched, started again, ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rltool.config.serve import EngineGroup, EngineLaunch
from rltool.engines.endpoints import Endpoints, EngineEndpoint
from rltool.engines.launch.host_engines import HostEngines
from rltool.engines.launch.plan import (
    EnginePlan,
    Host,
    Model,
    Settings,
    engine_slots,
    handed_out,
    plan_engines,
    port_needs,
    seat_slots,
    url_of,
)
from rltool.engines.launch.start import Order, launch_engines
from rltool.engines.sync_client import probe
from rltool.errors import EngineError, UsageError
from rltool.processes.ports import reserve_ports
from rltool.processes.run_directory import RunDirectory, open_run
from rltool.processes.spawn import ProcessFailed
from rltool.processes.state import is_alive, read_state, read_states, state_of_this_process, write_state
from rltool.processes.supervise import ProcessGroup
from tests.contract.fakes.engine_process import write_python

SECONDS = 60.0


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = open_run("demo", create=True, root=tmp_path / "runs")
    directory.ensure_key()
    return directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"]}))
    (directory / "pytorch_model.bin").touch()
    (directory / "tokenizer.json").touch()
    return directory


@pytest.fixture
def groups(tmp_path: Path) -> Callable[..., tuple[EngineGroup, ...]]:
    python = write_python(tmp_path)

    def make(**changes) -> tuple[EngineGroup, ...]:
        return (
            EngineGroup(name="a", device="cpu", engine_python=python, ready_timeout=SECONDS, **changes),
            EngineGroup(name="j", model="judge", device="cpu", engine_python=python, ready_timeout=SECONDS),
        )

    return make


@pytest.fixture
def host(run: RunDirectory) -> Iterator[HostEngines]:
    engines = HostEngines(run)
    try:
        yield engines
    finally:
        engines.close()


def planned(host: HostEngines, run: RunDirectory, model: Path, groups) -> EnginePlan:
    """As the driver does it: the host holds the ports that the plan needs."""
    slots = engine_slots(groups, device="cpu")
    seats = seat_slots(slots, [Host("here")])
    models = {"policy": Model(model), "judge": Model(model, update_weights=False)}
    settings = Settings(models, run.key_file, run.state_dir, device="cpu")
    ports = host.hold(port_needs(slots, seats, settings))
    return plan_engines(slots, seats, settings, handed_out(ports))


def until(condition: Callable[[], bool], what: str) -> None:
    ends = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > ends:
            raise AssertionError(f"never happened: {what}")
        time.sleep(0.02)


def boot_id(engine: EngineEndpoint) -> str | None:
    """What the server at this address says of itself; None: there is none yet."""
    try:
        return probe(engine, timeout=60.0).boot_id
    except EngineError:
        return None


def test_engines_take_the_places_of_an_earlier_attempt_on_another_host(host, run, model, groups):
    """The host that had them is gone, and the attempt that goes on has others."""
    earlier = state_of_this_process("engine-0", argv=["x"])
    write_state(run, earlier.model_copy(update={"boot": "of-host-a", "host": "host-a"}))
    host.start(planned(host, run, model, groups()).launches)
    assert is_alive(read_state(run, "engine-0"))


def test_an_engine_that_measures_its_gpu_loads_after_the_one_before_it_serves(host, run, model, groups):
    """As of a GPU that they share; the fakes need none."""
    plan = planned(host, run, model, groups(count=2))
    shared = [launch.model_copy(update={"gpus": (0,)}) if launch.group == "a" else launch for launch in plan.launches]
    host.start(shared)
    begun = {state.role for state in read_states(run)}
    assert begun == {"engine-0", "engine-2"}, "the judge is on no GPU"

    def log(line: str) -> None:
        serving.append(line)
        assert "engine-1" in line or read_state(run, "engine-1") is None, "it has not begun before engine-0 serves"

    serving: list[str] = []
    found = asyncio.run(host.ready(log))
    assert len(found) == 3 and len({engine.url for engine in found}) == 3
    assert {state.role for state in read_states(run)} == {"engine-0", "engine-1", "engine-2"}
    assert host.exits() == {}


def test_engines_of_all_models_are_started_and_all_are_ended(host, run, model, groups):
    host.start(planned(host, run, model, groups(count=2)).launches)
    found = asyncio.run(host.ready(lambda line: None))
    assert [(e.group, e.dialect, e.plugin) for e in found] == [(name, "vllm", True) for name in ("a", "a", "j")]
    assert len({e.url for e in found}) == 3 and all(boot_id(e) == e.boot_id for e in found)
    states = [read_state(run, f"engine-{n}") for n in range(3)]
    assert [s.url for s in states if s] == [e.url for e in found] and host.exits() == {}
    host.close()
    assert not any(psutil.pid_exists(s.pid) and is_alive(s) for s in states if s)
    assert [read_state(run, f"engine-{n}") for n in range(3)] == [None] * 3
    with pytest.raises(UsageError, match="the run is ending"):
        host.start_engine(1, "f" * 32)  # a restart that came too late


def test_a_classifier_is_ready_once_it_classifies(host, run, model, groups):
    policy, judge = planned(host, run, model, groups()).launches
    host.start([policy, judge.model_copy(update={"task": "classify"})])
    found = asyncio.run(host.ready(lambda line: None))
    assert [probe(engine, timeout=60.0).task for engine in found] == ["generate", "classify"]


def test_an_engine_that_was_to_classify_and_does_not_is_no_engine(host, run, model, groups):
    _, judge = planned(host, run, model, groups()).launches
    host.start([judge.model_copy(update={"task": "classify", "extra_args": ("--runner", "generate")})])
    with pytest.raises(ProcessFailed, match="refuses what a ready engine must answer.*classify answered 404"):
        asyncio.run(host.ready(lambda line: None))


def test_a_killed_engine_is_reported_once_and_started_again_under_its_address(host, run, model, groups):
    host.start(planned(host, run, model, groups()).launches)
    victim = asyncio.run(host.ready(lambda line: None))[1]
    before = read_state(run, "engine-1")
    assert before is not None
    os.kill(before.pid, signal.SIGKILL)
    until(lambda: host.exits() == {1: "engine-1 was killed by signal 9"}, "the exit is seen")
    assert host.exits() == {}, "once"
    host.stop_engine(1)
    host.start_engine(1, "f" * 32)
    until(lambda: boot_id(victim) == "f" * 32, "a new process answers at the old address")
    after = read_state(run, "engine-1")
    assert after is not None and after.pid != before.pid and after.log == before.log
    assert after.log is not None and after.log.read_text().count("this is the fake engine") == 2, "its log goes on"
    assert host.exits() == {}
    os.kill(after.pid, signal.SIGKILL)
    until(lambda: 1 in host.exits(), "the second death is seen as well")


def test_one_that_hangs_is_ended_before_it_is_started_again(host, run, model, groups):
    host.start(planned(host, run, model, groups()).launches)
    asyncio.run(host.ready(lambda line: None))
    before = read_state(run, "engine-0")
    assert before is not None
    host.stop_engine(0)
    assert not is_alive(before) and host.exits() == {}, "that was asked for, and is no news"
    host.start_engine(0, "e" * 32)
    assert (state := read_state(run, "engine-0")) is not None and is_alive(state)


def test_an_engine_that_dies_while_it_starts_is_an_error_with_the_end_of_its_log(host, run, model, groups):
    host.start(planned(host, run, model, groups(flags=("--fail",))).launches)
    with pytest.raises(ProcessFailed, match="ended with exit code 1 while starting") as error:
        asyncio.run(host.ready(lambda line: None))
    assert "out of memory" in str(error.value)


def test_a_model_that_is_not_there_is_refused_before_anything_starts(host, run, tmp_path, groups):
    made = planned(host, run, tmp_path / "absent", groups())
    with pytest.raises(UsageError, match="no such directory"):
        host.start(made.launches)
    assert read_state(run, "engine-0") is None


def test_serve_engines_starts_all_groups_and_names_each_model_in_endpoints_json(run, model, groups):
    models = {"policy": Model(model), "judge": Model(model, update_weights=False)}
    with ProcessGroup(run) as group:
        found = launch_engines(Order(groups(), models), group)
        written = Endpoints.load(run.endpoints_file).models
        assert {name: [e.url for e in entry.engines] for name, entry in written.items()} == {
            name: [e.url for e in engines] for name, engines in found.items()
        }
        assert written["policy"].update_weights and not written["judge"].update_weights
        assert [e.group for e in written["policy"].engines] == ["a"]


@pytest.fixture
def one_after_the_other(monkeypatch) -> list[EngineLaunch]:
    """Engines start as they do on one GPU, which is not here; the plan that they are of."""
    plan: list[EngineLaunch] = []

    def start_order(launches):
        plan.extend(launches)
        return [[launch] for launch in launches]

    monkeypatch.setattr("rltool.engines.launch.start.start_order", start_order)
    return plan


def test_engines_on_one_gpu_start_one_after_the_other_and_each_keeps_its_port_until_then(
    run, model, groups, one_after_the_other
):
    models, lines = {"policy": Model(model), "judge": Model(model, update_weights=False)}, []

    def report(line: str) -> None:
        lines.append(line.split(":")[0])
        if line.startswith("engine-0 ready"):
            with pytest.raises(UsageError, match="cannot be used"):
                reserve_ports(1, first=one_after_the_other[1].port)

    with ProcessGroup(run) as group:
        launch_engines(Order(groups(count=2), models), group, report=report)
        assert lines == [f"engine-{number} {what}" for number in range(3) for what in ("started", "ready")]
        written = Endpoints.load(run.endpoints_file).models
        assert [e.url for e in written["policy"].engines] == [url_of(launch) for launch in one_after_the_other[:2]]


def test_one_that_dies_while_the_next_one_loads_ends_the_start(run, model, groups, one_after_the_other):
    models = {"policy": Model(model), "judge": Model(model, update_weights=False)}

    def report(line: str) -> None:
        if line.startswith("engine-1 started"):
            os.kill(group.processes[0].state.pid, signal.SIGKILL)

    with pytest.raises(ProcessFailed, match="engine-0 .*while others were starting"), ProcessGroup(run) as group:
        launch_engines(Order(groups(count=2), models), group, report=report)
    assert not run.endpoints_file.exists() and read_state(run, "engine-1") is None
