"""The head that tells the teacher's tokens apart, against the definition: values, gradients, chunks, slices of the
vocabulary, precision, memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from rltool.algorithms.kl import topk_kl
from rltool.megatron import topk_head
from rltool.megatron.output_head import head_logprobs
from rltool.megatron.topk_head import head_logprobs_of, head_topk

VOCAB, PADDED, HIDDEN, ROWS, K = 37, 40, 16, 23, 5


def inputs(dtype, seed=0):
    """(hidden, weight, targets, ids of which some are the target, factors of the four results)."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator)
    weight = 0.7 * torch.randn(PADDED, HIDDEN, generator=generator)
    targets = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    ids = torch.stack([torch.randperm(VOCAB, generator=generator)[:K] for _ in range(ROWS)])
    ids[::4, 2] = targets[::4]
    ids[::4, [0, 1, 3, 4]] = (targets[::4, None] + torch.tensor([3, 5, 8, 11])) % VOCAB
    factors = torch.randn(K + 3, ROWS, generator=generator)
    return hidden.to(dtype), weight.to(dtype), targets, ids.int(), factors


def plain(hidden, weight, targets, ids, temperature, softcap=None):
    """As the definition says, in fp64."""
    logits = hidden.double() @ weight[:VOCAB].double().t()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logp = torch.log_softmax(logits / temperature, dim=-1)
    others = logp.scatter(-1, ids.long(), -torch.inf).logsumexp(-1)
    chosen = logp.gather(-1, targets[:, None]).squeeze(-1)
    return chosen, -(logp.exp() * logp).sum(-1), logp.gather(-1, ids.long()), others


def fused(chunk, keep=False, softcap=None):
    options = dict(vocab_size=VOCAB, softcap=softcap, chunk=chunk, keep=keep)
    return lambda hidden, weight, targets, ids, temperature: head_logprobs_of(
        hidden, weight, targets, ids, temperature=temperature, **options
    )


def run(function, dtype, temperature, used=(1.0, 1.0, 1.0, 1.0)):
    """The four results, and the gradients of hidden and weight; used: factors of the four in the sum."""
    hidden, weight, targets, ids, factors = inputs(dtype)
    hidden.requires_grad_()
    weight.requires_grad_()
    found = function(hidden, weight, targets, ids, temperature)
    by = (factors[0], factors[1], factors[3:].t(), factors[2])
    sum(use * (b * values).sum() for use, b, values in zip(used, by, found, strict=True) if use).backward()
    return *(values.detach() for values in found), hidden.grad, weight.grad


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, ROWS, 1000])
@pytest.mark.parametrize("used", [(0, 0, 1, 0), (0, 0, 0, 1), (1, 0, 0, 0), (0, 1, 0, 0), (1.0, -0.4, 0.8, 2.0)])
def test_values_and_gradients_in_fp32_equal_the_definition(chunk, used, keep):
    pairs = zip(
        run(fused(chunk, keep), torch.float32, 0.7, used), run(plain, torch.float32, 0.7, used), strict=True
    )
    for found, expected in pairs:
        torch.testing.assert_close(found, expected.float(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("used", [(0, 0, 1, 0), (0, 0, 0, 1), (1, 0, 0, 0), (0, 1, 0, 0), (1.0, -0.4, 0.8, 2.0)])
def test_capped_logits_have_the_values_and_gradients_of_the_definition(used, keep):
    def definition(*given):
        return plain(*given, 3.0)

    pairs = zip(
        run(fused(5, keep, 3.0), torch.float32, 0.7, used), run(definition, torch.float32, 0.7, used), strict=True
    )
    for found, expected in pairs:
        torch.testing.assert_close(found, expected.float(), rtol=2e-5, atol=2e-5)


def test_the_best_of_capped_logits_have_their_capped_probabilities():
    hidden, weight, *_ = inputs(torch.float32)
    found = head_topk(hidden, weight, K, temperature=0.7, vocab_size=VOCAB, softcap=3.0, chunk=5)
    targets = torch.zeros(ROWS, dtype=torch.long)
    expected = plain(hidden, weight, targets, torch.arange(VOCAB).expand(ROWS, -1), 0.7, 3.0)[2].topk(K)
    assert torch.equal(found.ids.long(), expected.indices)
    torch.testing.assert_close(found.logprobs, expected.values.float(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("keep", [False, True])
def test_in_bf16_values_are_exact_and_gradients_rounded_once(keep):
    found, exact = run(fused(7, keep), torch.bfloat16, 1.0), run(plain, torch.bfloat16, 1.0)
    errors = [((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(found, exact, strict=True)]
    assert max(errors[:4]) < 1e-6 and max(errors) < 1e-2


def test_targets_and_entropies_are_those_of_the_head_without_given_tokens():
    hidden, weight, targets, ids, _ = inputs(torch.float32)
    logprobs, entropy = head_logprobs(hidden, weight, targets, temperature=0.7, vocab_size=VOCAB, chunk=7)
    found = fused(7)(hidden, weight, targets, ids, 0.7)
    torch.testing.assert_close(found.logprobs, logprobs, rtol=0, atol=5e-6)
    torch.testing.assert_close(found.entropy, entropy, rtol=0, atol=5e-6)


def test_padded_vocabulary_rows_get_no_probability_and_no_gradient():
    assert torch.equal(run(fused(5), torch.float32, 1.0)[-1][VOCAB:], torch.zeros(PADDED - VOCAB, HIDDEN))
    hidden, weight, targets, ids, _ = inputs(torch.float32)
    loud = weight.clone()
    loud[VOCAB:] = 1e4
    for found, expected in zip(
        fused(5)(hidden, loud, targets, ids, 1.0), fused(5)(hidden, weight, targets, ids, 1.0), strict=True
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("keep", [False, True])
def test_an_id_below_zero_is_no_token(keep):
    hidden, weight, targets, ids, factors = inputs(torch.float32)
    fewer, lacking = ids[:, :3], ids.clone()
    lacking[:, 3:] = -1
    grads = []
    for given in (fewer, lacking):
        states = hidden.clone().requires_grad_()
        found = fused(7, keep)(states, weight, targets, given, 1.0)
        assert (found.topk[:, 3:] == 0).all()
        (found.topk.sum(1) * factors[0] + found.topk[:, 3:].exp().sum(1) + found.tail * factors[1]).sum().backward()
        grads.append((found.topk[:, :3].detach(), found.tail.detach(), states.grad))
    for found, expected in zip(*grads, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("keep", [False, True])
def test_given_the_whole_vocabulary_no_other_token_is_left(keep):
    hidden, weight, targets, _, _ = inputs(torch.float32)
    hidden.requires_grad_()
    everything = torch.arange(VOCAB, dtype=torch.int32).expand(ROWS, -1)
    found = fused(7, keep)(hidden, weight, targets, everything, 1.0)
    assert (found.tail == -torch.inf).all()
    teacher = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(5)).log_softmax(-1)
    topk_kl(teacher, found.topk, found.tail).sum().backward()
    other = hidden.detach().double().requires_grad_()
    logp = torch.log_softmax(other @ weight[:VOCAB].double().t(), -1)
    torch.nn.functional.kl_div(logp, teacher.double(), reduction="sum", log_target=True).backward()
    torch.testing.assert_close(hidden.grad, other.grad.float(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("target", [1, 2], ids=["a given token", "another"])
@pytest.mark.parametrize("apart", [20.0, 80.0, 300.0])
def test_a_tail_that_the_policy_has_lost_is_pulled_by_softmax_minus_target(apart, target, keep):
    """From 1 minus the others nothing would be left of it in fp32."""
    hidden = torch.tensor([[1.0, 0.0]], requires_grad=True)
    weight = torch.tensor([[apart, 0.0], [apart, 0.0], [0.0, 1.0], [0.0, 0.0]], requires_grad=True)
    found = head_logprobs_of(
        hidden, weight, torch.tensor([target]), torch.tensor([[0, 1]]), temperature=1.0, vocab_size=4, keep=keep
    )
    assert found.tail.item() == pytest.approx(math_tail(apart), rel=1e-5)
    teacher = torch.tensor([[0.3, 0.2]]).log()
    (topk_kl(teacher, found.topk, found.tail).sum() + 0.0 * found.logprobs.sum()).backward()
    by_logit = weight.grad[:, 0]
    assert by_logit[:2].tolist() == pytest.approx([0.2, 0.3], abs=1e-5)
    # Below SMALLEST_TAIL its pull fades, and stays finite.
    expected = [-0.25, -0.25] if apart < 60 else [0.0, 0.0]
    assert by_logit[2:].tolist() == pytest.approx(expected, abs=1e-5)


def math_tail(apart: float) -> float:
    z = torch.tensor([apart, apart, 0.0, 0.0], dtype=torch.float64).log_softmax(0)
    return z[2:].logsumexp(0).item()


def test_gradient_of_the_weight_is_summed_into_main_grad():
    hidden, weight, targets, ids, factors = inputs(torch.float32)
    weight = torch.nn.Parameter(weight)
    weight.main_grad = torch.ones(PADDED, HIDDEN)
    found = fused(4)(hidden, weight, targets, ids, 1.0)
    (found.tail * factors[2]).sum().backward()
    assert weight.grad_added_to_main_grad and torch.equal(weight.grad, torch.zeros_like(weight))
    exact = run(plain, torch.float32, 1.0, (0, 0, 0, 1))[-1]
    torch.testing.assert_close(weight.main_grad - 1, exact.float(), rtol=2e-5, atol=2e-5)


# The teacher's side.


@pytest.mark.parametrize("chunk", [1, 5, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_most_probable_tokens_are_those_of_the_whole_softmax(dtype, chunk):
    hidden, weight, _, _, _ = inputs(dtype)
    found = head_topk(hidden, weight, K, temperature=0.7, vocab_size=VOCAB, chunk=chunk)
    exact = torch.log_softmax(hidden.double() @ weight[:VOCAB].double().t() / 0.7, -1).topk(K, dim=-1)
    assert found.ids.dtype is torch.int32 and torch.equal(found.ids.long(), exact.indices)
    torch.testing.assert_close(found.logprobs, exact.values.float(), rtol=1e-6, atol=2e-6)  # AMX sums otherwise


def test_beyond_the_vocabulary_there_is_no_token():
    hidden, weight, _, _, _ = inputs(torch.float32)
    found = head_topk(hidden, weight, VOCAB + 2, temperature=1.0, vocab_size=VOCAB)
    assert (found.ids[:, VOCAB:] == -1).all() and (found.logprobs[:, VOCAB:] == -torch.inf).all()
    torch.testing.assert_close(found.logprobs.exp().sum(-1), torch.ones(ROWS))


# Slices of the vocabulary: ranks in threads, which meet at each collective.


class Slices:
    """A process group of `size` threads; `dist` for the module under test. counted: reductions of rank 0."""

    ReduceOp = torch.distributed.ReduceOp

    def __init__(self, size):
        self.count, self.barrier, self.given = size, threading.Barrier(size, timeout=30), [None] * size
        self.counted = []

    def all_gather(self, out, tensor, group):
        for place, values in zip(out, self._meet(tensor, group), strict=True):
            place.copy_(values)

    def all_reduce(self, tensor, op=torch.distributed.ReduceOp.SUM, *, group):
        if group.rank() == 0:
            self.counted.append(tensor.numel())
        everyone = torch.stack(self._meet(tensor, group))
        tensor.copy_(everyone.amax(0) if op == self.ReduceOp.MAX else everyone.sum(0))

    def _meet(self, tensor, group):
        self.given[group.rank()] = tensor.clone()
        self.barrier.wait()
        everyone = list(self.given)
        self.barrier.wait()
        return everyone

    def run(self, function):
        """function(rank, group) of each rank."""
        groups = [SimpleNamespace(rank=lambda r=r: r, size=lambda: self.count) for r in range(self.count)]
        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(function, range(self.count), groups))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("size", [2, 4, 8, 20])
def test_slices_of_the_vocabulary_give_what_the_whole_gives(monkeypatch, size, keep):
    """Of 8 slices of 5 rows the last is padding but for 2, of 20 slices of 2 one is padding alone."""
    slices = Slices(size)
    monkeypatch.setattr(topk_head, "dist", slices)
    hidden, weight, targets, ids, factors = inputs(torch.float32)
    height = PADDED // size

    def one(rank, group):
        states = hidden.clone().requires_grad_()
        own = weight[rank * height : (rank + 1) * height].clone().requires_grad_()
        found = head_logprobs_of(
            states, own, targets, ids, temperature=0.7, vocab_size=VOCAB, group=group, chunk=7, keep=keep
        )
        by = (factors[0], factors[1], factors[3:].t(), factors[2])
        sum((b * values).sum() for b, values in zip(by, found, strict=True)).backward()
        return [values.detach() for values in found], states.grad, own.grad

    ranks = slices.run(one)
    assert slices.counted == [2 * ROWS, (3 + 1 + K) * ROWS], "one reduction serves all chunks"
    expected = run(plain, torch.float32, 0.7)
    for values, _, _ in ranks:
        for found, exact in zip(values, expected, strict=False):
            torch.testing.assert_close(found, exact.float(), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(sum(grad for _, grad, _ in ranks), expected[4].float(), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(torch.cat([grad for _, _, grad in ranks]), expected[5].float(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("size", [2, 8, 20])
def test_the_most_probable_tokens_come_from_all_slices(monkeypatch, size):
    slices = Slices(size)
    monkeypatch.setattr(topk_head, "dist", slices)
    hidden, weight, _, _, _ = inputs(torch.float32)
    height = PADDED // size

    def one(rank, group):
        own = weight[rank * height : (rank + 1) * height]
        return head_topk(hidden, own, K, temperature=0.7, vocab_size=VOCAB, group=group, chunk=7)

    exact = torch.log_softmax(hidden.double() @ weight[:VOCAB].double().t() / 0.7, -1).topk(K, dim=-1)
    for found in slices.run(one):
        assert torch.equal(found.ids.long(), exact.indices)
        torch.testing.assert_close(found.logprobs, exact.values.float(), rtol=1e-6, atol=2e-6)  # AMX sums otherwise


PEAK = """
import resource, torch
from rltool.megatron.topk_head import head_logprobs_of, head_topk
hidden = torch.randn(4096, 16, requires_grad=True)
weight = torch.randn(16000, 16, requires_grad=True)
targets = torch.randint(0, 16000, (4096,))
def step(rows, chunk):
    given = dict(temperature=1.0, vocab_size=16000, chunk=chunk)
    ids = head_topk(hidden[:rows], weight, 8, **given).ids
    found = head_logprobs_of(hidden[:rows], weight, targets[:rows], ids, **given)
    (found.logprobs.sum() + found.topk.sum() + found.tail.sum()).backward()
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
