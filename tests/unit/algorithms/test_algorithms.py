import math

import pytest
import torch

from rltool.algorithms.advantages import group_advantages
from rltool.algorithms.batch import TrainBatch
from rltool.algorithms.kl import k3
from rltool.algorithms.losses import ppo_loss
from rltool.algorithms.mismatch import logprob_difference
from rltool.algorithms.ragged import broadcast_to_tokens


def plain_group_advantages(rewards, groups, normalize_std):
    result = []
    for reward, group in zip(rewards.tolist(), groups.tolist(), strict=True):
        members = [r for r, g in zip(rewards.tolist(), groups.tolist(), strict=True) if g == group]
        values = torch.tensor(members, dtype=torch.float64)
        if len(members) == 1:
            result.append(0.0)
            continue
        advantage = reward - values.mean().item()
        result.append(advantage / (values.std().item() + 1e-6) if normalize_std else advantage)
    return torch.tensor(result)


@pytest.mark.parametrize("normalize_std", [True, False])
def test_group_advantages_match_a_plain_loop_for_shuffled_groups_of_any_size(normalize_std):
    groups = torch.tensor([7, 3, 7, 99, 3, 7, -1, 3, 7])
    rewards = torch.rand(9, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        group_advantages(rewards, groups, normalize_std=normalize_std),
        plain_group_advantages(rewards, groups, normalize_std),
    )


def test_one_dropped_sample_does_not_mix_groups():
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0])  # group 0 lost one of its three samples
    advantages = group_advantages(rewards, torch.tensor([0, 0, 1, 1, 1]), normalize_std=True)
    assert advantages.tolist() == [0.0] * 5


def test_a_group_of_one_has_no_advantage():
    assert group_advantages(torch.tensor([5.0]), torch.tensor([0]), normalize_std=True).tolist() == [0.0]


def test_k3_is_zero_at_equality_positive_elsewhere_and_its_gradient_sees_the_reference():
    ours = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    value = k3(ours, torch.tensor([-1.0, -2.0, -0.5]))
    assert value[0] == 0 and bool((value[1:] > 0).all())
    value.sum().backward()
    assert ours.grad[0] == 0 and ours.grad[1] > 0 > ours.grad[2]


def test_ppo_loss_clips_only_where_the_clip_lowers_the_objective():
    old = torch.zeros(4)
    new = torch.log(torch.tensor([1.5, 0.5, 1.5, 0.5]))
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    result = ppo_loss(new - old, advantages, clip_low=0.2, clip_high=0.28)
    torch.testing.assert_close(result.loss, torch.tensor([-1.28, -0.5, 1.5, 0.8]))
    assert result.clipped.tolist() == [1.0, 0.0, 0.0, 1.0]


def test_ppo_loss_gradient_on_policy_is_minus_advantage():
    logprobs = torch.tensor([-2.0, -3.0], requires_grad=True)
    ppo_loss(logprobs - logprobs.detach(), torch.tensor([0.5, -2.0]), clip_low=0.2, clip_high=0.2).loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([-0.5, 2.0]))


def test_a_wild_ratio_gives_a_finite_loss_and_gradient():
    logprobs = torch.tensor([0.0], requires_grad=True)
    loss = ppo_loss(logprobs - torch.tensor([-1e4]), torch.tensor([-1.0]), clip_low=0.2, clip_high=0.2).loss
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(logprobs.grad).all()


@pytest.mark.parametrize("selection", [torch.tensor([0.0, 1.0, 1.0]), torch.tensor([False, True, True])], ids=str)
def test_log_probabilities_are_compared_at_the_selected_tokens_alone(selection):
    ours, theirs = torch.tensor([9.0, -1.0, -2.0]), torch.tensor([0.0, -1.0, -2.5])
    found = logprob_difference(ours, theirs, selection)
    assert found.abs_mean == pytest.approx(0.25) and found.abs_max == pytest.approx(0.5) and found.tokens == 2
    # k3 of KL(engine || trainer): mean of exp(r) - 1 - r with r = trainer - engine
    assert found.kl == pytest.approx((math.exp(0.5) - 1.5) / 2)
    assert found.metrics == {
        "train/logprob_compared_tokens": 2.0,
        "train/logprob_abs_diff_mean": found.abs_mean,
        "train/logprob_abs_diff_max": found.abs_max,
        "train/mismatch_kl": found.kl,
    }


def test_no_token_to_compare_is_not_taken_for_agreement():
    found = logprob_difference(torch.zeros(3), torch.zeros(3), torch.zeros(3))
    assert found.tokens == 0 and not found.abs_mean <= 1.0 and not found.abs_max <= 1.0 and not found.kl <= 1.0
    assert found.metrics == {"train/logprob_compared_tokens": 0.0}


def batch():
    lengths = torch.tensor([2, 3, 1])
    mask = torch.tensor([0, 1, 0, 1, 1, 0], dtype=torch.float32)
    return TrainBatch(
        tokens=torch.arange(6), lengths=lengths, loss_mask=mask, rewards=torch.tensor([1.0, 0.0, 0.5]),
        group_ids=torch.tensor([4, 4, 5]), loss_weights=mask,
        advantages=broadcast_to_tokens(torch.tensor([1.0, 2.0, 3.0]), lengths, mask),
    )  # fmt: skip


def test_a_batch_selects_whole_samples_in_the_asked_order():
    chosen = batch().select([1, 0])
    assert chosen.tokens.tolist() == [2, 3, 4, 0, 1]
    assert chosen.lengths.tolist() == [3, 2]
    assert chosen.advantages.tolist() == [0, 2, 2, 0, 1]
    assert chosen.old_logprobs is None


def test_an_empty_micro_batch_is_filled_with_a_sample_that_has_no_loss():
    filler = batch().micro_batch([])
    assert filler.tokens.tolist() == [5] and filler.num_loss_tokens == 0 and filler.loss_weights.tolist() == [0]


def test_a_batch_refuses_a_field_of_the_wrong_length_or_dtype():
    with pytest.raises(ValueError, match="old_logprobs"):
        batch().replace(old_logprobs=torch.zeros(5))
    with pytest.raises(ValueError, match="tokens is torch.int32"):
        batch().replace(tokens=torch.zeros(6, dtype=torch.int32))
