"""Weights of KL and entropy that follow what was measured."""

from __future__ import annotations

import math

import pytest

from rltool.algorithms.contracts import example_batch
from rltool.algorithms.controllers import Coefficients, adapted_entropy_coef, adapted_kl_coef, with_coefficients
from rltool.config.algorithm import AlgorithmConfig


@pytest.mark.parametrize(
    ("kl", "expected"),
    [(6.0, 0.2), (6.6, 0.202), (5.7, 0.199), (60.0, 0.204), (0.0, 0.196), (-3.0, 0.196), (math.nan, 0.2)],
)
def test_the_kl_weight_moves_towards_the_target_by_a_fiftieth_at_most(kl, expected):
    """Ziegler et al. 2019: K = 0.1, the relative error within 0.2."""
    assert adapted_kl_coef(0.2, kl, target=6.0, gain=0.1) == pytest.approx(expected, rel=1e-12)


def test_the_kl_weight_finds_the_target_of_a_policy_that_moves_less_the_more_it_costs():
    coef = 1.0
    for _ in range(400):
        coef = adapted_kl_coef(coef, 0.3 / coef, target=0.05, gain=0.1)
    assert 0.3 / coef == pytest.approx(0.05, rel=1e-3)


@pytest.mark.parametrize(
    ("coef", "entropy", "expected"),
    [
        (0.01, 0.1, (0.015, 0.015)),
        (0.01, 0.2, (0.01, 0.01)),
        (0.01, 0.3, (0.005, 0.0)),
        (0.002, 0.3, (0.0, 0.0)),
        (0.0, 0.1, (0.005, 0.005)),
    ],
)
def test_the_entropy_bonus_grows_below_the_target_and_rests_above_it(coef, entropy, expected):
    assert adapted_entropy_coef(coef, entropy, target=0.2, step=0.005) == pytest.approx(expected)


def test_only_what_is_configured_and_was_measured_is_adapted():
    both = AlgorithmConfig(
        kl={"kind": "loss", "coef": 0.2, "target": 6.0}, entropy={"kind": "bonus", "coef": 0.01, "target": 0.2}
    )
    start = Coefficients.initial(both)
    assert start.applied(both) == both
    assert start.adapted(both, {}) == start
    after = start.adapted(both, {"train/kl": 60.0, "train/entropy": 0.1})
    assert (after.kl, after.entropy, after.entropy_bonus) == pytest.approx((0.204, 0.015, 0.015))
    present = after.applied(both)
    assert (present.kl.coef, present.entropy.coef) == pytest.approx((0.204, 0.015))
    fixed = AlgorithmConfig(kl={"kind": "loss", "coef": 0.2}, entropy={"kind": "bonus", "coef": 0.01})
    assert Coefficients.initial(fixed).adapted(fixed, {"train/kl": 60.0, "train/entropy": 0.1}).applied(fixed) == fixed


def test_the_bonus_is_off_above_the_target_but_what_it_was_is_kept():
    algorithm = AlgorithmConfig(entropy={"kind": "bonus", "coef": 0.02, "target": 0.2})
    above = Coefficients.initial(algorithm).adapted(algorithm, {"train/entropy": 0.5})
    assert above.applied(algorithm).entropy.coef == 0 and above.entropy == pytest.approx(0.015)
    below = above.adapted(algorithm, {"train/entropy": 0.1})
    assert below.applied(algorithm).entropy.coef == pytest.approx(0.02)


def test_the_ranks_get_the_present_weights_with_the_batch():
    configured = AlgorithmConfig(
        kl={"kind": "loss", "coef": 0.2, "target": 6.0}, entropy={"kind": "bonus", "target": 0.2}
    )
    present = Coefficients(0.3, 0.01, 0.01).applied(configured)
    batch, metrics = with_coefficients(example_batch(), configured, present)
    assert batch.kl_coefs.tolist() == pytest.approx([0.3] * 7) and batch.entropy_coefs.tolist() == pytest.approx(
        [0.01] * 7
    )
    assert metrics == {"train/kl_coef": 0.3, "train/entropy_coef": 0.01}
    assert batch.select([3, 1]).kl_coefs.shape == (2,)
    untouched, nothing = with_coefficients(
        example_batch(),
        AlgorithmConfig(kl={"kind": "loss", "coef": 0.2}),
        AlgorithmConfig(kl={"kind": "loss", "coef": 0.2}),
    )
    assert untouched.kl_coefs is None and untouched.entropy_coefs is None and nothing == {}
