"""Before a run starts: the engines of models beside the policy (a judge, a reward model), found and asked."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rltool.config.serve import POLICY
from rltool.config.train import TrainConfig
from rltool.engines.endpoints import Endpoints, ModelEndpoints, files_in, resolve
from rltool.errors import UsageError
from rltool.rollout.side_model import SideEngines
from rltool.training.preflight import probe_fleet


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
    """UsageError for a model of [models.NAME] that has no engine. found: names of those that have."""
    missing = [name for name in config.models if name not in found]
    if missing:
        raise UsageError(
            f"models.{missing[0]} has no engine: name them in models.{missing[0]}.external, give --rollout-external an "
            'endpoints.json that has them (`rltool serve-engines --config`), or, with engines.mode = "managed" or '
            f'"colocate", an [[engines.groups]] with model = "{missing[0]}"'
        )


def probe_models(config: TrainConfig, models: Mapping[str, ModelEndpoints]) -> dict[str, SideEngines]:
    """Ask every engine of these models what it is. UsageError names those that do not answer, or answer only together
    with others."""
    found = {}
    for name, entry in models.items():
        halves = sorted({engine.role for engine in entry.engines} - {"regular"})
        if halves:
            raise UsageError(
                f"model {name!r} has engines of role {', '.join(halves)}: a run asks regular engines alone; leave the "
                "model out of the endpoints file that train is given"
            )
        fleet = probe_fleet(entry, config.deadlines.preflight, given=f"model {name!r}")
        path = config.models[name].path if name in config.models else None
        found[name] = SideEngines(fleet.endpoints.engines, fleet.infos, entry.data_endpoint(), path)
    return found
