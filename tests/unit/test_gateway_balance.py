"""Which engine a session's turn goes to."""

from __future__ import annotations

from rltool.engines.types import Completion, VersionSpan
from rltool.gateway.balance import REST_SECONDS, Balance
from rltool.gateway.engines import joined


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_a_session_stays_where_it_was():
    balance = Balance(["a", "b"])
    first = balance.begin("one", ())
    balance.finish(first, failed=False)
    for other in ("two", "three", "four"):
        balance.begin(other, ())
    assert balance.begin("one", ()) == first


def test_new_sessions_go_to_the_least_busy_engine_and_then_to_that_with_the_fewest():
    balance = Balance(["a", "b"])
    assert balance.begin("one", ()) == "a"
    assert balance.begin("two", ()) == "b"
    balance.finish("b", failed=False)
    assert balance.begin("three", ()) == "b"
    balance.finish("a", failed=False)
    balance.finish("b", failed=False)
    assert balance.begin("four", ()) == "a"  # nobody is busy, b has two sessions
    balance.finish("a", failed=False)
    balance.forget("two")
    balance.forget("three")
    assert balance.begin("five", ()) == "b"


def test_an_engine_that_failed_rests_and_its_sessions_move():
    clock = Clock()
    balance = Balance(["a", "b"], clock=clock)
    assert balance.begin("one", ()) == "a"
    balance.finish("a", failed=True)
    assert balance.begin("one", ("a",)) == "b"
    balance.finish("b", failed=False)
    clock.now += REST_SECONDS + 1
    assert balance.begin("one", ()) == "b"  # its prefix is there now


def test_with_one_engine_there_is_no_choice():
    balance = Balance(["a"])
    balance.begin("one", ())
    balance.finish("a", failed=True)
    assert balance.begin("one", ("a",)) == "a"


def test_parts_of_an_aborted_response_keep_their_versions():
    first = Completion((1, 2), (-1.0, -2.0), "abort", (VersionSpan("v0", 0, 2),))
    second = Completion((3,), (-3.0,), "stop", (VersionSpan("v1", 0, 1),))
    whole = joined(first, second)
    assert (whole.token_ids, whole.logprobs, whole.finish_reason) == ((1, 2, 3), (-1.0, -2.0, -3.0), "stop")
    assert whole.versions == (VersionSpan("v0", 0, 2), VersionSpan("v1", 2, 3))
