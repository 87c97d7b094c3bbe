"""trainer.shared_prefixes: each distinct token of a micro-batch is computed once, with the log-probabilities and
gradients of separate rows."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from rltool.config.algorithm import CriticConfig
from rltool.megatron.critic import Critic
from tests.e2e.megatron_models import make_trainer, policy_batch, save_hf
from tests.e2e.test_parallelism import OPTIONS

pytestmark = pytest.mark.e2e

SHARED = {"shared_prefixes": True}
SEQUENCE = {"tp": 2, "trainer": {"sequence_parallel": True}}
TOLERANCE, OF_GRADIENTS = 1e-6, 1e-5
"""Relative, of 2-norms, in fp32. Gradients are summed in another order: whole ones differed by 0.2e-6 to 1.7e-6 on one
machine, single tensors of small norm by up to 4.5e-6."""


def branches():
    """Two prompts: branches of one context, of branches of it, a branch that ends where others go on, one that is there
    twice; a sample that shares nothing. Loss tokens are shared, with weights and advantages of their own."""
    lengths = [29, 33, 26, 12, 33, 21, 24, 24, 7]
    batch = policy_batch(lengths)
    tokens = [row.clone() for row in batch.tokens.split(lengths)]
    for row, of, common in ((1, 0, 20), (2, 1, 23), (3, 0, 12), (4, 1, 33), (6, 5, 15), (7, 5, 15)):
        tokens[row][:common] = tokens[of][:common]
    return batch.replace(tokens=torch.cat(tokens))


def distinct(batch):
    rows = batch.tokens.split(batch.lengths.tolist())
    return len({tuple(row[: n + 1].tolist()) for row in rows for n in range(len(row))})


def halves(batch, at):
    """This rank's samples in two micro-batches, of which both have branches."""
    count, ranks = batch.num_samples, at.layout.dp
    own = list(range(at.dp_rank * count // ranks, (at.dp_rank + 1) * count // ranks))
    return [batch.select(own[: len(own) // 2]), batch.select(own[len(own) // 2 :])]


def case_policy(place, path, layout, batch):
    """(log-probabilities, of the training step, loss metrics, gradients by name, tokens computed) and what they are to
    be."""
    computed = []
    with closing(make_trainer(place, path, **OPTIONS, **layout)) as trainer:
        trainer.gpt.register_forward_pre_hook(
            lambda _module, _args, kwargs: computed.append(kwargs["input_ids"].numel()), with_kwargs=True
        )
        micros = halves(batch, trainer.coordinates)
        logprobs = trainer.compute_logprobs(micros)
        trained, metrics = trainer.forward_backward(micros, global_loss_tokens=batch.num_loss_tokens)
        gradients = {name: p.main_grad.clone() for name, p in trainer.gpt.named_parameters() if p.requires_grad}
        return logprobs, trained, metrics, gradients, computed, [distinct(micro) for micro in micros] * 2


def case_critic(place, path, layout, batch):
    algorithm = {"advantage": {"kind": "gae"}}
    with closing(make_trainer(place, path, algorithm=algorithm, **layout)) as trainer:
        critic = Critic(trainer, CriticConfig(path=path), total_optimizer_steps=10)
        critic.load_hf_weights(path)
        batch = batch.replace(values=batch.old_logprobs, value_targets=batch.advantages)
        made = [critic.train_step([batch], global_loss_tokens=batch.num_loss_tokens) for _ in range(2)]
        return made, critic.compute_values([batch])


def error(found, expected):
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


def with_sharing(layout):
    return {**layout, "trainer": {**layout.get("trainer", {}), **SHARED}}


def compare(ranks, path, world, layout):
    batch = branches()
    separate, shared = (ranks.run(case_policy, world, path, cut, batch) for cut in (layout, with_sharing(layout)))
    for expected, found in zip(separate, shared, strict=True):
        for ours, theirs in zip(found[:2], expected[:2], strict=True):
            assert (ours is None) == (theirs is None)
            for x, y in zip(ours or [], theirs or [], strict=True):
                assert error(x, y) <= TOLERANCE
        assert found[2] == pytest.approx(expected[2], rel=TOLERANCE, abs=TOLERANCE)
        assert found[3].keys() == expected[3].keys()
        whole = [torch.cat([gradient.flatten() for gradient in of[3].values()]) for of in (found, expected)]
        assert error(*whole) <= OF_GRADIENTS
        for name, gradient in found[3].items():
            assert error(gradient, expected[3][name]) <= OF_GRADIENTS, name
        padding = 1 if layout.get("trainer", {}).get("sequence_parallel") else 0
        assert all(0 <= n - wanted <= padding for n, wanted in zip(found[4], found[5], strict=True))
        assert sum(found[4]) < 0.9 * sum(expected[4])


@pytest.mark.parametrize(
    ("world", "layout"),
    [(1, {}), (2, {}), (2, {"tp": 2}), (2, SEQUENCE), (2, {"pp": 2}), (1, {"trainer": {"recompute": "full"}})],
    ids=["one rank", "DP2", "TP2", "TP2 with sequence parallelism", "PP2", "full recompute"],
)
def test_log_probabilities_and_gradients_are_those_of_separate_rows(ranks, tmp_path, world, layout):
    compare(ranks, save_hf(tmp_path / "model"), world, layout)


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "deepseek_v3", "olmo3"])
def test_with_windows_capped_scores_sinks_latent_attention_and_experts(ranks, tmp_path, kind):
    compare(ranks, save_hf(tmp_path / "model", kind), 1, {})


def test_the_critic_learns_from_shared_prefixes_what_it_learns_from_rows(ranks, tmp_path):
    path, batch = save_hf(tmp_path / "model"), branches()
    separate, shared = (ranks.run(case_critic, 1, path, cut, batch)[0] for cut in ({}, with_sharing({})))
    for found, expected in zip(shared[0], separate[0], strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    # After two steps of Adam, which divides by small gradients' own size.
    assert error(shared[1][0], separate[1][0]) <= 1e-4
