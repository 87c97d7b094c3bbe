import random

import pytest
import torch

from rltool.algorithms.schedule import plan_micro_batches, split_for_optimizer_steps
from rltool.errors import UsageError
from rltool.models.cost import ModelCost


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


def test_costs_are_balanced_in_place_of_tokens_and_packing_stays_within_them():
    cost = ModelCost(products=0, attention_width=1)
    lengths = [1000] + [100] * 10
    costs = [cost.training_flops(length) for length in lengths]
    plan = plan_micro_batches(lengths, max_tokens=1000, data_parallel=2, costs=costs)
    assert sorted(i for rank in plan for micro in rank for i in micro) == list(range(11))
    # In tokens the ten short ones weigh as much as the long one; in attention they are a tenth: they stay together.
    assert [sorted(i for micro in rank for i in micro) for rank in plan] == [[0], list(range(1, 11))]
    mixed = [1000] * 2 + [250] * 16
    by_tokens = plan_micro_batches(mixed, max_tokens=2000, data_parallel=2)
    by_cost = plan_micro_batches(
        [1500, *[100] * 15],
        max_tokens=1500,
        data_parallel=2,
        costs=[cost.training_flops(n) for n in [1500, *[100] * 15]],
    )
    assert [sum(mixed[i] for micro in rank for i in micro) for rank in by_tokens] == [3000, 3000]
    assert [sum(1 for micro in rank for _ in micro) for rank in by_cost] == [1, 15]


def test_training_flops_are_six_per_product_and_of_attention_only_the_pairs_that_are_seen():
    cost = ModelCost(products=1000, attention_width=64, windows=((3, 16), (9, 4)))
    seen = torch.ones(7, 7).tril()
    full, windowed = int(seen.sum()), int((seen - seen.tril(-3)).sum())
    assert cost.training_flops(7) == 6 * 1000 * 7 + 3 * 4 * ((64 + 4) * full + 16 * windowed)
    assert cost.batch_flops([7, 7]) == 2 * cost.training_flops(7)


def test_a_sample_beyond_the_limit_is_named_with_the_setting():
    with pytest.raises(UsageError, match="max_tokens_per_micro_batch"):
        plan_micro_batches([5, 11], max_tokens=10, data_parallel=1)


def test_prompt_groups_stay_together_over_optimizer_steps():
    groups = [5, 5, 9, 9, 9, 1, 5]
    steps = split_for_optimizer_steps(groups, 2)
    assert steps == [[0, 1, 5, 6], [2, 3, 4]]
    with pytest.raises(UsageError, match="3 prompt groups with a loss cannot feed 4"):
        split_for_optimizer_steps(groups, 4)


def test_every_optimizer_step_gets_a_group_with_a_loss():
    groups = [5, 5, 9, 9, 9, 1, 5, 3]
    masked = [group != 9 for group in groups]
    # Round-robin by position would give the second step group 9 and 3, the first 5 and 1.
    assert split_for_optimizer_steps(groups, 2, has_loss=masked) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert split_for_optimizer_steps(groups, 3, has_loss=masked) == [[0, 1, 2, 3, 4, 6], [5], [7]]
    one_sample_left = [True, False, False, False, True, False, False, False]
    assert split_for_optimizer_steps(groups, 2, has_loss=one_sample_left) == [[0, 1, 5, 6], [2, 3, 4, 7]]
    with pytest.raises(UsageError, match="2 prompt groups with a loss cannot feed 3"):
        split_for_optimizer_steps(groups, 3, has_loss=one_sample_left)
