"""What a run takes on a cluster that need not be there: ranks and engines by host, memory, connections, and what its
links carry in a weight sync and in a training step. Pure: it looks at a configuration and a model's shapes.

Seconds are bytes over the rate of the link that carries them, without latency and contention. Links work side by side,
so a sync takes as long as its slowest one, at least.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rltool.config.loader import Loaded, load_config
from rltool.config.parallel import ParallelLayout
from rltool.config.sections import TrainerConfig
from rltool.config.serve import POLICY, EngineGroup
from rltool.config.train import TrainConfig
from rltool.engines.dialects.parallel_flags import parallel_sizes
from rltool.engines.launch.plan import Host, Seat, Slot, engine_slots, seat_slots
from rltool.errors import UsageError
from rltool.megatron.shards import owners
from rltool.models.base import Family
from rltool.models.layout import owner_stage
from rltool.models.memory import (
    BESIDE_BYTES,
    GIB,
    USED,
    EngineBytes,
    RankMemory,
    engine_bytes,
    fitting_layout,
    reduced_bytes,
    training_memory,
)
from rltool.training.cluster.placement import check_reach

LAYOUT_KEYS = frozenset(
    f"trainer.{key}"
    for key in (
        "tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel", "sequence_parallel",
        "distributed_optimizer", "recompute", "recompute_layers",
    )
)  # fmt: skip
"""A configuration that sets one of them has a layout; else one is looked for."""
SEQUENCE, WORLD_SIZE = "trainer.sequence_parallel", "trainer.world_size"


MOST_RANKS = 8192
"""Up to which a layout that fits is looked for, to say how many ranks would do."""


class Rate(NamedTuple):
    value: float
    unit: str
    source: str


RATES: dict[str, Rate] = {
    "network": Rate(40.0, "GB/s", "from a GPU to one of another host: 80 % (assumed) of an adapter of 400 Gbit/s for "
                    "each GPU (NVIDIA DGX H100 user guide)"),
    "nvlink": Rate(237.0, "GB/s", "from a GPU to one of its host: 15.2 GB in 0.064 s (docs/benchmarks.md, H200)"),
    "tcp": Rate(1.4, "GB/s", "gloo, from a host to an engine: 0.99 GB in 0.70 s (docs/benchmarks.md)"),
    "disk": Rate(2.0, "GB/s", "a shared directory, all readers and writers together (assumed)"),
    "flops": Rate(989.0, "TFLOP/s", "of a GPU, dense in bfloat16 (NVIDIA H100 SXM data sheet)"),
    "utilization": Rate(0.2, "of it", "model FLOPs utilisation in training: 0.19 for DeepSeek-V3 on 96 H20 (verl, "
                        "docs/perf/dpsk.md)"),
    "changed": Rate(0.015, "of all bytes", "a patch, of bfloat16 at lr 3e-6 (docs/benchmarks.md, Weight deltas)"),
}  # fmt: skip
"""Defaults of `rltool plan --rate NAME=VALUE`, and where each is from."""


def rates_of(given: Sequence[str]) -> dict[str, float]:
    """Name -> value in the units of RATES. given: NAME=VALUE. Raises UsageError."""
    rates = {name: rate.value for name, rate in RATES.items()}
    for text in given:
        name, _, value = text.partition("=")
        if name not in rates:
            raise UsageError(f"--rate {text!r}: there is no rate {name!r}; there are {', '.join(rates)}")
        try:
            rates[name] = float(value)
        except ValueError:
            raise UsageError(f"--rate {text!r}: expected {name}=NUMBER, in {RATES[name].unit}") from None
        if not 0 < rates[name] < math.inf:
            raise UsageError(f"--rate {text!r}: expected a number above 0")
    return rates


@dataclass(frozen=True)
class Cluster:
    """gpu_bytes: of each GPU."""

    hosts: int
    gpus_per_host: int
    gpu_bytes: int


class Link(NamedTuple):
    """What one link carries, and for how long."""

    what: str
    carried: int
    seconds: float


@dataclass(frozen=True)
class Engines:
    """gpus: of each; cache_tokens: that fit on its GPUs beside the weights, below 1 where these alone do not."""

    count: int
    gpus: int
    bytes: EngineBytes
    cache_tokens: int


@dataclass(frozen=True)
class ClusterPlan:
    """trainer, memory: None where no layout fits. on_hosts: (hosts, what they hold); idle: GPUs without a rank or an
    engine. sync, step: links by what they carry, in bytes and seconds; training: seconds of a step's floating-point
    operations, with pipeline bubbles. tokens: of a step; problems: why it cannot run; notes: what an engineer should
    know."""

    cluster: Cluster
    trainer: TrainerConfig | None
    memory: RankMemory | None
    engines: Engines | None
    on_hosts: tuple[tuple[str, str], ...]
    idle: int
    connections: tuple[tuple[str, int], ...]
    transport: str
    sync: tuple[Link, ...]
    step: tuple[Link, ...]
    training: float
    tokens: int
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def sync_seconds(self) -> float:
        return max((link.seconds for link in self.sync), default=0.0)

    @property
    def bottleneck(self) -> str:
        """What has to change first."""
        if self.problems:
            return self.problems[0]
        links = [Link("the ranks' floating-point operations", 0, self.training), *self.step, *self.sync]
        slowest = max(links, key=lambda link: link.seconds)
        return f"{slowest.what}: {seconds_text(slowest.seconds)}"

    def as_json(self) -> dict[str, Any]:
        """Bytes and seconds."""
        trainer, memory, engines = self.trainer, self.memory, self.engines
        return {
            "hosts": self.cluster.hosts,
            "gpus_per_host": self.cluster.gpus_per_host,
            "gpu_bytes": self.cluster.gpu_bytes,
            "ranks": trainer and trainer.world_size,
            "layout": trainer and trainer.layout.to_json(),
            "recompute": trainer and trainer.recompute,
            "rank_bytes": memory and memory.total,
            "engines": engines and {
                "count": engines.count, "gpus": engines.gpus, "weights": engines.bytes.weights,
                "cache_tokens": engines.cache_tokens,
            },
            "placement": [{"hosts": hosts, "holds": holds} for hosts, holds in self.on_hosts],
            "idle_gpus": self.idle,
            "connections": dict(self.connections),
            "transport": self.transport,
            "sync": [link._asdict() for link in self.sync],
            "sync_seconds": self.sync_seconds,
            "step": [link._asdict() for link in self.step],
            "training_seconds": self.training,
            "tokens_per_step": self.tokens,
            "fits": not self.problems,
            "problems": list(self.problems),
            "notes": list(self.notes),
            "bottleneck": self.bottleneck,
        }  # fmt: skip


def seconds_text(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


def configured(
    files: Sequence[Path], sets: Sequence[str], model: Path | None, cluster: Cluster, trainer_hosts: int | None = None
) -> Loaded[TrainConfig]:
    """A run's configuration (as for load_config, without the rules of a run that starts) on this cluster, in bfloat16
    unless it sets model.dtype, with as many ranks as it has there.

    trainer_hosts: hosts of ranks alone; None: as trainer.world_size says, else half of the hosts, all where engines
    share the ranks' GPUs. Raises UsageError for sizes that do not divide the ranks, and more ranks than GPUs.
    """
    flags: dict[str, tuple[str, Any]] = {"model.path": ("MODEL", model)}
    # Sizes are compared with the number of ranks, which is to be known first.
    uncut = {key: ("", 1) for key in LAYOUT_KEYS if key.endswith("_parallel")} | {SEQUENCE: ("", False)}
    first = load_config(TrainConfig, files, sets, flags | uncut, rules=())
    given = first.config
    alone = given.engines.shares_gpus or not given.needs_engines
    gpus = cluster.hosts * cluster.gpus_per_host
    if trainer_hosts is not None:
        flag, ranks = "--trainer-hosts", trainer_hosts * cluster.gpus_per_host
    elif WORLD_SIZE in first.origins:
        flag, ranks = first.origins[WORLD_SIZE], given.trainer.world_size
    else:
        flag, ranks = "--hosts", gpus if alone else max(1, cluster.hosts // 2) * cluster.gpus_per_host
    if ranks > gpus or (ranks == gpus and not alone):
        raise UsageError(
            f"{ranks} ranks ({flag}) on {cluster.hosts} x {cluster.gpus_per_host} GPUs leave none for engines: more "
            '--hosts, a lower --trainer-hosts (trainer.world_size), or engines.mode = "colocate"'
        )
    dtype = None if "model.dtype" in first.origins else "bfloat16"  # a run's own default, float32, is for CPUs
    flags |= {WORLD_SIZE: (flag, ranks), "model.dtype": ("rltool plan", dtype)}
    return load_config(TrainConfig, files, sets, flags, rules=())


def plan_cluster(
    loaded: Loaded[TrainConfig], family: Family, cluster: Cluster, rates: Mapping[str, float], *, sample_tokens: int
) -> ClusterPlan:  # fmt: skip
    """The plan of what `configured` returned. sample_tokens: of prompt and response, on average. Raises UsageError for
    what the model cannot be cut into, and for more engines than GPUs are left."""
    config, per_host = loaded.config, cluster.gpus_per_host
    ranks, gpus = config.trainer.world_size, cluster.hosts * per_host
    shared = config.needs_engines and config.engines.shares_gpus
    trainer, memory = _layout(loaded, family, cluster)
    problems = list(_rank_problems(memory, cluster, ranks, config, family))
    engines, seats = None, []
    if config.needs_engines:
        hosts = _hosts(cluster, 0 if shared else ranks, end=ranks if shared else gpus)
        engines, seats = _engines(config, family, cluster, hosts)
        if engines is None:
            problems.append(
                f"no engine of {family.architecture} fits the {sum(len(host.gpus) for host in hosts)} GPUs that ranks "
                "leave: more hosts, or GPUs with more memory"
            )
        elif engines.cache_tokens < 1:
            problems.append(
                f"engines: {engines.bytes.weights / engines.gpus / GIB:.1f} GiB of weights on each GPU leave no room "
                f"for a cache in {cluster.gpu_bytes / GIB:.0f} GiB: more GPUs an engine (engines.groups: tp)"
            )
    if shared and trainer is not None:
        try:
            nodes = [str(rank // per_host) for rank in range(trainer.world_size)]
            check_reach(config.weights, trainer.layout, nodes, [[seat.node for seat in taken] for taken in seats])
        except UsageError as error:
            problems.append(str(error))
    held = ranks if shared else ranks + len({(s.node, gpu) for taken in seats for s in taken for gpu in s.gpus})
    transport = _transport(config)
    item = 2 if config.model.dtype == "bfloat16" else 4
    tokens = config.rollout.prompts_per_step * config.rollout.samples_per_prompt * sample_tokens
    sync: tuple[Link, ...] = ()
    step: tuple[Link, ...] = ()
    training, notes = 0.0, list[str]()
    if trainer is not None:
        if engines is not None:
            links = sync_links(family, trainer.layout, per_host, seats, config, rates, item=item)
            sync = tuple(link for link in links if link.carried)
        step = tuple(_step_links(family, trainer, per_host, tokens, rates, config.model.dtype))
        training, notes = _training(family, trainer, tokens, sample_tokens, rates)
        notes += _layout_notes(trainer.layout, per_host)
        if transport == "nccl" and not config.weights.delta and seats:
            patched = config.model_copy(update={"weights": config.weights.model_copy(update={"delta": True})})
            links = sync_links(family, trainer.layout, per_host, seats, patched, rates, item=item)
            faster = max(link.seconds for link in links)
            if max(link.seconds for link in sync) > max(training, 2 * faster):
                notes.append(
                    f"with patches (weights.delta = true) a sync takes {seconds_text(faster)}; each engine is sent a "
                    "copy, so fewer, larger ones take less"
                )
    return ClusterPlan(
        cluster, trainer, memory, engines, tuple(_on_hosts(cluster, ranks, seats)), gpus - held,
        tuple(_connections(config, ranks, engines, transport)), transport, sync, step, training, tokens,
        tuple(problems), tuple(notes),
    )  # fmt: skip


# -- ranks


def _layout(
    loaded: Loaded[TrainConfig], family: Family, cluster: Cluster
) -> tuple[TrainerConfig | None, RankMemory | None]:  # fmt: skip
    config = loaded.config
    if loaded.origins.keys().isdisjoint(LAYOUT_KEYS):
        return _found_layout(config, family, cluster, config.trainer.world_size) or (None, None)
    return config.trainer, training_memory(family, config.trainer, dtype=config.model.dtype, lora=config.lora)


def _found_layout(
    config: TrainConfig, family: Family, cluster: Cluster, ranks: int
) -> tuple[TrainerConfig, RankMemory] | None:  # fmt: skip
    return fitting_layout(
        family, gpus=ranks, gpu_bytes=cluster.gpu_bytes, tokens=config.trainer.max_tokens_per_micro_batch,
        logprob_tokens=config.trainer.logprob_tokens_per_micro_batch, dtype=config.model.dtype, lora=config.lora,
        gpus_per_host=cluster.gpus_per_host,
    )  # fmt: skip


def _rank_problems(
    memory: RankMemory | None, cluster: Cluster, ranks: int, config: TrainConfig, family: Family
) -> Iterator[str]:
    room = f"{cluster.gpu_bytes / GIB:.0f} GiB"
    if memory is None:
        tokens, untrained = config.trainer.max_tokens_per_micro_batch, config.trainer.logprob_tokens_per_micro_batch
        larger = f" ({untrained:,} where nothing is trained)" if untrained else ""
        more = (ranks << times for times in range(1, 13) if ranks << times <= MOST_RANKS)
        enough = next((number for number in more if _found_layout(config, family, cluster, number)), None)
        helps = f"{enough} do" if enough is not None else f"up to {MOST_RANKS} do not either"
        yield f"no layout of {ranks} ranks fits GPUs of {room} with {tokens:,} tokens a micro-batch{larger}; {helps}"
    elif memory.total > USED * cluster.gpu_bytes:
        parts = {name: getattr(memory, name) for name in ("weights", "gradients", "optimizer", "activations", "head")}
        largest = max(parts, key=lambda name: parts[name])
        yield (
            f"ranks: {memory.total / GIB:.1f} GiB do not fit {room}, of which a tenth stays free; most are {largest}, "
            f"{parts[largest] / GIB:.1f} GiB"
        )


def _layout_notes(layout: ParallelLayout, per_host: int) -> list[str]:
    notes = []
    if per_host % layout.tp:
        notes.append(
            f"tensor_parallel = {layout.tp} does not divide the {per_host} GPUs of a host: every layer waits for the "
            "network twice in each direction"
        )
    if layout.ep > 1 and per_host % (layout.tp * layout.ep):
        notes.append(
            f"experts are spread over {layout.tp * layout.ep} GPUs, more than a host has: their tokens cross the "
            "network"
        )
    return notes


# -- engines


def _hosts(cluster: Cluster, first: int, *, end: int) -> list[Host]:
    """The hosts with those of their GPUs that are numbered first .. end - 1 in the cluster."""
    per_host = cluster.gpus_per_host
    hosts = []
    for number in range(cluster.hosts):
        at = number * per_host
        gpus = tuple(gpu for gpu in range(per_host) if first <= at + gpu < end)
        hosts.append(Host(str(number), f"host-{number}", gpus))
    return [host for host in hosts if host.gpus]


def _engines(
    config: TrainConfig, family: Family, cluster: Cluster, hosts: Sequence[Host]
) -> tuple[Engines | None, list[tuple[Seat, ...]]]:
    groups = [group.model_copy(update={"gpus": ()}) for group in config.engines.groups]
    if not any(group.model == POLICY and group.role != "placeholder" for group in groups):
        group = _found_group(config, family, cluster, hosts)
        if group is None:
            return None, []
        groups.append(group)
    slots = engine_slots(groups, device="cuda", gpus_per_host=max(len(host.gpus) for host in hosts))
    every = seat_slots(slots, hosts)
    placed = [(slot, seats) for slot, seats in zip(slots, every, strict=True) if _takes_weights(slot)]
    sizes = Counter(slot.group.name for slot, _ in placed)
    most = next(slot.group for slot, _ in placed if slot.group.name == sizes.most_common(1)[0][0])
    return _engine_facts(most, family, config, cluster, len(placed)), [s for _, s in placed]


def _takes_weights(slot: Slot) -> bool:
    return slot.group.model == POLICY and slot.group.role != "placeholder"


def _engine_facts(
    group: EngineGroup, family: Family, config: TrainConfig, cluster: Cluster, count: int
) -> Engines:  # fmt: skip
    sizes = parallel_sizes(group)
    if family.transformer["num_attention_heads"] % sizes.tp:
        raise UsageError(
            f"engines.groups {group.name!r}: tp = {sizes.tp} does not divide the model's "
            f"{family.transformer['num_attention_heads']} attention heads"
        )
    needs = engine_bytes(family, tensor_parallel=sizes.tp, dtype=config.model.dtype)
    on_gpu = USED * cluster.gpu_bytes / group.engines_per_gpu - BESIDE_BYTES - needs.weights / (sizes.tp * sizes.pp)
    tokens = int(on_gpu // (needs.cache / sizes.pp)) * sizes.dp
    return Engines(count, sizes.world_size, needs, tokens)


def _found_group(
    config: TrainConfig, family: Family, cluster: Cluster, hosts: Sequence[Host]
) -> EngineGroup | None:  # fmt: skip
    """As many engines as there is room for, each of the fewest GPUs that hold the weights and something of a cache; of
    several hosts: a pipeline stage on each, tensor parallelism within."""
    per_host = max(len(host.gpus) for host in hosts)
    heads = family.transformer["num_attention_heads"]
    within = [(tp, 1) for tp in (1, 2, 4, 8) if tp <= per_host and heads % tp == 0]
    for tp, pp in [*within, *((per_host, pp) for pp in range(2, len(hosts) + 1) if heads % per_host == 0)]:
        group = EngineGroup(tp=tp, flags=("--pipeline-parallel-size", str(pp)) if pp > 1 else ())
        if _engine_facts(group, family, config, cluster, 1).cache_tokens < 1:
            continue
        if pp > 1:
            count = sum(len(host.gpus) == per_host for host in hosts) // pp
        else:
            count = sum(len(host.gpus) // tp for host in hosts)
        return group.model_copy(update={"count": count})
    return None


def _on_hosts(cluster: Cluster, ranks: int, seats: Sequence[tuple[Seat, ...]]) -> Iterator[tuple[str, str]]:
    """(hosts, what they hold), hosts that hold the same in one line."""
    found: list[list[str]] = [[] for _ in range(cluster.hosts)]
    per_host = cluster.gpus_per_host
    for host in range(cluster.hosts):
        first, end = host * per_host, min(ranks, (host + 1) * per_host)
        if first < end:
            found[host].append(f"{end - first} ranks")
    whole = Counter(seat.node for taken in seats if len(taken) == 1 for seat in taken)
    parts = Counter((seat.node, len(taken)) for taken in seats if len(taken) > 1 for seat in taken)
    for node, count in whole.items():
        found[int(node)].append(f"{count} engine{'s' * (count > 1)}")
    for (node, spread), count in parts.items():
        found[int(node)].append(f"{count} of the {spread} parts of an engine")
    start = 0
    for host in range(1, cluster.hosts + 1):
        if host == cluster.hosts or found[host] != found[start]:
            yield (str(start) if host == start + 1 else f"{start}-{host - 1}"), " and ".join(found[start]) or "nothing"
            start = host


# -- links


def _transport(config: TrainConfig) -> str:
    if config.weights.transport != "auto":
        return config.weights.transport
    return "ipc" if config.needs_engines and config.engines.shares_gpus else "nccl"


def weight_bytes(family: Family, *, item: int) -> int:
    """Of one copy of the weights on the wire."""
    return sum(math.prod(p.merged_shape) * (4 if p.keeps_fp32 else item) for p in family.parameters)


def gathered_bytes(family: Family, layout: ParallelLayout, per_host: int, *, item: int) -> tuple[int, int]:
    """(bytes from its own host, from other hosts) that rank 0 receives to have all parameters once: what other
    tensor-parallel ranks of the holder have, and what a holder of another stage or with other experts sends
    (rltool/megatron/gathering.py)."""
    near = far = 0
    for parameter in family.parameters:
        size = math.prod(parameter.merged_shape) * (4 if parameter.keeps_fp32 else item)
        stage = owner_stage(parameter, family.num_layers, layout.pp)
        replica = 0 if parameter.expert is None else parameter.expert * layout.ep // family.num_experts
        holder = layout.global_rank(tp=0, pp=stage, replica=replica)
        if holder >= per_host:
            far += size
        elif holder:
            near += size
        elif layout.tp > 1 and parameter.shard_dim is not None:
            beyond = max(0, layout.tp - per_host)
            far += size * beyond // layout.tp
            near += size * (layout.tp - 1 - beyond) // layout.tp
    return near, far


def sharded_bytes(family: Family, layout: ParallelLayout, per_host: int, *, item: int) -> list[float]:
    """Of one copy of the weights, what each host's ranks send (weights.sharded): those that hold the same share it."""
    out = [0.0] * -(-layout.world_size // per_host)
    for parameter in family.parameters:
        size = math.prod(parameter.merged_shape) * (4 if parameter.keeps_fp32 else item)
        cut = owners(parameter, family, layout)
        for ranks in cut:
            for rank in ranks:
                out[rank // per_host] += size / len(cut) / len(ranks)
    return out


def sync_links(
    family: Family, layout: ParallelLayout, per_host: int, seats: Iterable[tuple[Seat, ...]], config: TrainConfig,
    rates: Mapping[str, float], *, item: int,
) -> Iterator[Link]:  # fmt: skip
    """What a weight sync carries over each kind of link. Rank 0, on host 0, gathers the weights and sends each engine a
    copy; engines in one group with it pass it on among their GPUs (NCCL). seats: of the engines.

    With weights.sharded each host of ranks sends what its ranks hold, and a host of engines gets what these store; over
    CUDA IPC a worker reads at most that from other GPUs, and the store has one copy.
    Patches (weights.delta, transport delta) are of the share `changed`; versions that go whole are not counted.
    """
    weights, transport = config.weights, _transport(config)
    size = weight_bytes(family, item=item)
    near, far = gathered_bytes(family, layout, per_host, item=item)
    taken = list(seats)
    here = sum(all(seat.node == "0" for seat in seats) for seats in taken)
    sent = size * rates["changed"] if weights.delta or transport == "delta" else size

    def link(what: str, carried: float, rate: str) -> Link:
        return Link(what, int(carried), carried / (rates[rate] * 1e9))

    if weights.sharded and transport == "gloo":
        out = sharded_bytes(family, layout, per_host, item=item)
        most = max(out) * len(taken)
        yield link(f"out of the ranks' host that sends most, over TCP; {len(taken)} copies in all", most, "tcp")
        into = Counter(seat.node for seats in taken for seat in seats)
        shares = {node: sum(size * sum(s.node == node for s in seats) / len(seats) for seats in taken) for node in into}
        yield link("into the engines' host that takes most, over TCP", max(shares.values(), default=0.0), "tcp")
        return
    if weights.sharded and transport in ("nccl", "ipc"):
        into = size / min((sum(max(1, len(seat.gpus)) for seat in seats) for seats in taken), default=1)
        if transport == "ipc":
            yield link("into a worker, from other GPUs of its host at most", into, "nvlink")
            return
        most = max(sharded_bytes(family, layout, 1, item=item)) * len(taken)
        what = f"out of the rank that sends most, over its network adapter; {len(taken)} copies in all"
        yield link(what, most, "network")
        yield link("into a worker, over its network adapter", into, "network")
        return
    if transport == "ipc":  # a broadcast to every rank, which copies to the engine on its GPU
        hosts = -(-layout.world_size // per_host)
        yield link("weights to every rank, over a GPU's network adapter", size if hosts > 1 else 0, "network")
        yield link("weights to every rank, within its host", size if layout.world_size > 1 else 0, "nvlink")
        return
    if not weights.sharded:
        yield link("gathering: into rank 0 from other hosts", far, "network")
        yield link("gathering: into rank 0 from its own host", near, "nvlink")
    if transport == "nccl":
        away = len(taken) - here
        yield link(f"out of rank 0's network adapter, {away} copies", sent * away, "network")
        yield link(f"out of rank 0 to engines of its host, {here} copies", sent * here, "nvlink")
    elif transport == "gloo":
        # A binomial tree from rank 0 over the workers of each engine.
        copies = sum(math.ceil(math.log2(1 + sum(max(1, len(seat.gpus)) for seat in seats))) for seats in taken)
        yield link(f"out of rank 0's host over TCP, {copies} copies", sent * copies, "tcp")
    else:
        yield link("into the shared store", sent, "disk")
        yield link(f"out of the shared store, {len(taken)} copies", sent * len(taken), "disk")


def _step_links(
    family: Family, trainer: TrainerConfig, per_host: int, tokens: int, rates: Mapping[str, float], dtype: str
) -> Iterator[Link]:
    """What a rank's network adapter carries in a step: gradients and parameters between replicas, once, and the chosen
    experts' tokens there and back, forward and backward, once more where layers are computed again."""
    layout, item = trainer.layout, 2 if dtype == "bfloat16" else 4
    if layout.world_size <= per_host:
        return
    reduced = reduced_bytes(family, layout, dtype=dtype)
    yield Link("gradients and parameters between replicas, a rank", reduced, reduced / (rates["network"] * 1e9))
    spread = layout.ep * layout.tp
    if layout.ep > 1 and per_host % spread:
        shape = family.transformer
        passes = 6 if trainer.recompute == "full" else 4
        layers = sum(family.expert_layers) / layout.pp
        of_rank = tokens / (layout.dp * layout.cp * layout.tp)
        away = max(0.0, 1 - per_host / spread)
        values = of_rank * layers * shape["moe_router_topk"] * shape["hidden_size"] * passes * away
        carried = int(values * item)
        yield Link("experts' tokens between hosts, a rank", carried, carried / (rates["network"] * 1e9))


def _training(
    family: Family, trainer: TrainerConfig, tokens: int, sample_tokens: int, rates: Mapping[str, float]
) -> tuple[float, list[str]]:
    """(seconds of a step's floating-point operations, notes). One optimizer step a rollout, or several on parts of
    it."""
    layout, notes = trainer.layout, []
    flops = family.cost().training_flops(sample_tokens) * tokens / sample_tokens
    seconds = flops / (layout.world_size * rates["flops"] * 1e12 * rates["utilization"])
    micro_batches = tokens / layout.dp / trainer.micro_batch_tokens
    if micro_batches < 1:
        notes.append(
            f"{tokens:,} tokens a step are {micro_batches:.2g} micro-batches for each of {layout.dp} replicas: ranks "
            "idle; raise rollout.prompts_per_step, or lower trainer.max_tokens_per_micro_batch"
        )
    if layout.pp > 1:
        bubble = (layout.pp - 1) / max(1.0, micro_batches)
        seconds *= 1 + bubble
        waiting = bubble / (1 + bubble)
        notes.append(f"pipeline: ranks wait {waiting:.0%} of a step, with {micro_batches:.1f} micro-batches")
    return seconds, notes


def _connections(config: TrainConfig, ranks: int, engines: Engines | None, transport: str) -> Iterator[tuple[str, int]]:
    if engines is not None:
        yield "HTTP, rollout manager to engines, at most", engines.count * config.rollout.requests_per_engine
        groups = {"nccl": "an NCCL communicator", "gloo": "a gloo group"}.get(transport)
        if groups is not None:
            yield f"weight transfer at rank 0, a thread and {groups} each", engines.count
    yield "Ray actors of ranks, each in the process groups of its layout", ranks
