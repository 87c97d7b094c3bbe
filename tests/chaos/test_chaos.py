"""A few seeds of what `make chaos` does for as long as one likes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.resources import GROWTH, growth, medians
from tests.chaos.served import LOSE_ANSWER, LOSE_REQUEST, ROLES, run_served

EVENTS = 100
SEEDS = (1, 4)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_lost_and_nobody_is_stale_whatever_happens_to_the_engines(seed):
    """In a process of its own: a socket that something else opens meanwhile in this one is not the run's."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--seed", str(seed), "--events", str(EVENTS)],
        capture_output=True, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    events, steps, tokens = map(int, re.findall(r"(\d+) (?:events|steps|tokens trained)\b", done.stdout)[:3])
    assert events >= EVENTS and steps > 0 and tokens > 0


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.timeout(2400)
def test_clients_of_a_served_trainer_lose_no_call_and_repeat_none_whatever_is_killed():
    [line] = run_served(seed=3, minutes=0.1)
    assert all(f"'{name}'" in line for name in ("rank", *ROLES, LOSE_ANSWER, LOSE_REQUEST)), line


def rising(least: float, most: float) -> list[float]:
    return [least + (most - least) * tenth / 9 for tenth in range(10)]


@pytest.mark.parametrize(
    ("tenths", "grows"),
    [
        ([700.0] * 10, False),
        ([400.0] + [700.0] * 9, False),  # caches fill
        ([700.0, 720.0, 690.0, 730.0, 700.0, 760.0, 790.0, 735.0, 800.0, 740.0], False),  # up and down
        (rising(700, 740), False),
        (rising(700, 790), True),
    ],
)
def test_a_soak_fails_for_what_grows_all_the_time(tenths, grows):
    assert (growth(tenths) > GROWTH["memory"]) is grows


def test_medians_are_of_tenths_of_the_time():
    assert medians([float(number // 5) for number in range(50)]) == [float(tenth) for tenth in range(10)]
    assert len(medians([1.0] * 53)) == 10
