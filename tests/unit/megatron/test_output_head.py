"""The fused head against the unfused path and plain torch: values, both gradients, chunks, precision, memory."""

import os
import subprocess
import sys

import pytest
import torch

from rltool.megatron import output_head
from rltool.megatron.output_head import head_logprobs

VOCAB, PADDED, HIDDEN, ROWS = 37, 40, 16, 23


def inputs(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator)
    weight = 0.7 * torch.randn(PADDED, HIDDEN, generator=generator)
    targets = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    return hidden.to(dtype), weight.to(dtype), targets, torch.randn(2, ROWS, generator=generator)


def plain(hidden, weight, targets, temperature, softcap=None):
    """As the definition says, in fp64."""
    logits = hidden.double() @ weight[:VOCAB].double().t()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), -(logprobs.exp() * logprobs).sum(-1)


def unfused(hidden, weight, targets, temperature):
    """Whole logits, rounded to the inputs' precision as Megatron's output layer gives them, then a softmax in fp32."""
    logits = (hidden @ weight.t()).float()[:, :VOCAB] / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), -(logprobs.exp() * logprobs).sum(-1)


def run(function, dtype, temperature, coefficients=(1.0, 1.0)):
    hidden, weight, targets, factors = inputs(dtype)
    hidden.requires_grad_()
    weight.requires_grad_()
    logprobs, entropy = function(hidden, weight, targets, temperature)
    total = coefficients[0] * (factors[0] * logprobs).sum() + coefficients[1] * (factors[1] * entropy).sum()
    total.backward()
    return logprobs.detach(), entropy.detach(), hidden.grad, weight.grad


def fused(chunk, keep=False, softcap=None):
    return lambda hidden, weight, targets, temperature: head_logprobs(
        hidden, weight, targets, temperature=temperature, vocab_size=VOCAB, softcap=softcap, chunk=chunk, keep=keep
    )


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, ROWS, 1000])
@pytest.mark.parametrize("coefficients", [(1.0, 0.0), (0.0, 1.0), (1.0, -0.4)])
def test_values_and_gradients_in_fp32_equal_the_unfused_path_and_the_definition(chunk, coefficients, keep):
    for reference in (plain, unfused):
        for found, expected in zip(
            run(fused(chunk, keep), torch.float32, 0.7, coefficients),
            run(reference, torch.float32, 0.7, coefficients),
            strict=True,
        ):
            torch.testing.assert_close(found, expected.float(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("softcap", [0.5, 3.0])
@pytest.mark.parametrize("coefficients", [(1.0, 0.0), (0.0, 1.0), (1.0, -0.4)])
def test_capped_logits_have_the_values_and_gradients_of_the_definition(coefficients, softcap, keep):
    def definition(*given):
        return plain(*given, softcap)

    for dtype, close in ((torch.float32, 2e-6), (torch.bfloat16, 1e-2)):
        found = run(fused(5, keep, softcap), dtype, 0.7, coefficients)
        for mine, exact in zip(found, run(definition, dtype, 0.7, coefficients), strict=True):
            assert (mine.double() - exact.double()).norm() / exact.double().norm() < close


@pytest.mark.parametrize("keep", [False, True])
def test_in_bf16_it_is_at_least_as_close_to_the_definition_as_the_unfused_path(keep):
    exact = run(plain, torch.bfloat16, 1.0)
    errors = {}
    for name, function in (("fused", fused(7, keep)), ("unfused", unfused)):
        errors[name] = [
            ((a.double() - b.double()).norm() / b.double().norm()).item()
            for a, b in zip(run(function, torch.bfloat16, 1.0), exact, strict=True)
        ]
    # Values never pass through bf16 logits; gradients do, rounded once.
    assert errors["fused"][0] < 1e-6 < errors["unfused"][0]
    assert errors["fused"][1] < 1e-6
    assert all(error < 1e-2 for error in errors["fused"])
    assert all(mine <= 1.1 * theirs for mine, theirs in zip(errors["fused"], errors["unfused"], strict=True))


def test_padded_vocabulary_rows_get_no_probability_and_no_gradient():
    _, _, _, weight_grad = run(fused(5), torch.float32, 1.0)
    assert torch.equal(weight_grad[VOCAB:], torch.zeros(PADDED - VOCAB, HIDDEN))
    hidden, weight, targets, _ = inputs(torch.float32)
    loud = weight.clone()
    loud[VOCAB:] = 1e4
    for found, expected in zip(
        fused(5)(hidden, loud, targets, 1.0), fused(5)(hidden, weight, targets, 1.0), strict=True
    ):
        assert torch.equal(found, expected)


def test_gradient_of_the_weight_is_summed_into_main_grad_in_fp32_and_marked_for_megatron():
    hidden, weight, targets, factors = inputs(torch.bfloat16)
    weight = torch.nn.Parameter(weight)
    weight.main_grad = torch.ones(PADDED, HIDDEN)
    for _ in range(2):
        logprobs, _ = fused(4)(hidden, weight, targets, 1.0)
        (factors[0] * logprobs).sum().backward()
    exact = run(plain, torch.bfloat16, 1.0, (1.0, 0.0))[3].double()
    assert weight.grad_added_to_main_grad
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    found = (weight.main_grad.double() - 1) / 2
    assert (found - exact).norm() / exact.norm() < 5e-3


def test_entropy_gradient_is_finite_where_a_probability_underflows():
    hidden = torch.tensor([[1.0, 0.0]], requires_grad=True)
    weight = torch.tensor([[0.0, 1.0], [-300.0, 0.0], [1.0, 0.0]])
    _, entropy = head_logprobs(hidden, weight, torch.tensor([0]), temperature=1.0, vocab_size=3)
    entropy.sum().backward()
    assert torch.isfinite(hidden.grad).all()


def test_kept_probabilities_leave_the_gradient_of_a_nearly_certain_token_exact():
    """1 - p of p = 0.9995 is below what bf16 resolves near 1."""
    hidden = torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[7.625, 0.0], [0.0, 1.0]], dtype=torch.bfloat16)
    grads = []
    for keep in (False, True):
        hidden.grad = None
        logprobs, _ = head_logprobs(hidden, weight, torch.tensor([0]), temperature=1.0, vocab_size=2, keep=keep)
        logprobs.sum().backward()
        grads.append(hidden.grad.clone())
    assert 0 < grads[0][0, 0] < 0.005
    torch.testing.assert_close(grads[1], grads[0], rtol=0.01, atol=0)


def test_probabilities_are_kept_only_where_a_gradient_will_be_asked_for(monkeypatch):
    kept = []
    statistics = output_head.vocabulary_statistics
    monkeypatch.setattr(
        output_head, "vocabulary_statistics", lambda *given: (kept.append(given[3] is not None), statistics(*given))[1]
    )
    hidden, weight, targets, _ = inputs(torch.float32)

    def run_once():
        kept.clear()
        head_logprobs(hidden, weight, targets, temperature=1.0, vocab_size=VOCAB, keep=True)
        return kept == [True]

    assert not run_once()
    hidden.requires_grad_()
    with torch.no_grad():
        assert not run_once()
    assert run_once()


PEAK = """
import resource, torch
from rltool.megatron.output_head import head_logprobs
hidden = torch.randn(4096, 16, requires_grad=True)
weight = torch.randn(16000, 16, requires_grad=True)
targets = torch.randint(0, 16000, (4096,))
def step(rows, chunk):
    parts = hidden[:rows], weight, targets[:rows]
    logprobs, entropy = head_logprobs(*parts, temperature=1.0, vocab_size=16000, chunk=chunk)
    (logprobs.sum() + entropy.sum()).backward()
step(8, 8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
step(4096, {chunk})
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def peak_mib(chunk: int) -> float:
    done = subprocess.run(
        [sys.executable, "-c", PEAK.format(chunk=chunk)], capture_output=True, text=True, timeout=120, check=True,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},  # else glibc keeps free blocks, or not, by chance
    )  # fmt: skip
    return float(done.stdout)


def test_peak_memory_is_that_of_a_chunk_and_not_of_the_whole_logits():
    whole = 4096 * 16000 * 4 / 2**20
    assert peak_mib(128) < whole / 2 < peak_mib(4096)
