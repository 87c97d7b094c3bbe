"""What `train` says between its plan and its first step, when nothing but waiting happens for minutes."""

import json
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace

import pytest
from ray.exceptions import RayTaskError

from rltool.config.loader import load_config
from rltool.config.train import TrainConfig
from rltool.engines.launch.plan import EnginePlan
from rltool.errors import PartLost, RltoolError
from rltool.masking import MASK
from rltool.processes.run_directory import RunDirectory
from rltool.processes.run_lock import RunLock
from rltool.terminal import Console
from rltool.training import session
from rltool.training.cluster.placement import plan_placement
from rltool.training.console import LoggedConsole
from rltool.training.prepare import Prepared
from rltool.training.session import execute
from rltool.training.stopping import StopRequested, StopSignal
from tests.full_disk import FullDisk


class Ranks:
    devices: list = []

    def __init__(self, *_, **__):
        pass

    def start(self, steps, while_waiting):
        pass

    def close(self):
        pass

    def handles(self):
        return []


class Manager:
    """In place of the rollout manager: it fails when it has to read the data."""

    def __init__(self, *_, **__):
        pass

    def start(self):
        raise RltoolError("far enough")

    def close(self):
        pass


@pytest.mark.parametrize(
    ("ended_by", "waits"),
    [
        (None, True),
        (RltoolError("failing rewards"), True),
        (OSError(28, "No space left on device"), True),
        (KeyError("of the driver's own"), True),
        (PartLost("trainer rank 1 died"), False),
        (RayTaskError("train_step", "Traceback", RuntimeError("CUDA error")), False),
        (StopRequested(), False),
        (KeyboardInterrupt(), False),
    ],
    ids=repr,
)
def test_a_save_in_flight_is_waited_for_unless_the_ranks_may_hang_or_nobody_wants_to_wait(ended_by, waits):
    closed = []
    with suppress(type(ended_by) if ended_by else OSError), ExitStack() as stack:
        stack.push(session._closing(SimpleNamespace(close=lambda: closed.append(True))))
        if ended_by is not None:
            raise ended_by
    assert bool(closed) is waits


def test_a_log_that_cannot_be_written_ends_no_run(tmp_path):
    screen = StringIO()
    console = LoggedConsole(Console(file=screen, width=200), tmp_path / "train.log")
    console._file_console.file = FullDisk()
    console.log_line("step 1")
    console.log_line("step 2")
    assert screen.getvalue().splitlines() == [
        "step 1", f"{tmp_path}/train.log cannot be written: No space left on device", "step 2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("beside", "order"),
    [
        (True, ["engines begin", "build", "load", "warm up", "offload", "engines serve"]),
        (False, ["build", "load", "offload", "engines begin", "engines serve"]),
    ],
    ids=["room for both", "one after the other"],
)
def test_engines_load_beside_the_trainer_unless_they_measure_what_it_leaves(tmp_path, monkeypatch, beside, order):
    done: list[str] = []

    class Recording(Ranks):
        devices = ()

        def start(self, steps, while_waiting):
            done.append("build")

        def warm_up(self, while_waiting):
            done.append("warm up")

        def offload(self, while_waiting):
            done.append("offload")

    class Managed:
        starting = ""

        def __init__(self, *_):
            pass

        def start(self, look):
            done.append("engines begin")

        def wait(self, look):
            done.append("engines serve")
            raise RltoolError("far enough")

        def close(self):
            pass

    def load(*_):
        done.append("load")
        return SimpleNamespace(progress=None, lineage=None)

    for name, value in {
        "ray_cluster": lambda *_, **__: nullcontext(), "placed": lambda *_: nullcontext(object()), "_load": load,
        "find_places": lambda *_, **__: [], "TrainerGroup": Recording, "ManagedEngines": Managed,
        "describe_devices": lambda *_: "cpu", "run_facts": lambda *_: {},
    }.items():  # fmt: skip
        monkeypatch.setattr(session, name, value)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"vocab_size": 8}')
    loaded = load_config(TrainConfig, [], [f"model.path={model}", 'engines.mode="colocate"', "engines.groups=[{}]"])
    plan = replace(plan_placement(loaded.config, gpu=False), starts_beside=beside)
    run = RunDirectory(tmp_path / "runs" / "a")
    prepared = Prepared(loaded, run, plan, "cpu", None, None, expected=EnginePlan(()))
    with RunLock(run) as lock, StopSignal().installed() as stop, pytest.raises(RltoolError, match="far enough"):
        execute(prepared, lock, Console(file=StringIO(), width=300), stop)
    assert done == order


def test_every_phase_names_what_is_waited_for_and_its_deadline(tmp_path, monkeypatch):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"vocab_size": 8}')
    sets = [f"model.path={model}", "deadlines.start=9", "reward.options.api_key=hunter2"]
    loaded = load_config(TrainConfig, [], sets)
    lines = StringIO()

    @contextmanager
    def no_ray(*_, **__):
        assert lines.getvalue().endswith("starting Ray (deadlines.start = 9 s)\n"), "said before the wait"
        yield

    monkeypatch.setattr(session, "ray_cluster", no_ray)
    monkeypatch.setattr(session, "placed", lambda *_: nullcontext())
    monkeypatch.setattr(session, "TrainerGroup", Ranks)
    monkeypatch.setattr(session, "_load", lambda *_: SimpleNamespace(progress=None, lineage=SimpleNamespace(run="r")))
    monkeypatch.setattr(session, "describe_engines", lambda fleet, config: ["engines: 2 x vllm"])
    monkeypatch.setattr(session, "describe_devices", lambda *_: "cpu")
    monkeypatch.setattr(session, "run_facts", lambda *_: {"device": "cpu"})
    monkeypatch.setattr(session, "Rollouts", Manager)
    monkeypatch.setattr(session, "Engines", lambda *_, **__: None)
    nobody = SimpleNamespace(engines=(), data_endpoint=lambda: None)
    fleet = SimpleNamespace(endpoints=nobody, infos={}, takers={}, absent={})
    run = RunDirectory(tmp_path / "runs" / "a")
    prepared = Prepared(
        loaded, run, plan_placement(loaded.config, gpu=False), "cpu", fleet, None,
    )  # fmt: skip
    # Installed, for `execute` sets the handlers again behind Ray's: other tests are to find those before.
    with RunLock(run) as lock, StopSignal().installed() as stop, pytest.raises(RltoolError, match="far enough"):
        execute(prepared, lock, Console(file=lines, width=300), stop)
    written = (tmp_path / "runs" / "a" / "config.json").read_text()
    assert json.loads(written)["config"]["reward"]["options"] == {"api_key": MASK} and "hunter2" not in written
    said = lines.getvalue().splitlines()
    assert said[1:] == [
        "engines: 2 x vllm",
        "starting Ray (deadlines.start = 9 s)",
        "placing the ranks (deadlines.start = 9 s)",
        "building the model on 1 rank (trainer.rendezvous_timeout = 300 s)",
        "trainer: cpu",
        f"loading {model} (deadlines.step = 7200 s)",
        "reading the data (deadlines.step = 7200 s)",
    ]
    assert (tmp_path / "runs" / "a" / "logs" / "latest" / "train.log").read_text().splitlines() == said
