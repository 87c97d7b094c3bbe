"""Which checkpoints stay: the newest, the best, and what is in use."""

from __future__ import annotations

import itertools
import math

import pytest

from rltool.checkpoints.retention import Kept, expendable


def steps(*values: int) -> list[Kept]:
    return [Kept(step) for step in values]


def test_zero_keeps_all():
    assert expendable(steps(1, 2, 3), keep_last=0) == []


def test_the_newest_stay_whatever_the_order_they_come_in():
    assert expendable(steps(30, 4, 200, 1), keep_last=2) == [1, 4]
    assert expendable(steps(7), keep_last=1) == [] and expendable([], keep_last=1) == []


@pytest.mark.parametrize(("higher", "staying"), [(True, {2, 5}), (False, {1, 5})])
def test_the_best_stay_beside_the_newest(higher, staying):
    complete = [Kept(1, 0.1), Kept(2, 0.9), Kept(3, 0.5), Kept(4), Kept(5, 0.3)]
    gone = expendable(complete, keep_last=1, keep_best=1, higher_is_better=higher)
    assert {entry.step for entry in complete} - set(gone) == staying


def test_of_equally_good_ones_the_newer_stays():
    for higher in (True, False):
        assert expendable(
            [Kept(1, 0.5), Kept(2, 0.5), Kept(3, 0.5), Kept(4)], keep_last=1, keep_best=1, higher_is_better=higher
        ) == [1, 2]


def test_what_was_not_measured_is_never_the_best():
    complete = [Kept(1, math.nan), Kept(2, None), Kept(3, -1.0), Kept(4)]
    assert expendable(complete, keep_last=1, keep_best=3) == [1, 2]


def test_what_is_pointed_at_or_read_stays():
    assert expendable(steps(1, 2, 3, 4), keep_last=1, protected={1, 3}) == [2]


def test_the_newest_is_never_among_those_that_go():
    values = [None, 0.0, 1.0, math.nan]
    for a, b, c in itertools.product(values, repeat=3):
        for last, best, higher in itertools.product((0, 1, 2), (0, 1, 2), (True, False)):
            gone = expendable(
                [Kept(1, a), Kept(2, b), Kept(9, c)], keep_last=last, keep_best=best, higher_is_better=higher
            )
            assert 9 not in gone and len(gone) <= max(0, 3 - max(last, 1))
