"""What happens between the hosts of `rltool train` (tests/hosts): ranks' hosts that vanish or do not reach each other.

No engine takes part: the head is on a, where commands are given, a rank on b and one on c.
"""

from __future__ import annotations

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

SECONDS = 200.0
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
def healthy(world: World) -> Iterator[None]:
    yield
    world.hosts.heal()


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
