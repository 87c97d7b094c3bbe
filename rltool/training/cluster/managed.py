"""engines.mode = "managed" or "colocate": the driver has the run's engines started, in bundles of their own or in the
trainer's, and ends them.

    ManagedEngines.start     one actor on each host that has engines; ports; the plan; all processes begin
                   wait      until all serve; the run's endpoints.json names them; a router in front where asked for
                   close     all are ended, however the run ends

Starting engines again when they die is the rollout manager's business (rollout/serving/restarts.py); routers are
watched here, in a thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rltool.checkpoints.hf_export import order_in_fp8
from rltool.config.serve import POLICY, EngineLaunch
from rltool.config.train import TrainConfig
from rltool.engines.endpoints import Endpoints, EngineEndpoint, ModelEndpoints, edit_endpoints
from rltool.engines.launch.plan import (
    EnginePlan,
    Host,
    PortNeeds,
    Seat,
    Settings,
    describe_plan,
    handed_out,
    plan_engines,
    port_needs,
    seat_slots,
    shares_seat,
    start_order,
    url_of,
)
from rltool.engines.launch.ready import process_role
from rltool.engines.launch.start import Order, order_of_file
from rltool.engines.launch.startup import describe
from rltool.errors import RltoolError
from rltool.processes.keys import read_key
from rltool.processes.run_directory import RunDirectory
from rltool.processes.state import is_alive, read_states
from rltool.processes.stop import GRACE_SECONDS, stop_processes
from rltool.processes.supervise import ProcessGroup, Watching
from rltool.router.planned import start_planned_routers
from rltool.training.cluster.engine_host import EngineHost, HostHandles
from rltool.training.cluster.placement import PlacementPlan, check_reach
from rltool.training.cluster.places import Place, hosts_of, in_order
from rltool.training.cluster.ray_calls import Waiting, get_all, is_ready
from rltool.training.console import LoggedConsole

CHECK_SECONDS = 180.0
"""For a host to look at models and interpreters, and to start its processes."""
CLOSE_SECONDS = GRACE_SECONDS + 20.0
"""For a host to end its engines: TERM, the grace period, KILL."""


def expected_plan(
    config: TrainConfig, plan: PlacementPlan, run: RunDirectory, hosts: Sequence[Host]
) -> EnginePlan:
    """What --dry-run shows: the engines on these hosts, were the trainer's ranks to take the first GPUs; behind them,
    or on them if they are shared. Ports are numbered from 20000: the real ones are found when the run starts. The model
    is the configured one also where engines will read a copy in FP8, which is written then."""
    ranks, left = len(plan.trainer) if plan.device == "cuda" else 0, []
    for host in hosts:
        taken = min(ranks, len(host.gpus))
        ranks -= taken
        left.append(Host(host.name, host.address, host.gpus[:taken] if plan.shares_gpus else host.gpus[taken:]))
    settings = _settings(order_of_run(config), plan, run, spread=config.ray.address is not None)
    seats = seat_slots(plan.slots, left)
    needs = port_needs(plan.slots, seats, settings)
    ports = handed_out({key: range(20_000, 20_000 + count) for key, count in needs.free.items()})
    return plan_engines(plan.slots, seats, settings, ports)


def order_of_run(config: TrainConfig, run: RunDirectory | None = None) -> Order:
    """The groups and models of the configuration, with engines in FP8 where it says so. run: as for `order_in_fp8`."""
    order = order_of_file(config)
    in_fp8 = config.engines.quantization == "fp8"
    return order_in_fp8(order, POLICY, config.model.family, run) if in_fp8 else order


def _settings(order: Order, plan: PlacementPlan, run: RunDirectory, *, spread: bool) -> Settings:
    return Settings(
        order.models, run.key_file, run.state_dir, device=plan.device, spread=spread, colocated=plan.shares_gpus
    )


class ManagedEngines:
    """places: of all bundles of the plan."""

    def __init__(
        self, config: TrainConfig, run: RunDirectory, plan: PlacementPlan, group: PlacementGroup,
        places: Sequence[Place], log_dir: Path, console: LoggedConsole,
    ) -> None:  # fmt: skip
        self._config, self._run, self._plan, self._console = config, run, plan, console
        self._order = order_of_run(config, run)
        own = [place for place in places if place.bundle >= len(plan.trainer)]
        self._places = in_order(places) if plan.shares_gpus else own
        key = read_key(run.ensure_key(), f"run {run.name}")
        self._hosts: list[tuple[str, Any]] = []
        self._addresses = {place.node: place.address for place in self._places}
        for place in self._places:
            if place.node not in [node for node, _ in self._hosts]:
                strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place.bundle)
                log = log_dir / f"engine_host{len(self._hosts)}.log"
                actor = EngineHost.options(scheduling_strategy=strategy).remote(run.name, run.path.parent, key, log)
                self._hosts.append((place.node, actor))
        self._launches: tuple[EngineLaunch, ...] = ()
        self._ready: list[Any] = []
        self.starting = ""  # what engines that do not serve yet are doing, in words
        self._routers = ExitStack()
        self._started = False

    def start(self, look: Waiting) -> None:
        """Begin to start every engine; `wait` waits. look: see ray_calls.get_all."""
        seats = self._seats()
        if self._plan.shares_gpus and self._plan.device == "cuda":
            nodes = [place.node for place in self._places if place.bundle < len(self._plan.trainer)]
            policy = [
                [seat.node for seat in taken]
                for slot, taken in zip(self._plan.slots, seats, strict=True)
                if slot.group.model == POLICY
            ]
            check_reach(self._config.weights, self._config.trainer.layout, nodes, policy)
        settings = _settings(self._order, self._plan, self._run, spread=self._config.ray.address is not None)
        needs = port_needs(self._plan.slots, seats, settings)
        held = self._all(
            [actor.hold.remote(_needs_of(needs, node)) for node, actor in self._hosts],
            CHECK_SECONDS, "the time to look at a host", look,
        )  # fmt: skip
        ports = {key: found for at in held for key, found in at.items()}
        plan = plan_engines(self._plan.slots, seats, settings, handed_out(ports))
        for line in describe_plan(plan, name_hosts=len(self._hosts) > 1):
            self._console.log_line(line)
        self._write_fp8_copies(plan, look)
        self._launches, self._started = plan.launches, True
        self._all(
            [actor.start.remote([x for x in plan.launches if x.node == node]) for node, actor in self._hosts],
            CHECK_SECONDS, "the time to check models and start processes", look,
        )  # fmt: skip
        self._ready = [actor.ready.remote() for _, actor in self._hosts]

    def _write_fp8_copies(self, plan: EnginePlan, look: Waiting) -> None:
        """Of the policy, on each host with engines that read it so; one does for hosts that share the directory."""
        model = self._order.models[POLICY]
        if (copy := model.quantized_copy) is None:
            return
        nodes = {launch.node for launch in plan.launches if launch.model == copy.absolute()}
        self._console.log_line(f"engines read {model.path} in FP8: {copy}, which is written unless it is there")
        self._all(
            [
                actor.write_fp8_copy.remote(model.path.absolute(), copy.absolute(), self._config.model.family)
                for node, actor in self._hosts if node in nodes
            ],
            self._config.deadlines.step, "deadlines.step", look,
        )  # fmt: skip

    def wait(self, look: Waiting) -> dict[str, ModelEndpoints]:
        """The engines by model, once all serve. Raises ProcessFailed for the first that died or is late."""
        longest = max(launch.ready_timeout for launch in self._launches) * len(start_order(self._launches))
        see = self._seeing(look)
        answers = self._all(self._ready, longest + CHECK_SECONDS, "ready_timeout of engines.groups and more", see)
        found = by_model(self._launches, [engine for at in answers for engine in at])
        models = {
            name: ModelEndpoints(update_weights=self._order.models[name].update_weights, engines=tuple(engines))
            for name, engines in found.items()
        }
        edit_endpoints(self._run.endpoints_file, lambda _: Endpoints(models=models))
        group = self._routers.enter_context(ProcessGroup(self._run, replaces_other_hosts=True))
        routers = start_planned_routers(self._order, found, group, required=False, report=self._console.log_line)
        self._routers.enter_context(Watching(group, self._console.log_line))
        return {name: entry.model_copy(update={"data_url": routers.get(name)}) for name, entry in models.items()}

    def _seeing(self, look: Waiting) -> Waiting:
        """`look`, and now and then a question to the hosts whose answer is `starting`; it waits for none."""
        asked: list[Any] = []

        def see(seconds: float) -> None:
            look(seconds)
            if asked and all(map(is_ready, asked)):
                with suppress(RayError):  # of an actor that has died; `_all` hears of it
                    self.starting = describe({role: at for each in ray.get(asked) for role, at in each.items()})
                asked.clear()
            if not asked:
                asked.extend(actor.starting.remote() for _, actor in self._hosts)

        return see

    def handles(self) -> HostHandles:
        """For the rollout manager, which has engines started again."""
        return HostHandles(self._hosts, self._addresses, self._launches)

    def close(self) -> None:
        """End routers and engines. What fails here is reported, not raised: `rltool stop` finds what is left."""
        try:
            self._routers.close()
        finally:
            self._close_engines()

    def _close_engines(self) -> None:
        if self._started:
            self._close_hosts()
        # Where Ray was lost they still run; on this host they are found by their records.
        roles = {process_role(launch) for launch in self._launches}
        stop_processes([state for state in read_states(self._run) if state.role in roles and is_alive(state)])
        if self._started:
            edit_endpoints(self._run.endpoints_file, lambda _: Endpoints())

    def _close_hosts(self) -> None:
        """Each by itself: one that is lost must not keep the others from ending theirs."""
        closing = [actor.close.remote() for _, actor in self._hosts]
        ends = time.monotonic() + CLOSE_SECONDS
        for ref, who in zip(closing, self._starters(), strict=True):
            try:
                get_all([ref], max(1.0, ends - time.monotonic()), "the time to end", who=[who])
            except RltoolError as error:
                self._console.log_line(f"ending the engines: {error}")

    def _seats(self) -> list[tuple[Seat, ...]]:
        """The places of the bundles, as many for each slot as it has processes; or places in the trainer's."""
        if self._plan.shares_gpus:
            return seat_slots(self._plan.slots, hosts_of(self._places))
        places = iter(sorted(self._places, key=lambda place: place.bundle))
        seats: list[tuple[Seat, ...]] = []
        for slot in self._plan.slots:
            taken = () if shares_seat(slot) else tuple(place for _, place in zip(slot.shares, places, strict=False))
            seats.append(tuple(Seat(at.node, at.address, at.gpus) for at in taken) or seats[-1])
        return seats

    def _all(self, refs: Sequence[Any], seconds: float, name: str, look: Waiting | None) -> list[Any]:
        return get_all(refs, seconds, name, who=self._starters(), while_waiting=look)

    def _starters(self) -> list[str]:
        return [f"what starts engines on host {self._addresses[node]}" for node, _ in self._hosts]


def by_model(launches: Sequence[EngineLaunch], engines: Sequence[EngineEndpoint]) -> dict[str, list[EngineEndpoint]]:
    """The engines of these launches by the model that they serve. They are known by their addresses: an SGLang before
    0.5.18 has a boot id of its own."""
    names = {url_of(launch): launch.model_name for launch in launches}
    found: dict[str, list[EngineEndpoint]] = {}
    for engine in engines:
        found.setdefault(names[engine.url], []).append(engine)
    return found


def _needs_of(needs: PortNeeds, node: str) -> PortNeeds:
    """Those on one host."""
    return PortNeeds(
        {key: count for key, count in needs.free.items() if key[0] == node},
        tuple(port for port in needs.fixed if port[0] == node),
    )
