"""Where the bundles of a placement group are, and in which order ranks take them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rltool.config.sections import RayConfig
from rltool.engines.launch.plan import Host
from rltool.training.cluster.placement import Bundle
from rltool.training.cluster.ray_calls import Waiting, get_all

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Place:
    """Of one bundle. node: Ray's id; address: where its host is reached; gpus: the host's own indices, as Ray counts
    them."""

    bundle: int
    node: str
    address: str
    gpus: tuple[int, ...] = ()


def this_node() -> NodeAffinitySchedulingStrategy:
    """For an actor that shall be on the driver's own."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def in_order(places: Sequence[Place]) -> list[Place]:
    """By host and GPU, so that neighbouring ranks (a tensor-parallel group) share a host. Pure."""
    return sorted(places, key=lambda place: (_natural(place.address), place.node, place.gpus, place.bundle))


def hosts_of(places: Sequence[Place]) -> list[Host]:
    """Their hosts, with the GPUs of these bundles alone, in this order. Pure."""
    found: dict[str, list[Place]] = {}
    for place in places:
        found.setdefault(place.node, []).append(place)
    return [
        Host(node, here[0].address, tuple(gpu for place in here for gpu in place.gpus)) for node, here in found.items()
    ]


def _natural(address: str) -> tuple[tuple[int, int | str], ...]:
    """10.0.0.2 before 10.0.0.10."""
    parts = re.split(r"(\d+)", address)
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in parts if part)


def find_places(
    config: RayConfig, group: PlacementGroup | None, bundles: Sequence[Bundle], deadline: float,
    while_waiting: Waiting, *, shared: bool = False,
) -> list[Place]:  # fmt: skip
    """One for each bundle of a group that is there. Only a process in a bundle learns its GPUs; of a single
    bundle they are not needed, unless others go onto its GPUs (shared)."""
    if group is None:
        return []
    nodes = placement_group_table(group)["bundles_to_node_id"]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    gpus = _gpus(group, bundles, deadline, while_waiting) if len(bundles) > 1 or shared else {}
    return [
        # In a local cluster Ray still names the host's outer address; the run has no business there.
        Place(i, nodes[i], addresses[nodes[i]] if config.address is not None else LOOPBACK, gpus.get(i, ()))
        for i in range(len(bundles))
    ]


def _gpus(
    group: PlacementGroup, bundles: Sequence[Bundle], deadline: float, while_waiting: Waiting
) -> dict[int, tuple[int, ...]]:
    """Bundle -> its GPUs, asked of a task in each that has any, all at once."""

    @ray.remote
    def seen() -> list[Any]:
        return ray.get_runtime_context().get_accelerator_ids().get("GPU", [])

    asked = {
        index: seen.options(
            num_cpus=0, num_gpus=bundle["GPU"],
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        ).remote()
        for index, bundle in enumerate(bundles)
        if bundle.get("GPU")
    }  # fmt: skip
    found = get_all(
        list(asked.values()), deadline, "deadlines.start", who=[f"bundle {index}" for index in asked],
        while_waiting=while_waiting,
    )  # fmt: skip
    return {
        index: tuple(int(gpu) for gpu in ids if str(gpu).isdigit()) for index, ids in zip(asked, found, strict=True)
    }
