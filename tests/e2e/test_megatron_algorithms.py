"""Every algorithm in the real trainer: one optimizer step against plain loops on the transformers model, and in other
layouts."""

from __future__ import annotations

import math
from contextlib import closing

import pytest
import torch

from rltool.algorithms.batch import TrainBatch
from rltool.algorithms.shaping import (
    with_advantages,
    with_corrections,
    with_loss_weights,
    with_old_logprobs,
)
from rltool.algorithms.staleness import mask_older_than
from rltool.algorithms.token_selection import with_selected_tokens
from rltool.config.algorithm import AlgorithmConfig
from tests import plain_algorithms as plain
from tests.e2e.megatron_models import VOCAB, hf_logprobs, hf_model, make_trainer, policy_batch, save_hf

pytestmark = pytest.mark.e2e

LENGTHS = [5, 17, 2, 9, 12, 3, 8, 8]
RESPONSE = 12
KEPT = 6
TOPK = 5
"""Tokens of the teacher's at each position."""
STEP = 4
"""Training step; the tokens were sampled at steps 2 to 4."""
OPTIMIZER = {"lr": 1e-3, "clip_grad": 0.5, "eps": 1e-4}
"""The eps keeps the update smooth in the gradient: at 1e-8 Adam's first step is its sign, even of rounding errors."""


def exported(trainer) -> dict[str, torch.Tensor] | None:
    """The HF tensors, copied; None but on rank 0."""
    pairs = [(meta.name, tensor if tensor is None else tensor.clone()) for meta, tensor in trainer.export_weights()]
    return dict(pairs) if trainer.coordinates.rank == 0 else None


def rollout(model) -> TrainBatch:
    """Samples whose old, engine's, reference's and teacher's log-probabilities lie around the model's own."""
    batch, generator = policy_batch(LENGTHS), torch.Generator().manual_seed(2)
    with torch.no_grad():
        own = torch.cat([hf_logprobs(model, tokens, 1.0) for tokens in batch.tokens.split(LENGTHS)])
    near = lambda scale: own + scale * torch.randn(len(own), generator=generator)  # noqa: E731
    old = near(0.2)
    versions = STEP - 2 + torch.arange(len(own)) % 3
    # Groups of 2, 3 and 3, sharded out of order.
    return batch.replace(
        token_versions=torch.where(batch.loss_mask > 0, versions, -1),
        group_ids=torch.tensor([7, 3, 5, 3, 5, 7, 3, 5]),
        advantages=None,
        loss_weights=batch.loss_mask,
        old_logprobs=old,
        ref_logprobs=near(0.3),
        teacher_logprobs=near(0.3),
        rollout_logprobs=(old + 0.1 * torch.randn(len(own), generator=generator)) * batch.loss_mask,
    )


def with_teachers_tokens(batch: TrainBatch) -> TrainBatch:
    """Of a teacher that finds other tokens likely than the model."""
    logits = 3 * torch.randn(len(batch.tokens), VOCAB, generator=torch.Generator().manual_seed(4))
    best = logits.log_softmax(-1).topk(TOPK, dim=-1)
    return batch.replace(teacher_topk_ids=best.indices.int(), teacher_topk_logprobs=best.values)


def with_sampling_mask(batch: TrainBatch) -> TrainBatch:
    """Each sampled token was drawn from 1 to KEPT tokens, of which it is one; no other has a mask."""
    generator = torch.Generator().manual_seed(5)
    others = torch.stack([torch.randperm(VOCAB - 1, generator=generator)[: KEPT - 1] for _ in batch.tokens])
    others += others >= batch.tokens[:, None]
    counts = torch.where(batch.loss_mask > 0, torch.randint(1, KEPT + 1, batch.tokens.shape, generator=generator), 0)
    kept = torch.cat([batch.tokens[:, None], others], 1).masked_fill(torch.arange(KEPT) >= counts[:, None], -1)
    return batch.replace(sampling_mask=kept.int())


def hf_distributions(model, batch: TrainBatch) -> torch.Tensor:
    """[T, V]: log-probabilities of all tokens in the place of each; those of first tokens mean nothing."""
    found = []
    for tokens in batch.tokens.split(batch.lengths.tolist()):
        distribution = torch.log_softmax(model(tokens[None]).logits[0], dim=-1)
        found += [torch.zeros_like(distribution[:1]), distribution[:-1]]
    return torch.cat(found)


def merged_kl(batch: TrainBatch, distributions: torch.Tensor, t: int) -> torch.Tensor:
    """KL(teacher || model) over the teacher's tokens and all others as one, by its definition."""
    ids, p = batch.teacher_topk_ids[t].tolist(), batch.teacher_topk_logprobs[t].exp()
    q = distributions[t].exp()
    rest = sum(q[v] for v in range(VOCAB) if v not in ids)
    terms = [p[i] * (p[i].log() - q[v].log()) for i, v in enumerate(ids)]
    return sum(terms) + (1 - p.sum()) * ((1 - p.sum()).log() - rest.log())


def prepared(batch: TrainBatch, algorithm: AlgorithmConfig) -> TrainBatch:
    """As the loop does it."""
    if algorithm.mask_tokens_older_than is not None:
        batch, _ = mask_older_than(batch, STEP, algorithm.mask_tokens_older_than)
    if algorithm.loss == "policy":
        batch = with_old_logprobs(batch, algorithm, batch.old_logprobs)
        batch, _ = with_advantages(batch, algorithm, max_response_tokens=RESPONSE)
        batch, _ = with_corrections(batch, algorithm)
        batch, _ = with_selected_tokens(batch, algorithm)
    return with_loss_weights(batch, algorithm, max_response_tokens=RESPONSE)


def hf_logprobs_and_entropy(model, batch: TrainBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Over the tokens of batch.sampling_mask, where it names any."""
    masks = torch.full((len(batch.tokens), 1), -1) if batch.sampling_mask is None else batch.sampling_mask
    logprobs, entropies = [], []
    lengths = batch.lengths.tolist()
    for tokens, mask in zip(batch.tokens.split(lengths), masks.split(lengths), strict=True):
        logits = model(tokens[None]).logits[0]
        kept = torch.stack([torch.isin(torch.arange(VOCAB), own) | (own < 0).all() for own in mask.roll(-1, 0)])
        distribution = torch.log_softmax(logits.masked_fill(~kept, -1e9), dim=-1)
        entropy = -(distribution.exp() * distribution).sum(-1)
        logprobs.append(torch.cat([torch.zeros(1), distribution[:-1].gather(-1, tokens[1:, None]).squeeze(-1)]))
        entropies.append(torch.cat([torch.zeros(1), entropy[:-1]]))
    return torch.cat(logprobs), torch.cat(entropies)


# Cases: run in the ranks.


def case_step(place, path, batch, settings, tp, pp, micro_batches, cp=1, more=None):
    options = {"algorithm": settings, "optimizer": OPTIMIZER, "trainer": more or {}}
    with closing(make_trainer(place, path, tp=tp, pp=pp, cp=cp, **options)) as trainer:
        at = trainer.coordinates
        own = list(range(batch.num_samples))[at.dp_rank :: at.layout.dp]
        dealt = [batch.micro_batch(own[i::micro_batches]) for i in range(micro_batches)]
        return trainer.train_step(dealt, global_loss_tokens=batch.num_loss_tokens), exported(trainer)


def case_entropies(place, path, batch, tp, pp, cp):
    with closing(make_trainer(place, path, tp=tp, pp=pp, cp=cp, optimizer=OPTIMIZER)) as trainer:
        halves = [batch.select([0, 1, 2]), batch.select([3, 4, 5, 6, 7])]
        pairs, alone = trainer.compute_logprobs_and_entropies(halves), trainer.compute_logprobs(halves)
        return None if pairs is None else (torch.cat(pairs, 1), torch.cat(alone))


def case_teacher_topk(place, path, teacher, batch, tp, pp, cp):
    from rltool.checkpoints.torch_dist import load_teacher

    settings = {"distill_kl_coef": 1.0, "distill_top_k": TOPK}
    with closing(make_trainer(place, path, tp=tp, pp=pp, cp=cp, algorithm=settings, optimizer=OPTIMIZER)) as trainer:
        hashed = trainer.parameter_hash()
        load_teacher(trainer, teacher)
        halves = [batch.select([0, 1, 2]), batch.select([3, 4, 5, 6, 7])]
        found = trainer.compute_teacher_topk(halves)
        assert trainer.parameter_hash() == hashed, "the policy is put back"
        names = ("teacher_topk_ids", "teacher_topk_logprobs")
        return None if found is None else tuple(torch.cat([half[name] for half in found]) for name in names)


def case_teacher(place, path, teacher, checkpoint, batch, tp, pp):
    from rltool.checkpoints.torch_dist import load_teacher, load_weights, save_checkpoint

    with closing(make_trainer(place, path, tp=tp, pp=pp, load=False, optimizer=OPTIMIZER)) as trainer:
        load_weights(trainer, teacher)
        save_checkpoint(trainer, checkpoint, {"step": 0})
        load_teacher(trainer, teacher)
        load_weights(trainer, path)
        from_hf, policy = trainer.compute_logprobs([batch], weights="teacher"), trainer.compute_logprobs([batch])
        hashed = trainer.parameter_hash()
        load_teacher(trainer, checkpoint)
        from_checkpoint = trainer.compute_logprobs([batch], weights="teacher")
        assert trainer.parameter_hash() == hashed, "the policy is put back"
        trainer.train_step([batch], global_loss_tokens=batch.num_loss_tokens)
        trained = exported(trainer)
        after = trainer.compute_logprobs([batch], weights="teacher")
        return (None if policy is None else (policy[0], from_hf[0], from_checkpoint[0], after[0])), trained


# Tests.

FAMILIES = {
    "grpo": {"loss_reduction": "sample", "kl": {"kind": "loss", "coef": 0.3}},
    "dr-grpo": {"advantage": {"normalize_std": False}, "loss_reduction": "constant"},
    "dapo": {"objective": {"clip_low": 0.1, "clip_high": 0.18}, "overlong_buffer": 6},
    "gspo": {"objective": {"ratio": "sequence", "clip_low": 0.02, "clip_high": 0.03}, "loss_reduction": "sample"},
    "cispo": {"objective": {"kind": "cispo", "clip_low": 1.0, "clip_high": 0.1}},
    "rloo, group means": {"advantage": "rloo", "loss_reduction": "group"},
    "reinforce++": {
        "advantage": {"kind": "reinforce_pp", "gamma": 0.95},
        "kl": {"kind": "reward", "coef": 0.3, "estimator": "k1"},
    },
    "reinforce++ baseline": {
        "advantage": "reinforce_pp_baseline", "kl": {"kind": "loss", "coef": 0.3, "estimator": "k2"},
    },
    "distillation": {"advantage": "distill"},
    "dual clip": {"objective": {"dual_clip": 1.05}},
    "entropy bonus": {"entropy": {"kind": "bonus", "coef": 0.3}},
    "unbiased k3": {"kl": {"kind": "loss", "coef": 0.3, "unbiased": True}},
    "truncated importance sampling": {"is_weights": {"kind": "token", "cap": 1.02}},
    "icepop": {"is_weights": {"kind": "token", "cap": 1.08}, "is_mask": {"kind": "token", "low": 0.92, "high": 1.08}},
    "sequence mask": {"is_mask": {"kind": "sequence", "low": 0.8, "high": 1.2}},
    "geometric mask": {"is_mask": {"kind": "geometric", "low": 0.97, "high": 1.03}},
    "decoupled ppo": {
        "is_weights": {"kind": "token", "cap": math.inf}, "objective": {"clip_low": 0.1, "clip_high": 0.1},
    },
    "the engines' old policy": {"old_logprobs": "rollout", "objective": {"clip_low": 0.1, "clip_high": 0.1}},
    "stale tokens masked": {
        "mask_tokens_older_than": 1,
        "is_mask": {"kind": "sequence", "low": 0.8, "high": 1.2},
        "overlong_buffer": 6,
    },
    "sapo": {"objective": "sapo", "loss_reduction": "sample"},
    "gmpo": {**plain.gmpo(0.1, 0.1), "loss_reduction": "sample"},
    "gpg": {"advantage": "examples.algorithms:gpg", "objective": "reinforce"},
    "opo": {"advantage": "examples.algorithms:opo", "objective": "reinforce"},
    "off-policy samples masked": {"off_policy_mask_threshold": 0.05},
    "veto, floor, mean 1": {"is_weights": {"kind": "token", "floor": 0.95, "normalize": True}, "is_veto": 0.85},
    "distillation beside reward": {
        "distill_coef": 0.3, "reward_clip": (-0.5, 0.6), "advantage": {"normalize_std_over": "batch"},
    },
    "sft": {"loss": "sft", "loss_reduction": "sample"},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_one_step_equals_plain_torch_on_the_transformers_model(ranks, tmp_path, name):
    path, model, algorithm = save_hf(tmp_path), hf_model("qwen2", tied=True), AlgorithmConfig(**FAMILIES[name])
    batch = rollout(model)
    made = prepared(batch, algorithm)
    metrics, weights = ranks.run(case_step, 1, path, made, FAMILIES[name], 1, 1, 3)[0]

    logprobs, entropy = hf_logprobs_and_entropy(model, batch)
    scored = made.replace(rewards=batch.rewards)
    advantages = (
        plain.advantages(scored, algorithm, RESPONSE) if algorithm.loss == "policy" else torch.zeros(len(logprobs))
    )
    expected = plain.loss(scored, advantages, logprobs, entropy, algorithm, RESPONSE)
    check_step(metrics, weights, model, expected)


def check_step(metrics: dict, weights: dict, model, expected: torch.Tensor) -> None:
    """Against one step of torch's AdamW on this loss."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=OPTIMIZER["lr"], betas=(0.9, 0.98), eps=OPTIMIZER["eps"], weight_decay=0.0
    )
    expected.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["clip_grad"])
    optimizer.step()

    assert metrics["train/loss"] == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    assert metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-5) and norm > 0.01
    state = model.state_dict()
    for tensor_name, tensor in weights.items():
        torch.testing.assert_close(tensor, state[tensor_name], rtol=0, atol=1e-5, msg=tensor_name)


@pytest.mark.parametrize("keep", [False, True], ids=["recomputed", "kept"])
@pytest.mark.parametrize("advantage", ["none", "grpo"])
def test_one_step_towards_the_teachers_tokens_equals_plain_torch(ranks, tmp_path, advantage, keep):
    path, model = save_hf(tmp_path), hf_model("qwen2", tied=True)
    settings = {"advantage": advantage, "distill_kl_coef": 0.7, "distill_top_k": TOPK, "loss_reduction": "sample"}
    algorithm = AlgorithmConfig(**settings)
    batch = with_teachers_tokens(rollout(model))
    made = prepared(batch, algorithm)
    trainer = {"recompute_head": not keep}
    metrics, weights = ranks.run(case_step, 1, path, made, settings, 1, 1, 3, 1, trainer)[0]

    logprobs, entropy = hf_logprobs_and_entropy(model, batch)
    distributions = hf_distributions(model, batch)
    tokens = made.loss_mask.nonzero().squeeze(-1).tolist()
    kl = torch.stack([merged_kl(batch, distributions, t) for t in tokens])
    expected = 0.7 * (made.loss_weights[tokens] * kl).sum() / len(tokens)
    if advantage != "none":
        advantages = plain.advantages(batch, algorithm, RESPONSE)
        expected = expected + plain.loss(batch, advantages, logprobs, entropy, algorithm, RESPONSE)
    assert metrics["train/distill_kl"] == pytest.approx(kl.mean().item(), rel=1e-5) and kl.mean() > 1
    check_step(metrics, weights, model, expected)


@pytest.mark.parametrize(
    ("world", "tp", "pp", "cp"), [(1, 1, 1, 1), (2, 2, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2), (2, 1, 1, 1)]
)
def test_the_teachers_most_probable_tokens_are_those_of_transformers(ranks, tmp_path, world, tp, pp, cp):
    path, teacher = save_hf(tmp_path / "policy"), save_hf(tmp_path / "teacher", seed=3)
    batch = prepared(rollout(hf_model("qwen2", tied=True)), AlgorithmConfig())
    results = ranks.run(case_teacher_topk, world, path, teacher, batch, tp, pp, cp)
    ids, logprobs = next(found for found in results if found is not None)
    with torch.no_grad():
        best = hf_distributions(hf_model("qwen2", True, 3), batch).topk(TOPK, dim=-1)
    rows = batch.loss_mask > 0
    assert ids.dtype is torch.int32 and torch.equal(ids[rows].long(), best.indices[rows])
    torch.testing.assert_close(logprobs[rows], best.values[rows], rtol=0, atol=2e-5)
    assert not ids[~rows].any() and not logprobs[~rows].any()


@pytest.mark.parametrize(
    "settings",
    [
        {
            "objective": {"ratio": "sequence", "clip_low": 0.02, "clip_high": 0.03},
            "loss_reduction": "sample",
            "entropy": {"kind": "bonus", "coef": 0.3},
            "kl": {"kind": "loss", "coef": 0.3, "unbiased": True},
        },
        {
            "advantage": "reinforce_pp",
            "objective": "cispo",
            "is_weights": "sequence",
            "is_mask": "geometric",
            "loss_reduction": "group",
        },
        {
            **plain.gmpo(0.1, 0.1),
            "loss_reduction": "sample",
            "off_policy_mask_threshold": 0.05,
            "entropy": {"kind": "kl_cov", "fraction": 0.2},
        },
        {"distill_kl_coef": 0.7, "distill_top_k": TOPK, "entropy": {"kind": "bonus", "coef": 0.1}},
        {"entropy": {"kind": "bonus", "coef": 0.3}, "kl": {"kind": "loss", "coef": 0.3}},
    ],
    ids=[
        "gspo, entropy, kl", "reinforce++, cispo, corrected", "gmpo, off-policy mask, covariances",
        "teachers tokens", "kept tokens, entropy, kl",
    ],
)  # fmt: skip
def test_loss_gradient_and_metrics_do_not_depend_on_the_layout(ranks, request, tmp_path, settings):
    batch = with_teachers_tokens(rollout(hf_model("qwen2", tied=True)))
    if "kept tokens" in request.node.callspec.id:
        batch = with_sampling_mask(batch)
    path, batch = save_hf(tmp_path), prepared(batch, AlgorithmConfig(**settings))
    reference, weights = ranks.run(case_step, 1, path, batch, settings, 1, 1, 1)[0]
    assert reference["train/grad_norm"] > 0.01
    for tp, pp, micro_batches, cp in ((1, 1, 4, 1), (2, 1, 2, 1), (1, 2, 3, 1), (1, 1, 2, 2)):
        results = ranks.run(case_step, 2, path, batch, settings, tp, pp, micro_batches, cp)
        for metrics, _ in results:
            assert metrics == pytest.approx(reference, rel=1e-5, abs=1e-6), (tp, pp, cp)
        for name, tensor in results[0][1].items():
            torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-6, msg=f"{tp} {pp} {cp} {name}")


@pytest.mark.parametrize("truncated", [False, True], ids=["all tokens", "kept tokens"])
@pytest.mark.parametrize(("world", "tp", "pp", "cp"), [(1, 1, 1, 1), (2, 2, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2)])
def test_entropies_come_with_the_log_probabilities(ranks, tmp_path, world, tp, pp, cp, truncated):
    path, model = save_hf(tmp_path), hf_model("qwen2", tied=True)
    batch = with_sampling_mask(rollout(model)) if truncated else rollout(model)
    with torch.no_grad():
        expected = torch.stack(hf_logprobs_and_entropy(model, batch))
    results = ranks.run(case_entropies, world, path, batch, tp, pp, cp)
    pairs, alone = next(found for found in results if found is not None)
    torch.testing.assert_close(pairs, expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(pairs[0], alone, rtol=0, atol=1e-6)
    assert pairs[1][batch.loss_mask > 0].max() > 1


@pytest.mark.parametrize(("world", "tp", "pp"), [(1, 1, 1), (2, 2, 1), (2, 1, 2)])
def test_a_teacher_scores_with_its_own_weights_and_leaves_the_policy_alone(ranks, tmp_path, world, tp, pp):
    path, teacher = save_hf(tmp_path / "policy"), save_hf(tmp_path / "teacher", seed=3)
    batch = prepared(rollout(hf_model("qwen2", tied=True)), AlgorithmConfig())
    results = ranks.run(case_teacher, world, path, teacher, tmp_path / "step_0", batch, tp, pp)
    with torch.no_grad():
        expected = [
            torch.cat([hf_logprobs(hf_model("qwen2", True, seed), t, 1.0) for t in batch.tokens.split(LENGTHS)])
            for seed in (0, 3)
        ]
    policy, *teachers = next(found for found, _ in results if found is not None)
    torch.testing.assert_close(policy, expected[0], rtol=0, atol=2e-5)
    for found in teachers:
        torch.testing.assert_close(found, expected[1], rtol=0, atol=2e-5)
    assert (expected[0] - expected[1]).abs().max() > 0.5
    # The optimizer's own copies of the weights did not become the teacher's: the step equals one without a teacher.
    alone = ranks.run(case_step, 1, path, batch, {}, 1, 1, 1)[0][1]
    for name, tensor in results[0][1].items():
        torch.testing.assert_close(tensor, alone[name], rtol=0, atol=1e-6, msg=name)


def test_a_teacher_of_another_shape_is_refused_before_anything_starts(tmp_path):
    from rltool.config.algorithm import AlgorithmConfig
    from rltool.config.sections import ModelConfig
    from rltool.config.train import TrainConfig
    from rltool.errors import UsageError
    from rltool.training.checks.validate import check_model

    path, teacher = save_hf(tmp_path / "policy"), save_hf(tmp_path / "teacher", kind="llama")
    model = ModelConfig(path=path, teacher_path=teacher)
    config = TrainConfig(model=model, algorithm=AlgorithmConfig(advantage="distill"))
    with pytest.raises(UsageError, match="must be of the same architecture, size and vocabulary"):
        check_model(config)
