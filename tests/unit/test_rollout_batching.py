"""Samples and supervised rows to TrainBatch."""

import pytest
import torch

from rltool.engines.types import VersionSpan
from rltool.errors import UsageError
from rltool.rollout.batching import samples_to_batch, supervised_batch, supervised_set
from rltool.rollout.data import Prompt
from rltool.rollout.sample import Sample, SampleStatus


def sample(group, prompt, response, mask=None, reward=1.0, status=SampleStatus.COMPLETED, versions=True):
    mask = mask or [1] * len(response)
    return Sample(
        group_id=group, index=0, prompt_index=0, prompt_ids=prompt, response_ids=response, response_mask=mask,
        response_logprobs=[-0.25 * (i + 1) if m else 0.0 for i, m in enumerate(mask)], reward=reward, status=status,
        versions=[VersionSpan("v", 0, len(response))] if versions and response else [],
    )


def test_samples_are_laid_out_back_to_back():
    batch = samples_to_batch(
        [sample(7, [1, 2], [3, 4], reward=0.5), sample(7, [1, 2], [5], status=SampleStatus.TRUNCATED), sample(9, [6], [7, 8, 9], mask=[1, 0, 1])],
    )
    assert batch.tokens.tolist() == [1, 2, 3, 4, 1, 2, 5, 6, 7, 8, 9]
    assert batch.lengths.tolist() == [4, 3, 4]
    assert batch.loss_mask.tolist() == [0, 0, 1, 1, 0, 0, 1, 0, 1, 0, 1]
    assert batch.rollout_logprobs.tolist() == [0, 0, -0.25, -0.5, 0, 0, -0.25, 0, -0.25, 0, -0.75]
    assert batch.rewards.tolist() == [0.5, 1.0, 1.0]
    assert batch.group_ids.tolist() == [7, 7, 9]
    assert torch.equal(batch.loss_weights, batch.loss_mask)


@pytest.mark.parametrize("status", [SampleStatus.PENDING, SampleStatus.ABORTED, SampleStatus.FAILED])
def test_unfinished_samples_are_refused(status):
    with pytest.raises(ValueError, match="drop it before training"):
        samples_to_batch([sample(0, [1], [2], status=status)])


def test_a_field_that_only_some_samples_have_is_refused():
    with pytest.raises(ValueError, match="reward: 1 of 2 samples have it"):
        samples_to_batch([sample(0, [1], [2]), sample(0, [1], [2], reward=None)])
    with pytest.raises(ValueError, match="weight versions: 1 of 2"):
        samples_to_batch([sample(0, [1], [2]), sample(0, [1], [2], versions=False)])
    with pytest.raises(ValueError, match="no sample has a reward"):
        samples_to_batch([sample(0, [1], [2], reward=None)])
    with pytest.raises(ValueError, match="at least one"):
        samples_to_batch([])


class Letters:
    def encode_target(self, text):
        return [*map(ord, text), 0]


def row(index, **fields):
    return Prompt(index=index, prompt_ids=(1, 2), text="p", **fields)


def test_supervised_rows_have_their_loss_on_target_and_eos():
    rows = [row(0, label="ab"), row(5, label="c")]
    found = supervised_set(rows, Letters(), max_response_tokens=3)
    batch = supervised_batch(found.prompts, found.targets)
    assert batch.tokens.tolist() == [1, 2, 97, 98, 0, 1, 2, 99, 0]
    assert batch.loss_mask.tolist() == [0, 0, 1, 1, 1, 0, 0, 1, 1]
    assert batch.lengths.tolist() == [5, 4]
    assert batch.rollout_logprobs is None and batch.group_ids.tolist() == [0, 1]


def test_response_goes_before_label():
    found = supervised_set([row(0, label="a", response="b")], Letters(), max_response_tokens=9)
    assert found.targets == {0: [98, 0]}


def test_targets_beyond_the_limit_are_left_out_and_counted():
    found = supervised_set([row(0, label="abc"), row(1, label="ab")], Letters(), max_response_tokens=3)
    assert [p.index for p in found.prompts] == [1] and found.num_too_long == 1
    with pytest.raises(UsageError, match="all 1 targets are longer"):
        supervised_set([row(0, label="abc")], Letters(), max_response_tokens=3)


def test_rows_without_target_and_mixed_rows_are_errors():
    with pytest.raises(UsageError, match="row 3 has neither"):
        supervised_set([row(3)], Letters(), max_response_tokens=3)
    with pytest.raises(UsageError, match=r"1 of 2 rows have a `response`, row 1 does not"):
        supervised_set([row(0, response="a"), row(1, label="b")], Letters(), max_response_tokens=3)
