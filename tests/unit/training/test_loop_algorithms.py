"""What the loop hands to the trainer under each kind of algorithm, with a trainer that only remembers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rltool.algorithms.batch import TrainBatch, Wide, fetched
from rltool.algorithms.contracts import example_batch
from rltool.config.loader import load_config
from rltool.config.train import TrainConfig
from rltool.training.loop import Loop, Parts, Progress
from rltool.training.stopping import StopSignal
from tests import plain_algorithms as plain
from tests.declared import Store
from tests.unit.training.test_loop import Saves

RESPONSE = 6
TOPK_IDS = torch.arange(2 * len(example_batch().tokens), dtype=torch.int32).view(-1, 2)
ENTROPIES = torch.rand(len(example_batch().tokens), generator=torch.Generator().manual_seed(9))


class RememberingTrainer:
    """Has the log-probabilities of `example_batch`, and keeps every batch that it is to train on."""

    def __init__(self) -> None:
        self.known = {
            "policy": example_batch().old_logprobs,
            "reference": example_batch().ref_logprobs,
            "teacher": example_batch().teacher_logprobs,
        }
        self.asked: list[str] = []
        self.trained: list[TrainBatch] = []
        self.store = Store()

    def logprobs(self, batch: TrainBatch, *, weights: str = "policy") -> torch.Tensor:
        self.asked.append(weights)
        return self.known[weights].clone()

    def logprobs_and_entropies(self, batch: TrainBatch) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append("policy with entropies")
        return self.known["policy"].clone(), ENTROPIES

    def with_teacher_fields(self, batch: TrainBatch) -> TrainBatch:
        self.asked.append("teacher's tokens")
        values = {"teacher_topk_ids": TOPK_IDS, "teacher_topk_logprobs": -TOPK_IDS.float()}
        return batch.replace(wide=(*batch.wide, Wide.cut(values, batch.lengths, self.store.put)))

    def forward_backward(self, batch: TrainBatch, *, on_policy: bool = False) -> tuple[torch.Tensor, dict[str, float]]:
        assert on_policy == (batch.old_logprobs is None)
        self.trained.append(batch)
        order = [int(token) for token in batch.tokens]  # tokens of the example are numbered
        return self.known["policy"][order], {"train/loss": 0.0}

    def optimizer_step(self) -> dict[str, float]:
        return {"train/skipped": 0.0, "train/grad_norm": 1.0}

    def train_step(self, batch: TrainBatch) -> dict[str, float]:
        self.trained.append(batch)
        return {"train/loss": 0.0, **self.optimizer_step()}


def train(*sets: str, scored: bool = False) -> tuple[RememberingTrainer, dict[str, float], TrainConfig]:
    common = ["model.path=model", f"sampling.max_response_tokens={RESPONSE}", "monitor.logprob_difference_limit=10.0"]
    config = load_config(TrainConfig, [], [*common, *sets]).config
    trainer = RememberingTrainer()
    nothing: Any = None
    loop = Loop(config, Parts(trainer, nothing, None, Saves(), nothing, nothing, StopSignal()), Progress(0))
    fresh = example_batch().replace(old_logprobs=None, ref_logprobs=None, token_rewards=None)
    if not scored:
        fresh = fresh.replace(teacher_logprobs=None)
    metrics = loop.train(fresh)
    return trainer, metrics, config


def expected_advantages(config: TrainConfig) -> torch.Tensor:
    return plain.advantages(example_batch(), config.algorithm, RESPONSE)


@pytest.mark.parametrize(
    ("sets", "asked", "metrics"),
    [
        (["algorithm.kl={kind='loss', coef=0.1}"], ["reference"], []),
        (["algorithm.overlong_buffer=3"], [], ["train/overlong_fraction"]),
        (
            ["algorithm.advantage=reinforce_pp", "algorithm.kl={kind='reward', coef=0.1}"],
            ["policy", "reference"], ["train/kl"],
        ),
        (["algorithm.advantage=distill", "model.teacher_path=teacher"], ["policy", "teacher"], []),
        (
            ["algorithm.is_weights=sequence", "algorithm.is_weights.cap=1.05"],
            ["policy"], ["train/is_weight_mean", "train/is_truncated_fraction"],
        ),
        (
            ["algorithm.is_weights=token", "algorithm.is_weights.normalize=true", "algorithm.is_veto=0.9"],
            ["policy"], ["train/is_weight_mean", "train/vetoed_fraction"],
        ),
        (["algorithm.distill_coef=0.2", "model.teacher_path=teacher"], ["policy", "teacher"], []),
        (["algorithm.advantage=examples.algorithms:opo", "algorithm.objective=reinforce"], ["policy"], []),
        (
            ["algorithm.is_mask=sequence", "algorithm.is_mask.low=0.95", "algorithm.is_mask.high=1.05"],
            ["policy"], ["train/masked_fraction"],
        ),
    ],
    ids=str,
)  # fmt: skip
def test_one_step_gets_what_the_algorithm_needs_and_no_more(sets, asked, metrics):
    trainer, measured, config = train(*sets)
    assert trainer.asked == asked
    for name in metrics:
        assert measured[name] != 0, name
    assert measured["train/logprob_abs_diff_mean"] > 0 and "train/advantage_std" in measured
    (batch,) = trainer.trained
    torch.testing.assert_close(batch.advantages, expected_advantages(config), rtol=1e-5, atol=1e-6)
    if config.algorithm.weights_policy_loss:
        factors = [value for sample in plain.is_weight(example_batch(), config.algorithm) for value in sample.values()]
        torch.testing.assert_close(batch.is_weights[batch.loss_mask > 0], torch.tensor(factors))
    else:
        assert batch.is_weights is None


@pytest.mark.parametrize(
    ("more", "asked"),
    [
        (["algorithm.advantage=none"], ["teacher's tokens"]),
        ([], ["teacher's tokens"]),
        (["algorithm.distill_coef=0.2"], ["policy", "teacher", "teacher's tokens"]),
    ],
)
def test_the_teachers_tokens_go_to_every_optimizer_step(more, asked):
    trainer, _, config = train("algorithm.distill_kl_coef=1.0", "model.teacher_path=teacher", *more)
    assert trainer.asked == asked
    (batch,) = trainer.trained
    assert batch.teacher_topk_ids is None, "the driver has references"
    (batch,) = fetched([batch], trainer.store.get)
    order = batch.tokens  # tokens of the example are numbered
    assert torch.equal(batch.teacher_topk_ids, TOPK_IDS[order])
    assert torch.equal(batch.teacher_topk_logprobs, -TOPK_IDS[order].float())
    if config.algorithm.advantage.kind == "none":
        assert not batch.advantages.any()


def test_a_batch_that_a_teachers_engines_have_scored_is_not_scored_by_the_trainer():
    sets = ["algorithm.advantage=distill", "model.teacher=big", "models.big.path=big"]
    trainer, _, config = train(*sets, scored=True)
    assert trainer.asked == ["policy"]
    torch.testing.assert_close(trainer.trained[0].advantages, expected_advantages(config), rtol=1e-5, atol=1e-6)


def test_optimizer_steps_share_one_whitening_and_have_their_own_reduction():
    trainer, _, config = train(
        "algorithm.advantage=reinforce_pp", "optimizer_steps_per_rollout=2", "algorithm.loss_reduction=sample"
    )
    assert trainer.asked == ["policy"], "with two steps the old log-probabilities are those before the first"
    first, second = trainer.trained
    expected = expected_advantages(config)
    for part in (first, second):
        torch.testing.assert_close(part.advantages, expected[part.tokens], rtol=1e-5, atol=1e-6)
        assert part.loss_weights.sum().item() == pytest.approx(part.num_loss_tokens)
    assert first.num_samples + second.num_samples == 7 and not set(first.group_ids.tolist()) & set(
        second.group_ids.tolist()
    )


@pytest.mark.parametrize("asked", [["policy"], []], ids=["trainer's old policy", "engines' old policy"])
def test_each_epoch_trains_on_the_same_samples_against_the_same_old_policy(asked):
    old = ["algorithm.old_logprobs=rollout"] if not asked else []
    trainer, metrics, config = train("epochs_per_rollout=3", "optimizer_steps_per_rollout=2", *old)
    assert trainer.asked == asked and config.updates_per_rollout == len(trainer.trained) == 6
    assert config.policy_optimizer_steps == 600
    for first, again in zip(trainer.trained[:4], trainer.trained[2:], strict=True):
        for name in ("tokens", "advantages", "old_logprobs", "loss_weights"):
            assert torch.equal(getattr(first, name), getattr(again, name)), name
    assert metrics["train/grad_norm"] == 1.0


def test_one_optimizer_step_in_two_epochs_is_not_on_policy():
    trainer, _, _ = train("epochs_per_rollout=2")
    assert trainer.asked == ["policy"] and trainer.trained[0].old_logprobs is not None


def test_entropies_come_with_the_old_log_probabilities_and_mask_the_policy_loss():
    trainer, metrics, config = train(
        "algorithm.entropy={kind='high_entropy', fraction=0.25}", "optimizer_steps_per_rollout=2"
    )
    assert trainer.asked == ["policy with entropies"]
    mask = example_batch().loss_mask
    expected = (mask > 0) & (torch.quantile(ENTROPIES[mask > 0].double(), 0.75) <= ENTROPIES)
    assert 0 < metrics["train/top_entropy_fraction"] < 0.5
    for batch in trainer.trained:
        assert torch.equal(batch.is_weights > 0, expected[batch.tokens])
        torch.testing.assert_close(batch.advantages, expected_advantages(config)[batch.tokens], rtol=1e-5, atol=1e-6)


def test_tokens_are_ranked_over_the_whole_rollout_and_not_over_an_optimizer_step():
    trainer, metrics, config = train(
        "algorithm.entropy={kind='kl_cov', fraction=0.2, coef=0.5}", "optimizer_steps_per_rollout=2"
    )
    whole = plain.covariances(example_batch(), expected_advantages(config))
    highest = sorted(whole, key=lambda t: -whole[t])[: int(0.2 * len(whole))]
    found = {
        int(t): float(c) for batch in trainer.trained for t, c in zip(batch.tokens, batch.kl_cov_coefs, strict=True)
    }
    assert {t for t, c in found.items() if c} == set(highest) and set(found.values()) == {0.0, 0.5}
    assert metrics["train/covariance_mean"] == pytest.approx(sum(whole.values()) / len(whole), abs=1e-6)


def test_dr_grpo_divides_by_the_longest_response_unless_told_otherwise():
    for sets, length in (([], RESPONSE), (["algorithm.loss_length=11"], 11)):
        trainer, _, _ = train("algorithm.loss_reduction=constant", "algorithm.advantage.normalize_std=false", *sets)
        (batch,) = trainer.trained
        # loss_weights / loss tokens = 1 / (samples x length)
        torch.testing.assert_close(batch.loss_weights / batch.num_loss_tokens, batch.loss_mask / (7 * length))


def test_supervised_training_asks_for_no_log_probabilities():
    trainer, metrics, _ = train("algorithm.loss=sft")
    assert trainer.asked == [] and trainer.trained[0].advantages is None and "train/advantage_std" not in metrics
