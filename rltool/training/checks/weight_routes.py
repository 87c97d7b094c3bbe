"""How weights reach each engine, in words: for the log of a run and for its dry run."""

from __future__ import annotations

from collections.abc import Sequence

from rltool.config.rollout import WeightsConfig
from rltool.config.train import TrainConfig
from rltool.training.checks.preflight import ProbedFleet, backends
from rltool.weights.transport import transport


def describe_routes(fleets: Sequence[ProbedFleet], config: TrainConfig, trainer_device: str) -> str:
    """Which transport the engines have. They are named where several were chosen with weights.engines."""
    over: dict[str, list[str]] = {}
    for fleet in fleets:
        groups = {engine.url: engine.group for engine in fleet.endpoints.engines}
        for url, backend in backends(fleet, config, trainer_device).items():
            can_stage = transport(fleet.infos[url].dialect, backend).staged is not None
            is_staged = can_stage and bool(config.weights.of(url, groups[url]).staged)
            over.setdefault(f"{backend}, staged" if is_staged else backend, []).append(url)
    if len(over) == 1:
        return f"weights over {next(iter(over))}"
    if not config.weights.engines:
        return f"weights over {', '.join(f'{name} ({len(urls)})' for name, urls in over.items())}"
    return "weights over " + "; ".join(f"{name}: {', '.join(urls)}" for name, urls in over.items())


def idle_rules(fleets: Sequence[ProbedFleet], weights: WeightsConfig) -> list[str]:
    """A line for each section of weights.engines that decides for no engine of the start, those that do not answer
    included."""
    engines = [e for fleet in fleets for e in (*fleet.endpoints.engines, *fleet.absent) if e.takes_weights]
    deciding = {engine.url: weights.rule_of(engine.url, engine.group) for engine in engines}
    lines = []
    for rule in weights.engines:
        if rule in deciding.values():
            continue
        fitting = (deciding[engine.url] for engine in engines if rule.fits(engine.url, engine.group))
        earlier = dict.fromkeys(other.whom for other in fitting if other is not None)
        lines.append(
            f"[[weights.engines]] with {rule.whom} decides for none of the run's engines; "
            + (f"for those that it fits an earlier one does, with {'; '.join(earlier)}; " if earlier else "")
            + "it will for one that joins later, that it fits and that no earlier one fits"
        )
    return lines
