"""`rltool train` over several hosts (tests/hosts): ranks on two Ray nodes, an engine on a third."""

from __future__ import annotations

import os
import re
import signal
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
@pytest.mark.parametrize("layout", ["tensor_parallel", "pipeline_parallel"])
def test_a_model_is_cut_over_two_hosts(world: World, undisturbed: str, layout: str):
    said = world.train(layout, f"trainer.{layout}=2")
    assert "1 rank: CPU on a, 1 rank: CPU on b" in said and len(metrics(world.cluster.runs, layout)) == 3
    runs = [metrics(world.cluster.runs, run) for run in (layout, "undisturbed")]
    first, second = ([step["train/grad_norm"] for step in steps] for steps in runs)
    assert first == pytest.approx(second, rel=1e-3)


def test_a_firewall_between_engine_and_trainer_is_named_with_both_ends(world: World):
    a, _, c = world.hosts
    world.hosts.block(a, 7000, source=c)
    sets = ("weights.port_range=[7000,7000]", "deadlines.sync=20", "deadlines.engines=5")
    said = world.train("blocked", *sets, code=4)
    assert f"host c does not reach the trainer at {a.address}, port 7000 (timed out)" in said
    world.hosts.heal()
    assert "done after step 1" in world.train("open", *sets, "steps=1"), "the engine was left as it was"


@pytest.mark.long
def test_a_run_is_seen_from_another_host_and_stopped_on_its_own(world: World):
    """b sees the run's directory, and no process of a."""
    _, b, _ = world.hosts
    running = world.begin("seen", "steps=100")
    world.reaches("seen", "step 1/")
    assert "on host a" in world.cluster.run(b, "status", "seen")
    said = world.cluster.run(b, "stop", "seen", code=None)
    assert "host a" in said and "stop it there" in said and running.poll() is None
    os.killpg(running.pid, signal.SIGINT)
    assert running.wait(SECONDS) == 130 and list((world.cluster.runs / "seen" / "checkpoints").glob("step_*"))


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


@pytest.mark.long
def test_a_host_of_ranks_that_vanishes_ends_the_run_which_goes_on_with_what_is_left(world: World):
    """The last test: b does not come back."""
    _, b, _ = world.hosts
    sets = ("steps=100", "checkpoint.every_steps=1", "trainer.rendezvous_timeout=30")
    running = world.begin("lost", *sets)
    world.reaches("lost", "step 2/")
    world.hosts.kill(b)
    assert running.wait(SECONDS) == 4
    said = world.output("lost")
    assert re.search(r"error: .*(trainer rank 1|rank 1)", said) and "rltool train --resume" in said
    done = max(step["step"] for step in metrics(world.cluster.runs, "lost"))
    words = [*world.words("lost", *sets, f"steps={done + 3}", "trainer.world_size=1"), "--resume"]
    assert f"done after step {done + 3}" in world.cluster.run(world.a, *words, timeout=SECONDS)
