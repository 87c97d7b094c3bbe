"""POST /rltool/update_weights and /rltool/finish_weight_update: what the engine core is asked, in which order, and what
becomes of failures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rltool.engines.plugin.loading import WeightUpdateError
from rltool.engines.plugin.routes import finish_update, pause, pause_mode, update_weights
from rltool.engines.plugin.worker import WeightUpdateRecovery, ask_workers, hear_all_workers

INFO = {"update_info": {"names": []}}
VERSION = {"weight_version": "v", "resume": True}
Step = Callable[[Any, Any], Awaitable[tuple[int, dict[str, Any]]]]


class Engine:
    """AsyncLLM of two replicas. answers: of their workers; fails: the call that raises; another_vllm: it has nothing of
    what rltool reaches for below AsyncLLM."""

    def __init__(self, *answers: list[str], another_vllm: bool = False, dropped: bool = True) -> None:
        self.calls: list[Any] = []
        self.answers, self.fails, self.dropped = answers or ([""], [""]), "", dropped
        if not another_vllm:
            self.renderer = SimpleNamespace(clear_mm_cache_async=self._nothing)
            self.engine_core = SimpleNamespace(
                pause_scheduler_async=self._pause_scheduler, call_utility_all_async=self._ask_all
            )

    async def _nothing(self) -> None: ...

    async def _pause_scheduler(self, mode, clear_cache):
        self._called("pause_scheduler", mode, clear_cache)

    async def _ask_all(self, utility, method, timeout, args, kwargs):
        assert (utility, timeout, kwargs) == ("collective_rpc", None, None)
        self._called(method, *args)
        return list(self.answers)

    async def pause_generation(self, *, mode):
        self._called("pause_generation", mode)

    async def collective_rpc(self, method, *, args=()):
        self._called(method, *args)
        return self.answers[0]

    async def update_weight_version(self, new_version):
        self._called("update_weight_version", new_version)

    async def reset_prefix_cache(self, reset_running_requests=False):
        self._called("reset_prefix_cache", reset_running_requests)
        return self.dropped

    async def resume_generation(self):
        self._called("resume_generation")

    def _called(self, *call: Any) -> None:
        self.calls.append(call)
        if call[0] == self.fails:
            raise RuntimeError("planned")


def asked(step: Step, engine: Engine, body: Any) -> tuple[int, dict[str, Any]]:
    return asyncio.run(step(engine, body))


UPDATED = ("rltool_update_weights", {"names": []})
FINISHED = [
    ("rltool_finish_update",), ("update_weight_version", "v"), ("reset_prefix_cache", True), ("resume_generation",),
]  # fmt: skip


@pytest.mark.parametrize("another_vllm", [False, True])
def test_the_engine_is_paused_and_updated_and_then_named_and_its_cache_dropped(another_vllm):
    engine = Engine(another_vllm=another_vllm)
    assert asked(update_weights, engine, INFO) == (200, {"status": "updated"})
    assert engine.calls == [
        ("pause_generation", "keep") if another_vllm else ("pause_scheduler", "keep", True), UPDATED,
    ]  # fmt: skip
    engine.calls.clear()
    assert asked(finish_update, engine, VERSION) == (200, {"weight_version": "v"})
    assert engine.calls == FINISHED


@pytest.mark.parametrize(
    ("query", "mode"),
    [(b"mode=keep", "keep"), (b"mode=abort", "abort"), (b"mode=wait", "wait"), (b"", None), (b"mode=no", None),
     (b"mode=abort&mode=keep", None), (b"mode=abort&clear_cache=false", None)],
)  # fmt: skip
def test_a_pause_that_asks_for_more_than_a_mode_is_left_to_vllm(query, mode):
    assert pause_mode(query) == mode


@pytest.mark.parametrize(("mode", "refuses", "ours"), [("keep", False, True), ("keep", True, True),
                                                      ("abort", True, True), ("wait", True, True),
                                                      ("abort", False, False)])  # fmt: skip
def test_requests_wait_while_an_engine_is_paused_also_where_vllm_would_refuse_them(mode, refuses, ours):
    """refuses: as pause_generation of 0.33 has it."""
    engine = Engine()
    if refuses:
        engine.engine_core.pause_generation_async = None
    assert asyncio.run(pause(engine, mode)) == ours
    assert engine.calls == [("pause_scheduler", mode, True)] * ours


@pytest.mark.parametrize("body", [{"weight_version": "v"}, {"weight_version": "v", "resume": False}])
def test_who_does_not_ask_for_it_gets_no_end_of_the_pause(body):
    engine = Engine()
    assert asked(finish_update, engine, body)[0] == 200
    assert engine.calls == FINISHED[:-1]


@pytest.mark.parametrize(("step", "body"), [(update_weights, INFO), (finish_update, VERSION)])
def test_what_a_worker_of_any_replica_says_is_the_answer_and_the_version_stays(step, body):
    engine = Engine(["", "b is missing"], ["b is missing", "a is missing"])
    assert asked(step, engine, body) == (500, {"error": "a is missing; b is missing"})
    assert not {"update_weight_version", "resume_generation"} & {call[0] for call in engine.calls}


@pytest.mark.parametrize(
    ("step", "body", "call"),
    [(update_weights, INFO, "pause_scheduler"), (update_weights, INFO, UPDATED[0]),
     *((finish_update, VERSION, call[0]) for call in FINISHED)],
)  # fmt: skip
def test_any_other_failure_is_an_answer_too(step, body, call):
    engine = Engine()
    engine.fails = call
    assert asked(step, engine, body) == (500, {"error": "RuntimeError: planned"})


@pytest.mark.parametrize(
    ("step", "bodies"),
    [(update_weights, (None, [], {}, {"update_info": []})), (finish_update, (None, {}, {"weight_version": ""}))],
)
def test_a_body_that_is_no_update_touches_nothing(step, bodies):
    for body in bodies:
        engine = Engine()
        status, reply = asked(step, engine, body)
        assert status == 400 and "must be" in reply["error"] and engine.calls == []


def test_a_prefix_cache_that_stays_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        assert asked(finish_update, Engine(dropped=False), VERSION)[0] == 200
    assert "prefix cache" in caplog.text


def test_all_workers_of_all_replicas_are_heard():
    assert asyncio.run(ask_workers(Engine(["a", "b"], ["c"]), "method")) == ["a", "b", "c"]
    assert asyncio.run(ask_workers(Engine(["a", "b"], another_vllm=True), "method")) == ["a", "b"]


class Asked:
    """An AsyncLLM with one replica, whose workers answer with these."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.calls = answers, []

    async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        self.calls.append((method, args))
        return list(self.answers)


def test_vllms_own_weight_methods_go_through_one_that_does_not_raise():
    engine = Asked("", "no group", "no group", "no file")
    hear_all_workers(engine)
    hear_all_workers(engine)
    with pytest.raises(RuntimeError, match=r"^no file; no group$"):
        asyncio.run(engine.collective_rpc("update_weights", kwargs={"update_info": {"a": 1}}))
    assert engine.calls == [("rltool_call", ("update_weights", (), {"update_info": {"a": 1}}))]
    engine.answers = ("", "")
    asyncio.run(engine.collective_rpc("finish_weight_update"))
    assert asyncio.run(engine.collective_rpc("reset_weights", None, ("all",))) == ["", ""]
    assert engine.calls[1:] == [("rltool_call", ("finish_weight_update", (), {})), ("reset_weights", ("all",))]


def test_a_call_of_a_workers_own_method_answers_why_it_failed():
    worker = Worker()
    assert worker.rltool_call("update_weights", (), {"update_info": {}}) == "" and worker.steps == ["update {}"]
    assert worker.rltool_call("no_such_method", (), {}).startswith("AttributeError: ")


class Worker(WeightUpdateRecovery):
    """fails: (step, error)."""

    def __init__(self, fails: tuple[str, Exception] | None = None) -> None:
        self.steps: list[str] = []
        self.fails = fails
        self._weight_update_active = True
        self.weight_transfer_engine = SimpleNamespace(
            abandon=lambda: self._step("abandon"), reset_weight_update_target=lambda: None, changed=True
        )
        self.start_weight_update = lambda: self._step("start")
        self.update_weights = lambda update_info: self._step(f"update {update_info}")
        self.finish_weight_update = lambda: self._step("finish")

    def _step(self, name: str) -> None:
        self.steps.append(name)
        if self.fails is not None and name == self.fails[0]:
            raise self.fails[1]


def test_a_worker_ends_what_was_left_open_and_takes_the_update():
    worker = Worker()
    assert (worker.rltool_update_weights({}), worker.rltool_finish_update()) == ("", "")
    assert worker.steps == ["abandon", "start", "update {}", "finish"]


@pytest.mark.parametrize("error", [WeightUpdateError("why"), KeyError("why"), RuntimeError("why")], ids=repr)
@pytest.mark.parametrize("step", ["abandon", "start", "update {}", "finish"])
def test_a_worker_never_raises_but_says_why(step, error):
    """vLLM leaves the replies of the workers behind one that raises in their queues."""
    worker = Worker((step, error))
    assert "why" in worker.rltool_update_weights({}) + worker.rltool_finish_update()
