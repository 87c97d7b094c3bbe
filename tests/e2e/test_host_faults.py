"""What happens between the hosts of `rltool train` (tests/hosts): hosts of ranks, and of engines that the run starts
itself, that vanish or do not reach each other.

The head is on a, where commands are given. Without engines there is a rank on b and one on c; managed engines are on b
and c, and the rank on a.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from rltool.checkpoints.directory import latest_checkpoint, step_of
from tests.e2e.job import Job, write_job
from tests.e2e.several_hosts import BackgroundRun, Cluster, steps_of
from tests.e2e.trainer_faults import ENDLESS, SETS
from tests.hosts import Host, Hosts, require

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

SECONDS = 240.0
NOTICED = 100.0
"""From the loss of a host to the end of the run: Ray's own health checks take up to 65 s, or a minute."""
BOTH = ("trainer.cpus_per_rank=2",)
ON_ONE = ("trainer.cpus_per_rank=1",)
STEPS = 60


@dataclass
class World:
    hosts: Hosts
    cluster: Cluster
    job: Job

    def words(self, run: str, steps: int, *more: str, sets: Sequence[str] = BOTH) -> list[str]:
        every = (*SETS, "checkpoint.every_steps=2", *sets)
        return [
            "train", "--config", str(self.job.root / "run.toml"), "--run", run, "--ray-address", self.cluster.address,
            "--steps", str(steps), *more, *(word for item in every for word in ("--set", item)),
        ]  # fmt: skip

    def train(self, run: str, steps: int, *more: str, sets: Sequence[str] = BOTH, at: Host | None = None) -> str:
        words = self.words(run, steps, *more, sets=sets)
        return self.cluster.run(at or self.cluster.nodes[0], *words, timeout=SECONDS)

    def begin(self, run: str, steps: int = ENDLESS, *, sets: Sequence[str] = BOTH, at: Host | None = None) -> Running:
        words = self.words(run, steps, sets=sets)
        out = self.job.root / f"{run}.out"
        return Running(self.cluster.runs, run, self.cluster.start(at or self.cluster.nodes[0], *words, out=out), out)

    def steps(self, run: str) -> list[dict]:
        return steps_of(self.cluster.runs, run)

    def ranks_on(self, host: Host) -> list[str]:
        return re.findall(r"ray::TrainerActor", host.run(["ps", "ax", "-o", "args"]))


class Running(BackgroundRun):
    def has_done(self, steps: int) -> Running:
        until(lambda: len(self.steps()) >= steps or self.process.poll() is not None, self.said)
        assert self.process.poll() is None, self.said()
        return self

    def end(self, code: int, seconds: float = SECONDS) -> str:
        assert self.process.wait(seconds) == code, self.said()[-4000:]
        assert "Traceback" not in self.said() and self.said().count("error: ") == (code != 0), self.said()[-4000:]
        return self.said()


def until(condition: Callable[[], object], said: Callable[[], str] = str, seconds: float = SECONDS) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, said()[-4000:]
        time.sleep(0.1)


def parameters(said: str) -> str:
    found = re.search(r"parameters (sha256:\w+)", said)
    assert found is not None, said[-3000:]
    return found[1]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tiny_tied_dir: Path) -> Iterator[World]:
    require()
    job = write_job(tmp_path_factory.mktemp("faults") / "job", tiny_tied_dir, None)
    with Hosts(3, shared=[job.root, tiny_tied_dir]) as hosts:
        yield World(hosts, Cluster(hosts, [*hosts], job.runs, more=["--num-cpus=0"]), job)


@pytest.fixture(autouse=True)
def healthy(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "world" in request.fixturenames:
        request.getfixturevalue("world").hosts.heal()


@pytest.fixture(scope="module")
def undisturbed(world: World) -> str:
    """Parameters after STEPS steps."""
    return parameters(world.train("undisturbed", STEPS))


def test_a_minute_without_a_wire_between_ranks_changes_no_bit(world: World, undisturbed: str):
    _, b, c = world.hosts
    world.hosts.delay(0.02)
    cut = world.begin("cut", STEPS).has_done(2)
    world.hosts.partition(b, c)
    time.sleep(2.0)
    done = len(world.steps("cut"))
    assert done < STEPS, "it is in the middle"
    time.sleep(58.0)
    assert len(world.steps("cut")) == done and cut.process.poll() is None
    world.hosts.heal()
    assert parameters(cut.end(0)) == undisturbed


def test_ranks_that_do_not_reach_each_other_in_time_are_named_with_their_hosts(world: World):
    _, b, c = world.hosts
    # No checkpoints: ranks wait longer for each other while one of them writes.
    cut = world.begin("apart", sets=(*BOTH, "trainer.rendezvous_timeout=8", "checkpoint.every_steps=0")).has_done(2)
    world.hosts.partition(b, c)
    said = cut.end(1, 60.0)
    assert re.search(r"trainer rank (0 on host b|1 on host c).* trainer rank (0 on host b|1 on host c)", said), said
    until(lambda: not world.ranks_on(b) and not world.ranks_on(c), seconds=20.0)


def test_a_host_of_ranks_that_vanishes_ends_the_run_with_its_name_and_the_run_goes_on_without_it(world: World):
    a, _, c = world.hosts
    lost = world.begin("lost").has_done(4)
    world.hosts.kill(c)
    said = lost.end(4, NOTICED)
    assert f"error: trainer rank 1 on host c was lost with its host, {c.address}: from Ray's head at" in said
    assert f" at {a.address}:6379 that is gone (" in said
    newest = latest_checkpoint(world.cluster.runs / "lost" / "checkpoints")
    assert newest is not None
    steps = step_of(newest) + 4
    # The same layout on one host: the same bits. Fewer ranks: the same steps, but for rounding.
    resumed = world.train("lost", steps, "--resume", sets=ON_ONE)
    assert "2 ranks: CPU on b" in resumed
    assert parameters(resumed) == parameters(world.train("whole", steps, sets=ON_ONE))
    world.train("lost", steps + 4, "--resume", sets=("trainer.world_size=1",))
    world.train("whole", steps + 4, "--resume", sets=ON_ONE)
    lost_steps, whole = world.steps("lost"), world.steps("whole")
    assert [step["step"] for step in lost_steps] == list(range(steps + 4)) == [step["step"] for step in whole]
    for found, expected in zip(lost_steps, whole, strict=True):
        assert found["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-4)
    world.cluster.rejoin(c)


def test_a_host_that_ray_gave_up_ends_its_ranks_when_it_is_reached_again_and_joins_again(world: World):
    a, b, c = world.hosts
    cut = world.begin("given-up").has_done(4)
    world.hosts.partition(c, a, b)
    said = cut.end(4, NOTICED)
    assert f"was lost with its host, {c.address}" in said
    world.hosts.heal()
    until(lambda: not world.ranks_on(b) and not world.ranks_on(c), seconds=60.0)
    world.cluster.rejoin(c)
    newest = latest_checkpoint(world.cluster.runs / "given-up" / "checkpoints")
    assert newest is not None
    assert "1 rank: CPU on b, 1 rank: CPU on c" in world.train("given-up", step_of(newest) + 1, "--resume")


def test_the_head_that_vanishes_ends_the_run_of_a_driver_elsewhere_with_its_address(world: World):
    """The last one: the cluster is gone with it."""
    a, b, _ = world.hosts
    headless = world.begin("headless", at=b).has_done(4)
    world.hosts.kill(a)
    said = headless.end(4, NOTICED)
    assert f"Ray's head at {a.address}:6379" in said and " from host b" in said


# -- engines of the run


MANAGED = (
    'engines.mode="managed"', 'engines.groups=[{name="main",count=2,max_model_len=64}]', "trainer.cpus_per_rank=2",
    "optimizer_steps_per_rollout=1", "eval.sets={}", "monitor.tensorboard=false", "checkpoint.every_steps=2",
    "deadlines.generate=30", "deadlines.sync=20", "deadlines.call=10", "engines.restart_backoff=0.5",
)  # fmt: skip
ONE_ENGINE = "--num-cpus=1"


@dataclass
class Managing(World):
    def words(self, run: str, steps: int, *more: str, sets: Sequence[str] = ()) -> list[str]:
        every = (*MANAGED, *sets)
        return [
            "train", "--config", str(self.job.root / "run.toml"), "--run", run, "--ray-address", self.cluster.address,
            "--steps", str(steps), *more, *(word for item in every for word in ("--set", item)),
        ]  # fmt: skip

    def states(self, run: str) -> dict[str, str]:
        """Address of an engine's host -> its state."""
        said = self.cluster.run(self.cluster.nodes[0], "status", "--run", run, "--json")
        [found] = json.loads(said)["runs"]
        return {re.split(r"[/:]+", row["url"])[1]: row["state"] for row in found["training"]["engines"]}

    def engines_on(self, host: Host) -> list[str]:
        return re.findall(r".*vllm.*", host.run(["ps", "ax", "-o", "args"]))


@pytest.fixture(scope="module")
def managing(tmp_path_factory: pytest.TempPathFactory, tiny_tied_dir: Path) -> Iterator[Managing]:
    require()
    job = write_job(tmp_path_factory.mktemp("managing") / "job", tiny_tied_dir, None)
    with Hosts(3, shared=[job.root, tiny_tied_dir]) as hosts:
        a, b, c = hosts
        cluster = Cluster(hosts, [a], job.runs)
        for node in (b, c):
            cluster.join(node, ONE_ENGINE)
        yield Managing(hosts, cluster, job)


@pytest.fixture(autouse=True)
def whole(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "managing" in request.fixturenames:
        made: Managing = request.getfixturevalue("managing")
        *_, c = made.hosts
        if not c.alive:
            made.cluster.rejoin(c, ONE_ENGINE)


def test_a_host_of_managed_engines_that_vanishes_is_named_and_the_run_goes_on_and_ends_in_order(managing: Managing):
    a, b, c = managing.hosts
    run = managing.begin("smaller").has_done(2)
    assert managing.states("smaller").keys() == {b.address, c.address}
    managing.hosts.kill(c)
    done = len(run.steps())
    run.has_done(done + 3)
    until(lambda: managing.states("smaller") == {b.address: "ready", c.address: "dead"}, run.said)
    until(lambda: f"was lost with its host, {c.address}" in run.said(), run.said, NOTICED)
    done = len(run.steps())
    run.has_done(done + 3)
    assert run.said().count(f"stays dead: what starts engines on host {c.address} was lost with its host") == 1
    assert "could not be started again" not in run.said(), run.said()[-4000:]
    began = time.monotonic()
    managing.cluster.run(a, "stop", "--run", "smaller")
    run.end(0, 60.0)
    assert time.monotonic() - began < 60 and managing.engines_on(b) == []


def test_a_run_that_may_not_go_on_without_a_lost_host_of_engines_ends_with_its_name_and_resumes_with_it(
    managing: Managing,
):
    _, b, c = managing.hosts
    sets = ("engines.min_serving=2", "deadlines.engines=20")
    run = managing.begin("both", sets=sets).has_done(4)
    managing.hosts.kill(c)
    said = run.end(1, NOTICED + 40.0)
    assert re.search(rf"too few engines serve: .*http://{c.address}:\d+: (suspect|dead) \(", said), said[-4000:]
    assert managing.engines_on(b) == []
    managing.cluster.rejoin(c, ONE_ENGINE)
    newest = latest_checkpoint(managing.cluster.runs / "both" / "checkpoints")
    assert newest is not None
    managing.train("both", step_of(newest) + 2, "--resume", sets=sets)


def test_a_host_that_vanishes_while_its_engine_loads_ends_the_start_with_its_name(managing: Managing):
    _, b, c = managing.hosts
    run = managing.begin("loading")
    until(lambda: managing.engines_on(c), run.said)
    managing.hosts.kill(c)
    said = run.end(4, NOTICED)
    assert f"what starts engines on host {c.address} was lost with its host, {c.address}" in said
    assert managing.engines_on(b) == []
