import random

import pytest

from rltool.algorithms.schedule import plan_micro_batches, split_for_optimizer_steps
from rltool.errors import UsageError


def check(lengths, max_tokens, ranks):
    plan = plan_micro_batches(lengths, max_tokens=max_tokens, data_parallel=ranks)
    assert len(plan) == ranks
    assert sorted(i for rank in plan for micro in rank for i in micro) == list(range(len(lengths)))
    assert len({len(rank) for rank in plan}) == 1
    assert all(sum(lengths[i] for i in micro) <= max_tokens for rank in plan for micro in rank)
    return plan


def test_random_lengths_keep_every_sample_once_within_the_limit_with_equal_counts():
    rng = random.Random(0)
    for _ in range(300):
        ranks = rng.randint(1, 5)
        check([rng.choice([1, 2, 3, 50, 99, 100]) for _ in range(rng.randint(1, 40))], 100, ranks)


def test_a_rank_with_nothing_left_to_split_gets_an_empty_micro_batch():
    assert [len(micro) for rank in check([100, 100, 100], 100, 2) for micro in rank] == [1, 1, 1, 0]
    assert check([100], 100, 2) == [[[0]], [[]]]


def test_ranks_get_near_equal_tokens():
    rng = random.Random(1)
    lengths = [rng.randint(10, 400) for _ in range(256)]
    plan = check(lengths, 4096, 4)
    loads = [sum(lengths[i] for micro in rank for i in micro) for rank in plan]
    assert max(loads) - min(loads) <= 400


def test_a_sample_beyond_the_limit_is_named_with_the_setting():
    with pytest.raises(UsageError, match="max_tokens_per_micro_batch"):
        plan_micro_batches([5, 11], max_tokens=10, data_parallel=1)


def test_prompt_groups_stay_together_over_optimizer_steps():
    groups = [5, 5, 9, 9, 9, 1, 5]
    steps = split_for_optimizer_steps(groups, 2)
    assert steps == [[0, 1, 5, 6], [2, 3, 4]]
    with pytest.raises(UsageError, match="3 prompt groups cannot feed 4"):
        split_for_optimizer_steps(groups, 4)
