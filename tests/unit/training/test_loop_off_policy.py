"""Which forward passes a rollout costs, and that the gate stands before the optimizer in each way of training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rltool.algorithms.contracts import example_batch
from rltool.config.loader import load_config
from rltool.config.train import TrainConfig
from rltool.errors import TrainingStopped
from rltool.training.loop import Loop, Parts, Progress
from rltool.training.stopping import StopSignal
from tests.unit.training.test_loop import Saves


class Recorder:
    """A trainer whose policy is `off` nats away from what the engines said, and that writes down what it is asked."""

    def __init__(self, off: float) -> None:
        self.off, self.calls = off, []

    def _logprobs(self, batch: Any) -> torch.Tensor:
        return (batch.rollout_logprobs + self.off) * batch.loss_mask

    def logprobs(self, batch: Any, *, weights: str = "policy") -> torch.Tensor:
        self.calls.append(f"forward of the {weights}")
        return self._logprobs(batch)

    def forward_backward(self, batch: Any, *, on_policy: bool = False) -> tuple[torch.Tensor, dict[str, float]]:
        assert on_policy and batch.old_logprobs is None
        self.calls.append("forward and backward")
        return self._logprobs(batch), {"train/loss": 0.5}

    def optimizer_step(self) -> dict[str, float]:
        self.calls.append("optimizer")
        return {"train/skipped": 0.0}

    def discard_gradients(self) -> None:
        self.calls.append("discard")

    def train_step(self, batch: Any) -> dict[str, float]:
        assert batch.old_logprobs is not None
        self.calls += ["forward and backward", "optimizer"]
        return {"train/loss": 0.5, "train/skipped": 0.0}


def loop_with(off: float, *sets: str) -> tuple[Loop, Recorder]:
    config = load_config(TrainConfig, [], ["model.path=model", "monitor.logprob_difference_limit=0.1", *sets]).config
    trainer, nothing = Recorder(off), None
    return Loop(config, Parts(trainer, nothing, None, Saves(), nothing, nothing, StopSignal()), Progress(0)), trainer


def on_policy_batch() -> Any:
    return example_batch().replace(old_logprobs=None, ref_logprobs=None, teacher_logprobs=None, token_rewards=None)


@pytest.mark.parametrize(
    ("sets", "calls"),
    [
        ([], ["forward and backward", "optimizer"]),
        (["algorithm.kl={kind='loss', coef=0.1}"], ["forward of the reference", "forward and backward", "optimizer"]),
        (["algorithm.is_weights=token"], ["forward and backward", "optimizer"]),
        (["algorithm.is_weights=sequence"], ["forward of the policy", "forward and backward", "optimizer"]),
        (["optimizer_steps_per_rollout=2"], ["forward of the policy", *["forward and backward", "optimizer"] * 2]),
    ],
    ids=str,
)
def test_the_old_policy_costs_a_forward_of_its_own_only_where_it_must_be_known_first(sets, calls):
    loop, trainer = loop_with(0.02, *sets)
    metrics = loop.train(on_policy_batch())
    assert trainer.calls == calls
    assert metrics["train/logprob_abs_diff_mean"] == pytest.approx(0.02, abs=1e-5)


@pytest.mark.parametrize("sampled_by", [-1, None])
def test_tokens_of_earlier_or_unknown_weights_cost_no_forward_of_their_own_either(sampled_by):
    """Whichever weights sampled: the old policy is the one before the only optimizer step, and the training forward is
    of that one. Such tokens are not compared with the engines, which had other weights."""
    loop, trainer = loop_with(0.5)
    batch = on_policy_batch()
    versions = None if sampled_by is None else torch.full_like(batch.token_versions, sampled_by)
    metrics = loop.train(batch.replace(token_versions=versions))
    assert trainer.calls == ["forward and backward", "optimizer"]
    assert metrics["train/logprob_compared_tokens"] == 0


@pytest.mark.parametrize(
    ("sets", "calls"),
    [([], ["forward and backward", "discard"]), (["optimizer_steps_per_rollout=2"], ["forward of the policy"])],
    ids=str,
)
def test_a_logprob_difference_above_the_limit_is_found_before_any_weight_changes(sets, calls):
    loop, trainer = loop_with(0.5, *sets)
    with pytest.raises(TrainingStopped, match="no optimizer step was made on this rollout"):
        loop.train(on_policy_batch())
    assert trainer.calls == calls
    # Nothing stands between the optimizer steps of one rollout: the state before it may be saved.
    assert not loop.between_updates
