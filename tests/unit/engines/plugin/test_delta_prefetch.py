"""Fetching beside generation: the thread in a worker, and the route that waits for all workers."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

from rltool.engines.delta.chain import Held
from rltool.engines.delta.rebuild import CannotRebuild, Rebuilt
from rltool.engines.plugin import prefetch as prefetching
from rltool.engines.plugin.prefetch import NotFetched, Prefetcher
from rltool.engines.plugin.routes import prefetch
from rltool.engines.plugin.worker import WeightUpdateRecovery

BODY = {"store": "/store", "version": "v", "seconds": 5.0}


@pytest.fixture
def may_end(monkeypatch):
    """A download that takes until the test sets this; one of the version "bad" fails."""
    event = threading.Event()

    def bring(copy, store, version, *, seconds):
        assert event.wait(10)
        if version == "bad":
            raise CannotRebuild("a file is damaged")
        copy.held = Held(version, "state")
        return Rebuilt(copy.held, 1, 0.1, False)

    monkeypatch.setattr(prefetching, "bring", bring)
    monkeypatch.setattr(prefetching, "open_store", lambda address: None)
    return event


def test_a_version_is_there_when_its_download_has_ended(may_end):
    prefetcher = Prefetcher(pin=False)
    prefetcher.fetch("/store", "v", 5.0)
    assert not prefetcher.fetched("v")
    prefetcher.fetch("/store", "v", 5.0)  # asked again, by a client that did not hear the answer
    with pytest.raises(NotFetched, match="v are still on their way; w has to wait"):
        prefetcher.fetch("/store", "w", 5.0)
    may_end.set()
    assert list(prefetcher.buckets("v")) == [], "it waits for the download"
    assert prefetcher.fetched("v")
    prefetcher.fetch("/store", "w", 5.0)
    assert list(prefetcher.buckets("w")) == []


def test_a_download_that_does_not_end_is_given_up(may_end):
    prefetcher = Prefetcher(pin=False)
    prefetcher.fetch("/store", "v", 0.01)
    with pytest.raises(NotFetched, match=r"did not come within 0\.01 s"):
        prefetcher.buckets("v")
    may_end.set()


def test_a_version_that_was_not_asked_for_is_not_there(may_end):
    prefetcher = Prefetcher(pin=False)
    for fetched in (prefetcher.fetched, prefetcher.buckets):
        with pytest.raises(NotFetched, match="v were not asked for"):
            fetched("v")
    may_end.set()
    prefetcher.fetch("/store", "v", 5.0)
    prefetcher.buckets("v")
    with pytest.raises(NotFetched, match="w were not asked for"):
        prefetcher.buckets("w")


def test_why_a_version_does_not_come_is_said_to_whoever_waits(may_end):
    prefetcher = Prefetcher(pin=False)
    prefetcher.fetch("/store", "bad", 5.0)
    may_end.set()
    with pytest.raises(NotFetched, match="CannotRebuild: a file is damaged"):
        prefetcher.buckets("bad")


def test_what_is_received_is_there_until_it_is_forgotten(may_end):
    prefetcher = Prefetcher(pin=False)
    prefetcher.receive(lambda: [((), torch.zeros(3))], "v", 5.0)
    [(bucket, flat)] = prefetcher.buckets("v")
    assert bucket == () and flat.numel() == 3
    prefetcher.forget()
    with pytest.raises(NotFetched, match="v were not asked for"):
        prefetcher.buckets("v")


def test_what_is_on_its_way_when_it_is_forgotten_does_not_reach_the_next_copy(may_end):
    prefetcher = Prefetcher(pin=False)
    before = prefetcher._copy
    prefetcher.fetch("/store", "v", 5.0)
    prefetcher.forget()
    assert prefetcher._copy is not before
    may_end.set()
    prefetcher.fetch("/store", "w", 5.0)
    prefetcher.buckets("w")
    kept = prefetcher._copy
    prefetcher.forget()
    assert prefetcher._copy is kept, "a copy that is at rest is kept"


class Workers:
    """Two workers; each is given the answers to "is it there?" one after another, the last one again and again."""

    def __init__(self, *answers: list[tuple[bool, str]], refuses: str = "") -> None:
        self.answers, self.refuses = [list(each) for each in answers], refuses
        self.calls: list[tuple[str, tuple]] = []

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append((method, args))
        if method == "rltool_prefetch":
            return [self.refuses] * len(self.answers)
        return [each.pop(0) if len(each) > 1 else each[0] for each in self.answers]


@pytest.fixture(autouse=True)
def without_naps(monkeypatch):
    monkeypatch.setattr("rltool.engines.plugin.routes.POLL_SECONDS", 0.0)


def test_the_route_answers_when_every_worker_has_the_version():
    workers = Workers([(True, "")], [(False, ""), (False, ""), (True, "")])
    assert asyncio.run(prefetch(workers, BODY)) == (200, {"version": "v"})
    assert workers.calls == [("rltool_prefetch", ("v", 5.0, "/store", None))] + 3 * [("rltool_prefetched", ("v",))]


def test_one_worker_that_cannot_have_it_is_an_error_at_once():
    status, reply = asyncio.run(prefetch(Workers([(False, "")], [(True, "no way")]), BODY))
    assert (status, reply) == (409, {"error": "no way"})
    status, reply = asyncio.run(prefetch(Workers([(True, "")], refuses="another one comes"), BODY))
    assert (status, reply) == (409, {"error": "another one comes"})


def test_the_route_gives_up_after_its_seconds():
    status, reply = asyncio.run(prefetch(Workers([(False, "")]), BODY | {"seconds": 0.01}))
    assert status == 409 and "did not come within 0.01 s" in reply["error"]


def test_an_engine_with_another_backend_says_so():
    worker = WeightUpdateRecovery()
    worker.weight_transfer_engine = None
    assert "not rltool's" in worker.rltool_prefetch("v", 1.0, "/store")
