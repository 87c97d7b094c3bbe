"""The bundle plan against a real Ray cluster that declares GPUs: external engines cost not one bundle."""

from __future__ import annotations

import re
import socket
import threading
from types import SimpleNamespace

import pytest
import ray

from rltool.config.rollout import EnginesConfig
from rltool.config.sections import RayConfig, TrainerConfig
from rltool.config.train import TrainConfig
from rltool.errors import UsageError
from rltool.training.cluster.placement import plan_placement
from rltool.training.cluster.places import find_places, in_order
from rltool.training.cluster.ray_cluster import PlacementTimeout, check_versions, placed
from rltool.training.ranks.trainer_actor import TrainerActor
from rltool.training.ranks.trainer_group import TrainerGroup

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

GPUS = 4


@pytest.fixture(scope="module")
def cluster():
    """A local Ray that declares GPUs which this host need not have: Ray only counts them, and tells each process the
    numbers of its own among those that it may see."""
    counted = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    ray.init(
        address="local",
        num_cpus=4,
        num_gpus=GPUS,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        runtime_env={"env_vars": counted},
    )
    try:
        yield
    finally:
        ray.shutdown()


def config(mode: str, *, count: int = 2, tp: int = 1) -> TrainConfig:
    return TrainConfig(
        model={"path": "m"},
        trainer=TrainerConfig(world_size=2, cpus_per_rank=0.5),
        engines=EnginesConfig(mode=mode, groups=({"count": count, "tp": tp},)),
    )


def free_gpus() -> float:
    return ray.available_resources().get("GPU", 0.0)


@ray.remote(num_cpus=0)
class Manager:
    def ping(self) -> str:
        return "here"


def test_with_external_engines_exactly_the_trainers_bundles_are_reserved_and_the_manager_reserves_none(cluster):
    plan = plan_placement(config("external"), gpu=True)
    with placed(plan, timeout=120) as group:
        assert group.bundle_count == 2 and len(ray.util.placement_group_table(group)["bundles"]) == 2
        assert free_gpus() == GPUS - 2
        manager = Manager.remote()
        assert ray.get(manager.ping.remote(), timeout=120) == "here"
        assert free_gpus() == GPUS - 2, "the rollout manager holds no GPU"
        ray.kill(manager)


def test_the_managed_plan_of_the_same_configuration_asks_for_more(cluster):
    with placed(plan_placement(config("managed"), gpu=True), timeout=120) as group:
        assert group.bundle_count == 4 and free_gpus() == 0


def test_every_bundle_is_told_which_gpus_it_has(cluster):
    plan = plan_placement(config("managed", tp=1), gpu=True)
    with placed(plan, timeout=120) as group:
        places = find_places(RayConfig(), group, plan.bundles, 120.0, lambda _: None)
    assert [place.bundle for place in places] == [0, 1, 2, 3] and len({place.node for place in places}) == 1
    assert sorted(gpu for place in places for gpu in place.gpus) == [0, 1, 2, 3]
    ranks = in_order(places[:2])
    assert ranks[0].gpus < ranks[1].gpus


def test_an_engine_of_two_gpus_has_one_bundle_with_both(cluster):
    plan = plan_placement(config("managed", tp=2, count=1), gpu=True)
    with placed(plan, timeout=120) as group:
        places = find_places(RayConfig(), group, plan.bundles, 120.0, lambda _: None)
    assert [len(place.gpus) for place in places] == [1, 1, 2]


def test_bundles_are_given_back_at_the_end(cluster):
    with placed(plan_placement(config("external"), gpu=True), timeout=120):
        pass
    with placed(plan_placement(config("managed"), gpu=True), timeout=120):
        pass


def test_waiting_in_vain_ends_at_the_deadline_with_what_is_missing(cluster):
    too_much = config("external").model_copy(update={"trainer": TrainerConfig(world_size=GPUS + 1, cpus_per_rank=0.1)})
    with (
        pytest.raises(PlacementTimeout, match=r"deadlines.start = 1 s: GPU: 5 wanted, . free of 4"),
        placed(plan_placement(too_much, gpu=True), timeout=1),
    ):
        pass


def test_nodes_with_another_rltool_are_refused(cluster, monkeypatch):
    check_versions()
    monkeypatch.setattr("rltool.__version__", "9.9.9")
    with pytest.raises(UsageError, match=r"every node of the cluster needs rltool 9\.9\.9: .* has rltool "):
        check_versions()


def test_ranks_without_the_planned_gpu_are_refused_by_rank_and_host_before_they_wait_for_each_other(cluster):
    plan = plan_placement(config("external"), gpu=True)
    with placed(plan, timeout=120) as bundles:
        trainer = TrainerGroup(config("external"), plan, bundles, log_dir=None)
        assert trainer.config.trainer.device == "cuda"
        host = re.escape(socket.gethostname())
        with pytest.raises(UsageError, match=rf"torch sees no GPU in rank 0 on host {host}, rank 1 on host {host}:"):
            trainer.start(total_optimizer_steps=1)


def test_ranks_planned_for_the_cpu_report_where_they_run(cluster):
    plan = plan_placement(config("external"), gpu=False)
    with placed(plan, timeout=120) as bundles:
        trainer = TrainerGroup(config("external"), plan, bundles, log_dir=None)
        with pytest.raises(UsageError, match="m is not a directory"):
            trainer.start(total_optimizer_steps=1)
        assert [(at.rank, at.host) for at in trainer.devices] == [(0, socket.gethostname()), (1, socket.gethostname())]


# -- threads of a rank

SECONDS = 60.0


class BlockedSender:
    """A WeightSender whose `join` ends when `abort` comes."""

    def __init__(self) -> None:
        self.joining, self.aborted = threading.Event(), threading.Event()
        self.threads: dict[str, int] = {}

    def join(self) -> dict[str, str]:
        self.threads["join"] = threading.get_ident()
        self.joining.set()
        return {} if self.aborted.wait(SECONDS) else {"nobody": "aborted it"}

    def ready(self, url: str, version: str, number: int, seconds: float) -> None:
        assert self.joining.wait(SECONDS)
        self.threads["ready"] = threading.get_ident()

    def abort(self, urls: list[str], reason: str) -> None:
        assert self.joining.wait(SECONDS)
        self.threads["abort"] = threading.get_ident()
        self.aborted.set()


@pytest.mark.long
def test_aborts_and_acknowledgements_run_beside_a_blocked_call_and_all_else_on_one_thread(cluster, tmp_path):
    """Megatron's patches for the CPU are thread-local."""

    def prepare(actor) -> int:
        actor._started, actor.mark = SimpleNamespace(sender=BlockedSender()), threading.local()
        actor.mark.patched = True
        return threading.get_ident()

    def look(actor) -> tuple[int, bool]:
        return threading.get_ident(), getattr(actor.mark, "patched", False)

    def call(function):
        return ray.get(actor.__ray_call__.remote(function), timeout=SECONDS)

    actor = TrainerActor.options(num_cpus=0.1).remote(TrainConfig(model={"path": tmp_path}), 0, None)
    try:
        ident = call(prepare)
        joining = actor.join.remote()
        assert ray.get(actor.ready.remote("http://engine:1", "v", 0, SECONDS), timeout=SECONDS) is None
        ray.get(actor.abort_transfer.remote(["http://engine:1"], "it failed"), timeout=SECONDS)
        assert ray.get(joining, timeout=SECONDS) == {}
        threads = call(lambda actor: actor._started.sender.threads)
        assert threads["join"] == ident and ident not in (threads["abort"], threads["ready"])
        assert [call(look) for _ in range(5)] == [(ident, True)] * 5
    finally:
        ray.kill(actor)


class FillsForAll(BlockedSender):
    """A rank that fills the next bucket of all engines when the last of them has taken the one before."""

    def ready(self, url: str, version: str, number: int, seconds: float) -> str | None:
        if url == "http://engine:last":
            self.aborted.set()
        return None if self.aborted.wait(seconds) else "no bucket"


def test_engines_that_wait_for_a_bucket_do_not_keep_out_one_that_has_taken_the_last(cluster, tmp_path):
    """Eight on one GPU, whose memory the rank shares with each."""

    def prepare(actor) -> None:
        actor._started = SimpleNamespace(sender=FillsForAll())

    actor = TrainerActor.options(num_cpus=0.1).remote(TrainConfig(model={"path": tmp_path}), 0, None)
    try:
        ray.get(actor.__ray_call__.remote(prepare), timeout=SECONDS)
        waiting = [actor.ready.remote(f"http://engine:{number}", "v", 1, SECONDS) for number in range(7)]
        assert ray.wait(waiting, timeout=0.5)[0] == []
        last = actor.ready.remote("http://engine:last", "v", 1, SECONDS)
        assert ray.get([*waiting, last], timeout=SECONDS / 2) == [None] * 8
    finally:
        ray.kill(actor)
