"""No search for cycles while engines stand still."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from rltool.processes import garbage


class Cycle:
    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def _as_before():
    assert gc.isenabled()
    thresholds, callbacks = gc.get_threshold(), gc.callbacks[:]
    yield
    gc.callbacks[:] = callbacks
    gc.set_threshold(*thresholds)
    gc.unfreeze()
    gc.enable()


def test_it_is_paused_until_the_last_of_several_blocks_ends():
    first, second = garbage.paused(), garbage.paused()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_a_block_that_raises_ends_it_and_a_collector_that_was_off_stays_off():
    with pytest.raises(ValueError, match="planned"), garbage.paused():
        raise ValueError("planned")
    assert gc.isenabled()
    gc.disable()
    with garbage.paused():
        pass
    assert not gc.isenabled()


def test_a_function_can_be_such_a_block_every_time():
    looked = []

    @garbage.paused()
    def work() -> None:
        looked.append(gc.isenabled())

    work()
    work()
    assert looked == [False, False] and gc.isenabled()


def test_what_was_there_is_not_looked_at_again_and_what_comes_is():
    old = Cycle()
    garbage.settle()
    assert gc.get_freeze_count() > 0 and not any(found is old for found in gc.get_objects())
    new = Cycle()
    gone = weakref.ref(new)
    del new
    gc.collect()
    assert gone() is None


def test_a_server_looks_at_each_object_once_and_at_cycles_that_were_left_out_when_it_looks_at_all():
    looked = []

    def count(phase: str, about: dict[str, int]) -> None:
        if phase == "start":
            looked.append(sum(len(gc.get_objects(generation=g)) for g in range(about["generation"] + 1)))

    garbage.collect_each_once()
    gc.callbacks.append(count)
    rounds, objects, kept = 60, 12_000, []
    for number in range(rounds):
        for _ in range(12):
            if number >= rounds // 2:  # as many go as come: Python by itself would wait
                del kept[0]
            kept.append([{"turn": []} for _ in range(objects // 24)])
        asyncio.run(garbage.collect_new())
    assert 0.95 < sum(looked) / (rounds * objects) < 1.1 and max(looked) < 1.1 * objects, looked
    left_out = gc.get_freeze_count()
    kept.clear()
    assert left_out - gc.get_freeze_count() >= rounds // 2 * objects  # freed all the same
    old = Cycle()
    gone = weakref.ref(old)
    asyncio.run(garbage.collect_new())
    del old
    asyncio.run(garbage.collect_new())
    assert gone() is not None
    asyncio.run(garbage.collect_all())
    assert gone() is None


def test_syncs_and_what_the_ranks_send_are_such_blocks(monkeypatch):
    """Of the two that matter: neither a method renamed nor a decorator lost goes unnoticed."""
    from rltool.weights.send.sender import WeightSender
    from rltool.weights.sync import WeightSync

    entered = []
    monkeypatch.setattr(gc, "disable", lambda: entered.append("paused"))
    with pytest.raises(AttributeError):
        WeightSender.send(object(), [], "v", [])  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        asyncio.run(WeightSync.sync(object(), "v"))  # type: ignore[arg-type]
    assert entered == ["paused", "paused"]
