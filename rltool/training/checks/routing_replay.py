"""algorithm.routing_replay: what a run needs for it, and what contradicts it. UsageError unless noted."""

from __future__ import annotations

from collections.abc import Mapping

from rltool.algorithms.batch import TrainBatch
from rltool.config.algorithm_rules import ROUTER_DROPS_EXPERTS
from rltool.config.train import TrainConfig
from rltool.engines.dialects.routed_experts import FLAG
from rltool.engines.types import EngineInfo, Routing
from rltool.errors import TrainingStopped, UsageError
from rltool.models.base import Family
from rltool.models.registry import family_for, read_hf_config

SETTING = "algorithm.routing_replay = true"


def routing_of(family: Family) -> Routing:
    """What the choices of this model's routers look like."""
    if not family.num_experts:
        raise UsageError(f"{SETTING}, but the model has no experts; leave it out")
    dense = tuple(layer for layer, has_experts in enumerate(family.expert_layers) if not has_experts)
    return Routing(family.num_layers, family.transformer["moe_router_topk"], family.num_experts, dense)


def wanted_routing(config: TrainConfig) -> Routing | None:
    """What rollouts ask the engines for; None where nothing is replayed."""
    if not config.algorithm.routing_replay:
        return None
    return routing_of(family_for(read_hf_config(config.model.path), config.model.family))


def check_rollout_engines(config: TrainConfig, infos: Mapping[str, EngineInfo], *, router: str | None) -> None:
    """infos: of the engines that rollouts are sampled from, by URL. router: that is asked in their place."""
    if not config.algorithm.routing_replay:
        return
    if router is not None:
        raise UsageError(f"{SETTING}, but generation goes through {router}: {ROUTER_DROPS_EXPERTS}")
    halves = [url for url, info in infos.items() if info.role in ("prefill", "decode")]
    if halves:
        raise UsageError(
            f"{SETTING}, but {', '.join(halves)} prefill or decode alone: the experts of a sample would be chosen at "
            "two engines; use regular ones"
        )
    without = [url for url, info in infos.items() if info.routed_experts is False]
    if without:
        raise UsageError(
            f"{SETTING}, but these engines do not return the experts that they chose: {', '.join(without)}; start them "
            f"with `rltool serve-engines --return-routed-experts`, or with {FLAG}"
        )


def check_has_routing(config: TrainConfig, batch: TrainBatch) -> None:
    """TrainingStopped where there is nothing to replay, as in a recording of another run."""
    if config.algorithm.routing_replay and not batch.has("routed_experts"):
        raise TrainingStopped(
            f"{SETTING}, but these samples came without the experts that an engine chose: a recording made without it, "
            "synthetic samples, or responses that rollout.generate_function did not take from context.generate; leave "
            "it out"
        )
