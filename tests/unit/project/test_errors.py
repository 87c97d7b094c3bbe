"""What crosses rooms keeps what it carries."""

import copy
import pickle

import pytest

from rltool.errors import EngineRejected, MissingLogprobs, RltoolError, UsageError


class Timed(RltoolError):
    """An error whose constructor takes more than a message."""

    def __init__(self, seconds: float, *, url: str) -> None:
        super().__init__(f"{url} took {seconds:g} s")
        self.url = url


def test_context_goes_around_the_message_and_the_class_stays():
    again = MissingLogprobs("two tokens, one value").with_context(before="sample 3/1: ", after=" (gave up)")
    assert type(again) is MissingLogprobs
    assert str(again) == "sample 3/1: two tokens, one value (gave up)"


@pytest.mark.parametrize("transport", [lambda error: error, copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_the_status_of_a_rejection_survives_context_and_transport(transport):
    again = transport(EngineRejected("no such route", 404).with_context(before="http://a:1: "))
    assert (type(again), again.status, str(again)) == (EngineRejected, 404, "http://a:1: no such route")


def test_a_constructor_with_other_parameters_is_not_called_again():
    again = Timed(2.5, url="http://a:1").with_context(before="step 4: ")
    assert (again.url, str(again)) == ("http://a:1", "step 4: http://a:1 took 2.5 s")


def test_the_original_is_left_as_it_was():
    error = UsageError("wrong flag")
    error.with_context(before="--x: ")
    assert str(error) == "wrong flag"
