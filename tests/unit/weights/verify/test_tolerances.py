"""How far log-probabilities may differ: by what both sides compute in, unless configured."""

from __future__ import annotations

import pytest

from rltool.weights.verify.tolerances import check_tolerance, difference_limit


@pytest.mark.parametrize(
    ("trainer", "engine", "device", "tolerance"),
    [
        ("float32", "float32", "cpu", 1e-3),
        ("float32", "float32", "cuda", 1e-2),  # TF32
        ("float32", "float32", None, 1e-2),
        ("bfloat16", "bfloat16", "cpu", 0.2),
        ("float32", "bfloat16", "cuda", 0.2),
        ("bfloat16", "float32", "cuda", 0.2),
        ("float32", "float16", "cuda", 0.2),
        ("float32", None, "cpu", 0.2),
    ],
)
def test_the_value_check_is_strict_where_both_sides_are_exact(trainer, engine, device, tolerance):
    assert check_tolerance(None, trainer, engine, device) == tolerance
    assert check_tolerance(0.07, trainer, engine, device) == 0.07


def test_one_rounding_engine_widens_the_limit_of_a_step():
    assert difference_limit(None, "float32", ["float32", "float32"]) == difference_limit(None, "float32", []) == 0.1
    assert difference_limit(None, "float32", ["float32", "bfloat16"]) == 0.2
    assert difference_limit(None, "bfloat16", []) == 0.2
    assert difference_limit(1e-4, "bfloat16", ["bfloat16"]) == 1e-4
