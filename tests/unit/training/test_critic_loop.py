"""PPO's loop: values before advantages, policy before critic, a warm-up of the critic alone; its pure parts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rltool.algorithms.contracts import example_batch
from rltool.algorithms.gae import explained_variance, value_is_clipped, value_loss
from rltool.config.loader import load_config
from rltool.config.train import TrainConfig
from rltool.errors import TrainingStopped, UsageError
from rltool.training.checks.validate import check_model
from rltool.training.loop import Loop, Parts, Progress
from rltool.training.stopping import StopSignal
from tests import plain_algorithms as plain
from tests.tiny_models import write_tiny_qwen2
from tests.unit.training.test_loop import Saves

RESPONSE = 6
VALUES = (
    torch.randn(len(example_batch().tokens), generator=torch.Generator().manual_seed(7)) * example_batch().loss_mask
)


class ActorCritic:
    """A trainer with the log-probabilities of `example_batch` and the values above. Writes down what it is asked."""

    def __init__(self, *, skips: bool = False) -> None:
        self.calls: list[str] = []
        self.batches: list[Any] = []
        self.skips = skips

    def logprobs(self, batch: Any, *, weights: str = "policy") -> torch.Tensor:
        self.calls.append(f"forward of the {weights}")
        return example_batch().ref_logprobs if weights == "reference" else example_batch().old_logprobs

    def values(self, batch: Any) -> torch.Tensor:
        self.calls.append("values")
        return VALUES.clone()

    def forward_backward(self, batch: Any, *, on_policy: bool = False) -> tuple[torch.Tensor, dict[str, float]]:
        self.calls.append("policy")
        return example_batch().old_logprobs[batch.tokens], {"train/loss": 0.5}

    def optimizer_step(self) -> dict[str, float]:
        return {"train/skipped": 0.0, "train/grad_norm": 1.0}

    def discard_gradients(self) -> None:
        self.calls.append("discard")

    def train_step(self, batch: Any) -> dict[str, float]:
        self.calls.append("policy")
        return {"train/loss": 0.5, **self.optimizer_step()}

    def critic_step(self, batch: Any) -> dict[str, float]:
        self.calls.append("critic")
        self.batches.append(batch)
        return {"train/value_loss": float(len(self.calls)), "train/critic_skipped": float(self.skips)}


def loop_with(*sets: str, step: int = 0, skips: bool = False) -> tuple[Loop, ActorCritic]:
    common = [
        "model.path=model",
        "algorithm.advantage=gae",
        f"sampling.max_response_tokens={RESPONSE}",
        "monitor.logprob_difference_limit=10.0",
    ]
    nothing: Any = None
    trainer = ActorCritic(skips=skips)
    config = load_config(TrainConfig, [], [*common, *sets]).config
    return Loop(config, Parts(trainer, nothing, None, Saves(), nothing, nothing, StopSignal()), Progress(step)), trainer


def on_policy_batch(step: int = 0) -> Any:
    mask = example_batch().loss_mask
    versions = torch.where(mask > 0, step, -1)
    return example_batch().replace(
        token_versions=versions, old_logprobs=None, ref_logprobs=None, teacher_logprobs=None, token_rewards=None
    )


KL = ["algorithm.kl={kind='reward', coef=0.1}"]


@pytest.mark.parametrize(
    ("sets", "step", "calls"),
    [
        ([], 0, ["values", "policy", "critic"]),
        (KL, 0, ["forward of the policy", "forward of the reference", "values", "policy", "critic"]),
        (["optimizer_steps_per_rollout=2"], 0, ["forward of the policy", "values", *["policy", "critic"] * 2]),
        (["critic.updates_per_optimizer_step=2"], 0, ["values", "policy", "critic", "critic"]),
        (["critic.warmup_rollouts=2"], 1, ["forward of the policy", "values", "critic"]),
        (["critic.warmup_rollouts=2"], 2, ["values", "policy", "critic"]),
    ],
    ids=str,
)
def test_values_come_before_the_policy_and_the_critic_trains_after_it(sets, step, calls):
    loop, trainer = loop_with(*sets, step=step)
    metrics = loop.train(on_policy_batch(step))
    assert trainer.calls == calls
    assert ("train/grad_norm" in metrics) == ("policy" in calls)
    assert {
        "train/value_loss",
        "train/value_mean",
        "train/explained_variance",
        "train/logprob_abs_diff_mean",
        "time/values_seconds",
    } <= set(metrics)
    assert (
        metrics["train/skipped_steps"] == 0
        and not [name for name in metrics if name.endswith("_skipped")]
        and not loop.between_updates
    )


@pytest.mark.parametrize("sets", [[], KL], ids=str)
def test_the_critics_targets_are_advantage_plus_value_before_whitening(sets):
    loop, trainer = loop_with("algorithm.advantage.gamma=0.9", *sets)
    metrics = loop.train(on_policy_batch())
    (batch,) = trainer.batches
    algorithm = loop.config.algorithm
    known = example_batch().replace(values=VALUES)
    mask = batch.loss_mask > 0
    torch.testing.assert_close(batch.advantages, plain.advantages(known, algorithm, RESPONSE), rtol=1e-5, atol=1e-5)
    raw = plain.advantages(known, algorithm.model_copy(update={"whiten_advantages": False}), RESPONSE)
    torch.testing.assert_close(batch.value_targets, raw + VALUES, rtol=1e-5, atol=1e-5)
    assert torch.equal(batch.values, VALUES)
    assert metrics["train/value_mean"] == pytest.approx(VALUES[mask].mean().item(), abs=1e-6)
    assert metrics["train/explained_variance"] == pytest.approx(
        1 - (raw[mask].var() / (raw + VALUES)[mask].var()).item(), rel=1e-5
    )


def test_a_critic_that_skips_counts_as_a_skipped_step():
    loop, _ = loop_with("optimizer_steps_per_rollout=2", "critic.updates_per_optimizer_step=2", skips=True)
    assert loop.train(on_policy_batch())["train/skipped_steps"] == 2 and loop.skipped_in_a_row == 2


@pytest.mark.parametrize(
    ("sets", "calls"),
    [([], ["values", "policy", "discard"]), (["critic.warmup_rollouts=1"], ["forward of the policy"])],
    ids=str,
)
def test_a_logprob_difference_stops_the_critic_as_well(sets, calls):
    loop, trainer = loop_with(*sets, "monitor.logprob_difference_limit=1e-6")
    with pytest.raises(TrainingStopped, match="no optimizer step was made"):
        loop.train(on_policy_batch())
    assert trainer.calls == calls


def test_a_warm_up_takes_no_steps_from_the_schedule_of_the_policy():
    def steps(*sets: str) -> int:
        return load_config(
            TrainConfig, [], ["model.path=model", "steps=10", "optimizer_steps_per_rollout=2", *sets]
        ).config.policy_optimizer_steps

    assert steps() == 20 and steps("algorithm.advantage=gae", "critic.warmup_rollouts=3") == 14


def test_a_value_is_clipped_where_its_loss_has_no_gradient():
    generator = torch.Generator().manual_seed(0)
    values, old, targets = torch.randn(3, 200, generator=generator)
    values.requires_grad_()
    value_loss(values, old, targets, clip=0.3).sum().backward()
    assert torch.equal(value_is_clipped(values.detach(), old, targets, clip=0.3), values.grad == 0)
    assert 0 < (values.grad == 0).sum() < 200
    near = old + 1e-3 * torch.randn(200, generator=generator)
    assert not value_is_clipped(near, old, targets, clip=0.3).any(), "rounding is no clipping"


def test_explained_variance_is_one_for_a_perfect_critic_and_zero_for_a_constant_one():
    targets, mask = torch.tensor([1.0, 3.0, 50.0, 2.0]), torch.tensor([1.0, 1.0, 0.0, 1.0])
    assert explained_variance(targets, targets, mask) == 1
    assert explained_variance(torch.full((4,), 0.7), targets, mask) == pytest.approx(0)
    assert explained_variance(-targets, targets, mask) == pytest.approx(-3)
    assert math.isnan(explained_variance(targets, torch.ones(4), mask))


def test_a_critic_of_another_vocabulary_is_refused_before_anything_starts(tmp_path):
    import json

    model, critic = (write_tiny_qwen2(tmp_path / name, tied=True) for name in ("model", "critic"))
    config = load_config(
        TrainConfig, [], [f"model.path={model}", "algorithm.advantage=gae", f"critic.path={critic}"]
    ).config
    check_model(config)
    described = json.loads((critic / "config.json").read_text())
    (critic / "config.json").write_text(json.dumps(described | {"vocab_size": described["vocab_size"] + 1}))
    with pytest.raises(UsageError, match="critic.path: .* has a vocabulary of .* it must be of the same tokenizer"):
        check_model(config)
    with pytest.raises(UsageError, match="critic.path: .* is not a directory"):
        check_model(config.model_copy(update={"critic": config.critic.model_copy(update={"path": tmp_path / "none"})}))
