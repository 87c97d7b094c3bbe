"""A few seeds of what `make chaos` does for as long as one likes."""

from __future__ import annotations

import pytest

from rltool.quickstart.tiny_model import make_tiny_model
from tests.chaos.driver import events_or_seconds, run_seed

EVENTS = 100
SEEDS = (1, 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_lost_and_nobody_is_stale_whatever_happens_to_the_engines(model, seed):
    report = run_seed(seed, model, enough=events_or_seconds(events=EVENTS))
    assert report.events.total() >= EVENTS and report.steps > 0 and report.tokens > 0
