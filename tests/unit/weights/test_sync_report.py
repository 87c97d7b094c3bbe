"""What a weight sync says of itself."""

from __future__ import annotations

import pytest

from rltool.weights.sync_report import SyncReport


@pytest.mark.parametrize(
    ("sent", "seconds", "rate"),
    [
        (2_900_000, 0.85, "3.4 MB/s"),
        (99_000_000, 1.0, "99.0 MB/s"),
        (14_000_000_000, 0.07, "200.00 GB/s"),
        (0, 0.0, "0.0 MB/s"),
    ],
)
def test_the_rate_is_said_in_a_unit_in_which_it_is_no_zero(sent, seconds, rate):
    line = SyncReport("run:1:4", sent, seconds, updated=("http://a", "http://b"), failed={"http://c": "gone"}).line()
    assert f"to 2/3 engines in {seconds:.3f} s ({rate};" in line and line.endswith("\n  http://c: gone")
