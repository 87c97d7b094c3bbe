"""The limit of requests in flight, by itself and against a simulated engine."""

import pytest

from rltool.engines.types import EngineLoad
from rltool.rollout.serving.concurrency import (
    DECREASE,
    FULL_KV_CACHE,
    ROOMY_KV_CACHE,
    ConcurrencyController,
    ConcurrencyPolicy,
    Pressure,
    pressure,
)
from tests.clock import Clock

ROOM = EngineLoad(running=100, waiting=0, kv_cache_usage=0.3)
QUEUE = EngineLoad(running=100, waiting=40, kv_cache_usage=0.3)
FULL = EngineLoad(running=100, waiting=0, kv_cache_usage=0.97)
FILLED = EngineLoad(running=100, waiting=0, kv_cache_usage=0.9)


def controller(start=64, **policy):
    clock = Clock()
    made = ConcurrencyController(ConcurrencyPolicy(start=start, **policy), clock=clock)
    clock.now += 60
    return made, clock


def test_it_starts_where_the_policy_says_for_as_many_engines_as_serve():
    made, _ = controller(start=64)
    assert (made.limit(1), made.limit(3), made.limit(0)) == (64, 192, 0)


def test_the_limit_grows_by_a_fixed_step_while_engines_have_room():
    made, clock = controller(start=64)
    for expected in (68, 72, 76):
        assert made.observe([ROOM], in_flight=made.limit(1)) is Pressure.ROOM
        assert made.limit(1) == expected
        clock.now += 60


@pytest.mark.parametrize("load", [QUEUE, FULL])
def test_the_limit_shrinks_by_a_factor_where_requests_wait_or_a_cache_is_full(load):
    made, _ = controller(start=64)
    assert made.observe([ROOM, load], in_flight=128) is Pressure.OVERLOADED
    assert made.limit(2) == 2 * 64 * DECREASE


def test_the_limit_stays_while_the_cache_is_neither_roomy_nor_full():
    made, _ = controller()
    assert made.observe([FILLED], in_flight=64) is Pressure.FILLED
    assert made.limit(1) == 64


@pytest.mark.parametrize(
    ("load", "found"),
    [
        (EngineLoad(100, 5, 0.1), Pressure.FILLED),  # just arrived
        (EngineLoad(100, 6, 0.1), Pressure.OVERLOADED),
        (EngineLoad(0, 1, 0.0), Pressure.OVERLOADED),
        (EngineLoad(0, 0, 0.0), Pressure.ROOM),
        (EngineLoad(9, 0, ROOMY_KV_CACHE), Pressure.FILLED),
        (EngineLoad(9, 0, FULL_KV_CACHE), Pressure.OVERLOADED),
    ],
)
def test_pressure_of_one_engine(load, found):
    assert pressure([load]) is found


def test_a_limit_that_nobody_reaches_does_not_grow():
    made, _ = controller(start=64)
    made.observe([ROOM], in_flight=10)
    assert made.limit(1) == 64


def test_a_limit_that_nobody_reached_comes_down_to_what_is_in_flight():
    made, _ = controller(start=64)
    made.observe([QUEUE], in_flight=20)
    assert made.limit(1) == 20 * DECREASE


def test_between_two_changes_there_is_the_cooldown():
    made, clock = controller(start=64, cooldown=5.0)
    made.observe([ROOM], in_flight=64)
    clock.now += 4.9
    made.observe([QUEUE], in_flight=68)
    assert made.limit(1) == 68
    clock.now += 0.2
    made.observe([QUEUE], in_flight=68)
    assert made.limit(1) == 51


def test_a_surplus_that_a_decrease_has_already_condemned_is_no_reason_for_another():
    made, clock = controller(start=64)
    made.observe([QUEUE], in_flight=64)
    for _ in range(20):
        clock.now += 60
        made.observe([QUEUE], in_flight=49)  # limit 48: still draining
    assert made.limit(1) == 48


def test_the_limit_stays_within_its_bounds():
    made, clock = controller(start=8, minimum=6, maximum=9)
    for _ in range(5):
        clock.now += 60
        made.observe([ROOM], in_flight=made.limit(1))
    assert made.limit(1) == 9
    for _ in range(5):
        clock.now += 60
        made.observe([FULL], in_flight=made.limit(1))
    assert made.limit(1) == 6


def test_where_no_engine_answers_nothing_is_known_and_nothing_changes():
    made, _ = controller()
    assert made.observe([], in_flight=64) is None
    assert made.limit(1) == 64


def test_an_engine_that_leaves_takes_its_share_along():
    made, _ = controller(start=64)
    made.observe([ROOM, ROOM], in_flight=128)
    assert (made.limit(2), made.limit(1)) == (136, 68)


@pytest.mark.parametrize(
    "wrong", [{"start": 0}, {"start": 4, "minimum": 5}, {"start": 4, "maximum": 3}, {"start": 4, "cooldown": -1}]
)
def test_a_policy_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match="not a concurrency policy"):
        ConcurrencyPolicy(**wrong)


class SimulatedEngine:
    """Groups of 8 samples: `slots` of them run at once (or `kv_groups` fit its cache), each takes `seconds`; the rest
    wait."""

    def __init__(self, slots=40, kv_groups=10_000.0, seconds=30.0):
        self.slots, self.kv_groups, self.seconds = slots, kv_groups, seconds
        self.ends = []
        self.queue = 0

    @property
    def in_flight(self):
        return len(self.ends) + self.queue

    def advance(self, now, limit):
        self.ends = [end for end in self.ends if end > now]
        self.queue += max(0, limit - self.in_flight)
        while self.queue and len(self.ends) < min(self.slots, self.kv_groups):
            self.queue -= 1
            self.ends.append(now + self.seconds * (0.5 + (len(self.ends) * 7 % 10) / 10))

    def load(self):
        return EngineLoad(8 * len(self.ends), 8 * self.queue, min(1.0, len(self.ends) / self.kv_groups))


def limits(engines, seconds, start):
    """The limit per engine after each second."""
    made, clock = controller(start=start)
    found = []
    for _ in range(seconds):
        clock.now += 1
        for engine in engines:
            engine.advance(clock.now, made.limit(len(engines)) // len(engines))
        made.observe([engine.load() for engine in engines], in_flight=sum(engine.in_flight for engine in engines))
        found.append(made.limit(len(engines)) / len(engines))
    return found


@pytest.mark.parametrize("start", [8, 64, 256])
@pytest.mark.parametrize("num_engines", [1, 3])
def test_on_a_simulated_fleet_the_limit_comes_to_the_engines_slots_and_stays_about_them(start, num_engines):
    found = limits([SimulatedEngine(slots=40) for _ in range(num_engines)], 2400, start)
    settled = found[600:]
    step = ConcurrencyPolicy(start=start).increase
    assert max(settled) <= 40 * 1.05 + step
    assert min(settled) >= 40 * DECREASE - 1
    assert sum(settled) / len(settled) > 0.8 * 40


def test_on_a_simulated_engine_whose_cache_is_the_limit_it_is_never_full_for_long():
    engine = SimulatedEngine(slots=1000, kv_groups=50.0)
    settled = limits([engine], 2400, 256)[600:]
    assert max(settled) <= 50 and min(settled) >= 50 * FULL_KV_CACHE * DECREASE - 1


def test_when_answers_grow_the_limit_follows():
    engine = SimulatedEngine(slots=1000, kv_groups=100.0)
    made, clock = controller(start=64)
    found = []
    for second in range(3600):
        engine.kv_groups = 100.0 if second < 1200 else 40.0
        clock.now += 1
        engine.advance(clock.now, made.limit(1))
        made.observe([engine.load()], in_flight=engine.in_flight)
        found.append(made.limit(1))
    assert min(found[600:1200]) >= 70 and max(found[600:1200]) <= 100
    assert max(found[1500:]) <= 42
