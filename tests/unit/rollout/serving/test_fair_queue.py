"""Who is next where several kinds of requests wait."""

from __future__ import annotations

from rltool.rollout.serving.fair_queue import FairQueue


def arrive(queue, kind, count):
    for number in range(count):
        queue.push(queue.ticket(kind), f"{kind}{number}")


def served(queue, count):
    return [queue.pop() for _ in range(count)]


def test_one_kind_is_served_in_the_order_in_which_it_came():
    queue = FairQueue()
    arrive(queue, "a", 5)
    assert served(queue, 5) == ["a0", "a1", "a2", "a3", "a4"] and not queue


def test_a_kind_that_comes_late_takes_turns_at_once_with_the_many_that_wait():
    queue = FairQueue()
    arrive(queue, "a", 10_000)
    served(queue, 3)
    arrive(queue, "b", 3)
    assert served(queue, 7) == ["a3", "b0", "a4", "b1", "a5", "b2", "a6"]


def test_a_kind_that_was_idle_has_saved_up_no_turns():
    queue = FairQueue()
    arrive(queue, "b", 1)
    arrive(queue, "a", 100)
    served(queue, 101)
    arrive(queue, "a", 2)
    arrive(queue, "b", 2)
    assert served(queue, 4) == ["a0", "b0", "a1", "b1"]


def test_a_request_that_has_to_wait_again_keeps_its_place():
    queue = FairQueue()
    first = queue.ticket("a")
    queue.push(first, "a0")
    arrive(queue, "a", 2)
    assert queue.pop() == "a0"
    queue.push(first, "a0 again")
    assert served(queue, 3) == ["a0 again", "a0", "a1"]
