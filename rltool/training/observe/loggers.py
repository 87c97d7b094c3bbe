"""Where metrics go beside metrics.jsonl: TensorBoard, Weights & Biases, MLflow, a logger of the user's own. Each
package is imported only where it is asked for."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rltool.config.import_path import load_callable
from rltool.config.sections import MonitorConfig
from rltool.config.train import TrainConfig
from rltool.errors import UsageError
from rltool.processes.run_directory import RunDirectory
from rltool.report.run_files import flatten

MLFLOW_BATCH = 1000
"""Metrics that MLflow's server takes in one request."""
MLFLOW_LONGEST = 500
"""Characters of a parameter's value that every store of MLflow takes."""
MLFLOW_REFUSES = re.compile(r"[^\w\-. :/]")
"""Characters of a name, such as the @ of pass@4, for which its server refuses a whole batch."""
RUN_TAG = "rltool.run_id"
T = TypeVar("T")


class MetricLogger(Protocol):
    """One backend. `log` gets finite numbers alone; steps as in metrics.jsonl, where -1 is before the first. An
    evaluation beside training comes under the step that it began after, when later steps were logged already."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoardLogger:
    """Event files in `directory`. A resumed run first drops what lies at its first step and behind it."""

    def __init__(self, directory: Path, *, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbLogger:
    """A run of Weights & Biases with the id of ours, so that a resumed run goes on in it.

    W&B's own step only rises and begins at 0; ours begins at -1, and is done again after a resume. So `step` is logged
    as a metric, and the charts use it as their axis.
    """

    def __init__(self, project: str, run: RunDirectory, config: Mapping[str, Any]) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=project, name=run.name, id=run.run_id, resume="allow", config=dict(config), dir=str(run.path)
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        self._run.finish()


class MlflowLogger:
    """A run of MLflow that has our run's id as a tag, by which a resumed run finds it. `eval/x/pass@4` is
    `eval/x/pass_4` there."""

    def __init__(self, experiment: str, run: RunDirectory, config: Mapping[str, Any]) -> None:
        import mlflow
        from mlflow.entities import Metric, Param

        self._metric: Any = Metric
        self._client: Any = mlflow.MlflowClient()
        found = self._client.get_experiment_by_name(experiment)
        experiment_id = found.experiment_id if found is not None else self._client.create_experiment(experiment)
        earlier = self._client.search_runs([experiment_id], f"tags.`{RUN_TAG}` = '{run.run_id}'", max_results=1)
        if earlier:
            self._id = earlier[0].info.run_id
            return
        self._id = self._client.create_run(experiment_id, run_name=run.name, tags={RUN_TAG: run.run_id}).info.run_id
        params = [Param(_mlflow_name(key), str(value)[:MLFLOW_LONGEST]) for key, value in config.items()]
        for start in range(0, len(params), 100):  # the server's limit for one request
            self._client.log_batch(self._id, params=params[start : start + 100])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        entries = [self._metric(_mlflow_name(name), value, now, step) for name, value in metrics.items()]
        for start in range(0, len(entries), MLFLOW_BATCH):
            self._client.log_batch(self._id, metrics=entries[start : start + MLFLOW_BATCH])

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _mlflow_name(name: str) -> str:
    return MLFLOW_REFUSES.sub("_", name)


@dataclass(frozen=True)
class LoggedRun:
    """What monitor.logger gets. directory: of the run; settings: dotted key -> value, secrets masked; first_step: a
    resumed run logs this step and what is behind it again."""

    name: str
    run_id: str
    directory: Path
    settings: Mapping[str, Any]
    first_step: int


def own_logger(path: str, run: LoggedRun) -> MetricLogger:
    """monitor.logger, started. UsageError where that fails, or what comes of it is no logger."""
    made = _started("monitor.logger", path, lambda: load_logger(path)(run))
    missing = [name for name in ("log", "close") if not callable(getattr(made, name, None))]
    if missing:
        raise UsageError(f"monitor.logger = {path!r}: the {type(made).__name__} that it returned has no {missing[0]}()")
    return made


def _started(setting: str, value: str, start: Callable[[], T]) -> T:
    """UsageError for what a package, its server or a user's code raises."""
    try:
        return start()
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{setting} = {value!r} did not start: {type(error).__name__}: {error}") from error


def load_logger(path: str) -> Callable[[LoggedRun], MetricLogger]:
    """UsageError for an import path that leads nowhere."""
    return load_callable(path, setting="monitor.logger", takes=("run",))


def check_loggers(monitor: MonitorConfig) -> None:
    """UsageError for a logger whose package is not installed, or that cannot be imported: before anything starts."""
    if monitor.logger is not None:
        load_logger(monitor.logger)
    asked = {
        "wandb": ("monitor.wandb_project", monitor.wandb_project),
        "mlflow": ("monitor.mlflow_experiment", monitor.mlflow_experiment),
    }
    for package, (setting, value) in asked.items():
        if value is not None and find_spec(package) is None:
            raise UsageError(
                f"{setting} = {value!r} needs the package {package}, which is not installed here: "
                f"pip install 'rltool[{package}]'"
            )


def open_loggers(config: TrainConfig, run: RunDirectory, *, first_step: int) -> list[MetricLogger]:
    """Those that the configuration asks for."""
    monitor = config.monitor
    settings = flatten(config.shown())
    found: list[MetricLogger] = []
    if monitor.tensorboard:
        found.append(TensorBoardLogger(run.path / "tensorboard", first_step=first_step))
    services = (
        ("monitor.wandb_project", monitor.wandb_project, WandbLogger),
        ("monitor.mlflow_experiment", monitor.mlflow_experiment, MlflowLogger),
    )
    for setting, name, logger in services:
        if name is not None:
            found.append(_started(setting, name, lambda name=name, logger=logger: logger(name, run, settings)))
    if monitor.logger is not None:
        found.append(own_logger(monitor.logger, LoggedRun(run.name, run.run_id, run.path, settings, first_step)))
    return found
