import pytest

from rltool.algorithms.contracts import check_advantage_function, check_loss_function
from rltool.errors import ContractViolation

HERE = "tests.unit.algorithms.own_algorithms"


@pytest.mark.parametrize("name", ["centred", "per_token"])
def test_a_sound_advantage_function_passes(name):
    check_advantage_function(f"{HERE}:{name}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("by_reshape", "another order.*group_ids"),
        ("in_place", "changed its inputs: rewards"),
        ("as_list", "returned list"),
        ("one_number", r"returned shape \(\), expected \(7,\) or"),
        ("not_finite", "not finite"),
        ("raises", "RuntimeError: this function is broken"),
    ],
)
def test_a_broken_advantage_function_is_told_what_it_breaks(name, message):
    with pytest.raises(ContractViolation, match=message):
        check_advantage_function(f"{HERE}:{name}")


@pytest.mark.parametrize("name", ["reinforce", "squared"])
def test_a_sound_loss_function_passes(name):
    check_loss_function(f"{HERE}:{name}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("summed", r"returned shape \(\), expected \(10,\)"),
        ("detached", "no gradient"),
        ("no_pull", "0 everywhere"),
        ("unbounded", "not finite"),
        ("over_the_micro_batch", "alone has another loss"),
        ("raises", "this function is broken"),
    ],
)
def test_a_broken_loss_function_is_told_what_it_breaks(name, message):
    with pytest.raises(ContractViolation, match=message):
        check_loss_function(f"{HERE}:{name}")
