"""Where metrics go: the loggers against stand-ins for their packages, and what happens when one of them fails."""

from __future__ import annotations

import io
import json
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest

from rltool.config.sections import MonitorConfig
from rltool.config.train import TrainConfig
from rltool.errors import UsageError
from rltool.processes.run_directory import open_run
from rltool.terminal import Console
from rltool.training.observe.loggers import RUN_TAG, TensorBoardLogger, check_loggers, open_loggers
from rltool.training.observe.metrics import MetricsWriter


class FakeWandb(ModuleType):
    """wandb.init and the run that it returns."""

    def __init__(self):
        super().__init__("wandb")
        self.calls = []

    def init(self, **options):
        self.calls.append(("init", options))
        return SimpleNamespace(
            define_metric=lambda name, **more: self.calls.append(("define", name, more)),
            log=lambda values: self.calls.append(("log", values)),
            finish=lambda: self.calls.append(("finish",)),
        )


class FakeMlflow(ModuleType):
    """mlflow.MlflowClient with its experiments and runs; mlflow.entities."""

    def __init__(self):
        super().__init__("mlflow")
        self.entities = ModuleType("mlflow.entities")
        self.entities.Metric = lambda key, value, timestamp, step: (key, value, step)
        self.entities.Param = lambda key, value: (key, value)
        self.experiments, self.runs, self.ended = {}, {}, []
        self.MlflowClient = lambda: self

    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name):
        self.experiments[name] = f"e{len(self.experiments)}"
        return self.experiments[name]

    def search_runs(self, experiment_ids, filter_string, max_results):
        assert max_results == 1
        return [
            SimpleNamespace(info=SimpleNamespace(run_id=key))
            for key, run in self.runs.items()
            if run["experiment"] in experiment_ids and filter_string == f"tags.`{RUN_TAG}` = '{run['tags'][RUN_TAG]}'"
        ]

    def create_run(self, experiment_id, run_name, tags):
        key = f"r{len(self.runs)}"
        self.runs[key] = {"experiment": experiment_id, "name": run_name, "tags": tags, "metrics": [], "params": []}
        return SimpleNamespace(info=SimpleNamespace(run_id=key))

    def log_batch(self, run_id, metrics=(), params=()):
        assert len(metrics) <= 1000 and len(params) <= 100
        bad = [entry[0] for entry in (*metrics, *params) if not re.fullmatch(r"[/\w.\- :]+", entry[0])]
        if bad:
            raise RuntimeError(f"INVALID_PARAMETER_VALUE: Invalid value {bad[0]!r}: Names may only contain ...")
        self.runs[run_id]["metrics"] += metrics
        self.runs[run_id]["params"] += params

    def set_terminated(self, run_id):
        self.ended.append(run_id)


def settings(**monitor):
    return TrainConfig.model_validate({"model": {"path": "m"}, "monitor": {"tensorboard": False, **monitor}})


@pytest.fixture
def run(tmp_path):
    return open_run("demo", create=True, root=tmp_path)


def test_wandb_gets_settings_and_numbers_with_our_step_as_the_axis(run, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    [logger] = open_loggers(settings(wandb_project="p"), run, first_step=0)
    logger.log(-1, {"eval/a/accuracy": 0.5})
    logger.log(0, {"train/loss": 1.0})
    logger.close()
    (_, options), *rest = wandb.calls
    assert (options["project"], options["name"], options["id"], options["resume"]) == ("p", "demo", run.run_id, "allow")
    assert options["config"]["optimizer.lr"] == 1e-6 and options["dir"] == str(run.path)
    assert rest == [
        ("define", "step", {}), ("define", "*", {"step_metric": "step"}),
        ("log", {"eval/a/accuracy": 0.5, "step": -1}), ("log", {"train/loss": 1.0, "step": 0}), ("finish",),
    ]  # fmt: skip


def test_mlflow_gets_settings_once_and_a_resumed_run_goes_on_in_the_same_run(run, monkeypatch):
    mlflow = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "mlflow.entities", mlflow.entities)
    for first_step in (0, 3):
        [logger] = open_loggers(settings(mlflow_experiment="e"), run, first_step=first_step)
        logger.log(first_step, {f"rollout/{i}": 1.0 for i in range(1500)})
        logger.close()
    assert len(mlflow.runs) == 1 and mlflow.ended == ["r0", "r0"]
    kept = mlflow.runs["r0"]
    assert kept["name"] == "demo" and ("optimizer.lr", "1e-06") in kept["params"]
    assert len(kept["params"]) == len({key for key, _ in kept["params"]}) and len(kept["metrics"]) == 3000
    assert kept["metrics"][-1] == ("rollout/1499", 1.0, 3)


def test_mlflow_gets_the_names_that_its_server_takes(run, monkeypatch):
    mlflow = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "mlflow.entities", mlflow.entities)
    [logger] = open_loggers(settings(mlflow_experiment="e"), run, first_step=0)
    logger.log(0, {"eval/gsm8k/pass@4": 0.5, "own (mean)": 1.0})
    assert mlflow.runs["r0"]["metrics"] == [("eval/gsm8k/pass_4", 0.5, 0), ("own _mean_", 1.0, 0)]


def test_a_service_that_does_not_start_is_an_error_with_its_setting(run, monkeypatch):
    wandb = FakeWandb()
    wandb.init = lambda **options: (_ for _ in ()).throw(OSError("no route to host"))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with pytest.raises(UsageError, match="monitor.wandb_project = 'p' did not start: OSError: no route to host"):
        open_loggers(settings(wandb_project="p"), run, first_step=0)


def test_tensorboard_has_every_number_under_its_name(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, first_step=0)
    logger.log(0, {"train/loss": 0.5})
    logger.log(1, {"train/loss": 0.25})
    logger.close()
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("train/loss")] == [(0, 0.5), (1, 0.25)]


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_a_package_that_is_missing_is_named_with_its_extra_before_anything_starts(package, monkeypatch):
    setting = {"wandb": "wandb_project", "mlflow": "mlflow_experiment"}[package]
    monkeypatch.setattr("rltool.training.observe.loggers.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=rf"monitor.{setting} = 'x' .* pip install 'rltool\[{package}\]'"):
        check_loggers(MonitorConfig(**{setting: "x"}))
    check_loggers(MonitorConfig())


def test_a_logger_of_ones_own_gets_the_run_and_one_that_is_none_is_refused_before_anything_starts(run):
    config = settings(logger="examples.logger:csv_file")
    for first_step, value in ((0, 0.5), (1, 0.25)):
        [logger] = open_loggers(config, run, first_step=first_step)
        for step in range(first_step, 3):
            logger.log(step, {"train/loss": value})
        logger.close()
    rows = [f"{step},train/loss,{value}" for step, value in ((0, 0.5), (1, 0.25), (2, 0.25))]
    assert (run.path / "metrics.csv").read_text().splitlines() == rows
    check_loggers(config.monitor)
    with pytest.raises(UsageError, match="monitor.logger = 'examples.logger:nobody'"):
        check_loggers(MonitorConfig(logger="examples.logger:nobody"))


class Broken:
    """Fails at its second record, and when it is closed."""

    def __init__(self):
        self.steps = []

    def log(self, step, metrics):
        self.steps.append((step, metrics))
        if step == 1:
            raise ConnectionError("the [server] has gone")

    def close(self):
        raise ConnectionError("still gone")


def test_a_logger_that_fails_is_left_out_and_the_run_goes_on(tmp_path):
    screen = io.StringIO()
    broken, other = Broken(), Broken()
    other.log = lambda step, metrics: other.steps.append(step)
    file = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(file, console=Console(file=screen, width=200), loggers=[broken, other])
    for step in range(3):
        writer.write(step, "v", {"a": 1.0, "b": float("nan")})
    writer.close()
    assert broken.steps == [(0, {"a": 1.0}), (1, {"a": 1.0})] and other.steps == [0, 1, 2]
    assert [json.loads(line)["b"] for line in file.read_text().splitlines()] == [None] * 3
    first, second = screen.getvalue().splitlines()
    assert first == "Broken failed and gets nothing more: ConnectionError: the [server] has gone"
    assert second == "Broken could not be closed: ConnectionError: still gone"
