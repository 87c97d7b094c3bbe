"""Log-probability and entropy of vocab-parallel logits: values and both gradients against plain torch."""

import pytest
import torch

from rltool.megatron.logprobs import token_logprobs

VOCAB, PADDED = 11, 16


def plain(logits, tokens, rows, temperature):
    """Written as the definition says, one row after the other."""
    logprobs, entropies = [], []
    for row in rows.tolist():
        distribution = torch.log_softmax(logits[row - 1, :VOCAB] / temperature, dim=-1)
        logprobs.append(distribution[tokens[row]])
        entropies.append(-(distribution.exp() * distribution).sum())
    return torch.stack(logprobs), torch.stack(entropies)


@pytest.mark.parametrize(("by_logprob", "by_entropy"), [(1.0, 0.0), (0.0, 1.0), (0.7, -0.3)])
def test_both_gradients_equal_autograd_also_at_a_temperature_and_with_a_padded_vocabulary(by_logprob, by_entropy):
    generator = torch.Generator().manual_seed(0)
    values = 2 * torch.randn(6, PADDED, generator=generator)
    tokens = torch.randint(0, VOCAB, (6,), generator=generator)
    rows = torch.tensor([1, 2, 4, 5])
    scale = torch.rand(4, generator=generator)
    gradients = []
    for function in (lambda x: token_logprobs(x, tokens, rows, temperature=0.6, vocab_size=VOCAB), lambda x: plain(x, tokens, rows, 0.6)):
        logits = values.clone().requires_grad_()
        logprobs, entropy = function(logits)
        total = 0.0
        if by_logprob:
            total = total + by_logprob * (scale * logprobs).sum()
        if by_entropy:
            total = total + by_entropy * (scale * entropy).sum()
        total.backward()
        gradients.append((logprobs.detach(), entropy.detach(), logits.grad))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert gradients[0][2].abs().max() > 1e-3


def test_the_gradient_of_the_entropy_is_finite_where_a_probability_underflows_to_zero():
    logits = torch.tensor([[0.0, -300.0, 1.0]], requires_grad=True)
    _, entropy = token_logprobs(logits, torch.tensor([0, 2]), torch.tensor([1]), temperature=1.0, vocab_size=3)
    entropy.sum().backward()
    assert torch.isfinite(logits.grad).all() and logits.grad[0, 1] == 0
