"""`rltool train` over several hosts (tests/hosts): ranks on two Ray nodes, an engine on a third."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from rltool.engines.endpoints import Endpoints, EngineEndpoint, ModelEndpoints
from tests.e2e.job import Job, write_job
from tests.e2e.several_hosts import Cluster, RemoteEngine, metrics, serve
from tests.hosts import REPOSITORY, Host, Hosts, require

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SECONDS = 200.0
PORT = 29519


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

    def words(self, run: str, *sets: str, engines: str = "") -> list[str]:
        """Of `train`, one rank on each node. The key's file is there on a alone, by a relative path."""
        both = ("trainer.world_size=2", "trainer.cpus_per_rank=2", "engines.api_key_file=only-here/engine.key")
        return [
            "train", "--config", str(self.job.root / "run.toml"), "--run", run, "--ray-address", self.cluster.address,
            "--rollout-external", engines or self.engine.address,
            *(w for item in (*both, *sets) for w in ("--set", item)),
        ]  # fmt: skip

    def begin(self, run: str, *sets: str, engines: str = "") -> subprocess.Popen[bytes]:
        return self.cluster.start(self.a, *self.words(run, *sets, engines=engines), out=self.job.root / f"{run}.out")

    def output(self, run: str) -> str:
        return (self.job.root / f"{run}.out").read_text()

    def reaches(self, run: str, text: str) -> None:
        """Waits until the run has said so."""
        ends = time.monotonic() + SECONDS
        while text not in self.output(run):
            assert time.monotonic() < ends and "error:" not in self.output(run), self.output(run)[-4000:]
            time.sleep(0.1)

    def train(self, run: str, *sets: str, engines: str = "", more: Sequence[str] = (), code: int = 0) -> str:
        words = [*self.words(run, *sets, engines=engines), *more]
        return self.cluster.run(self.a, *words, code=code, timeout=SECONDS)

    def gives_keys(self, *engines: RemoteEngine) -> str:
        """endpoints.json of engines with keys of their own, on a alone. Returns what to give to `train`."""
        found = []
        for number, engine in enumerate(engines):
            key = Path(f"/tmp/only-here/engine{number}.key")
            at = self.a.outside(key)
            at.touch(mode=0o600)
            at.write_text(engine.key)
            found.append(EngineEndpoint(url=f"http://{engine.address}", key_file=key))
        file = self.a.outside(Path("/tmp/only-here/endpoints.json"))
        Endpoints(models={"policy": ModelEndpoints(engines=tuple(found))}).save(file)
        return "@/tmp/only-here/endpoints.json"


@contextmanager
def running(root: Path, model: Path, count: int) -> Iterator[World]:
    """Ranks' nodes on a and b, an engine on c, nothing on the others."""
    require()
    job = write_job(root / "job", model, None)
    (job.root / "only-here").symlink_to("/tmp/only-here")
    # As Debian writes it: a host's own name is an address that nobody else reaches.
    names = {"b": {"b": "127.0.1.1"}}
    with Hosts(count, shared=[job.root, model], names=names) as hosts:
        a, b, c, *_ = hosts
        engine = serve(c, model, root / "engine.out")
        cluster = Cluster(hosts, [a, b], job.runs)
        engine.wait()
        key = a.outside(Path("/tmp/only-here/engine.key"))
        key.parent.mkdir()
        key.touch(mode=0o600)
        key.write_text(engine.key)
        yield World(hosts, cluster, engine, job)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tiny_tied_dir: Path) -> Iterator[World]:
    with running(tmp_path_factory.mktemp("several"), tiny_tied_dir, 3) as made:
        yield made


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
def test_a_minute_without_the_engine_delays_a_run_and_no_more(world: World):
    a, _, c = world.hosts
    running = world.begin("cut", "steps=8", "deadlines.sync=20", "deadlines.call=10")
    world.reaches("cut", "step 2/")
    world.hosts.partition(a, c)
    time.sleep(60)
    world.hosts.heal()
    assert running.wait(SECONDS) == 0, world.output("cut")
    assert [step["step"] for step in metrics(world.cluster.runs, "cut")] == list(range(8))


def test_a_firewall_before_one_rank_is_named_with_both_ends_and_the_port(world: World):
    _, b, c = world.hosts
    world.hosts.block(b, PORT, source=c)
    sets = ("weights.sharded=true", f"weights.port_range=[{PORT},{PORT}]", "deadlines.engines=3", "steps=1")
    said = " ".join(world.train("blocked", *sets, code=1).split())
    assert f"host c does not reach the trainer's rank 1 at {b.address}, port {PORT}" in said
    assert "a firewall between them (weights.port_range)?" in said and "Traceback" not in said


AHEAD = """
import time
_time, _time_ns = time.time, time.time_ns
time.time, time.time_ns = lambda: _time() + 3600, lambda: _time_ns() + 3600 * 10**9
"""
"""sitecustomize.py: the wall clock of the Python processes of a host is an hour fast."""


@pytest.mark.long
def test_an_engine_at_an_ipv6_address_and_clocks_an_hour_apart(world: World, undisturbed: str, tmp_path: Path):
    """Engine and driver are an hour ahead of the ranks and of the rollout manager."""
    a, _, c = world.hosts
    ahead = world.job.root / "ahead"
    ahead.mkdir()
    (ahead / "sitecustomize.py").write_text(AHEAD)
    clock = {"PYTHONPATH": f"{ahead}:{REPOSITORY}"}
    assert float(c.python("import time; print(time.time())", env=clock)) > time.time() + 3000
    engine = serve(c, world.job.model, tmp_path / "six.out", at=c.address6, run="six", environment=clock).wait()
    try:
        engines = world.gives_keys(engine)
        before, world.cluster.environment = world.cluster.environment, world.cluster.environment | clock
        try:
            said = world.train("six", engines=engines)
            shown = world.cluster.run(a, "status", "--run", "six")
            sharded = world.train("six-sharded", "weights.sharded=true", engines=engines)
        finally:
            world.cluster.environment = before
    finally:
        engine.process.terminate()
        engine.process.wait(SECONDS)
    assert f"http://[{c.address6}]:8101" in said + shown
    assert parameters(said) == parameters(sharded) == parameters(undisturbed)


@pytest.fixture
def own_world(tmp_path: Path, tiny_tied_dir: Path) -> Iterator[World]:
    """Of one test that breaks it for good; d is one more host."""
    with running(tmp_path, tiny_tied_dir, 4) as made:
        yield made


@pytest.mark.long
def test_a_host_of_ranks_that_vanishes_ends_the_run_and_it_resumes_on_what_is_left(own_world: World):
    world = own_world
    _, b, _, _ = world.hosts
    going = world.begin("vanished", "steps=500", "checkpoint.every_steps=2", "trainer.rendezvous_timeout=20")
    world.reaches("vanished", "step 5/")
    world.hosts.kill(b)
    assert going.wait(SECONDS) == 1, world.output("vanished")
    said = " ".join(world.output("vanished").split())
    assert "error: " in said and ("rank 1" in said or b.address in said or "host b" in said), said[-3000:]
    done = max(int(path.name[5:]) for path in (world.cluster.runs / "vanished" / "checkpoints").glob("step_*"))
    sets = ("trainer.world_size=1", f"steps={done + 2}")
    resumed = world.train("vanished", *sets, more=["--resume"])
    assert f"done after step {done + 2};" in " ".join(resumed.split())
    steps = metrics(world.cluster.runs, "vanished")
    assert [step["step"] for step in steps] == list(range(done + 2))
    assert all(step["train/logprob_abs_diff_mean"] < 1e-5 for step in steps)


@pytest.mark.long
def test_a_slow_link_to_one_engine_holds_up_the_others_no_longer_than_the_deadline(own_world: World):
    world = own_world
    d = list(world.hosts)[3]
    slow = serve(d, world.job.model, world.job.root / "slow.out").wait()
    going = world.begin(
        "slow", "steps=1000", "deadlines.bucket=3", "deadlines.sync=6", "deadlines.generate=20",
        engines=world.gives_keys(world.engine, slow),
    )  # fmt: skip
    try:
        world.reaches("slow", "step 3/")
        world.hosts.rate(20_000, d)
        world.reaches("slow", f"engine http://{slow.address}: ready -> ")
        done = len(metrics(world.cluster.runs, "slow"))
        world.reaches("slow", f"step {done + 5}/")
        steps = metrics(world.cluster.runs, "slow")
        assert steps[-1]["rollout/engines_serving"] == 1
        assert all(step["train/logprob_abs_diff_mean"] < 1e-5 for step in steps)
    finally:
        world.hosts.kill(d)
        going.terminate()
        going.wait(SECONDS)
