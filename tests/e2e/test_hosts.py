"""`rltool train` over several hosts (tests/hosts): ranks on two Ray nodes, an engine on a third."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.job import Job, write_job
from tests.e2e.several_hosts import Cluster, RemoteEngine, metrics, serve
from tests.hosts import Host, Hosts, require

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SECONDS = 200.0


@dataclass
class World:
    """a: the head, and where commands are given; b: the other node; c: an engine, and nothing shared."""

    hosts: Hosts
    cluster: Cluster
    engine: RemoteEngine
    job: Job

    @property
    def a(self) -> Host:
        return self.cluster.nodes[0]

    def words(self, run: str, *sets: str) -> list[str]:
        """Of `train`, one rank on each node. The key's file is there on a alone, by a relative path."""
        both = ("trainer.world_size=2", "trainer.cpus_per_rank=2", "engines.api_key_file=only-here/engine.key")
        return [
            "train", "--config", str(self.job.root / "run.toml"), "--run", run, "--ray-address", self.cluster.address,
            "--rollout-external", self.engine.address, *(w for item in (*both, *sets) for w in ("--set", item)),
        ]  # fmt: skip

    def begin(self, run: str, *sets: str) -> subprocess.Popen[bytes]:
        return self.cluster.start(self.a, *self.words(run, *sets), out=self.job.root / f"{run}.out")

    def output(self, run: str) -> str:
        return (self.job.root / f"{run}.out").read_text()

    def reaches(self, run: str, text: str) -> None:
        """Waits until the run has said so."""
        ends = time.monotonic() + SECONDS
        while text not in self.output(run):
            assert time.monotonic() < ends and "error:" not in self.output(run), self.output(run)[-4000:]
            time.sleep(0.1)

    def train(self, run: str, *sets: str, code: int = 0) -> str:
        return self.cluster.run(self.a, *self.words(run, *sets), code=code, timeout=SECONDS)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tiny_tied_dir: Path) -> Iterator[World]:
    require()
    root = tmp_path_factory.mktemp("several")
    job = write_job(root / "job", tiny_tied_dir, None)
    (job.root / "only-here").symlink_to("/tmp/only-here")
    # As Debian writes it: a host's own name is an address that nobody else reaches.
    names = {"b": {"b": "127.0.1.1"}}
    with Hosts(3, shared=[job.root, tiny_tied_dir], names=names) as hosts:
        a, b, c = hosts
        engine = serve(c, tiny_tied_dir, root / "engine.out")
        cluster = Cluster(hosts, [a, b], job.runs)
        engine.wait()
        key = a.outside(Path("/tmp/only-here/engine.key"))
        key.parent.mkdir()
        key.touch(mode=0o600)
        key.write_text(engine.key)
        yield World(hosts, cluster, engine, job)


@pytest.fixture(autouse=True)
def healthy(world: World) -> Iterator[None]:
    yield
    world.hosts.heal()


def parameters(said: str) -> str:
    found = re.search(r"parameters (sha256:\w+)", said)
    assert found is not None, said[-3000:]
    return found[1]


@pytest.fixture(scope="module")
def undisturbed(world: World) -> str:
    """What `train` said of three steps, data parallel over a and b."""
    return world.train("undisturbed")


def test_ranks_on_two_nodes_train_with_an_engine_on_a_third(world: World, undisturbed: str):
    assert "1 rank: CPU on a, 1 rank: CPU on b" in undisturbed
    assert "engines agree with the trainer within" in undisturbed
    steps = metrics(world.cluster.runs, "undisturbed")
    assert len(steps) == 3 and all(0 < step["train/logprob_abs_diff_mean"] < 1e-5 for step in steps)


@pytest.mark.long  # what a wire loses TCP sends again
def test_a_late_and_lossy_wire_changes_no_bit(world: World, undisturbed: str):
    world.hosts.loss(0.01)
    world.hosts.delay(0.02)
    assert parameters(world.train("lossy")) == parameters(undisturbed)


def test_runs_on_a_disk_of_one_host_are_refused_before_the_first_step(world: World, monkeypatch):
    monkeypatch.setitem(world.cluster.environment, "RLTOOL_RUNS", "/tmp/runs")
    said = world.train("alone", code=2)
    where = "/tmp/runs/alone/checkpoints"
    assert re.search(rf"error: checkpoints are written by all ranks to {where}, .* rank 1 on host b:", said)
    assert "step 1/3" not in said


@pytest.mark.long
def test_a_minute_without_the_engine_delays_a_run_and_no_more(world: World):
    a, _, c = world.hosts
    running = world.begin("cut", "steps=8", "deadlines.sync=20", "deadlines.call=10")
    world.reaches("cut", "step 2/")
    world.hosts.partition(a, c)
    time.sleep(60)
    world.hosts.heal()
    assert running.wait(SECONDS) == 0, world.output("cut")
    assert [step["step"] for step in metrics(world.cluster.runs, "cut")] == list(range(8))
