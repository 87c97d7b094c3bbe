"""Samples and supervised rows to TrainBatch."""

from array import array

import pytest
import torch

from rltool.engines.types import VersionSpan
from rltool.errors import TrainingStopped, UsageError
from rltool.rollout.batching import mask_metrics, samples_to_batch, supervised_batch, supervised_set, trim
from rltool.rollout.data import Prompt
from rltool.rollout.sample import Sample, SampleStatus


def sample(group, prompt, response, mask=None, reward=1.0, status=SampleStatus.COMPLETED, versions=True):
    mask = mask or [1] * len(response)
    return Sample(
        group_id=group,
        index=0,
        prompt_index=0,
        prompt_ids=prompt,
        response_ids=response,
        response_mask=mask,
        response_logprobs=[-0.25 * (i + 1) if m else 0.0 for i, m in enumerate(mask)],
        reward=reward,
        status=status,
        versions=[VersionSpan("v", 0, len(response))] if versions and response else [],
    )


def test_samples_are_laid_out_back_to_back():
    batch = samples_to_batch(
        [
            sample(7, [1, 2], [3, 4], reward=0.5),
            sample(7, [1, 2], [5], status=SampleStatus.TRUNCATED),
            sample(9, [6], [7, 8, 9], mask=[1, 0, 1]),
        ],
    )
    assert batch.tokens.tolist() == [1, 2, 3, 4, 1, 2, 5, 6, 7, 8, 9]
    assert batch.lengths.tolist() == [4, 3, 4]
    assert batch.loss_mask.tolist() == [0, 0, 1, 1, 0, 0, 1, 0, 1, 0, 1]
    assert batch.rollout_logprobs.tolist() == [0, 0, -0.25, -0.5, 0, 0, -0.25, 0, -0.25, 0, -0.75]
    assert batch.rewards.tolist() == [0.5, 1.0, 1.0]
    assert batch.group_ids.tolist() == [7, 7, 9]
    assert torch.equal(batch.loss_weights, batch.loss_mask)


def test_the_teachers_log_probabilities_are_those_of_the_responses_and_of_all_samples_or_none():
    samples = [sample(0, [1, 2], [3, 4]), sample(0, [1], []), sample(1, [5], [6])]
    assert samples_to_batch(samples).teacher_logprobs is None
    samples[0].teacher_logprobs, samples[2].teacher_logprobs = [-1.0, -2.0], [-0.5]
    assert samples_to_batch(samples).teacher_logprobs.tolist() == [0, 0, -1.0, -2.0, 0, 0, -0.5]
    samples[2].teacher_logprobs = []
    with pytest.raises(ValueError, match="log-probabilities of the teacher: 2 of 3 samples have it"):
        samples_to_batch(samples)
    samples[0].teacher_logprobs = [-1.0]
    with pytest.raises(ValueError, match="2 tokens, 1 log-probabilities of the teacher"):
        samples_to_batch(samples)


def with_topk(one, ids, logprobs):
    one.teacher_topk_ids, one.teacher_topk_logprobs = array("i", ids), array("f", logprobs)
    return one


def test_the_teachers_most_probable_tokens_lie_at_the_responses_tokens_and_are_of_all_samples_or_none():
    inf = float("inf")
    samples = [sample(0, [1, 2], [3, 4]), sample(0, [1], []), sample(1, [5], [6])]
    assert samples_to_batch(samples).teacher_topk_ids is None
    with_topk(samples[0], [3, 9, 4, -1], [-0.5, -1.5, -0.25, -inf])
    with pytest.raises(ValueError, match="most probable tokens of the teacher: 1 of 3 samples have it|2 of 3"):
        samples_to_batch(samples)
    with_topk(samples[2], [7, 6], [-0.125, -4.0])
    batch = samples_to_batch(samples)
    none, lost = [-1, -1], [-inf, -inf]
    assert batch.teacher_topk_ids.tolist() == [none, none, [3, 9], [4, -1], none, none, [7, 6]]
    assert batch.teacher_topk_logprobs.tolist() == [lost, lost, [-0.5, -1.5], [-0.25, -inf], lost, lost, [-0.125, -4.0]]
    part = batch.select([2, 0])
    assert part.teacher_topk_ids.tolist() == [none, [7, 6], none, none, [3, 9], [4, -1]]
    with_topk(samples[2], [7], [-0.125])
    with pytest.raises(ValueError, match=r"samples have \[1, 2\] of them a token"):
        samples_to_batch(samples)
    with_topk(samples[0], [3, 9, 4], [-0.5, -1.5, -0.25])
    with pytest.raises(ValueError, match="2 tokens, 3 most probable tokens of the teacher"):
        samples_to_batch(samples)


def test_reward_parts_are_columns_in_the_order_of_their_weights_and_zero_where_one_did_not_score():
    samples = [sample(0, [1], [2]), sample(0, [1], [2]), sample(1, [1], [2, 3])]
    samples[1].index = samples[2].index = 1
    samples[0].reward_parts, samples[1].reward_parts = {"a": 0.5, "b": 2.0}, {"b": 3.0}
    last = sample(1, [1], [2, 3])
    last.index, last.trajectory, last.reward_parts = 1, 1, {"a": 4.0}
    batch = samples_to_batch([*samples, last], part_weights={"b": 0.1, "a": 1.0})
    assert batch.reward_parts.tolist() == [[2.0, 0.5], [3.0, 0.0], [0.0, 4.0], [0.0, 4.0]], "an episode has its last's"
    torch.testing.assert_close(batch.part_weights, torch.tensor([[0.1, 1.0], [0.1, 0.0], [0.0, 1.0], [0.0, 1.0]]))
    assert samples_to_batch(samples).reward_parts is None
    samples[1].reward_parts = {}
    with pytest.raises(TrainingStopped, match="sample 0/1 has none: its environment, agent or recording gave one"):
        samples_to_batch(samples, part_weights={"a": 1.0})


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


RUN = "0123456789abcdef" * 2


def test_each_sampled_token_has_the_training_step_of_its_weights():
    first = sample(0, [1, 2], [3, 4, 5, 6])
    first.versions = [VersionSpan(f"{RUN}:0:4", 0, 1), VersionSpan(f"{RUN}:1:5", 1, 4)]
    second = sample(0, [1], [2, 3, 4], mask=[1, 0, 1])
    second.versions = [VersionSpan(f"{RUN}:1:12", 0, 1), VersionSpan(f"{RUN}:1:13", 2, 3)]
    empty = sample(0, [1], [])
    across = sample(0, [1], [2, 3, 4], mask=[1, 0, 1])
    across.versions = [VersionSpan(f"{RUN}:1:6", 0, 3)]
    versions = samples_to_batch([first, empty, second, across]).token_versions
    assert versions.tolist() == [-1, -1, 4, 5, 5, 5, -1, -1, 12, -1, 13, -1, 6, -1, 6]


@pytest.mark.parametrize("text", ["default", f"{RUN}:0", f"other-{RUN}:0:1"])
def test_versions_that_no_trainer_of_ours_wrote_leave_the_batch_without(text):
    ours, stock = sample(0, [1], [2]), sample(0, [1], [2])
    ours.versions, stock.versions = [VersionSpan(f"{RUN}:0:4", 0, 1)], [VersionSpan(text, 0, 1)]
    assert samples_to_batch([ours]).token_versions is not None
    assert samples_to_batch([ours, stock]).token_versions is None
    assert samples_to_batch([sample(0, [1], [2], versions=False)]).token_versions is None


def test_a_sampled_token_outside_every_version_span_is_refused():
    one = sample(3, [1], [2, 3])
    one.versions = [VersionSpan(f"{RUN}:0:4", 0, 1)]
    with pytest.raises(ValueError, match="sample 3/0: its version spans .* do not cover every token"):
        samples_to_batch([one])


def removed(*arguments, **fields):
    one = sample(*arguments, **fields)
    one.remove_sample = True
    return one


def test_removed_and_truncated_samples_have_no_loss_and_all_the_rest():
    cut = {"status": SampleStatus.TRUNCATED}
    samples = [
        sample(7, [1], [2, 3]),
        removed(7, [1], [4], reward=5.0),
        sample(7, [1], [5, 6], **cut),
        removed(7, [1], [7], **cut),
    ]
    for one in samples:
        one.versions = [VersionSpan(f"{RUN}:0:4", 0, len(one.response_ids))]
    lenient, strict = samples_to_batch(samples), samples_to_batch(samples, mask_truncated=True)
    assert lenient.loss_mask.tolist() == [0, 1, 1, 0, 0, 0, 1, 1, 0, 0]
    assert strict.loss_mask.tolist() == [0, 1, 1, 0, 0, 0, 0, 0, 0, 0]
    assert strict.token_versions.tolist() == [-1, 4, 4, -1, -1, -1, -1, -1, -1, -1]
    for batch in (lenient, strict):
        assert torch.equal(batch.loss_weights, batch.loss_mask)
        assert batch.sampled.tolist() == [0, 1, 1, 0, 1, 0, 1, 1, 0, 1]
        assert batch.rollout_logprobs.tolist() == [0, -0.25, -0.5, 0, -0.25, 0, -0.25, -0.5, 0, -0.25]
        assert batch.rewards.tolist() == [1.0, 5.0, 1.0, 1.0] and batch.group_ids.tolist() == [7] * 4
    counts = {"rollout/samples_removed": 2.0, "rollout/samples_masked_truncated": 1.0}
    assert mask_metrics(samples, mask_truncated=True) == counts
    assert mask_metrics(samples, mask_truncated=False) == {**counts, "rollout/samples_masked_truncated": 0.0}


def test_a_batch_without_any_loss_says_why():
    samples = [removed(0, [1], [2]), sample(0, [1], [2], status=SampleStatus.TRUNCATED), sample(0, [1], [])]
    with pytest.raises(
        TrainingStopped, match="of 3 samples 1 were removed by a hook .*, 1 masked .*mask_truncated.*, 1 have no token"
    ):
        samples_to_batch(samples, mask_truncated=True)
    assert samples_to_batch(samples).num_loss_tokens == 1


def groups_of(*sizes):
    return [[sample(group, [1], [index]) for index in range(size)] for group, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "multiple", "left", "cut"),
    [
        ([4, 4], 4, [4, 4], 0),
        ([4, 3, 4], 4, [4, 3, 1], 3),
        ([3, 4, 4], 11, [3, 4, 4], 0),
        ([4, 4, 3], 8, [4, 4], 3),
        ([2, 2, 1], 1, [2, 2, 1], 0),
    ],
)
def test_a_batch_is_trimmed_to_whole_global_batches_from_its_end(sizes, multiple, left, cut):
    groups = groups_of(*sizes)
    kept, trimmed = trim(groups, multiple)
    assert [len(group) for group in kept] == left and trimmed == cut
    assert [s for group in kept for s in group] == [s for group in groups for s in group][: sum(left)]
    assert [len(group) for group in groups] == sizes, "the groups given are as they were"


def test_less_than_one_global_batch_is_an_error():
    with pytest.raises(
        TrainingStopped, match=r'7 samples are left .* one global batch of 8.*rollout\.batch_size = "dynamic"'
    ):
        trim(groups_of(4, 3), 8)


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
