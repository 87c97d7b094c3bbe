"""Paths of checkpoints: what is one, and what is wrong with one that is not."""

from __future__ import annotations

import re

import pytest

from rltool.errors import UsageError
from rltool.tinker.paths import SAMPLERS, SHARED, STATES, CheckpointPath, checkpoint_name, parse_path, unnamed

MODEL = "0123456789abcdef:train:0"


@pytest.mark.parametrize("kind", [STATES, SAMPLERS])
@pytest.mark.parametrize("model", [MODEL, SHARED])
@pytest.mark.parametrize("name", ["a", "step_1", "1.0-b", "a..b", "x" * 100])
def test_a_path_is_read_as_it_was_written(model, kind, name):
    path = CheckpointPath(model, kind, name)
    assert str(path) == f"tinker://{model}/{kind}/{name}"
    assert parse_path(str(path)) == parse_path(str(path), kind) == path and not path.is_unnamed


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (None, "None is no path of a checkpoint"), (5, "5 is no path"), ("", "'' is no path"),
        (["tinker://m/weights/a"], "is no path"), ("m/weights/a", "is no path"), ("TINKER://m/weights/a", "is no path"),
        ("/tinker://m/weights/a", "is no path"), ("https://m/weights/a", "is no path"),
        ("tinker://", "has 1 parts, expected tinker://MODEL/weights|sampler_weights/NAME"),
        ("tinker://m/weights", "has 2 parts"), ("tinker://m/weights/a/b", "has 4 parts"),
        ("tinker://m/weights/a/", "has 4 parts"), ("tinker:///m/weights/a", "has 4 parts"),
        ("tinker://m//weights/a", "has 4 parts"), ("tinker://m/weights/../a", "has 4 parts"),
        ("tinker:///weights/a", "'' is no model's name"), ("tinker://../weights/a", "'..' is no model's name"),
        ("tinker://./weights/a", "'.' is no model's name"), ("tinker://m\n/weights/a", "is no model's name"),
        ("tinker://m\0/weights/a", "is no model's name"), ("tinker://m m/weights/a", "is no model's name"),
        (f"tinker://{'m' * 101}/weights/a", "is no model's name"),
        ("tinker://m//a", "'' is no kind of checkpoint"), ("tinker://m/Weights/a", "'Weights' is no kind"),
        ("tinker://m/weights%2fa/b", "is no kind"), ("tinker://m/../a", "'..' is no kind"),
        ("tinker://m/weights/", "a checkpoint's name is letters"), ("tinker://m/weights/..", "a checkpoint's name is"),
        ("tinker://m/weights/.", "a checkpoint's name is"), ("tinker://m/weights/.hidden", "a checkpoint's name is"),
        ("tinker://m/weights/a\n", "a checkpoint's name is"), ("tinker://m/weights/a\\b", "a checkpoint's name is"),
        ("tinker://m/weights/a b", "a checkpoint's name is"), ("tinker://m/weights/ä", "a checkpoint's name is"),
        (f"tinker://m/weights/{'x' * 101}", "at most 100"), (f"tinker://m/sampler_weights/{unnamed(1)}", "name is"),
    ],
)  # fmt: skip
def test_what_is_no_path_is_refused_by_what_is_wrong(path, message):
    with pytest.raises(UsageError, match=re.escape(message)) as error:
        parse_path(path)
    assert repr(path) in str(error.value)


def test_a_path_of_the_other_kind_is_refused_by_name():
    with pytest.raises(UsageError, match="is a checkpoint for sampling, one for training is wanted: .*/weights/"):
        parse_path(f"tinker://{MODEL}/sampler_weights/a", STATES)
    with pytest.raises(UsageError, match="is a checkpoint for training, one for sampling is wanted"):
        parse_path(f"tinker://{MODEL}/weights/a", SAMPLERS)


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "a/b", "/a", ".unnamed-000000000001", "x" * 101, None, 5])
def test_a_checkpoints_name_is_no_path(name):
    with pytest.raises(UsageError, match="a checkpoint's name is letters"):
        checkpoint_name(name)


def test_weights_without_a_name_are_in_the_order_of_their_numbers():
    assert sorted(map(unnamed, (10, 9, 123456))) == [unnamed(seq) for seq in (9, 10, 123456)]
    assert CheckpointPath(MODEL, SAMPLERS, unnamed(3)).is_unnamed
