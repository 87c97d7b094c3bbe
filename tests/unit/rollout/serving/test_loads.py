"""The engine with the least to do, compared with a look at all of them."""

from __future__ import annotations

import random

import pytest

from rltool.rollout.serving.loads import Loads

URLS = [f"http://e{number}:1" for number in range(7)]


def looked_up(loads: Loads, urls: list[str], avoid: str | None, *, by_sessions: bool) -> str:
    def rank(url: str):
        return url == avoid, loads.requests[url], loads.sessions[url] if by_sessions else 0, urls.index(url)

    return min(urls, key=rank)


@pytest.mark.parametrize("seed", range(20))
def test_the_least_is_that_of_a_look_at_all_engines_whatever_happened_before(seed):
    chance, loads, urls = random.Random(seed), Loads(), list(URLS)
    loads.choose_among(urls)
    for _ in range(400):
        match chance.randrange(5):
            case 0:
                urls = chance.sample(URLS, chance.randrange(1, len(URLS) + 1))
                loads.choose_among(urls)
            case 1 | 2:
                loads.add(loads.least(by_sessions=False), requests=1)
            case 3:
                busy = [url for url in URLS if loads.requests[url]]
                if busy:
                    loads.add(chance.choice(busy), requests=-1)
            case 4:
                loads.add(chance.choice(URLS), sessions=1)
        avoid = chance.choice([None, *URLS])
        for by_sessions in (False, True):
            least = loads.least(by_sessions=by_sessions, avoid=avoid)
            assert least == looked_up(loads, urls, avoid, by_sessions=by_sessions)
        assert loads.total == loads.requests.total()


def test_what_is_no_candidate_is_counted_and_never_chosen():
    loads = Loads()
    loads.choose_among(URLS[:1])
    loads.add("http://router:1", requests=3)
    loads.add(URLS[0], requests=2)
    assert loads.least(by_sessions=True) == loads.least(by_sessions=True, avoid=URLS[0]) == URLS[0]
    assert loads.total == 5


def test_the_heap_stays_as_small_as_the_fleet():
    loads = Loads()
    loads.choose_among(URLS)
    for _ in range(5000):
        loads.add(URLS[0], requests=1)
        loads.add(URLS[0], requests=-1)
    assert all(len(heap) <= 8 * len(URLS) + 65 for heap in loads._heaps.values())
    assert loads.least(by_sessions=False) == URLS[0]


def test_no_candidate_is_an_error():
    with pytest.raises(IndexError):
        Loads().least(by_sessions=False)
