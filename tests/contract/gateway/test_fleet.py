"""Engines that join, leave, die, fall behind and sleep while agents take turns: the gateway follows the run's fleet."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import requests

from rltool.agents.gateway_process import GatewayPlace, GatewayProcess
from rltool.config.train import TrainConfig
from rltool.engines.adapters import adapter_name
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.fleet import Fleet, State
from rltool.engines.weight_version import Lineage
from rltool.errors import UsageError
from rltool.gateway.fleet import FleetView
from rltool.rollout.serving.versions import VersionBook
from rltool.training.manager.generation import Generation
from tests import fleets
from tests.contract.fakes.scripted import ScriptedVllm
from tests.contract.gateway.running import KEY, QUICK, Gateway

RUN = "a" * 32
LINEAGE = Lineage(RUN, 0)
SECONDS = 60.0
"""Far more than anything here takes."""


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.01)


class Manager:
    """What a rollout manager knows of its engines, and brings about at them."""

    def __init__(self) -> None:
        self.fleet, self.step = Fleet(), 0
        self.gateway: Gateway | None = None

    def view(self) -> FleetView:
        return FleetView.of(self.fleet, self.step)

    def send(self) -> None:
        """The view, and wait until the gateway has it."""
        assert self.gateway is not None
        self.gateway.view(self.view())
        wanted = {m.url: m.state is State.READY for m in self.fleet.members()}
        until(lambda: {url: state == "ready" for url, state in self.seen().items()} == wanted, f"it sees {wanted}")

    def seen(self) -> dict[str, str]:
        assert self.gateway is not None
        return self.gateway.http("GET", "/status").json()["fleet"]

    def join(self, *engines: ScriptedVllm) -> None:
        for engine in engines:
            endpoint = EngineEndpoint(url=engine.url, dialect="vllm", plugin=True)
            self.fleet.add_probed(endpoint, fleets.info_of(endpoint, boot_id=engine.boot_id, model_id="policy"))

    def pause(self, *engines: ScriptedVllm, mode: str = "keep") -> None:
        for engine in engines:
            self.fleet.pause(engine.url)
            requests.post(f"{engine.url}/pause", params={"mode": mode}, timeout=30)

    def finish(self, step: int, *engines: ScriptedVllm) -> None:
        self.step, version = step, LINEAGE.version(step)
        for engine in engines:
            self.fleet.update_finished(engine.url, version)
            engine.version = str(version)
        self.fleet.advance(version)
        for engine in engines:
            requests.post(f"{engine.url}/resume", timeout=30)
            self.fleet.resume(engine.url)

    def sync(self, step: int, *engines: ScriptedVllm) -> None:
        self.pause(*engines)
        self.finish(step, *engines)

    def leave(self, engine: ScriptedVllm) -> None:
        self.fleet.drain(engine.url, "told to leave")
        self.send()
        self.fleet.remove(engine.url, "gone")
        self.send()


def version(step: int) -> str:
    return str(LINEAGE.version(step))


@contextmanager
def scripted(words: Any, *names: str) -> Iterator[list[ScriptedVllm]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(ScriptedVllm(vocab_size=words.size, default=words.spell(name))) for name in names
        ]


@pytest.fixture
def engines(words) -> Iterator[list[ScriptedVllm]]:
    with scripted(words, "one", "two") as found:
        yield found


@pytest.fixture
def manager(engines, tokenizer_dir, tmp_path) -> Iterator[Manager]:
    """With both engines at step 0, and a gateway that follows it."""
    manager = Manager()
    manager.join(*engines)
    manager.sync(0, *engines)
    parts = {"follows": True, "lineage": LINEAGE.to_json()}
    with Gateway(tmp_path, tokenizer_dir, [], policy=QUICK, parts=parts) as manager.gateway:
        manager.send()
        yield manager


class Agent:
    """One session and its conversation."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway, self.session = gateway, gateway.open()
        self.messages: list[dict[str, str]] = []

    def turn(self) -> str:
        self.messages.append({"role": "user", "content": "go on"})
        reply = self.gateway.http(
            "POST", f"/sessions/{self.session['id']}/v1/chat/completions", key=self.session["key"],
            json={"model": "policy", "messages": self.messages},
        )  # fmt: skip
        assert reply.status_code == 200, reply.text
        self.messages.append(reply.json()["choices"][0]["message"])
        return self.messages[-1]["content"]

    def turns(self) -> list[tuple[str, set[str]]]:
        """Of the record: the engine that gave each turn, and the versions of its tokens. Every turn extends the one
        trajectory."""
        record = self.gateway.record(self.session)
        [trajectory] = record["trajectories"]
        found, began = [], 0
        for turn in record["turns"]:
            spans = [s["version"] for s in trajectory["versions"] if began < s["end"] <= turn["end"]]
            found.append((turn["engine"], set(spans)))
            began = turn["end"]
        assert sum(trajectory["loss_mask"]) == sum(s["end"] - s["start"] for s in trajectory["versions"])
        return found


def asked(engine: ScriptedVllm) -> int:
    return len(engine.asked())


def test_agents_lose_no_turn_while_engines_join_fall_behind_leave_and_die(words, tokenizer_dir, tmp_path):
    with scripted(words, "one", "two", "three", "four") as engines, ExitStack() as stack:
        one, two, three, four = engines
        for engine in engines:
            engine.seconds = 10.0  # for 1024 tokens
        manager = Manager()
        manager.join(one, two)
        manager.sync(0, one, two)
        parts = {"follows": True, "lineage": LINEAGE.to_json()}
        gateway = stack.enter_context(Gateway(tmp_path, tokenizer_dir, [], parts=parts))
        manager.gateway = gateway
        manager.send()
        ending = threading.Event()
        pool = stack.enter_context(ThreadPoolExecutor(8))
        stack.callback(ending.set)
        agents: list[Agent] = []
        working: list[Future[int]] = []

        def work(agent: Agent) -> int:
            turns = 0
            while not ending.is_set():
                agent.turn()
                turns += 1
            return turns

        def more_agents() -> None:
            for _ in range(2):
                agents.append(Agent(gateway))
                working.append(pool.submit(work, agents[-1]))

        def serves(*wanted: ScriptedVllm) -> None:
            before = [asked(engine) for engine in wanted]
            until(lambda: all(asked(e) > n + 1 for e, n in zip(wanted, before, strict=True)), "they get turns")
            assert not [future.exception() for future in working if future.done()], "no agent has failed"

        more_agents()
        serves(one, two)
        manager.join(three)
        manager.send()
        assert asked(three) == 0, "it has no weights of this run"
        manager.sync(0, three)
        manager.send()
        more_agents()
        serves(one, two, three)

        manager.pause(one, three)  # two misses the sync
        manager.gateway.view(manager.view())
        manager.finish(1, one, three)
        manager.send()
        requests_of_two = asked(two)
        serves(one, three)

        manager.join(four)
        manager.sync(1, four)
        manager.send()
        manager.leave(one)
        requests_of_one = asked(one)
        more_agents()
        serves(three, four)

        three.die()  # with turns under way, and the manager has not noticed
        serves(four)
        ending.set()
        counts = [future.result(SECONDS) for future in working]

        assert (asked(one), asked(two)) == (requests_of_one, requests_of_two), "no turn after they were taken out"
        held = {one.url: {version(0), version(1)}, two.url: {version(0)}, four.url: {version(1)}}
        held[three.url] = held[one.url]
        for agent, count in zip(agents, counts, strict=True):
            turns = agent.turns()
            assert len(turns) == count
            assert all(versions and versions <= held[engine] for engine, versions in turns)
            assert turns[-1] == (four.url, {version(1)})
            steps = [max(versions) for _, versions in turns]
            assert steps == sorted(steps), "no older weights after newer ones"


@pytest.mark.parametrize("becomes", ["stale", "dead", "asleep"])
def test_a_turn_at_an_engine_that_is_taken_out_is_taken_over_at_once(manager, engines, becomes):
    one, two = engines
    one.seconds = 1e6
    agent = Agent(manager.gateway)
    with ThreadPoolExecutor(1) as pool:
        turn = pool.submit(agent.turn)
        one.wait_in_flight(1)
        if becomes == "dead":
            manager.fleet.process_exited(one.url, "killed")
        elif becomes == "asleep":
            manager.fleet.fall_asleep(one.url)
        else:
            manager.fleet.version_refused(one.url, "updated by others", sent_at=time.monotonic())
        manager.send()
        assert turn.result(SECONDS) == "two"
    assert agent.turn() == "two" and asked(one) == 1
    assert [engine for engine, _ in agent.turns()] == [two.url] * 2


def test_a_paused_engine_keeps_its_turn_and_further_ones_wait_for_the_sync(manager, engines):
    one, _ = engines
    one.seconds = 600.0
    manager.fleet.process_exited(engines[1].url, "killed")
    manager.send()
    first, second = Agent(manager.gateway), Agent(manager.gateway)
    with ThreadPoolExecutor(2) as pool:
        kept = pool.submit(first.turn)
        one.wait_in_flight(1)
        manager.pause(one)
        manager.send()
        waits = pool.submit(second.turn)
        time.sleep(0.3)
        assert asked(one) == 1 and not waits.done()
        manager.finish(1, one)
        manager.send()
        assert (kept.result(SECONDS), waits.result(SECONDS)) == ("one", "one")
    assert first.turns()[0][1] == {version(0), version(1)}
    assert second.turns()[0][1] == {version(1)}


def test_what_an_engine_samples_with_other_weights_is_sampled_again_and_never_recorded(manager, engines):
    one, two = engines
    one.version = "default"  # it was started again behind everybody's back
    agent = Agent(manager.gateway)
    assert agent.turn() == "two"
    assert asked(one) == 1 and agent.turns() == [(two.url, {version(0)})]
    manager.gateway.view(manager.view())
    assert Agent(manager.gateway).turn() == "two", "though the manager has not noticed"
    manager.sync(1, one, two)
    manager.send()
    assert Agent(manager.gateway).turn() == "one"


def test_a_turn_that_a_sync_waits_for_ends_at_its_version_and_the_session_goes_on_at_the_next(manager, engines):
    """weights.pause_mode = "wait"."""
    one, _ = engines
    one.seconds = 600.0
    manager.fleet.process_exited(engines[1].url, "killed")
    manager.send()
    agent = Agent(manager.gateway)
    with ThreadPoolExecutor(2) as pool:
        held = pool.submit(agent.turn)
        one.wait_in_flight(1)
        pausing = pool.submit(manager.pause, one, mode="wait")
        until(lambda: manager.fleet.member(one.url).state is State.PAUSED, "it pauses")
        manager.send()
        assert not held.done() and not pausing.done()
        one.hurry()
        assert held.result(SECONDS) == "one" and pausing.result(SECONDS) is None
        manager.finish(1, one)
        manager.send()
        assert agent.turn() == "one"
    assert [versions for _, versions in agent.turns()] == [{version(0)}, {version(1)}]


def test_without_an_engine_a_turn_fails_in_time_and_says_how_they_are(words, tokenizer_dir, tmp_path):
    with scripted(words, "one") as [one]:
        manager = Manager()
        manager.join(one)
        parts = {"follows": True, "lineage": LINEAGE.to_json()}
        with Gateway(tmp_path, tokenizer_dir, [], {"turn_timeout": 0.3}, parts=parts) as manager.gateway:
            manager.send()
            session = manager.gateway.open()
            reply = manager.gateway.http(
                "POST", f"/sessions/{session['id']}/v1/completions", key=session["key"],
                json={"model": "policy", "prompt": "hi"},
            )  # fmt: skip
            assert reply.status_code == 503 and f"{one.url} is stale" in reply.text
        assert asked(one) == 0


def test_engines_given_by_address_are_left_out_while_they_are_dead_and_taken_back(engines, tokenizer_dir, tmp_path):
    one, two = engines
    with Gateway(tmp_path, tokenizer_dir, engines, policy=QUICK) as gateway:

        def state(engine: ScriptedVllm) -> str:
            return gateway.http("GET", "/status").json()["fleet"][engine.url]

        one.die()
        until(lambda: state(one) != "ready", "its death is noticed without a turn")
        failed = gateway.http("GET", "/status").json()["engines"].get("failed_requests", 0)
        assert {Agent(gateway).turn() for _ in range(4)} == {"two"}
        assert gateway.http("GET", "/status").json()["engines"].get("failed_requests", 0) == failed
        one.forget()
        one.version = "anything"
        one.start()
        until(lambda: state(one) == "ready", "it is taken back")
        assert {Agent(gateway).turn() for _ in range(4)} == {"one"}, "which has the fewest sessions"
        two.die()
        agent = Agent(gateway)
        assert agent.turn() == "one" and agent.turns() == [(one.url, {"anything"})]


def generation_of(book: VersionBook, model_dir, tmp_path) -> tuple[GatewayPlace, Generation]:
    """That of a run with an agent."""
    place = GatewayPlace(tmp_path / "sessions", tmp_path / "gateway.key", tmp_path / "gateway.log")
    place.key_file.write_text(KEY)
    place.key_file.chmod(0o600)
    settings = {
        "model": {"path": model_dir}, "steps": 1, "rollout": {"agent": "tests.contract.agents:two_questions"},
        "sampling": {"max_prompt_tokens": 1000, "max_response_tokens": 2000}, "data": {"train": [tmp_path / "rows"]},
    }  # fmt: skip
    config = TrainConfig.model_validate(settings)
    return place, Generation(config, place, refusal=book.refusal, log=lambda line: None)


def test_every_turn_names_the_adapter_of_the_version_that_the_run_has_published(engines, tokenizer_dir, tmp_path):
    """Without a name the model alone would answer, and nothing would show it but the value check."""
    manager, names = Manager(), [adapter_name(LINEAGE.version(step)) for step in (0, 1)]
    for engine in engines:
        engine.lora_rank, engine.adapters = 8, dict.fromkeys(names, "/somewhere")
    manager.join(*engines)
    manager.sync(0, *engines)
    parts = {"follows": True, "lineage": replace(LINEAGE, adapters=True).to_json()}

    def named() -> list[str | None]:
        sent = [each for engine in engines for each in engine.requests if each.path == "/rltool/generate"]
        return [each.body.get("model") for each in sent]

    with Gateway(tmp_path, tokenizer_dir, [], policy=QUICK, parts=parts) as manager.gateway:
        manager.send()
        agent = Agent(manager.gateway)
        agent.turn()
        assert named() == names[:1]
        manager.step = 1
        manager.send()
        until(lambda: bool(agent.turn()) and names[1] in named(), "the gateway names the next version's")
        assert {*named()} == {*names}
        by_turn = [versions for _, versions in agent.turns()]
        assert by_turn[0] == {version(0)} and by_turn[-1] == {version(1)}
        assert all(len(versions) == 1 for versions in by_turn)


def test_agents_behind_a_router_are_refused_where_requests_name_an_adapter(model_dir, tmp_path):
    """Their gateway knows no versions: the model alone would answer."""
    book = VersionBook(Lineage("0" * 32, 1, adapters=True), published=0)
    _, generation = generation_of(book, model_dir, tmp_path)

    async def go() -> None:
        try:
            await generation.start(Manager().fleet, EngineEndpoint(url="http://127.0.0.1:1"), book)
        finally:
            await generation.close()

    with pytest.raises(UsageError, match="behind a router"):
        asyncio.run(go())


def test_a_run_s_gateway_is_told_over_its_pipe_also_when_it_is_started_again_and_goes_on_without_the_run(
    engines, model_dir, tmp_path
):
    one, two = engines
    manager = Manager()
    manager.join(one)
    manager.sync(0, one)
    book = VersionBook(LINEAGE, published=0)
    place, generation = generation_of(book, model_dir, tmp_path)

    async def go() -> None:
        await generation.start(manager.fleet, None, book)
        try:
            assert generation._process is not None
            await asyncio.to_thread(talk, generation._process)
        finally:
            await generation.close()

    def talk(process: GatewayProcess) -> None:
        manager.gateway = gateway = Gateway(tmp_path, model_dir, [], port=int(process.url.rpartition(":")[2]))

        def sees(wanted: dict[str, str]) -> bool:
            try:
                return manager.seen() == wanted
            except requests.ConnectionError:
                return False

        agent = Agent(gateway)
        assert agent.turn() == "one"
        manager.join(two)
        manager.sync(0, two)
        manager.fleet.drain(one.url, "told to leave")
        until(lambda: sees({one.url: "draining", two.url: "ready"}), "it follows")
        assert agent.turn() == "two" and [versions for _, versions in agent.turns()] == [{version(0)}] * 2
        manager.fleet.remove(one.url, "gone")
        assert process._process is not None
        os.kill(process._process.pid, signal.SIGKILL)
        until(lambda: process.counts["gateway_restarts"] == 1, "it is started again")
        until(lambda: sees({two.url: "ready"}), "it has its engines, whatever it began with")
        assert agent.turn() == "two"
        pipe = process._process.stdin
        assert pipe is not None
        process_loop.call_soon_threadsafe(pipe.close)
        until(lambda: "manager is gone" in place.log.read_text(), "it notices")
        assert agent.turn() == "two"

    with asyncio.Runner() as runner:
        process_loop = runner.get_loop()
        runner.run(go())
