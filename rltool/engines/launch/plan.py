"""Which processes groups of engines are, and where: hosts, GPUs, ports, the address at which an engine on several hosts
meets. Pure: it starts nothing and looks at nothing.

An engine that fits on one host is never spread over two. One that does not takes equal shares of as few hosts as
possible, a process on each; the first of them serves HTTP. Engines are numbered over all groups in their order.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rltool.config.serve import POLICY, Device, EngineGroup, EngineLaunch, Task
from rltool.engines.dialects.memory_flags import measures_memory, shares_memory
from rltool.engines.dialects.parallel_flags import parallel_sizes
from rltool.engines.dialects.table import dialect, launches
from rltool.engines.launch.interpreter import default_engine_python
from rltool.errors import UsageError
from rltool.processes.hosts import http_url

LOOPBACK = "127.0.0.1"
EVERYWHERE = "0.0.0.0"
"""Where torch.distributed's store listens, whatever address its ranks ask: its port must be free on all of them."""

Ports = Callable[[str, str], int]
"""(host's name, address to bind) -> a port that is free there."""


@dataclass(frozen=True)
class Host:
    """name: in plans; address: where other hosts reach it; gpus: those that engines may have, in this order."""

    name: str
    address: str = LOOPBACK
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True)
class Slot:
    """One engine, or the GPUs that one placeholder keeps, before it has a place. shares: GPUs of each of its processes,
    each on one host; (0,) on the CPU. number: in its group."""

    group: EngineGroup
    number: int
    shares: tuple[int, ...]


@dataclass(frozen=True)
class Seat:
    """The place of one process."""

    node: str
    address: str
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True)
class Model:
    """What engines of a model serve. return_routed_experts, lora_rank, lora_slots: all of them at least, whatever their
    groups set. quantized_copy: the same directory as `quantization` describes it, for engines that quantise nothing
    themselves."""

    path: Path
    update_weights: bool = True
    start_router: bool = False
    task: Task = "generate"
    return_routed_experts: bool = False
    lora_rank: int = 0
    lora_slots: int = 1
    quantization: dict[str, Any] | None = None
    quantized_copy: Path | None = None
    exact: bool = False


@dataclass(frozen=True)
class Kept:
    """GPUs of a placeholder."""

    group: str
    seat: Seat


@dataclass(frozen=True)
class Router:
    """A router that is started in front of the engines of a model. disaggregated: it knows prefill from decode."""

    model: str
    disaggregated: bool = False


@dataclass(frozen=True)
class EnginePlan:
    launches: tuple[EngineLaunch, ...]
    kept: tuple[Kept, ...] = ()
    routers: tuple[Router, ...] = ()


@dataclass(frozen=True)
class Settings:
    """What holds for all groups. device: of groups that name none; first: number of the first engine; spread: the hosts
    are several, so engines listen on their host's address unless their group sets it; colocated: they use their GPUs in
    turns with the trainer."""

    models: Mapping[str, Model]
    key_file: Path
    state_dir: Path
    device: Device = "cuda"
    first: int = 0
    spread: bool = False
    colocated: bool = False
    boot_id: Callable[[], str] = field(default=lambda: uuid.uuid4().hex)


def role_of(index: int, node_rank: int = 0) -> str:
    """Name of the process in the run: engine-3, and engine-3-node1 for its part on a second host."""
    return f"engine-{index}" if node_rank == 0 else f"engine-{index}-node{node_rank}"


def device_of(group: EngineGroup, default: Device) -> Device:
    return group.device or default


# -- how many processes, and of how many GPUs


def engine_slots(
    groups: Iterable[EngineGroup], *, device: Device = "cuda", gpus_per_host: int | None = None
) -> list[Slot]:
    """Every engine of every group, in order. gpus_per_host: of the largest host; None: as many as wanted.

    Raises UsageError for an engine that hosts cannot share equally, and GPUs named for engines on the CPU.
    """
    slots = []
    for group in groups:
        if device_of(group, device) == "cpu":
            if group.role == "placeholder":
                continue  # it keeps GPUs free, and there are none
            if group.gpus or group.engines_per_gpu > 1:
                raise UsageError(
                    f"--{'gpus' if group.gpus else 'engines-per-gpu'} with --device cpu (group {group.name!r}): "
                    "engines on the CPU take no GPU; leave one of the two out"
                )
            shares: tuple[int, ...] = (0,)
        else:
            shares = _shares(group, gpus_per_host)
        slots += [Slot(group, number, shares) for number in range(group.count)]
    return slots


def _shares(group: EngineGroup, per_host: int | None) -> tuple[int, ...]:
    size = parallel_sizes(group).world_size
    if per_host is None or size <= per_host or per_host == 0:
        return (size,)
    nodes = next(nodes for nodes in range(2, size + 1) if size % nodes == 0 and size // nodes <= per_host)
    return (size // nodes,) * nodes


# -- where


def seat_slots(slots: Sequence[Slot], hosts: Sequence[Host]) -> list[tuple[Seat, ...]]:
    """A seat for every process of every slot: the first host with room for it; the processes of one engine on different
    hosts; on the CPU the host with the fewest; engines that share GPUs in the same. Raises UsageError, with what is
    left, where that is too little."""
    named = _named(slots)
    claimed = {gpu for gpus in named.values() for gpu in gpus}
    free = {host.name: [gpu for gpu in host.gpus if host is not hosts[0] or gpu not in claimed] for host in hosts}
    on_cpu: Counter[str] = Counter()
    seats = []
    for slot in slots:
        if shares_seat(slot):
            seats.append(seats[-1])
            continue
        taken: list[Seat] = []
        for share in slot.shares:
            if share == 0:
                host = min(hosts, key=lambda candidate: on_cpu[candidate.name])
                on_cpu[host.name] += 1
                taken.append(Seat(host.name, host.address))
                continue
            if slot.group.gpus:
                taken.append(Seat(hosts[0].name, hosts[0].address, tuple(named[slot.group.name][:share])))
                del named[slot.group.name][:share]
                continue
            others = {seat.node for seat in taken}
            found = next((h for h in hosts if len(free[h.name]) >= share and h.name not in others), None)
            if found is None:
                raise UsageError(_too_few(slot, share, free))
            taken.append(Seat(found.name, found.address, tuple(free[found.name][:share])))
            del free[found.name][:share]
        seats.append(tuple(taken))
    return seats


def shares_seat(slot: Slot) -> bool:
    """Whether it is on the GPUs of the engine before it."""
    return slot.number % slot.group.engines_per_gpu > 0


def _named(slots: Sequence[Slot]) -> dict[str, list[int]]:
    """The GPUs that each group names. Raises UsageError for the wrong number, and one that is named twice."""
    groups = {slot.group.name: slot.group for slot in slots if slot.group.gpus}
    every = [gpu for group in groups.values() for gpu in group.gpus]
    twice = sorted({gpu for gpu in every if every.count(gpu) > 1})
    if twice:
        raise UsageError(
            f"--gpus names GPU {', '.join(map(str, twice))} twice; for several engines on each GPU name it once and "
            "set --engines-per-gpu"
        )
    for name, group in groups.items():
        needed = sum(sum(slot.shares) for slot in slots if slot.group.name == name and not shares_seat(slot))
        if len(group.gpus) != needed:
            raise UsageError(
                f"group {name!r}: {_times(group)} takes {needed} GPUs, --gpus names "
                f"{len(group.gpus)} ({','.join(map(str, group.gpus))}): "
                + ("name more, or start fewer engines" if len(group.gpus) < needed else "name fewer, or start more")
            )
    return {name: list(group.gpus) for name, group in groups.items()}


def _times(group: EngineGroup) -> str:
    """What takes GPUs in a group, for a message."""
    shared = f", {group.engines_per_gpu} on the same GPUs," if group.engines_per_gpu > 1 else ""
    return f"{group.count} x {parallel_sizes(group).world_size}{shared}"


def _too_few(slot: Slot, share: int, free: Mapping[str, Sequence[int]]) -> str:
    left = "; ".join(f"{name}: {','.join(map(str, gpus)) or 'none'}" for name, gpus in free.items())
    pieces = f"{share} GPUs" if len(slot.shares) == 1 else f"{share} GPUs on each of {len(slot.shares)} hosts"
    return (
        f"no room for {slot.group.role if slot.group.role == 'placeholder' else 'engine'} {slot.number} of group "
        f"{slot.group.name!r}, which takes {pieces}: left are {left}. Lower its count or tp, or name more GPUs"
    )


# -- what is started


def plan_engines(
    slots: Sequence[Slot], seats: Sequence[tuple[Seat, ...]], settings: Settings, ports: Ports
) -> EnginePlan:
    """The processes of all slots in their seats. Raises UsageError for half of a prefill and decode pair."""
    groups = list({slot.group.name: slot.group for slot in slots}.values())
    _check_pairs(groups)
    kept = [
        Kept(slot.group.name, seat)
        for slot, taken in zip(slots, seats, strict=True)
        if slot.group.role == "placeholder"
        for seat in taken
    ]
    engines = [pair for pair in zip(slots, seats, strict=True) if pair[0].group.role != "placeholder"]
    launches = [
        launch
        for index, (slot, taken) in enumerate(engines, settings.first)
        for launch in _processes(index, slot, taken, settings, ports)
    ]
    return EnginePlan(tuple(launches), tuple(kept), tuple(planned_routers(groups, settings.models)))


def _processes(
    index: int, slot: Slot, seats: Sequence[Seat], settings: Settings, ports: Ports
) -> Iterator[EngineLaunch]:
    device = device_of(slot.group, settings.device)
    colocated = settings.colocated and device != "cpu"
    group = shares_memory(slot.group, slot.number, colocated=colocated)
    listens = [group.host or (seat.address if settings.spread else LOOPBACK) for seat in seats]
    port = group.port + slot.number if group.port else ports(seats[0].node, listens[0])
    meets = group.role == "prefill" or (group.role == "decode" and dialect(group.engine).pairing == "in_turn")
    bootstrap = ports(seats[0].node, listens[0]) if meets else None
    meeting = f"{seats[0].address}:{ports(seats[0].node, seats[0].address)}" if len(seats) > 1 else None
    model, sizes, boot_id = settings.models[group.model], parallel_sizes(group), settings.boot_id()
    takes_port = meeting is None and launches(group.engine).takes_rendezvous_port(group.flags, sizes.dp)
    rendezvous = ports(seats[0].node, EVERYWHERE) if takes_port else None
    returns_experts = group.return_routed_experts or model.return_routed_experts
    if returns_experts:
        _check_returns_experts(group, model, device)
    lora_rank = max(group.lora_rank, model.lora_rank)
    if lora_rank and (why := launches(group.engine).no_adapters(device)) is not None:
        raise UsageError(
            f"group {group.name!r}: {dialect(group.engine).label} was to take adapters (lora_rank, or "
            f'weights.lora_sync = "adapter"): {why}; take merged weights, weights.lora_sync = "merged"'
        )
    if model.quantization is not None and (why := launches(group.engine).no_fp8(device, model.path)) is not None:
        raise UsageError(f"group {group.name!r}: {dialect(group.engine).label} was to serve FP8 (quantization): {why}")
    if model.exact and (why := launches(group.engine).not_exact(device, model.path)) is not None:
        raise UsageError(
            f"group {group.name!r}: {dialect(group.engine).label} was to compute exactly (algorithm.exact): {why}"
        )
    path, quantization = model.path, model.quantization
    if model.quantized_copy is not None and not launches(group.engine).quantizes:
        path, quantization = model.quantized_copy, None
    for rank, seat in enumerate(seats):
        yield EngineLaunch(
            index=index, engine=group.engine, model_name=group.model, group=group.name, role=group.role,
            node=seat.node, node_rank=rank, nodes=len(seats), dist_init=meeting, bootstrap_port=bootstrap,
            rendezvous_port=rendezvous,
            address=seat.address if settings.spread and group.host in (None, "0.0.0.0", "::") else "",
            pp=sizes.pp, dp=sizes.dp, update_weights=model.update_weights, ready_timeout=group.ready_timeout,
            model=path.absolute(), host=listens[rank], port=port, gpus=seat.gpus, tp=group.tp, device=device,
            served_name=group.served_name or group.model, dtype=group.dtype, max_model_len=group.max_model_len,
            seed=group.seed + index, task=model.task, return_routed_experts=returns_experts,
            lora_rank=lora_rank, lora_slots=max(group.lora_slots, model.lora_slots),
            quantization=quantization, exact=model.exact,
            trust_remote_code=group.trust_remote_code,
            # Absolute, as the model's, because engines run in another directory; not resolved, for the reason given at
            # default_engine_python.
            python=group.engine_python.absolute() if group.engine_python else default_engine_python(),
            key_file=settings.key_file, boot_id=boot_id, weight_backend=group.weight_backend,
            work_dir=settings.state_dir / role_of(index, rank), extra_args=group.flags,
        )  # fmt: skip


def _check_returns_experts(group: EngineGroup, model: Model, device: Device) -> None:
    why = launches(group.engine).no_routed_experts(device)
    if why is not None:
        raise UsageError(
            f"group {group.name!r}: {dialect(group.engine).label} does not return routed experts "
            f"(return_routed_experts, algorithm.routing_replay): {why}, or leave it out"
        )
    if group.role != "regular" or model.task != "generate":
        raise UsageError(
            f"group {group.name!r}: routed experts (return_routed_experts, algorithm.routing_replay) are returned by "
            "regular engines that generate; leave it out, or use no prefill and decode engines"
        )


def start_order(launches: Sequence[EngineLaunch]) -> list[list[EngineLaunch]]:
    """Who is started together, batch by batch. Engines on one GPU start one after the other where one of them measures
    what is free there while it starts: it takes what another one allocates meanwhile for its own."""
    batches: list[list[EngineLaunch]] = []
    for launch in launches:
        batch = next((batch for batch in batches if not any(_disturb(launch, other) for other in batch)), None)
        if batch is None:
            batches.append([launch])
        else:
            batch.append(launch)
    return batches


def _disturb(one: EngineLaunch, other: EngineLaunch) -> bool:
    return bool(set(one.gpus) & set(other.gpus)) and (measures_memory(one) or measures_memory(other))


def url_of(launch: EngineLaunch) -> str:
    """Where the engine is reached."""
    return http_url(launch.address or launch.host, launch.port)


def planned_routers(groups: Sequence[EngineGroup], models: Mapping[str, Model]) -> Iterator[Router]:
    """Where one is asked for, and where prefill and decode need one."""
    for name in dict.fromkeys(group.model for group in groups if group.role != "placeholder"):
        prefill = {group.engine for group in groups if group.model == name and group.role == "prefill"}
        disaggregated = any(dialect(kind).pairing == "side_by_side" for kind in prefill)
        if disaggregated or models[name].start_router:
            yield Router(name, disaggregated)


def _check_pairs(groups: Sequence[EngineGroup]) -> None:
    for name in dict.fromkeys(group.model for group in groups):
        roles = {group.role for group in groups if group.model == name} - {"placeholder"}
        if roles & {"prefill", "decode"} and roles != {"prefill", "decode"}:
            raise UsageError(
                f"model {name!r} has engines of role {' and '.join(sorted(roles))}: prefill and decode go together, "
                "and a model that has them has no regular ones"
            )
        halves = [group for group in groups if group.model == name and group.role in ("prefill", "decode")]
        for group in halves:
            if dialect(group.engine).pairing is None:
                raise UsageError(
                    f"group {group.name!r}: rltool cannot prefill and decode on different engines of "
                    f"{dialect(group.engine).label}: use regular ones"
                )
        if len({group.engine for group in halves}) > 1:
            raise UsageError(f"model {name!r}: prefill and decode engines are all vLLM's or all SGLang's")


# -- ports


@dataclass(frozen=True)
class PortNeeds:
    """Ports that must be free before the plan can be made: how many of any, by host and address, and specific ones."""

    free: Mapping[tuple[str, str], int]
    fixed: tuple[tuple[str, str, int], ...]


def port_needs(slots: Sequence[Slot], seats: Sequence[tuple[Seat, ...]], settings: Settings) -> PortNeeds:
    """Of the plan that `plan_engines` would make. UsageError as there."""
    free: Counter[tuple[str, str]] = Counter()

    def count(node: str, address: str) -> int:
        free[node, address] += 1
        return 0

    plan = plan_engines(slots, seats, settings, count)
    fixed = [(x.node, x.host, x.port) for x in plan.launches if x.port and x.node_rank == 0]
    return PortNeeds(dict(free), tuple(fixed))


def ports_of(launch: EngineLaunch) -> set[int]:
    """Those that its processes listen on."""
    meeting = launch.dist_init.rpartition(":")[2] if launch.dist_init else None
    ports = (launch.port, launch.bootstrap_port, launch.rendezvous_port, meeting)
    return {int(port) for port in ports if port}


def handed_out(ports: Mapping[tuple[str, str], Iterable[int]]) -> Ports:
    """Each of these ports once, in order."""
    left = {key: iter(found) for key, found in ports.items()}
    return lambda node, address: next(left[node, address])


# -- for people


def describe_plan(plan: EnginePlan, *, name_hosts: bool = False) -> list[str]:
    """A line for each process, placeholder and router. name_hosts: where there are several."""
    lines = []
    for launch in plan.launches:
        facts = [f"{launch.engine} {launch.role}", f"group {launch.group}"]
        if launch.model_name != POLICY:
            facts.append(f"model {launch.model_name}" + ("" if launch.update_weights else " (weights not updated)"))
        facts.append(f"host {launch.address or launch.node}" if name_hosts else "")
        facts.append(f"GPUs {','.join(map(str, launch.gpus))}" if launch.gpus else launch.device)
        facts.append(url_of(launch) if launch.node_rank == 0 else "no server of its own")
        facts.append(f"bootstrap port {launch.bootstrap_port}" if launch.bootstrap_port else "")
        if launch.dist_init is not None:
            facts.append(f"node {launch.node_rank} of {launch.nodes}, dist-init {launch.dist_init}")
        lines.append(f"{role_of(launch.index, launch.node_rank)}: {', '.join(filter(None, facts))}")
    for kept in plan.kept:
        where = f", host {kept.seat.node}" if name_hosts else ""
        lines.append(f"placeholder: group {kept.group}{where}, GPUs {','.join(map(str, kept.seat.gpus))}")
    for router in plan.routers:
        how = "prefill and decode" if router.disaggregated else "all engines in one pool"
        lines.append(f"{router_role(router.model)}: model {router.model}, {how}, a free port")
    return lines


def describe_copies(plan: EnginePlan, directory: Path) -> list[str]:
    """A line for each model of which a copy in FP8 is written there, for engines that quantise nothing themselves."""
    launched = [x for x in plan.launches if x.quantization is not None and not launches(x.engine).quantizes]
    read = dict.fromkeys(launch.model for launch in launched)
    return [f"with a copy of {model} in FP8, written to {directory}" for model in read]


def router_role(model: str) -> str:
    """Name of the router's process in the run."""
    return "router" if model == POLICY else f"router-{model}"


def is_router(role: str) -> bool:
    """The inverse: whether a process of a run is one of its routers."""
    return role == "router" or (role.startswith("router-") and not role.startswith("router-command"))
