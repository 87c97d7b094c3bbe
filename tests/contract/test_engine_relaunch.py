"""What serve-engines does, while it watches, about engines that die: real processes of a fake vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rltool.config.serve import EngineGroup
from rltool.engines.endpoints import Endpoints, EngineEndpoint
from rltool.engines.fleet import liveness
from rltool.engines.fleet.liveness import serves
from rltool.engines.launch import engine_process
from rltool.engines.launch.plan import Model
from rltool.engines.launch.start import Order, launch_engines
from rltool.engines.sync_client import probe
from rltool.errors import RltoolError
from rltool.processes.restarts import RestartPolicy
from rltool.processes.run_directory import open_run
from rltool.processes.spawn import ProcessFailed
from rltool.processes.state import ProcessState, is_alive, read_state
from rltool.processes.stop_run import stop_run
from rltool.processes.supervise import ProcessGroup
from tests.contract.fakes.engine_process import write_python
from tests.contract.supervised import SECONDS, Over, Supervised


class Serving(Supervised):
    """Two engines in a group of their own."""

    def __init__(self, model: Path, python: Path, group: ProcessGroup, most: int, backoff: float) -> None:
        super().__init__(group)
        engines = EngineGroup(device="cpu", count=2, engine_python=python, ready_timeout=SECONDS)
        order = Order((engines,), {"policy": Model(model)}, RestartPolicy(most, backoff))
        self.first = launch_engines(order, group)["policy"]

    def state(self, number: int) -> ProcessState:
        return self.process(f"engine-{number}")

    def listed(self) -> list[EngineEndpoint]:
        return list(Endpoints.load(self.run.endpoints_file).models["policy"].engines)

    def serves_again(self, number: int, before: ProcessState) -> Callable[[], bool]:
        def there() -> bool:
            state = read_state(self.run, f"engine-{number}")
            return state is not None and state.pid != before.pid and serves(self.first[number].url)

        return there

    def hangs(self, number: int) -> bool:
        """True once it was started again; from now on it has been loading for too long."""
        check = self.group.checks[f"engine-{number}"]
        if not isinstance(check, liveness.LivenessFromStart):
            return False
        check._seconds = -1.0
        return True

    def kill(self, number: int) -> ProcessState:
        return self.kill_process(f"engine-{number}")


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Callable[..., Serving]]:
    run, model = open_run("demo", create=True, root=tmp_path / "runs"), tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"]}))
    (model / "pytorch_model.bin").touch()
    (model / "tokenizer.json").touch()
    with ProcessGroup(run) as group:
        yield lambda most, backoff=0.05: Serving(model, write_python(tmp_path), group, most, backoff)


def test_an_engine_that_is_killed_serves_again_at_its_address_and_the_other_goes_on(serving):
    engines = serving(5)
    other = engines.state(1)

    def scenario() -> Iterator[Callable[[], bool]]:
        for _ in range(2):
            yield engines.serves_again(0, engines.kill(0))

    with pytest.raises(Over):
        engines.play(scenario)
    assert engines.state(1) == other and is_alive(other)
    now = engines.listed()
    assert [e.url for e in now] == [e.url for e in engines.first]
    assert now[1] == engines.first[1] and now[0].boot_id != engines.first[0].boot_id
    assert probe(now[0], timeout=60.0).boot_id == now[0].boot_id
    first, second = engines.said
    assert "engine-0 was killed by signal 9; it is started again in 0.05 s" in first and "in 0.1 s" in second


def test_one_that_has_no_restart_left_stays_dead_and_the_last_one_is_a_failure(serving):
    engines = serving(1)

    def scenario() -> Iterator[Callable[[], bool]]:
        yield engines.serves_again(0, engines.kill(0))
        engines.kill(0)
        yield lambda: any("stays dead" in line for line in engines.said)
        yield engines.serves_again(1, engines.kill(1))
        engines.kill(1)
        yield lambda: False

    with pytest.raises(ProcessFailed, match="engine-1 was killed by signal 9"):
        engines.play(scenario)


def test_without_restarts_the_end_of_one_is_the_end_of_all(serving):
    engines = serving(0)
    engines.kill(1)
    with pytest.raises(ProcessFailed, match="engine-1 was killed by signal 9"):
        engines.play(lambda: iter([lambda: False]))


def test_one_that_is_stopped_while_it_waits_for_its_restart_is_not_started_again(serving):
    engines = serving(5, backoff=30.0)

    def scenario() -> Iterator[Callable[[], bool]]:
        engines.kill(0)
        yield lambda: len(engines.said) == 1
        engines.now += 20
        stop_run(engines.run, ["engine-0"], grace=5.0)
        yield lambda: len(engines.said) == 1
        engines.now += 20
        yield lambda: engines.said[1:] == ["engine-0 was stopped"]

    with pytest.raises(Over):
        engines.play(scenario)
    assert read_state(engines.run, "engine-0") is None


def test_a_restart_that_fails_is_tried_again_and_counted(serving, monkeypatch):
    engines, fails = serving(2), [OSError("no space left"), RltoolError("planned")]
    start = engine_process.engine_spec

    def failing(launch):
        if fails:
            raise fails.pop(0)
        return start(launch)

    monkeypatch.setattr(engine_process, "engine_spec", failing)
    other = engines.state(1)

    def scenario() -> Iterator[Callable[[], bool]]:
        engines.kill(0)
        yield lambda: any("stays dead" in line for line in engines.said)

    with pytest.raises(Over):
        engines.play(scenario)
    assert "could not be started again: no space left" in engines.said[1]
    assert "could not be started again: planned; it stays dead" in engines.said[2] and is_alive(other)


def test_one_that_never_serves_uses_its_restarts_up_and_is_ended(serving, monkeypatch):
    engines = serving(1, backoff=0.0)
    monkeypatch.setattr(liveness, "serves", lambda url: False)

    def scenario() -> Iterator[Callable[[], bool]]:
        engines.kill(0)
        yield lambda: read_state(engines.run, "engine-0") is not None and len(engines.said) == 1
        yield lambda: engines.hangs(0)
        yield lambda: "did not serve within" in engines.said[-1] and "stays dead" in engines.said[-1]

    with pytest.raises(Over):
        engines.play(scenario)
    assert read_state(engines.run, "engine-0") is None, "it does not hold its GPU any more"


def test_one_that_is_stopped_by_hand_is_not_started_again(serving):
    engines = serving(5)

    def scenario() -> Iterator[Callable[[], bool]]:
        stop_run(engines.run, ["engine-0"], grace=5.0)
        yield lambda: "engine-0 was stopped" in engines.said

    with pytest.raises(Over):
        engines.play(scenario)
    assert read_state(engines.run, "engine-0") is None
