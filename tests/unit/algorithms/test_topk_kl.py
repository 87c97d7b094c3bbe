"""KL(teacher || policy) over the teacher's most probable tokens and a tail: value, gradient, limits, and its place in
the loss."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rltool.algorithms.contracts import example_batch
from rltool.algorithms.kl import topk_kl
from rltool.config.algorithm import AlgorithmConfig
from rltool.megatron.loss import loss_rows, metric_names, micro_batch_loss

V = 23


def distributions(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(teacher's log-probabilities, policy's logits), [rows, V] float64 each, sharp enough that a few tokens matter."""
    generator = torch.Generator().manual_seed(seed)
    made = [3.0 * torch.randn(rows, V, generator=generator, dtype=torch.float64) for _ in range(2)]
    return made[0].log_softmax(-1), made[1]


def parts(teacher: torch.Tensor, logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `topk_kl` takes, by plain torch."""
    found = teacher.topk(k, dim=-1)
    logp = logits.log_softmax(-1)
    others = logp.scatter(-1, found.indices, -torch.inf).logsumexp(-1)
    return found.values, logp.gather(-1, found.indices), others


def merged(logp: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """Probabilities of K + 1 outcomes."""
    p = logp.exp()
    rest = [p[v] for v in range(V) if v not in ids]
    return torch.stack([*(p[v] for v in ids), *([sum(rest)] if rest else [])])


def token_weights(batch):
    rows = loss_rows(batch)
    return rows, torch.rand(len(batch.tokens), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("k", [1, 2, 7, V - 1, V])
def test_value_and_gradient_equal_plain_torch_over_the_merged_outcomes_of_a_ragged_batch(k):
    batch = example_batch()
    rows, weights = token_weights(batch)
    teacher, logits = distributions(len(batch.tokens))
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    found = topk_kl(*parts(teacher[rows], ours[rows], k))
    expected = []
    for t in rows.tolist():
        ids = teacher[t].argsort(descending=True)[:k].tolist()
        p, q = merged(teacher[t], ids), merged(theirs[t].log_softmax(-1), ids)
        expected.append(sum(a * torch.log(a / b) for a, b in zip(p, q, strict=True)))
    expected = torch.stack(expected)
    (found * weights[rows]).sum().backward()
    (expected * weights[rows]).sum().backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-8)
    assert ours.grad.abs().max() > 0.1


def test_over_the_whole_vocabulary_it_is_torchs_kl_div():
    teacher, logits = distributions(40)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    found = topk_kl(*parts(teacher, ours, V))
    expected = F.kl_div(theirs.log_softmax(-1), teacher, reduction="none", log_target=True).sum(-1)
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-8)


def test_it_grows_with_k_up_to_the_whole_divergence_and_is_never_negative():
    teacher, logits = distributions(200)
    by_k = torch.stack([topk_kl(*parts(teacher, logits, k)) for k in range(1, V + 1)])
    assert by_k.min() > -1e-12 and (by_k.diff(dim=0) > -1e-12).all()
    assert (by_k[0] < 0.9 * by_k[-1]).any()


@pytest.mark.parametrize("k", [1, 5, V])
def test_it_is_zero_where_both_agree_on_the_tokens_and_the_tail_whatever_lies_within_that(k):
    teacher, _ = distributions(40)
    logits = teacher.clone()
    ids = teacher.topk(k, dim=-1).indices
    # Another distribution of the same mass over all other tokens.
    others = torch.ones_like(teacher).scatter(-1, ids, 0.0) > 0
    for row, other in zip(logits, others, strict=True):
        row[other] = row[other].flip(0)
    logits.requires_grad_()
    found = topk_kl(*parts(teacher, logits, k))
    found.sum().backward()
    torch.testing.assert_close(found, torch.zeros(40, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(logits.grad, torch.zeros_like(teacher), rtol=0, atol=1e-12)


def test_gradcheck():
    teacher, logits = distributions(3)
    assert torch.autograd.gradcheck(lambda x: topk_kl(*parts(teacher, x, 4)), logits.requires_grad_())


INF = float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("teacher", "topk", "tail"),
    [
        ([0.0, -200.0], [-3e4, 0.0], -3e4),
        ([0.0, -INF], [0.0, 0.0], -90.0),
        ([-0.7, -0.7], [-1e-8, -18.0], -INF),
        ([-60.0, -60.0], [-0.7, -0.7], -5000.0),
        ([1e-6, -14.0], [0.0, -20.0], -40.0),
    ],
    ids=["certain", "no second token", "no tail", "the tail is all, and lost", "rounded above 1"],
)
def test_extremes_are_finite_in_value_and_gradient(teacher, topk, tail, dtype):
    given = torch.tensor([topk], dtype=dtype, requires_grad=True)
    rest = torch.tensor([tail], dtype=dtype, requires_grad=True)
    found = topk_kl(torch.tensor([teacher], dtype=dtype), given, rest)
    found.sum().backward()
    for value in (found, given.grad, rest.grad):
        assert torch.isfinite(value).all()
    # By the log-probabilities: minus the teacher's probabilities.
    assert given.grad.abs().max() <= 1 + 2e-6 and rest.grad.abs().max() <= 1


# In the loss.


def loss(settings: dict, k: int = 4) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """(loss, its gradient by the policy's logits, sums for metrics) of the example, whose policy and teacher are those
    of `distributions`."""
    algorithm, batch = AlgorithmConfig(**settings), example_batch()
    rows = loss_rows(batch)
    teacher, logits = (made.float() for made in distributions(len(batch.tokens)))
    logits.requires_grad_()
    best = teacher.topk(k, dim=-1)
    batch = batch.replace(
        advantages=torch.zeros(len(batch.tokens)),
        teacher_topk_ids=best.indices.int(),
        teacher_topk_logprobs=best.values,
    )
    _, topk, tail = parts(teacher[rows], logits[rows], k)
    logp = logits.log_softmax(-1)
    logprobs, entropy = logp[rows, batch.tokens[rows] % V], -(logp.exp() * logp).sum(-1)[rows]
    total, sums = micro_batch_loss(batch, rows, logprobs, entropy, algorithm, topk, tail, on_policy=True)
    total.backward()
    assert set(sums) == set(metric_names(algorithm))
    return total.detach(), logits.grad, sums


def test_the_loss_is_the_coefficient_times_the_weighted_sum_and_the_metric_is_the_divergence():
    batch = example_batch()
    rows = loss_rows(batch)
    teacher, logits = distributions(len(batch.tokens))
    kl = topk_kl(*parts(teacher[rows], logits[rows], 4)).float()
    total, _, sums = loss({"advantage": "none", "distill_kl_coef": 0.7})
    torch.testing.assert_close(total, 0.7 * kl.sum(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sums["distill_kl"], kl.sum(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("changed", [{"distill_kl_coef": 0.5}, {"k": 2}], ids=str)
def test_its_coefficient_and_number_of_tokens_change_the_gradient(changed):
    settings = {"advantage": "none", "distill_kl_coef": 1.0}
    before = loss(settings)[1]
    after = loss(settings | {n: v for n, v in changed.items() if n != "k"}, changed.get("k", 4))[1]
    assert (before - after).abs().max() > 1e-3


def test_without_a_coefficient_the_loss_looks_at_no_teachers_token():
    assert loss({})[1].abs().max() == 0 and "distill_kl" not in loss({})[2]


def test_a_batch_without_the_teachers_tokens_is_refused():
    batch, algorithm = example_batch(), AlgorithmConfig(distill_kl_coef=1.0)
    batch = batch.replace(advantages=torch.zeros(len(batch.tokens)))
    rows = loss_rows(batch)
    zeros = torch.zeros(len(rows))
    with pytest.raises(ValueError, match=r"TrainBatch\.teacher_topk_logprobs is None"):
        micro_batch_loss(batch, rows, zeros, zeros, algorithm)
