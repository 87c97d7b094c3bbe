"""POST /rltool/update_weights: what the engine core is asked, in which order, and what becomes of failures."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rltool.engines.plugin.loading import WeightUpdateError
from rltool.engines.plugin.update_route import update_weights
from rltool.engines.plugin.worker import WeightUpdateRecovery

BODY = {"update_info": {"names": []}, "weight_version": "v"}


class Engine:
    """AsyncLLM. own_pause: it has what rltool's pause without the sleep needs."""

    def __init__(self, *, own_pause: bool = True) -> None:
        self.calls: list[Any] = []
        self.fails = ""
        if own_pause:
            self.renderer = SimpleNamespace(clear_mm_cache_async=self._nothing)
            self.engine_core = SimpleNamespace(pause_scheduler_async=self._pause_scheduler)

    async def _nothing(self) -> None: ...

    async def _pause_scheduler(self, mode, clear_cache):
        self._called("pause_scheduler", mode, clear_cache)

    async def pause_generation(self, *, mode):
        self._called("pause_generation", mode)

    async def collective_rpc(self, method, *, args=()):
        self._called(method, *args)
        return [None]

    async def update_weight_version(self, new_version):
        self._called("update_weight_version", new_version)

    async def reset_prefix_cache(self, reset_running_requests=False):
        self._called("reset_prefix_cache", reset_running_requests)
        return True

    def _called(self, *call: Any) -> None:
        self.calls.append(call)
        if call[0] == self.fails:
            raise RuntimeError("planned")


def asked(engine: Engine, body: Any = BODY) -> tuple[int, dict[str, Any]]:
    return asyncio.run(update_weights(engine, body))


UPDATED = ("rltool_update_weights", {"names": []})
AFTER = [("update_weight_version", "v"), ("reset_prefix_cache", True)]


@pytest.mark.parametrize(
    ("own_pause", "pause"), [(True, ("pause_scheduler", "keep", True)), (False, ("pause_generation", "keep"))]
)
def test_the_engine_is_paused_updated_and_named_and_its_cache_dropped(own_pause, pause):
    engine = Engine(own_pause=own_pause)
    assert asked(engine) == (200, {"weight_version": "v"})
    assert engine.calls == [pause, UPDATED, *AFTER]


@pytest.mark.parametrize("step", ["pause_scheduler", *UPDATED[:1], *(call[0] for call in AFTER)])
def test_a_failure_is_an_answer_and_nothing_follows_it(step):
    engine = Engine()
    engine.fails = step
    assert asked(engine) == (500, {"error": "RuntimeError: planned"})
    assert ("update_weight_version", "v") not in engine.calls or step in (call[0] for call in AFTER)


@pytest.mark.parametrize(
    ("body", "wrong"),
    [(None, "must be an object"), ({}, "update_info"), ({**BODY, "update_info": []}, "update_info"),
     ({"update_info": {}}, "weight_version"), ({**BODY, "weight_version": ""}, "weight_version")],
)  # fmt: skip
def test_a_body_that_is_no_update_touches_nothing(body, wrong):
    engine = Engine()
    status, reply = asked(engine, body)
    assert status == 400 and wrong in reply["error"] and engine.calls == []


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
        self.update_weights = lambda info: self._step(f"update {info}")
        self.finish_weight_update = lambda: self._step("finish")

    def _step(self, name: str) -> None:
        self.steps.append(name)
        if self.fails is not None and name == self.fails[0]:
            raise self.fails[1]


def test_a_worker_ends_what_was_left_open_and_takes_the_update():
    worker = Worker()
    worker.rltool_update_weights({})
    assert worker.steps == ["abandon", "start", "update {}", "finish"]


@pytest.mark.parametrize("step", ["start", "update {}", "finish"])
def test_a_worker_that_cannot_take_the_update_raises(step):
    """An answer would be lost: vLLM hears those of one data-parallel replica alone."""
    with pytest.raises(WeightUpdateError, match="why"):
        Worker((step, WeightUpdateError("why"))).rltool_update_weights({})
