"""Ages of tokens, and what becomes of old ones."""

from __future__ import annotations

import pytest
import torch

from rltool.algorithms.batch import TrainBatch
from rltool.algorithms.staleness import current_tokens, mask_older_than, staleness_metrics, token_ages
from rltool.errors import TrainingStopped, UsageError


def batch(versions: list[int] | None) -> TrainBatch:
    """Two samples of four tokens, prompts of one; the third token of the second was inserted by an environment."""
    mask = torch.tensor([0, 1, 1, 1, 0, 1, 0, 1], dtype=torch.float32)
    return TrainBatch(
        tokens=torch.arange(8), lengths=torch.tensor([4, 4]), loss_mask=mask, rewards=torch.ones(2),
        group_ids=torch.zeros(2, dtype=torch.int64), loss_weights=2 * mask, rollout_logprobs=-mask,
        token_versions=None if versions is None else torch.tensor(versions),
    )  # fmt: skip


MIXED = [-1, 3, 5, 6, -1, 4, -1, 6]


def test_the_age_of_a_loss_token_is_the_step_minus_its_version():
    assert token_ages(batch(MIXED), 6).tolist() == [0, 3, 1, 0, 0, 2, 0, 0]
    assert staleness_metrics(batch(MIXED), 6) == {"rollout/staleness_mean": 6 / 5, "rollout/staleness_max": 3.0}
    assert staleness_metrics(batch(MIXED), 8) == {"rollout/staleness_mean": 16 / 5, "rollout/staleness_max": 5.0}


def test_unknown_versions_have_no_age_and_no_metrics():
    assert staleness_metrics(batch(None), 6) == {}
    with pytest.raises(ValueError, match="token_versions is None"):
        token_ages(batch(None), 6)
    with pytest.raises(UsageError, match=r"leave algorithm\.mask_tokens_older_than out"):
        mask_older_than(batch(None), 6, 1)


@pytest.mark.parametrize(
    ("limit", "mask", "count"),
    [
        (0, [0, 0, 0, 1, 0, 0, 0, 1], 3),
        (1, [0, 0, 1, 1, 0, 0, 0, 1], 2),
        (2, [0, 0, 1, 1, 0, 1, 0, 1], 1),
        (3, [0, 1, 1, 1, 0, 1, 0, 1], 0),
    ],
)
def test_tokens_older_than_the_limit_lose_their_loss_and_nothing_else(limit, mask, count):
    before = batch(MIXED)
    found, metrics = mask_older_than(before, 6, limit)
    kept = torch.tensor(mask, dtype=torch.float32)
    assert metrics == {"rollout/tokens_masked_stale": count}
    assert torch.equal(found.loss_mask, kept) and torch.equal(found.loss_weights, 2 * kept)
    assert found.token_versions.tolist() == [v if m else -1 for v, m in zip(MIXED, mask, strict=True)]
    assert staleness_metrics(found, 6)["rollout/staleness_max"] <= limit
    # Sampled by the policy all the same.
    assert torch.equal(found.sampled, before.loss_mask) and torch.equal(found.rollout_logprobs, before.rollout_logprobs)


def test_masking_twice_remembers_what_was_sampled():
    once, _ = mask_older_than(batch(MIXED), 6, 2)
    twice, metrics = mask_older_than(once, 6, 0)
    assert metrics == {"rollout/tokens_masked_stale": 2} and torch.equal(twice.sampled, batch(MIXED).loss_mask)


def test_a_batch_of_stale_tokens_alone_is_an_error_that_says_so():
    with pytest.raises(
        TrainingStopped, match=r"step 9: no token with a loss is left, all 5 are older than 2 training steps"
    ):
        mask_older_than(batch(MIXED), 9, 2)


def test_current_tokens_are_those_of_the_weights_that_are_trained_now():
    assert current_tokens(batch(MIXED), 6).tolist() == [False, False, False, True, False, False, False, True]
    assert not current_tokens(batch(MIXED), 2).any(), "later weights, as in a replay, are other weights too"
    assert not current_tokens(batch(None), 6).any()
    masked = batch(MIXED).replace(loss_mask=torch.tensor([0, 0, 0, 0, 0, 1, 0, 1.0]))
    assert current_tokens(masked, 6).tolist() == [False] * 7 + [True], (
        "no loss, no log-probability of the training forward"
    )
