"""The policy loss as configured: values and gradients against plain loops, effect of every setting, invariance to
splits."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from rltool.algorithms.batch import TrainBatch
from rltool.algorithms.contracts import example_batch, example_tokens
from rltool.algorithms.objective import policy_objective
from rltool.algorithms.shaping import (
    with_advantages,
    with_corrections,
    with_loss_weights,
    with_old_logprobs,
)
from rltool.algorithms.staleness import mask_older_than
from rltool.algorithms.token_selection import with_selected_tokens
from rltool.config.algorithm import AlgorithmConfig
from rltool.config.loader import variants
from rltool.config.train import TrainConfig
from rltool.errors import ContractViolation
from rltool.megatron.loss import loss_rows, metric_names, micro_batch_loss
from tests import plain_algorithms as plain

LONGEST = 6


STEP = 5
"""Training step of the losses here; the tokens of `mixed_versions` were sampled at steps 2 to 5."""


def mixed_versions(batch: TrainBatch) -> TrainBatch:
    """Each sample begins under older weights than it ends with, as after an update in flight."""
    versions = [STEP - min(3, (int(n) - 1 - t + i) // 2) for i, n in enumerate(batch.lengths) for t in range(int(n))]
    return batch.replace(token_versions=torch.where(batch.loss_mask > 0, torch.tensor(versions), -1))


def current(batch: TrainBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """[T] leaves: log-probabilities that have moved away from the trainer's before the first step, and entropies."""
    generator = torch.Generator().manual_seed(5)
    moved = example_batch().old_logprobs + 0.3 * torch.randn(len(batch.tokens), generator=generator)
    return moved.requires_grad_(), torch.rand(len(batch.tokens), generator=generator).requires_grad_()


def prepared(algorithm: AlgorithmConfig) -> TrainBatch:
    """What the driver makes of a rollout."""
    batch = mixed_versions(example_batch().replace(token_rewards=None))
    if algorithm.mask_tokens_older_than is not None:
        batch, _ = mask_older_than(batch, STEP, algorithm.mask_tokens_older_than)
    batch = with_old_logprobs(batch, algorithm, batch.old_logprobs)
    if algorithm.uses_critic:
        batch = batch.replace(values=torch.randn(len(batch.tokens), generator=torch.Generator().manual_seed(4)))
    if algorithm.loss == "policy":
        batch, _ = with_advantages(batch, algorithm, max_response_tokens=LONGEST)
        batch, _ = with_corrections(batch, algorithm)
        entropies = torch.rand(len(batch.tokens), generator=torch.Generator().manual_seed(6))
        batch, _ = with_selected_tokens(batch.replace(old_entropies=entropies), algorithm)
    return with_loss_weights(batch, algorithm, max_response_tokens=LONGEST)


def loss_and_gradients(
    algorithm: AlgorithmConfig, split: list[list[int]] | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, float]]:
    """(loss, its gradient in the log-probabilities [T], in the entropies [T], sums of metrics) with samples sharded
    as in `split`."""
    batch = prepared(algorithm)
    logprobs, entropy = current(batch)
    of_sample = [list(part) for part in torch.arange(len(batch.tokens)).split(batch.lengths.tolist())]
    total, sums = torch.zeros(()), dict.fromkeys(metric_names(algorithm), 0.0)
    for samples in split or [list(range(batch.num_samples))]:
        part, rows = batch.select(samples), None
        rows = loss_rows(part)
        at = torch.tensor([int(t) for i in samples for t in of_sample[i]])[rows]
        if len(rows) == 0:
            continue
        value, measured = micro_batch_loss(part, rows, logprobs[at], entropy[at], algorithm)
        assert set(measured) == set(sums)
        total = total + value / batch.num_loss_tokens
        sums = {name: sums[name] + float(measured[name]) for name in sums}
    total.backward()
    zero = torch.zeros(len(batch.tokens))
    return total.detach(), logprobs.grad, zero if entropy.grad is None else entropy.grad, sums


OFF_POLICY = [
    {
        "mask_tokens_older_than": 1,
        "old_logprobs": "rollout",
        "objective": {"ratio": "sequence", "clip_low": 0.05, "clip_high": 0.08},
    },
    {"mask_tokens_older_than": 1, "is_weights": {"kind": "token", "cap": 1.02}},
    {
        "mask_tokens_older_than": 1,
        "is_weights": {"kind": "token", "cap": 1.1},
        "is_mask": {"kind": "token", "low": 0.9, "high": 1.1},
    },
    {"mask_tokens_older_than": 1, "is_mask": {"kind": "sequence", "low": 0.9, "high": 1.1}},
    {
        "mask_tokens_older_than": 0,
        "is_mask": {"kind": "geometric", "low": 0.9, "high": 1.05},
        "kl": {"kind": "loss", "coef": 0.3},
    },
    {"mask_tokens_older_than": 1, "overlong_buffer": 3},
    {"mask_tokens_older_than": 1, "kl": {"kind": "reward", "coef": 0.2, "estimator": "k1"}},
    {
        "mask_tokens_older_than": 1,
        "advantage": {"kind": "reinforce_pp", "gamma": 0.9},
        "kl": {"kind": "reward", "coef": 0.2, "estimator": "k1"},
    },
    {"mask_tokens_older_than": 1, "advantage": {"kind": "gae", "gamma": 0.9, "gae_lambda": 0.8}},
]
"""Tokens of mixed versions, the oldest of which are masked."""
LOSSES = [
    {},
    {"objective": {"clip_low": 0.05, "clip_high": 0.1}},
    {"objective": {"dual_clip": 1.1}},
    {"objective": {"kind": "cispo", "clip_low": 1.0, "clip_high": 0.1}},
    {"objective": {"ratio": "sequence", "clip_low": 0.05, "clip_high": 0.08}},
    {"objective": {"kind": "cispo", "ratio": "sequence"}},
    {"entropy": {"kind": "bonus", "coef": 0.1}},
    {"kl": {"kind": "loss", "coef": 0.3}},
    {"kl": {"kind": "loss", "coef": 0.3, "estimator": "k2"}},
    *({"kl": {"kind": "loss", "coef": 0.3, "estimator": k, "unbiased": True}} for k in ("k1", "k2", "k3")),
    {
        "advantage": "distill",
        "is_weights": {"kind": "sequence", "cap": 1.2},
        "is_mask": {"kind": "geometric", "low": 0.95, "high": 1.05},
    },
    {
        "advantage": "reinforce_pp",
        "kl": {"kind": "reward", "coef": 0.2, "estimator": "k1"},
        "is_mask": {"kind": "token", "low": 0.9, "high": 1.1},
    },
    {
        "advantage": {"kind": "gae", "gamma": 0.9, "gae_lambda": 0.8},
        "kl": {"kind": "reward", "coef": 0.2, "estimator": "k1"},
    },
    {"advantage": "gae", "whiten_advantages": False, "overlong_buffer": 3},
    {"loss": "sft"},
    {"is_weights": {"kind": "token", "cap": math.inf}},
    {"is_weights": {"kind": "sequence", "cap": 1.2, "floor": 0.95, "normalize": True}},
    {"is_weights": {"kind": "token", "normalize": True}, "is_veto": 0.9},
    {"objective": "sapo"},
    {"objective": {"kind": "sapo", "temperature_pos": 2.0, "temperature_neg": 5.0}, "advantage": "distill"},
    plain.gmpo(0.05, 0.1),
    plain.gmpo(1.0, math.inf),
    {"objective": "reinforce", "advantage": "examples.algorithms:gpg"},
    {"advantage": "gdpo"},
    {"objective": "reinforce", "advantage": "remax", "kl": {"kind": "reward", "coef": 0.2, "estimator": "k1"}},
    {"objective": "reinforce", "advantage": "examples.algorithms:opo", "is_weights": "token"},
    {"objective": {"clip_low": 1.0, "clip_high": math.inf}},
    {"off_policy_mask_threshold": 0.02},
    {"advantage": {"normalize_std_over": "batch"}, "reward_clip": (-0.5, 0.6)},
    {"advantage": "reinforce_pp_baseline", "distill_coef": 0.3, "whiten_advantages": True},
    {"old_logprobs": "rollout", "kl": {"kind": "reward", "coef": 0.2, "estimator": "k1"}},
    *OFF_POLICY,
]
REDUCTIONS = [
    {"loss_reduction": "token"},
    {"loss_reduction": "sample"},
    {"loss_reduction": "group"},
    {"loss_reduction": "constant"},
    {"loss_reduction": "constant", "loss_length": 9},
]


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=str)
@pytest.mark.parametrize("settings", LOSSES, ids=str)
def test_loss_and_gradient_equal_plain_loops_whatever_the_split(settings, reduction):
    algorithm = AlgorithmConfig(**settings, **reduction)
    batch = prepared(algorithm)
    logprobs, entropy = current(batch)
    advantages = (
        plain.advantages(batch.replace(rewards=example_batch().rewards), algorithm, LONGEST)
        if algorithm.loss == "policy"
        else torch.zeros(len(batch.tokens))
    )
    expected = plain.loss(batch, advantages, logprobs, entropy, algorithm, LONGEST)
    expected.backward()
    whole = loss_and_gradients(algorithm)
    torch.testing.assert_close(whole[0], expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(whole[1], logprobs.grad, rtol=1e-5, atol=1e-6)
    if algorithm.entropy.kind == "bonus":
        torch.testing.assert_close(whole[2], entropy.grad, rtol=1e-5, atol=1e-6)
    assert whole[1].abs().max() > 1e-3
    # Two ranks of two micro-batches, samples of one group apart; and every sample alone.
    for split in ([[6, 0], [3], [1, 5], [2, 4]], [[i] for i in range(7)]):
        dealt = loss_and_gradients(algorithm, split)
        for found, one in zip(dealt[:3], whole[:3], strict=True):
            torch.testing.assert_close(found, one, rtol=1e-5, atol=1e-7)
        assert dealt[3] == pytest.approx(whole[3], rel=1e-5)


EFFECTS: dict[str, tuple[dict, dict]] = {
    "loss": ({}, {"loss": "sft"}),
    "advantage": ({}, {"advantage": "rloo"}),
    "whiten_advantages": ({}, {"whiten_advantages": True}),
    "overlong_buffer": ({"advantage": {"normalize_std": False}}, {"overlong_buffer": 3}),
    "overlong_penalty": ({"advantage": {"normalize_std": False}, "overlong_buffer": 3}, {"overlong_penalty": 0.5}),
    "reward_clip": ({"advantage": {"normalize_std": False}}, {"reward_clip": (-0.5, 0.6)}),
    "distill_coef": ({}, {"distill_coef": 0.3}),
    "objective": ({}, {"objective": "cispo"}),
    "off_policy_mask_threshold": ({}, {"off_policy_mask_threshold": 0.02}),
    "entropy": ({}, {"entropy": {"kind": "bonus", "coef": 0.01}}),
    "loss_reduction": ({}, {"loss_reduction": "group"}),
    "loss_length": ({"loss_reduction": "constant"}, {"loss_length": 17}),
    "kl": ({}, {"kl": {"kind": "loss", "coef": 0.01}}),
    "old_logprobs": ({}, {"old_logprobs": "rollout"}),
    "mask_tokens_older_than": ({}, {"mask_tokens_older_than": 1}),
    "is_weights": ({}, {"is_weights": "token"}),
    "is_veto": ({}, {"is_veto": 0.95}),
    "is_mask": ({}, {"is_mask": {"kind": "token", "low": 0.95, "high": 1.05}}),
}
OF_THE_CRITIC = {"value_clip"}
"""Changes the critic's gradient, and not the policy's: tests/unit/training/test_critic_loop.py and
tests/e2e/test_critic.py."""
OF_THE_NEXT_STEP = {"target", "reference_update_steps"}
"""Of kl and entropy: change what the next step uses: tests/unit/algorithms/test_controllers.py,
tests/unit/training/test_loop_coefficients.py."""
OF_THE_TEACHERS_TOKENS = {"distill_kl_coef", "distill_top_k"}
"""Change the gradient by way of other tokens than those sampled: tests/unit/algorithms/test_topk_kl.py."""
OF_SEVERAL_TURNS = {"credit", "turn_gamma"}
"""Change nothing where a sample has one turn, as those here: tests/unit/rollout/test_turn_credit.py."""
OF_MIXTURES = {"routing_replay"}
"""Changes which experts compute: tests/e2e/test_routing_replay.py."""
OF_KERNELS = {"exact"}
"""Changes which kernels compute: tests/e2e/test_megatron_trainer.py, tests/gpu/test_exact.py."""


KL = {"kind": "loss", "coef": 0.1}
EFFECTS_IN_TABLES = {
    "ratio": ({}, {"objective": {"ratio": "sequence"}}),
    "clip_low": ({}, {"objective": {"clip_low": 0.01}}),
    "clip_high": ({}, {"objective": {"clip_high": 0.01}}),
    "dual_clip": ({}, {"objective": {"dual_clip": 1.01}}),
    "temperature_pos": ({"objective": "sapo"}, {"objective": {"kind": "sapo", "temperature_pos": 3.0}}),
    "temperature_neg": ({"objective": "sapo"}, {"objective": {"kind": "sapo", "temperature_neg": 3.0}}),
    "normalize_std": ({}, {"advantage": {"normalize_std": False}}),
    "gamma": ({"advantage": "reinforce_pp"}, {"advantage": {"kind": "reinforce_pp", "gamma": 0.9}}),
    "normalize_std_over": ({}, {"advantage": {"normalize_std_over": "batch"}}),
    "gae_lambda": ({"advantage": "gae"}, {"advantage": {"kind": "gae", "gae_lambda": 0.5}}),
    "cap": ({"is_weights": "token"}, {"is_weights": {"kind": "token", "cap": 1.01}}),
    "floor": ({"is_weights": "token"}, {"is_weights": {"kind": "token", "floor": 0.99}}),
    "normalize": ({"is_weights": "token"}, {"is_weights": {"kind": "token", "normalize": True}}),
    "low": ({"is_mask": "token"}, {"is_mask": {"kind": "token", "low": 0.95}}),
    "high": ({"is_mask": "token"}, {"is_mask": {"kind": "token", "high": 1.02}}),
    "coef": ({"kl": KL}, {"kl": {**KL, "coef": 0.2}}),
    "coef of reward": ({}, {"kl": {**KL, "kind": "reward"}}),
    "coef of bonus": ({}, {"entropy": {"kind": "bonus", "coef": 0.01}}),
    "coef of kl_cov": (
        {"entropy": {"kind": "kl_cov", "fraction": 0.3}},
        {"entropy": {"kind": "kl_cov", "fraction": 0.3, "coef": 0.1}},
    ),
    "estimator": ({"kl": KL}, {"kl": {**KL, "estimator": "k2"}}),
    "estimator of reward": ({"kl": {**KL, "kind": "reward"}}, {"kl": {**KL, "kind": "reward", "estimator": "k3"}}),
    "unbiased": ({"kl": KL}, {"kl": {**KL, "unbiased": True}}),
    "fraction": ({}, {"entropy": {"kind": "high_entropy", "fraction": 0.5}}),
    "fraction of kl_cov": ({}, {"entropy": {"kind": "kl_cov", "fraction": 0.3}}),
}
"""The same of the tables in it that have a kind."""


def test_every_setting_has_its_case_below():
    elsewhere = OF_THE_TEACHERS_TOKENS | OF_MIXTURES | OF_KERNELS
    assert set(AlgorithmConfig.model_fields) == set(EFFECTS) | elsewhere
    tables = [kind for name in AlgorithmConfig.model_fields for kind in variants(AlgorithmConfig, name).values()]
    in_tables = {name for kind in tables for name in kind.model_fields} - {"kind", "function", "options"}
    cases = {name.partition(" of ")[0] for name in EFFECTS_IN_TABLES}
    assert in_tables == cases | OF_THE_CRITIC | OF_SEVERAL_TURNS | OF_THE_NEXT_STEP


@pytest.mark.parametrize("name", [*EFFECTS, *EFFECTS_IN_TABLES])
def test_every_setting_changes_the_gradient(name):
    base, change = (EFFECTS | EFFECTS_IN_TABLES)[name]
    key = name.partition(" of ")[0]
    assert key in change or any(key in table for table in change.values())
    before, after = (loss_and_gradients(AlgorithmConfig(**settings)) for settings in (base, {**base, **change}))
    differs = (before[1] - after[1]).abs().max() + (before[2] - after[2]).abs().max()
    assert differs > 1e-4


@pytest.mark.parametrize(
    "advantage",
    ["rloo", "reinforce_pp", "reinforce_pp_baseline", "distill", "gae", "tests.unit.algorithms.own_algorithms:centred"],
)
def test_every_estimator_has_a_gradient_of_its_own(advantage):
    assert (
        loss_and_gradients(AlgorithmConfig())[1] - loss_and_gradients(AlgorithmConfig(advantage=advantage))[1]
    ).abs().max() > 1e-3


def test_on_policy_the_old_logprobs_are_the_new_ones():
    algorithm = AlgorithmConfig(kl={"kind": "loss", "coef": 0.1, "unbiased": True})
    batch = prepared(algorithm)
    rows = loss_rows(batch)
    logprobs, entropy = current(batch)
    alone, _ = micro_batch_loss(
        batch.replace(old_logprobs=None), rows, logprobs[rows], entropy[rows], algorithm, on_policy=True
    )
    given, _ = micro_batch_loss(
        batch.replace(old_logprobs=logprobs.detach()), rows, logprobs[rows], entropy[rows], algorithm
    )
    assert torch.equal(alone, given)


@pytest.mark.parametrize(
    "settings",
    [
        {"is_weights": {"kind": "token", "cap": 1.01}},
        {"is_weights": {"kind": "token", "cap": math.inf, "floor": 0.5}},
        {"is_mask": {"kind": "token", "low": 0.9, "high": 1.05}},
        {"is_weights": "token", "is_mask": {"kind": "token", "low": 0.9, "high": 1.05}},
    ],
    ids=str,
)
def test_corrections_by_token_are_the_same_in_the_training_forward_as_before_it(settings):
    algorithm = AlgorithmConfig(**settings)
    batch = prepared(AlgorithmConfig())
    rows = loss_rows(batch)
    logprobs, entropy = current(batch)
    alone, sums = micro_batch_loss(
        batch.replace(old_logprobs=None), rows, logprobs[rows], entropy[rows], algorithm, on_policy=True
    )
    assert set(sums) == set(metric_names(algorithm, on_policy=True))
    before, metrics = with_corrections(batch.replace(old_logprobs=logprobs.detach()), algorithm)
    given, _ = micro_batch_loss(before, rows, logprobs[rows], entropy[rows], algorithm)
    assert torch.equal(alone, given)
    assert metrics == pytest.approx({name: float(sums[name.removeprefix("train/")]) / len(rows) for name in metrics})
    plain, _ = micro_batch_loss(
        batch.replace(old_logprobs=None), rows, logprobs[rows], entropy[rows], AlgorithmConfig(), on_policy=True
    )
    assert not torch.equal(alone, plain), "the settings change nothing here, so this test shows nothing"


def test_a_missing_reference_or_correction_is_refused():
    for settings, missing in (
        ({"kl": {"kind": "loss", "coef": 0.1}}, "ref_logprobs"),
        ({"is_weights": "token"}, "is_weights"),
        ({}, "advantages"),
        ({}, "old_logprobs"),
    ):
        algorithm = AlgorithmConfig(**settings)
        batch = prepared(algorithm).replace(**{missing: None})
        rows = loss_rows(batch)
        with pytest.raises(ValueError, match=f"TrainBatch.{missing} is None"):
            micro_batch_loss(batch, rows, torch.zeros(len(rows)), torch.zeros(len(rows)), algorithm)


# Own objectives.


def test_an_own_objective_is_weighted_reduced_and_joined_by_kl_and_bonus():
    own = {"objective": "tests.unit.algorithms.own_algorithms:reinforce"}
    alone = loss_and_gradients(AlgorithmConfig(**own))
    batch = prepared(AlgorithmConfig(**own))
    torch.testing.assert_close(alone[1], -batch.advantages * batch.loss_weights / batch.num_loss_tokens)
    for more in ({"kl": {"kind": "loss", "coef": 0.1}}, {"is_weights": "token"}, {"loss_reduction": "sample"}):
        assert (loss_and_gradients(AlgorithmConfig(**own, **more))[1] - alone[1]).abs().max() > 1e-4
    assert loss_and_gradients(AlgorithmConfig(**own, entropy={"kind": "bonus", "coef": 0.1}))[2].abs().max() > 1e-3
    assert "clip_fraction" not in alone[3] and alone[3]["ratio_mean"] > 0


def test_an_own_objective_of_the_wrong_shape_is_named():
    logprobs, tokens = example_tokens()
    with pytest.raises(ContractViolation, match=r"own_algorithms:summed' returned a tensor of shape \(\).*\(10,\)"):
        policy_objective(logprobs, tokens, AlgorithmConfig(objective="tests.unit.algorithms.own_algorithms:summed"))


def test_an_own_advantage_of_the_wrong_shape_is_named():
    with pytest.raises(ContractViolation, match=r"returned list, expected one value per sample \(7,\) or per token"):
        with_advantages(
            example_batch(),
            AlgorithmConfig(advantage="tests.unit.algorithms.own_algorithms:as_list"),
            max_response_tokens=LONGEST,
        )


def test_an_own_advantage_per_token_is_cut_to_the_loss_tokens():
    batch, algorithm = example_batch(), AlgorithmConfig(advantage="tests.unit.algorithms.own_algorithms:per_token")
    found, _ = with_advantages(batch, algorithm, max_response_tokens=LONGEST)
    torch.testing.assert_close(found.advantages, (batch.ref_logprobs - batch.old_logprobs) * batch.loss_mask)


# Presets.


@pytest.mark.parametrize(
    "file",
    sorted((Path(__file__).parents[3] / "rltool/templates/algorithms").glob("*.toml")),
    ids=lambda file: file.stem,
)
def test_every_preset_trains(file):
    from rltool.config.loader import load_config

    more = {
        "distill": "model.teacher_path=teacher",
        "distill_topk": "model.teacher_path=teacher",
        "gdpo": 'reward.parts=[{name="a", function="exact"}, {name="b", function="numeric"}]',
    }
    config = load_config(TrainConfig, [file], ["model.path=model", more.get(file.stem, "seed=0")]).config
    assert file.stem == "sft" or config.algorithm != AlgorithmConfig()
    if config.algorithm.advantage.kind == "none":
        return  # its loss is of the teacher's tokens alone: tests/unit/algorithms/test_topk_kl.py
    assert (
        loss_and_gradients(
            config.algorithm.model_copy(update={"overlong_buffer": min(2, config.algorithm.overlong_buffer)})
        )[1]
        .abs()
        .max()
        > 0
    )


def test_dapo_samples_dynamically():
    from rltool.config.loader import load_config

    file = Path(__file__).parents[3] / "rltool/templates/algorithms/dapo.toml"
    assert load_config(TrainConfig, [file], ["model.path=model"]).config.rollout.group_filter == "equal_rewards"
