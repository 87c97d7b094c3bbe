"""Where two recordings differ."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rltool.cli import main
from rltool.engines.types import VersionSpan
from rltool.errors import UsageError
from rltool.rollout.measure.dump import write_dump
from rltool.rollout.measure.dump_diff import compare_dumps
from rltool.rollout.sample import Sample, SampleStatus


def samples(count=3):
    return [
        Sample(
            7, i, 0, [1, 2], prompt_text="p", response_ids=[3, 4, 5], response_mask=[1, 1, 1],
            response_logprobs=[-0.1, -0.2, -0.3], versions=[VersionSpan("r:0:1", 0, 3)],
            status=SampleStatus.COMPLETED, reward=1.0,
        )
        for i in range(count)
    ]  # fmt: skip


@pytest.fixture
def dumps(tmp_path):
    """write(name, step, samples) -> directory."""

    def write(name, step, found):
        write_dump(tmp_path / name, step=step, seed=0, samples=found)
        return tmp_path / name

    return write


def test_equal_recordings_are_equal(dumps):
    found = compare_dumps(dumps("a", 0, samples()), dumps("b", 0, samples()))
    assert found.equal and (found.steps, found.samples, found.differing) == (1, 3, 0)


def test_the_first_differing_token_is_named_and_all_are_counted(dumps):
    other = samples()
    other[1] = replace(other[1], response_ids=[3, 9, 5], response_logprobs=[-0.1, -0.7, -0.3], reward=0.0)
    other[2] = replace(other[2], reward=0.5)
    found = compare_dumps(dumps("a", 4, samples()), dumps("b", 4, other))
    assert str(found.first) == "step 4, sample 1, token 1: response_ids 4 against 9"
    assert found.differing == 2 and found.by_field == {"response_ids": 1, "response_logprobs": 1, "reward": 2}
    assert found.largest_logprob == pytest.approx(0.5)


def test_a_tolerance_covers_numbers_and_nothing_else(dumps):
    other = samples()
    other[0] = replace(other[0], response_logprobs=[-0.1, -0.2001, -0.3], reward=1.00005)
    a, b = dumps("a", 0, samples()), dumps("b", 0, other)
    assert not compare_dumps(a, b).equal
    assert compare_dumps(a, b, tolerance=1e-3).equal
    other[0] = replace(other[0], response_ids=[3, 4, 6])
    assert str(compare_dumps(a, dumps("c", 0, other), tolerance=1e-3).first).endswith("response_ids 5 against 6")


def test_lengths_samples_and_steps_that_one_has_alone(dumps):
    shorter = [
        replace(s, response_ids=[3], response_mask=[1], response_logprobs=[-0.1], versions=[]) for s in samples(2)
    ]
    a, b = dumps("a", 0, samples()), dumps("b", 0, shorter)
    found = compare_dumps(a, b)
    assert str(found.first) == "step 0, sample 0, token 1: response_ids 4 against 'nothing'"
    assert found.by_field["samples"] == 1
    dumps("b", 1, samples())
    assert compare_dumps(a, b).only_right == [1]
    same, more = dumps("c", 0, samples(2)), dumps("d", 0, samples(3))
    assert str(compare_dumps(same, more).first) == "step 0: 2 samples against 3"


def test_a_directory_without_recordings_is_named(tmp_path, dumps):
    with pytest.raises(UsageError, match="empty holds no recorded rollout"):
        compare_dumps(dumps("a", 0, samples()), tmp_path / "empty")
    with pytest.raises(UsageError, match="--step 3"):
        compare_dumps(tmp_path / "a", tmp_path / "a", step=3)


def test_the_verb_ends_with_1_where_they_differ(dumps, capsys):
    other = samples()
    other[2] = replace(other[2], status=SampleStatus.TRUNCATED)
    # as in a run's directory
    a, b = dumps("runs/a/rollouts", 0, samples()), dumps("b", 0, other)

    def call(*words):
        with pytest.raises(SystemExit) as ended:
            main(["diff-dumps", *map(str, words)])
        return ended.value.code, capsys.readouterr().out

    assert call(a.parent, a) == (0, "equal: 3 samples of 1 steps\n")
    code, text = call(a, b)
    assert code == 1 and text.splitlines()[0].startswith("first difference: step 0, sample 2: status")
    assert "1 of 3 samples of 1 steps differ\n  status: 1\n" in text
