"""Estimates of the divergence to the reference: formulas, gradients, and what float32 makes of them."""

from __future__ import annotations

import pytest
import torch

from rltool.algorithms.kl import MAX_K3, k1, k2, k3, kl_loss
from tests import plain_algorithms as plain


def test_kl_estimates_equal_their_formulas_and_average_to_the_true_divergence():
    policy, reference = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2])
    true = (policy * (policy / reference).log()).sum()
    for estimator in (k1, k3):
        torch.testing.assert_close((policy * estimator(policy.log(), reference.log())).sum(), true)
    torch.testing.assert_close(k2(policy.log(), reference.log()), 0.5 * (policy / reference).log() ** 2)


@pytest.mark.parametrize(
    ("estimator", "unbiased", "exact"),
    [("k1", True, True), ("k3", True, True), ("k2", False, True), ("k1", False, False), ("k3", False, False)],
)
def test_which_kl_losses_have_the_gradient_of_the_divergence(estimator, unbiased, exact):
    """Expectation over samples of the old policy, which the policy still is: so it is for the first optimizer step."""
    logits, reference = (
        torch.tensor([0.3, -0.2, 1.0], requires_grad=True),
        torch.tensor([-0.5, 0.7, 0.1]).log_softmax(-1),
    )
    logp = logits.log_softmax(-1)
    (true,) = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits, retain_graph=True)
    old = logp.detach()
    (found,) = torch.autograd.grad(
        (old.exp() * kl_loss(logp, reference, old, estimator=estimator, unbiased=unbiased)).sum(), logits
    )
    assert torch.allclose(found, true, atol=1e-6) == exact
    if estimator == "k1" and not unbiased:
        assert found.abs().max() < 1e-6, "k1 as a loss pulls towards nothing"


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_a_stale_sample_has_an_unbiased_kl_only_beside_its_behaviour_policy(estimator):
    """The expectation is over the behaviour policy's samples; the trained, the proximal and the behaviour policy all
    differ."""
    logits, reference = (
        torch.tensor([0.3, -0.2, 1.0], requires_grad=True),
        torch.tensor([-0.5, 0.7, 0.1]).log_softmax(-1),
    )
    behaviour, proximal = torch.tensor([0.9, 0.1, 0.2]).log_softmax(-1), torch.tensor([0.4, -0.1, 0.7]).log_softmax(-1)
    logp = logits.log_softmax(-1)
    (true,) = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits, retain_graph=True)
    for old, exact in ((behaviour, True), (proximal, False)):
        loss = (behaviour.exp() * kl_loss(logp, reference, old, estimator=estimator, unbiased=True)).sum()
        (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
        assert torch.allclose(found, true, atol=1e-6) == exact


# Numbers.


def random_logprobs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(policy's, reference's, old policy's) of 40 tokens in float64, up to some nats apart."""
    generator = torch.Generator().manual_seed(1)
    noise = lambda scale: scale * torch.randn(40, generator=generator, dtype=torch.float64)  # noqa: E731
    policy = -3.0 + noise(1.0)
    return policy, policy + noise(1.5), policy + noise(0.5)


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_value_and_gradient_of_every_kl_loss_equal_the_plain_formula(estimator, unbiased):
    policy, reference, old = random_logprobs()
    ours, theirs = policy.clone().requires_grad_(), policy.clone().requires_grad_()
    found = kl_loss(ours, reference, old, estimator=estimator, unbiased=unbiased)
    limit = None if unbiased else 10.0
    each = [plain.kl(p, q, estimator, limit=limit) for p, q in zip(theirs, reference, strict=True)]
    expected = torch.stack([torch.exp(p - o) * k for p, o, k in zip(theirs, old, each, strict=True)])
    expected = expected if unbiased else torch.stack(each)
    weights = torch.rand(40, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-8)


@pytest.mark.parametrize("apart", [3.0, 25.0, 500.0])
def test_k3_of_a_lost_token_counts_ten_nats_and_pulls_no_further(apart):
    logprobs = torch.tensor([-apart - 1, -1.0], requires_grad=True)
    found = k3(logprobs, torch.tensor([-1.0, -1.5]))
    found.sum().backward()
    assert found[0] == MAX_K3 == 10 and logprobs.grad[0] == 0
    assert logprobs.grad[1] == pytest.approx(1 - 2.718281828**-0.5)


def test_k3_keeps_its_digits_near_the_reference_in_float32():
    """exp(r) - 1 - r has none left at r = 1e-4: the answer is 5e-9, and the rounding of 1 is 6e-8."""
    away = torch.tensor([1e-4, -3e-4, 1e-3, -1e-2])
    for found in (
        k3(torch.zeros(4), away),
        kl_loss(torch.zeros(4), away, torch.zeros(4), estimator="k3", unbiased=True),
    ):
        exact = away.double().expm1() - away.double()
        torch.testing.assert_close(found.double(), exact, rtol=2e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("apart", [0.75, 5.0, 19.0, 25.0, 60.0])
def test_what_has_to_cancel_in_the_unbiased_k3_does_however_much_less_likely_the_token_became(apart, dtype):
    """d/dlogp of (p / p_old) k3 is -(p / p_old) log(p_ref / p), which is tiny for a token that the policy has lost; its
    two terms are not."""
    logprobs = torch.tensor([-1.0 - apart], dtype=dtype, requires_grad=True)
    reference, old = torch.tensor([-1.5], dtype=dtype), torch.tensor([-1.0], dtype=dtype)
    found = kl_loss(logprobs, reference, old, estimator="k3", unbiased=True)
    found.backward()
    ratio, r = torch.tensor(-apart).double().exp(), apart - 0.5
    assert logprobs.grad.double().item() == pytest.approx(float(-ratio * r), rel=1e-4, abs=0)
    assert found.item() == pytest.approx(float(torch.tensor(-0.5).exp() - ratio * (1 + r)), rel=1e-5)


def test_the_gradients_of_all_kl_losses_are_those_of_their_values():
    policy, reference, old = random_logprobs()
    near = (reference - policy).clamp(-1.8, 1.8) + policy
    for estimator in ("k1", "k2", "k3"):
        for unbiased in (False, True):

            def loss(logprobs: torch.Tensor, estimator=estimator, unbiased=unbiased) -> torch.Tensor:
                return kl_loss(logprobs, near, old, estimator=estimator, unbiased=unbiased)

            assert torch.autograd.gradcheck(loss, policy.clone().requires_grad_(), atol=1e-6)
