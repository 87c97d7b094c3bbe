"""What happens between the hosts of a trainer, a router and engines (tests/hosts), each on its own.

a: `rltool train`, its rank and its own Ray; b: sglang-router; c, d: vLLM, whose clocks are an hour behind and ahead.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.job import Job, write_job
from tests.e2e.several_hosts import ENGINE_PORT, BackgroundRun, RemoteEngine, metrics, rltool, serve, write_key
from tests.e2e.trainer_faults import ENDLESS
from tests.hosts import Host, Hosts, require

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

SECONDS = 240.0
ROUTER_PORT = 8200
FAST, SLOW = 10**10, 150_000
"""Bits a second. The weights are 1.6 MB: 85 s over the slow link."""
SYNC = 20.0
SHORT_SYNC = 6.0
SETS = (
    "eval.sets={}", "checkpoint.every_steps=0", "monitor.tensorboard=false", "optimizer_steps_per_rollout=1",
    f"deadlines.sync={SYNC:g}", "deadlines.call=10", "deadlines.generate=30",
)  # fmt: skip


@dataclass
class World:
    hosts: Hosts
    model: Path
    job: Job
    key: str
    engines: list[RemoteEngine]

    @property
    def a(self) -> Host:
        return next(iter(self.hosts))

    @property
    def router(self) -> str:
        return f"http://{[*self.hosts][1].address}:{ROUTER_PORT}"

    def serve(self, host: Host, **options) -> RemoteEngine:
        out = self.job.root / f"engine-{host.name}.out"
        return serve(host, self.model, out, "--max-model-len", "256", key=self.key, **options)

    def environment(self) -> dict[str, str]:
        return {"RLTOOL_RUNS": str(self.job.runs), "COLUMNS": "250", "OMP_NUM_THREADS": "1"}

    def words(self, run: str, steps: int, *more: str, sets: Sequence[str] = (), at: Sequence[str] = ()) -> list[str]:
        every = (*SETS, f"engines.api_key_file={self.job.root}/key", *sets)
        return [
            "train", "--config", str(self.job.root / "run.toml"), "--run", run, "--steps", str(steps), *more,
            "--rollout-external", ",".join(at or (engine.address for engine in self.engines)),
            *(word for item in every for word in ("--set", item)),
        ]  # fmt: skip

    def train(self, run: str, steps: int, *more: str, code: int = 0, **options) -> str:
        words = self.words(run, steps, *more, **options)
        return self.rltool(*words, code=code)

    def rltool(self, *words: str, code: int | None = 0, env: Mapping[str, str] | None = None) -> str:
        own = {**self.environment(), **(env or {})}
        said = self.a.run(rltool(*words), env=own, cwd=self.job.root, code=code, timeout=SECONDS)
        return " ".join(said.split())

    @contextmanager
    def training(
        self, run: str, *more: str, sets: Sequence[str] = (), in_order: bool = True
    ) -> Iterator[Running]:
        """It goes on until the end of the block."""
        out = self.job.root / f"{run}.out"
        words = self.words(run, ENDLESS, *more, sets=sets)
        process = self.a.start(rltool(*words), env=self.environment(), cwd=self.job.root, out=out)
        running = Running(self.job.runs, run, process, out, self)
        try:
            running.does(2)
            yield running
            if in_order:
                self.rltool("stop", "--run", run)
                assert process.wait(SECONDS) == 0, running.said()[-4000:]
        finally:
            if process.poll() is None or not in_order:
                self.rltool("stop", "--run", run, code=None)
            process.wait(SECONDS)


@dataclass
class Running(BackgroundRun):
    world: World

    def does(self, steps: int, seconds: float = SECONDS) -> list[dict]:
        """So many more, which are returned."""
        done = len(self.steps())
        self.until(lambda: len(self.steps()) >= done + steps, seconds)
        return self.steps()[done:]

    def until(self, condition: Callable[[], object], seconds: float = SECONDS) -> None:
        ends = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None and time.monotonic() < ends, self.said()[-4000:]
            time.sleep(0.2)

    def states(self) -> dict[str, str]:
        """Host -> state of its engine."""
        [run] = json.loads(self.world.rltool("status", "--run", self.run, "--json"))["runs"]
        found = {engine["url"]: engine["state"] for engine in run["training"]["engines"]}
        return {e.host.name: found[f"http://{e.address}"] for e in self.world.engines}

    def both_serve(self) -> bool:
        return set(self.states().values()) <= {"ready", "paused"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tiny_tied_dir: Path) -> Iterator[World]:
    require()
    job = write_job(tmp_path_factory.mktemp("engines") / "job", tiny_tied_dir, None)
    key = secrets.token_hex(16)
    write_key(job.root, key)
    # As Debian writes it on c: a host's own name is an address that nobody else reaches. There "trainer" is another.
    names = {"a": {"trainer": "10.77.0.1"}, "c": {"c": "127.0.1.1", "trainer": "10.77.0.99"}}
    clocks = {"c": -3600, "d": 3600}
    with Hosts(4, shared=[job.root, tiny_tied_dir], names=names, clocks=clocks) as hosts:
        _, b, c, d = hosts
        made = World(hosts, tiny_tied_dir, job, key, [])
        made.engines = [made.serve(host) for host in (c, d)]
        for engine in made.engines:
            engine.wait()
        router = [
            *rltool("router", *(f"{engine.address}" for engine in made.engines), "--host", b.address, "--port"),
            str(ROUTER_PORT), "--key-file", f"{job.root}/key", "--run", "router", "--detach",
        ]  # fmt: skip
        b.run(router, env={"RLTOOL_RUNS": str(b.here / "runs")})
        yield made


@pytest.fixture(autouse=True)
def healthy(request: pytest.FixtureRequest) -> Iterator[None]:
    world = request.getfixturevalue("world") if "world" in request.fixturenames else None
    yield
    if world is not None:
        world.hosts.heal()


def test_a_router_that_does_not_reach_one_engine_for_a_minute_delays_a_run_and_no_more(world: World):
    _, b, _, d = world.hosts
    with world.training("routed", "--router", world.router) as run:
        world.hosts.partition(b, d)
        began = time.monotonic()
        run.does(2, 60.0)
        time.sleep(max(0.0, began + 60.0 - time.monotonic()))
        run.does(2)
        world.hosts.heal()
        run.until(run.both_serve)
        run.does(2)


def test_a_router_that_reaches_no_engine_for_a_minute_is_waited_for(world: World):
    _, b, c, d = world.hosts
    with world.training("unrouted", "--router", world.router) as run:
        world.hosts.partition(b, c, d)
        time.sleep(60.0)
        world.hosts.heal()
        run.does(2)
        run.until(run.both_serve)


def test_a_host_of_engines_that_vanishes_is_left_out_and_taken_in_again(world: World):
    *_, d = world.hosts
    with world.training("smaller") as run:
        world.hosts.kill(d)
        run.does(3, 60.0)
        run.until(lambda: run.states() == {"c": "ready", "d": "dead"})
        world.hosts.boot(d)
        world.engines[1] = world.serve(d).wait()
        run.until(run.both_serve)
        run.does(2)


def test_a_slow_link_to_one_engine_holds_up_the_others_by_its_deadlines_and_then_no_more(world: World):
    *_, d = world.hosts
    with world.training("slow", sets=[f"deadlines.sync={SHORT_SYNC}"]) as run:
        usual = max(step["time/step_seconds"] for step in run.does(3))
        world.hosts.rate(SLOW, d)
        slow = [step["time/step_seconds"] for step in run.does(8)]
        # The engine's request has twice deadlines.sync, for its ranks may come late.
        assert SHORT_SYNC < max(slow) < 2 * SHORT_SYNC + usual + 10
        assert len([seconds for seconds in slow if seconds > SHORT_SYNC]) == 1, slow
        assert run.states() == {"c": "ready", "d": "stale"}
        world.hosts.rate(FAST, d)
        run.until(run.both_serve)
        run.does(1)


def test_a_firewall_before_an_engine_is_named_from_where_to_where(world: World):
    a, _, c, _ = world.hosts

    def refused(**options) -> tuple[str, float]:
        began = time.monotonic()
        said = world.train("walled", 1, sets=["deadlines.preflight=5"], code=2, **options)
        return said, time.monotonic() - began

    _, at_once = refused(at=[f"{a.address}:{ENGINE_PORT}"])
    world.hosts.block(c, ENGINE_PORT, source=a)
    said, seconds = refused()
    assert seconds < at_once + 5 + 10
    assert f"http://{c.address}:{ENGINE_PORT}: " in said and "no answer within 5 s" in said and "host a through" in said


def test_a_firewall_before_the_trainer_is_named_from_where_to_where(world: World):
    a, _, c, _ = world.hosts
    ports = (29555, 29556)  # one for each engine, whichever that is
    for port in ports:
        world.hosts.block(a, port, source=c)
    with world.training("one-way", sets=[f"weights.port_range={[*ports]}"]) as run:
        log = (world.job.runs / "one-way/logs/latest/rollout_manager.log").read_text()
        found = re.search(r"host c does not reach the trainer at (\S+), port (\d+) \(timed out\): a firewall", log)
        assert found is not None and found[1] == a.address and int(found[2]) in ports
        assert run.states()["d"] in ("ready", "paused") and run.states()["c"] not in ("ready", "paused")
        world.hosts.heal()
        run.until(run.both_serve)


def test_a_name_of_the_trainer_that_engines_resolve_otherwise_is_named_with_both_ends(world: World):
    said = world.train("misnamed", 1, sets=["weights.advertise_host=trainer", "deadlines.engines=20"], code=1)
    assert "host c does not reach the trainer at trainer" in said and "weights.advertise_host" in said


def test_a_lease_lasts_as_long_as_it_says_though_clocks_differ_by_hours(world: World):
    _, b, c, d = world.hosts
    assert int(d.run(["date", "+%s"])) - int(c.run(["date", "+%s"])) > 7000
    lease = 20

    def other(code: int | None) -> str:
        """Of a run of another host, that knows nothing of processes here."""
        words = world.words("other", 1, "--dry-run", sets=[f"engines.lease_seconds={lease}"])
        environment = {**world.environment(), "RLTOOL_RUNS": "/tmp/runs"}
        return b.run(rltool(*words), env=environment, cwd=world.job.root, code=code, timeout=SECONDS)

    with world.training("leased", sets=[f"engines.lease_seconds={lease}"]) as run:
        left = [int(n) for n in re.findall(r"the lease expires in (\d+) s", " ".join(other(2).split()))]
        assert len(left) == 2 and all(0 <= seconds <= lease for seconds in left)
    other(0)
    with world.training("lost", sets=[f"engines.lease_seconds={lease}"], in_order=False) as run:
        os.killpg(run.process.pid, signal.SIGKILL)
        run.process.wait()
        ends = time.monotonic() + lease + 30
        while "is leased by" in other(None):
            assert time.monotonic() < ends
    other(0)


def test_an_engine_is_named_by_a_name_that_means_another_address_on_its_own_host(world: World):
    said = world.train("named", 1, at=[f"c:{ENGINE_PORT}"])
    assert "engines agree with the trainer within" in said


def test_a_run_whose_engine_has_ipv6_alone(tmp_path: Path, tiny_tied_dir: Path):
    """Requests, weights and the value check; the IPv4 address of its host is taken away before."""
    require()
    job, key = write_job(tmp_path / "job", tiny_tied_dir, None), secrets.token_hex(16)
    write_key(job.root, key)
    with Hosts(2, shared=[job.root, tiny_tied_dir]) as hosts:
        _, b = hosts
        there = World(hosts, tiny_tied_dir, job, key, [])
        engine = there.serve(b, at=b.address6).wait()
        assert engine.address == f"[{b.address6}]:{ENGINE_PORT}"
        b.run(["ip", "address", "del", f"{b.address}/24", "dev", "eth0"])
        said = there.train("six", 2, at=[engine.address])
        assert "engines agree with the trainer within" in said and len(metrics(job.runs, "six")) == 2
