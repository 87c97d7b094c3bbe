"""Before a run starts: the engines of models beside the policy (a judge, a reward model), found and asked."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rltool.config.serve import POLICY, Task
from rltool.config.train import TrainConfig
from rltool.engines.endpoints import Endpoints, ModelEndpoints, files_in, resolve
from rltool.engines.types import EngineInfo
from rltool.errors import UsageError
from rltool.rollout.serving.side_model import SideEngines
from rltool.training.checks.asked_models import askings, check_tasks
from rltool.training.checks.disaggregated import check_regular
from rltool.training.checks.preflight import probe_fleet


def running_models(config: TrainConfig) -> dict[str, ModelEndpoints]:
    """Those whose engines run already: models.NAME.external, and every model with update_weights = false beside another
    one in the endpoints files of engines.external. Raises UsageError as `resolve`."""
    found: dict[str, ModelEndpoints] = {}
    for file in files_in(config.engines.external):
        models = Endpoints.load(file).models
        if len(models) > 1:
            found |= {name: entry for name, entry in models.items() if name != POLICY and not entry.update_weights}
    for name, model in config.models.items():
        if model.external:
            entry = resolve(model.external, name)
            keyed = tuple(
                e if e.key_file else e.model_copy(update={"key_file": model.api_key_file}) for e in entry.engines
            )
            found[name] = entry.model_copy(update={"engines": keyed})
    return found


def check_all_there(config: TrainConfig, found: Collection[str]) -> None:
    """UsageError for a model of [models.NAME], or one that a reward asks, without an engine. found: names of those that
    have some."""
    missing = [name for name in config.models if name not in found]
    if missing:
        raise UsageError(
            f"models.{missing[0]} has no engine: name them in models.{missing[0]}.external, give --rollout-external an "
            'endpoints.json that has them (`rltool serve-engines --config`), or, with engines.mode = "managed" or '
            f'"colocate", an [[engines.groups]] with model = "{missing[0]}"'
        )
    for asking in askings(config):
        if asking.model not in found:
            raise UsageError(
                f"{asking} asks model {asking.model!r}, which the run does not have (it has: "
                f"{', '.join(found) or 'none'}): name it in [models.{asking.model}], or another one with the option "
                "`model`"
            )


def probe_models(config: TrainConfig, models: Mapping[str, ModelEndpoints]) -> dict[str, SideEngines]:
    """Ask every engine of these models what it is. UsageError names those that do not answer, answer only together with
    others, or are served for another task than the one configured or that a reward asks for."""
    found = {}
    for name, entry in models.items():
        fleet = probe_fleet(entry, config.deadlines.preflight, given=f"model {name!r}")
        check_regular(fleet.endpoints.engines, f"model {name!r}")
        path = config.models[name].path if name in config.models else None
        task = _task(name, config, fleet.infos)
        from_disk = name in config.models and config.models[name].sleep == "disk"
        engines = fleet.endpoints.engines
        found[name] = SideEngines(engines, fleet.infos, entry.data_endpoint(), path, task, from_disk)
    check_tasks(config, {name: engines.task for name, engines in found.items()})
    return found


def _task(name: str, config: TrainConfig, infos: Mapping[str, EngineInfo]) -> Task:
    """From [models.NAME], or from the engines where it is not set there. UsageError where one differs."""
    tasks = {info.task: url for url, info in infos.items() if info.task is not None}
    found: Task = "classify" if "classify" in tasks else "generate"
    wanted = config.models[name].task if name in config.models else found
    other = next((task for task in tasks if task != wanted), None)
    if other is not None:
        raise UsageError(
            f"model {name!r}: {tasks[other]} is served for {other!r}, expected {wanted!r}: set models.{name}.task to "
            "what its engines are, or start them with `rltool serve-engines --task`"
        )
    return wanted
