"""The critic against plain torch on the transformers model, in every layout, beside the policy, through checkpoints."""

from __future__ import annotations

from contextlib import closing, contextmanager

import pytest
import torch

from rltool.algorithms.shaping import with_advantages
from rltool.checkpoints import directory as directories
from rltool.config.algorithm import AlgorithmConfig, CriticConfig
from rltool.errors import UsageError
from tests import plain_algorithms as plain
from tests.e2e.megatron_models import hf_model, make_trainer, policy_batch, save_hf

pytestmark = pytest.mark.e2e

LENGTHS = [5, 17, 2, 9, 12, 3, 8, 8]
ESTIMATOR = {"kind": "gae", "gamma": 0.97, "gae_lambda": 0.9, "value_clip": 0.1}
GAE = {"advantage": ESTIMATOR}
LR, CLIP_GRAD = 2e-3, 0.5
EPS = 1e-4
"""Keeps the update smooth in the gradient: at 1e-8 Adam's first step is its sign, even of rounding errors."""
OPTIMIZER = {"lr": 1e-3, "eps": EPS}
LAYOUTS = {
    "one": (1, {}),
    "dp2": (2, {}),
    "dp2, distributed optimizer": (2, {"trainer": {"distributed_optimizer": True}}),
    "tp2": (2, {"tp": 2}),
    "tp2, sequence parallel": (2, {"tp": 2, "trainer": {"sequence_parallel": True}}),
    "pp2": (2, {"pp": 2}),
    "cp2": (2, {"cp": 2}),
}


def make_critic(trainer, **settings):
    from rltool.megatron.critic import Critic

    config = CriticConfig(**{"lr": LR, "clip_grad": CLIP_GRAD, **settings})
    return Critic(trainer, config, total_optimizer_steps=10)


@contextmanager
def pair(place, path, layout, *, load=True, **settings):
    """A policy and a critic of one rank; the critic with a head that is not 0, as after some training."""
    with closing(make_trainer(place, path, load=load, algorithm=GAE, optimizer=OPTIMIZER, **layout)) as trainer:
        critic = make_critic(trainer, **settings)
        if load:
            critic.load_hf_weights(critic.path)
            if trainer.coordinates.is_last_stage:
                weight, bias = head(critic.gpt.output_layer.weight.shape[1])
                with torch.no_grad():
                    critic.gpt.output_layer.weight.copy_(weight)
                    critic.gpt.output_layer.bias.copy_(bias)
            critic.weights_changed()
        yield trainer, critic


def head(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return 0.05 * torch.randn(1, size, generator=generator), torch.tensor([0.3])


def dealt(trainer, batch):
    """This rank's samples in two micro-batches."""
    at = trainer.coordinates
    own = list(range(batch.num_samples))[at.dp_rank :: at.layout.dp]
    return [batch.micro_batch(own[i::2]) for i in range(2)]


def weights(trainer, critic) -> dict[str, torch.Tensor]:
    """The backbone's HF tensors on rank 0, the head on the ranks of the last stage."""
    from rltool.megatron.export_plan import full_plan
    from rltool.megatron.hf_weights import export_weights

    with trainer.runtime.mode():
        named = {
            meta.name: tensor.clone()
            for meta, tensor in export_weights(critic.gpt, full_plan(critic.family, trainer.dtype), trainer.runtime)
            if tensor is not None
        }
    if trainer.coordinates.is_last_stage:
        named |= {
            f"value_head.{name}": parameter.detach().clone()
            for name, parameter in critic.gpt.output_layer.named_parameters()
        }
    return named


# Cases: run in the ranks.


def case_step(place, path, batch, layout):
    with pair(place, path, layout) as (trainer, critic):
        values = critic.compute_values([batch])
        policy = trainer.parameter_hash()
        metrics = critic.train_step(dealt(trainer, batch), global_loss_tokens=batch.num_loss_tokens)
        assert trainer.parameter_hash() == policy
        return values, metrics, weights(trainer, critic)


def case_start(place, path, batch, critic_path):
    """Values of a critic as it starts, and after a step; the policy's step beside it."""
    with closing(make_trainer(place, path, algorithm=GAE, optimizer=OPTIMIZER)) as trainer:
        critic = make_critic(trainer, path=critic_path)
        critic.load_hf_weights(critic.path)
        first = critic.compute_values([batch])[0]
        critic.train_step([batch], global_loss_tokens=batch.num_loss_tokens)
        trainer.train_step([batch], global_loss_tokens=batch.num_loss_tokens)
        return first, critic.compute_values([batch])[0], trainer.parameter_hash()


def case_policy_alone(place, path, batch):
    with closing(make_trainer(place, path, algorithm=GAE, optimizer=OPTIMIZER)) as trainer:
        trainer.train_step([batch], global_loss_tokens=batch.num_loss_tokens)
        return trainer.parameter_hash()


def case_not_finite(place, path, batch):
    with pair(place, path, {}) as (trainer, critic):
        broken = batch.replace(value_targets=torch.where(batch.loss_mask > 0, torch.nan, 0.0))
        before = critic.parameter_hash()
        metrics = critic.train_step(
            dealt(trainer, broken if place.rank else batch), global_loss_tokens=batch.num_loss_tokens
        )
        return metrics, critic.parameter_hash() == before


def both_steps(trainer, critic, batch, count):
    metrics = []
    for _ in range(count):
        own = dealt(trainer, batch)
        metrics.append(
            trainer.train_step(own, global_loss_tokens=batch.num_loss_tokens)
            | critic.train_step(own, global_loss_tokens=batch.num_loss_tokens)
        )
    return metrics


def case_save(place, path, batch, layout, directory):
    from rltool.checkpoints.torch_dist import save_checkpoint

    with pair(place, path, layout) as (trainer, critic):
        both_steps(trainer, critic, batch, 2)
        save_checkpoint(trainer, directory, {"step": 2}, critic=critic)
        saved = weights(trainer, critic)
        return saved, both_steps(trainer, critic, batch, 2), trainer.parameter_hash(), critic.parameter_hash()


def case_resume(place, path, batch, layout, directory):
    from rltool.checkpoints.torch_dist import load_checkpoint

    with pair(place, path, layout, load=False) as (trainer, critic):
        load_checkpoint(trainer, directory, critic=critic)
        restored = weights(trainer, critic)
        return restored, both_steps(trainer, critic, batch, 2), trainer.parameter_hash(), critic.parameter_hash()


def case_without_critic(place, path, batch, with_critic, directory):
    """A checkpoint with a critic also serves a run without one; the other way round is refused.

    A critic may start from either.
    """
    from rltool.checkpoints.torch_dist import load_checkpoint, load_weights, save_checkpoint

    with pair(place, path, {}) as (trainer, critic):
        load_checkpoint(trainer, with_critic)
        save_checkpoint(trainer, directory, {"step": 2})
        policy = trainer.parameter_hash()
        try:
            load_checkpoint(trainer, directory, critic=critic)
        except UsageError as error:
            said = str(error)
        load_weights(critic, with_critic)
        started = weights(trainer, critic)
        exported = {meta.name: tensor.clone() for meta, tensor in trainer.export_weights()}
        return policy == trainer.parameter_hash(), said, started, exported


# The reference.


def hf_values(model, weight, bias, batch) -> torch.Tensor:
    """[T]: the value of the state before each loss token."""
    values = []
    for tokens in batch.tokens.split(batch.lengths.tolist()):
        states = model.model(tokens[None]).last_hidden_state[0] @ weight[0] + bias
        values.append(torch.cat([torch.zeros(1), states[:-1]]))
    return torch.cat(values) * batch.loss_mask


def plain_targets(batch, values) -> torch.Tensor:
    """By the definition of the estimator, sample by sample."""
    out, at = torch.zeros(len(batch.tokens)), 0
    for length, reward in zip(batch.lengths.tolist(), batch.rewards.tolist(), strict=True):
        own = [t for t in range(at, at + length) if batch.loss_mask[t] > 0]
        rewards = [reward if t == own[-1] else 0.0 for t in own]
        old = [values[t].item() for t in own]
        estimated = plain.gae(rewards, old, ESTIMATOR["gamma"], ESTIMATOR["gae_lambda"])
        for t, advantage, value in zip(own, estimated, old, strict=True):
            out[t] = advantage + value
        at += length
    return out


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """HF directory, a batch whose old values lie near the model's, and what one step of plain torch makes of them."""
    path = save_hf(tmp_path_factory.mktemp("critic") / "hf", tied=True)
    model, batch = hf_model("qwen2", tied=True), policy_batch(LENGTHS)
    weight, bias = (torch.nn.Parameter(tensor) for tensor in head(64))
    values = hf_values(model, weight, bias, batch)
    noise = torch.randn(len(values), generator=torch.Generator().manual_seed(6))
    old = (values.detach() + 0.15 * noise) * batch.loss_mask
    batch, _ = with_advantages(
        batch.replace(values=old, advantages=None), AlgorithmConfig(**GAE), max_response_tokens=16
    )
    targets = plain_targets(batch, old)
    torch.testing.assert_close(batch.value_targets, targets, rtol=1e-5, atol=1e-5)

    losses, clipped = [], 0
    for t in batch.loss_mask.nonzero().squeeze(-1).tolist():
        low, high = old[t] - ESTIMATOR["value_clip"], old[t] + ESTIMATOR["value_clip"]
        limited = torch.minimum(torch.maximum(values[t], low), high)
        two = (values[t] - targets[t]) ** 2, (limited - targets[t]) ** 2
        losses.append(0.5 * torch.maximum(*two))
        clipped += bool(two[1] > two[0])
    loss = torch.stack(losses).mean()
    named = dict(model.named_parameters()) | {"value_head.weight": weight, "value_head.bias": bias}
    optimizer = torch.optim.AdamW(named.values(), lr=LR, betas=(0.9, 0.98), eps=EPS, weight_decay=0.0)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_([p for p in named.values() if p.grad is not None], CLIP_GRAD)
    assert norm > CLIP_GRAD, "the limit acts"
    optimizer.step()
    metrics = {
        "train/value_loss": loss.item(),
        "train/value_clip_fraction": clipped / len(losses),
        "train/critic_grad_norm": norm.item(),
    }
    assert 0.1 < metrics["train/value_clip_fraction"] < 0.9
    return path, batch, values.detach(), metrics, {name: parameter.detach() for name, parameter in named.items()}


# Tests.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_loss_and_one_step_equal_plain_torch_in_every_layout(ranks, reference, layout):
    path, batch, values, metrics, expected = reference
    world, options = LAYOUTS[layout]
    results = ranks.run(case_step, world, path, batch, options)
    (found,) = next(result for result, _, _ in results if result is not None)
    torch.testing.assert_close(found, values, rtol=0, atol=1e-5)
    for _, measured, _ in results:
        for name, value in metrics.items():
            assert measured[name] == pytest.approx(value, rel=1e-5), name
        assert measured["train/critic_lr"] == LR and measured["train/critic_skipped"] == 0
    weights = {name: tensor for _, _, own in results for name, tensor in own.items()}
    assert set(weights) == set(expected) - {"lm_head.weight"}
    for name, tensor in weights.items():
        torch.testing.assert_close(
            tensor, expected[name], rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_a_critic_starts_at_zero_from_an_untied_or_smaller_model_and_leaves_the_policy_alone(
    ranks, reference, tmp_path
):
    path, batch, *_ = reference
    untied = save_hf(tmp_path / "untied", kind="llama", tied=False)
    smaller = tmp_path / "smaller"
    hf_model("qwen2", True, hidden_size=32, num_hidden_layers=2).save_pretrained(smaller)
    (alone,) = ranks.run(case_policy_alone, 1, path, batch)
    for critic in (None, untied, smaller):
        ((first, second, policy),) = ranks.run(case_start, 1, path, batch, critic)
        assert not first.any() and second[batch.loss_mask > 0].abs().min() > 0
        assert not second[batch.loss_mask == 0].any()
        assert policy == alone


def test_a_loss_that_is_not_finite_on_one_rank_skips_the_critics_step_on_all(ranks, reference):
    path, batch, *_ = reference
    for metrics, unchanged in ranks.run(case_not_finite, 2, path, batch):
        assert metrics["train/critic_skipped"] == 1 and unchanged


@pytest.fixture(scope="module")
def saved(ranks, reference, tmp_path_factory):
    path, batch, *_ = reference
    runs = {}
    for layout in ("one", "tp2", "pp2", "dp2, distributed optimizer"):
        world, options = LAYOUTS[layout]
        directory = tmp_path_factory.mktemp("saved") / "step_2"
        runs[layout] = directory, ranks.run(case_save, world, path, batch, options, directory)
    return path, batch, runs


@pytest.mark.parametrize("layout", ["one", "tp2", "pp2", "dp2, distributed optimizer"])
def test_resume_repeats_policy_and_critic_bit_for_bit(ranks, saved, layout):
    path, batch, runs = saved
    directory, first = runs[layout]
    world, options = LAYOUTS[layout]
    for (before, metrics, *hashes), (restored, again, *hashes_again) in zip(
        first, ranks.run(case_resume, world, path, batch, options, directory), strict=True
    ):
        assert all(torch.equal(before[name], restored[name]) for name in before)
        assert again == metrics and hashes_again == hashes and hashes[0] != hashes[1]
        assert (
            metrics[0]["train/critic_grad_norm"]
            != metrics[1]["train/critic_grad_norm"]
            != metrics[1]["train/grad_norm"]
        )


def test_a_critic_loads_under_another_layout(ranks, saved):
    path, batch, runs = saved
    directory, first = runs["tp2"]
    ((restored, again, *_),) = ranks.run(case_resume, 1, path, batch, {}, directory)
    before, metrics, *_ = first[0]
    assert all(torch.equal(before[name], restored[name]) for name in before)
    assert [step["train/critic_grad_norm"] for step in again] == pytest.approx(
        [step["train/critic_grad_norm"] for step in metrics], rel=1e-4
    )


def test_a_checkpoint_without_a_critic_is_refused_by_name_and_one_with_serves_a_run_without(ranks, saved, tmp_path):
    path, batch, runs = saved
    directory, first = runs["one"]
    ((same, said, started, exported),) = ranks.run(case_without_critic, 1, path, batch, directory, tmp_path / "step_2")
    assert same and 'holds no critic: it was saved by a run without algorithm.advantage = "gae"' in said
    # The head stays what it was; the rest comes from the checkpoint's policy, and not from its critic.
    assert torch.equal(started.pop("value_head.weight"), head(64)[0]) and torch.equal(
        started.pop("value_head.bias"), head(64)[1]
    )
    assert started.keys() == exported.keys() and all(torch.equal(started[name], exported[name]) for name in started)
    assert any(not torch.equal(started[name], first[0][0][name]) for name in started)
    assert directories.list_checkpoints(directory.parent) == [directory]
