"""The gateway's queue of episodes for agents on other hosts."""

from __future__ import annotations

import pytest

from rltool.gateway.agent_queue import SILENCE_SECONDS, AgentQueue
from rltool.gateway.errors import NotFound

TASK = {"base_url": "http://gateway/sessions/1/v1"}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock) -> AgentQueue:
    made = AgentQueue(clock=clock)
    made.put("a", TASK)
    made.put("b", TASK)
    return made


def test_episodes_are_given_out_once_and_in_order(queue):
    queue.put("a", {"other": 1})  # a request that was sent twice
    taken = [queue.take("w"), queue.take("w"), queue.take("w")]
    assert [episode and episode.id for episode in taken] == ["a", "b", None]
    assert taken[0].task == TASK and queue.waiting == 0


def test_an_outcome_is_there_until_the_trainer_has_it(queue):
    queue.take("w")
    assert queue.outcome("a") is None
    queue.finish("a", {"reward": 1.0})
    assert queue.outcome("a") == queue.outcome("a") == {"reward": 1.0}
    queue.withdraw("a")
    with pytest.raises(NotFound, match="withdrawn, or the gateway restarted"):
        queue.outcome("a")


def test_a_worker_that_falls_silent_has_failed_and_comes_too_late(queue, clock):
    queue.take("host-7")
    for _ in range(3):
        clock.now += SILENCE_SECONDS
        assert queue.outcome("a") is None
        queue.alive("a")
    clock.now += SILENCE_SECONDS + 1
    assert queue.outcome("a") == {"failed": "its worker host-7 has fallen silent"}
    for late in (lambda: queue.alive("a"), lambda: queue.finish("a", {"reward": 1.0})):
        with pytest.raises(NotFound, match="has an outcome already"):
            late()
    assert queue.counts["silent"] == 1 and queue.counts["finished"] == 0


def test_episodes_that_nobody_asks_for_are_not_run(queue, clock):
    clock.now += SILENCE_SECONDS - 1
    queue.outcome("b")
    clock.now += 2
    assert queue.take("w").id == "b" and queue.counts["dropped"] == 1


def test_what_is_not_wanted_any_more_is_told_to_its_worker(queue):
    queue.take("w")
    queue.withdraw("a")
    with pytest.raises(NotFound):
        queue.alive("a")


def test_episodes_of_a_trainer_that_has_gone_are_dropped_without_any_worker(queue, clock):
    clock.now += SILENCE_SECONDS - 1
    queue.outcome("b")
    clock.now += 2
    queue.drop_forgotten()
    assert queue.waiting == 1 and queue.counts["dropped"] == 1
