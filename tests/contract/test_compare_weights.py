"""`rltool debug weights` between two engines on real sockets, and what a checkpoint implies for an engine."""

from __future__ import annotations

import pytest
import torch

from rltool.cli import main
from rltool.engines.dialects.checksums import Compared
from rltool.weights.verify.verdict import Sampled, verdict
from tests.contract.fakes.sglang import FakeSglang
from tests.contract.fakes.vllm import FakeVllm

TENSORS = {"embed": torch.arange(6.0), "layers.0": torch.ones(3), "layers.1": torch.ones(2), "norm": torch.zeros(4)}
SAMPLES = [Sampled((5, 6, 7), (-1.0, -2.0)), Sampled((5, 8), (-0.5,))]


@pytest.fixture
def two(fake_vllm):
    """Engines with the same weights."""
    with FakeVllm(key="test-key") as other:
        for engine in (fake_vllm, other):
            engine.tensors = dict(TENSORS)
        yield fake_vllm, other


@pytest.fixture
def debug_weights(key_file, capsys):
    def run(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(["debug", "weights", *words, "--key-file", str(key_file)])
        out = capsys.readouterr()
        return ended.value.code or 0, out.out + out.err

    return run


def test_engines_with_the_same_weights_are_found_equal_by_bits_and_values(two, debug_weights):
    code, said = debug_weights(two[0].url, "--engine", two[1].url)
    assert code == 0 and "the same weights as" in said
    assert "4 of 4 parameters are bit-equal" in said and "128 sampled tokens agree" in said


def test_the_first_parameter_that_differs_is_named_and_the_exit_code_is_1(two, debug_weights):
    for name in ("norm", "layers.1"):
        two[1].tensors[name] = two[1].tensors[name] + 1
    code, said = debug_weights(two[0].url, "--engine", two[1].url)
    assert code == 1 and "other weights than" in said
    assert "2 of 4 parameters are bit-equal, 2 differ\n" in said
    assert "the first parameter that differs: layers.1; then norm\n" in said


def test_of_engines_with_several_ranks_the_one_that_differs_is_named(two, debug_weights):
    for engine in two:
        engine.of_ranks = [{}, {"layers.0": torch.zeros(3)}]
    assert debug_weights(two[0].url, "--engine", two[1].url)[0] == 0
    two[1].of_ranks[1]["layers.1"] = torch.zeros(2)
    code, said = debug_weights(two[0].url, "--engine", two[1].url)
    assert code == 1 and "3 of 4 parameters are bit-equal, 1 differ (over 2 ranks)\n" in said
    assert "the first parameter that differs: layers.1 (of dp0:pp0:pcp0:tp1)\n" in said


def test_values_that_differ_are_found_where_the_bits_are_equal(two, debug_weights):
    two[1].logprob_shift = 0.5
    code, said = debug_weights(two[0].url, "--engine", two[1].url)
    assert code == 1 and "4 of 4 parameters" in said and "sampled tokens differ: mean difference 5.00e-01" in said
    assert debug_weights(two[0].url, "--engine", two[1].url, "--tolerance", "0.6")[0] == 0


def test_engines_of_two_kinds_are_compared_by_values_alone(two, debug_weights, tmp_path):
    (tmp_path / "key").write_text("fake-key")
    for engine in two:
        engine.key, engine._policy = None, None
        engine.vocab_size = 100
    with FakeSglang() as other:
        code, said = debug_weights(other.url, "--engine", two[0].url)
    assert "checksums were not compared: the two engines differ in kind" in said and code == 1


def test_an_engine_that_is_paused_is_not_waited_for(two, debug_weights):
    two[0].batch.freeze()
    code, said = debug_weights(two[0].url, "--engine", two[1].url)
    assert code == 2 and "is paused" in said and "engines resume" in said


@pytest.mark.parametrize("words", [(), ("--engine", "x:1", "--checkpoint", "y"), ("--engine", "x:1", "--run", "y")])
def test_one_thing_to_compare_with_is_wanted(fake_vllm, debug_weights, words):
    code, said = debug_weights(fake_vllm.url, *words)
    assert code == 2 and "one of --checkpoint DIRECTORY, --engine HOST:PORT, --run NAME" in said


def test_the_settings_of_a_run_are_its_own(debug_weights):
    code, said = debug_weights("--run", "job")  # and the key file
    assert code == 2 and "leave the others out" in said


# -- the verdict


def test_values_alone_decide_where_there_are_no_checksums():
    assert verdict("no checksums", SAMPLES, [[-1.0, -2.0], [-0.6]], 0.1).equal
    assert not verdict("no checksums", SAMPLES, [[-1.0, -2.0], [-0.9]], 0.1).equal


def test_a_value_that_is_not_a_number_is_no_agreement():
    assert not verdict("no checksums", SAMPLES, [[-1.0, float("nan")], [-0.5]], 0.1).equal


def test_bits_that_differ_are_a_difference_whatever_the_values_say():
    differing = dict.fromkeys("abcdefg", ("tp0",))
    found = verdict(Compared(1, differing, ("x",)), SAMPLES, [[-1.0, -2.0], [-0.5]], 0.1)
    assert not found.equal
    assert "1 of 8 parameters are bit-equal, 7 differ; 1 more cannot be compared" in found.lines[0]
    assert found.lines[1] == "the first parameter that differs: a; then b, c, d, e and 2 more"
