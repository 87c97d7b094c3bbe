"""Each function of rltool.megatron.fused against the same one in plain torch: relative differences of values and
gradients, as JSON.

    python -m tests.unit.megatron.fused_cases cpu      # by Triton's interpreter (TRITON_INTERPRET=1)
    python -m tests.unit.megatron.fused_cases cuda
"""

from __future__ import annotations

import json
import sys

import torch

from rltool.megatron import fused, kernels, topk_head

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cpu"


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE, dtype)


def values_and_gradients(function, *arguments):
    given = [x.detach().requires_grad_() if torch.is_tensor(x) and x.is_floating_point() else x for x in arguments]
    result = function(*given)
    result.float().mul(torch.arange(result.numel(), device=DEVICE).view(result.shape).cos()).sum().backward()
    return [result.detach(), *[x.grad for x in given if torch.is_tensor(x) and x.grad is not None]]


def difference(found, expected):
    assert len(found) == len(expected), (len(found), len(expected))
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), (
            mine.shape,
            mine.dtype,
            theirs.shape,
            theirs.dtype,
        )
        assert torch.isfinite(mine).all()
    return max(
        float((mine.float() - theirs.float()).norm() / theirs.float().norm())
        for mine, theirs in zip(found, expected, strict=True)
    )


def norm(dtype, shape, centered):
    arguments = randn(*shape, dtype=dtype), 1 + 0.2 * randn(shape[-1], dtype=dtype), 1e-6
    plain = kernels.rms_norm_zero_centered if centered else kernels.rms_norm
    return difference(
        values_and_gradients(lambda *a: fused.rms_norm(*a, centered=centered), *arguments),
        values_and_gradients(plain, *arguments),
    )


def rotation(dtype, tokens, heads, dim):
    # A view into queries, keys and values together, as Megatron hands it over.
    x = randn(tokens, 1, heads, 3 * dim, dtype=dtype)[..., dim : 2 * dim]
    angles = randn(tokens, 1, 1, dim // 2)
    turn = torch.cat([angles.cos(), angles.sin()], -1)
    rotated = values_and_gradients(lambda x: fused.rotate(x, turn), x)
    return difference(rotated, values_and_gradients(lambda x: kernels.rotate(x, turn), x))


def split(dtype, tokens, groups, share, dim, biased):
    mixed = randn(tokens, 1, groups * (share + 2) * dim, dtype=dtype)
    bias = randn(mixed.size(-1), dtype=dtype) if biased else None
    angles = randn(tokens, 1, 1, dim // 2)
    turn = torch.cat([angles.cos(), angles.sin()], -1)

    def together(function):
        return lambda *given: torch.cat(function(*given, turn, groups, dim), dim=2)

    plain = values_and_gradients(together(kernels.split_and_rotate), mixed, bias)
    return difference(values_and_gradients(together(fused.split_and_rotate), mixed, bias), plain)


def gated(dtype, shape):
    x = randn(*shape, dtype=dtype)
    return difference(values_and_gradients(fused.swiglu, x), values_and_gradients(kernels.swiglu, x))


def gated_and_scaled(dtype, rows, width):
    x, scale = randn(rows, 2 * width, dtype=dtype), randn(rows).sigmoid()
    return difference(values_and_gradients(fused.swiglu, x, scale), values_and_gradients(kernels.swiglu, x, scale))


def gated_and_clamped(dtype, rows, width):
    """gpt-oss's kind, with its bound within the numbers."""
    x, scale, kind = randn(rows, 2 * width, dtype=dtype), randn(rows).sigmoid(), kernels.Gate(1.7, 1.0, 0.6)
    ours = values_and_gradients(lambda x, scale: fused.swiglu(x, scale, *kind), x, scale)
    return difference(ours, values_and_gradients(lambda x, scale: kernels.swiglu(x, scale, kind), x, scale))


def convolved(dtype, lengths, channels, taps):
    positions = torch.cat([torch.arange(length) for length in lengths]).to(DEVICE)
    x, weight = randn(len(positions), channels, dtype=dtype), randn(channels, taps, dtype=dtype)
    return difference(
        values_and_gradients(fused.short_convolution, x, weight, positions),
        values_and_gradients(kernels.short_convolution, x, weight, positions),
    )


def rows_summed(dtype, rows, width, groups):
    """Against the sums written out; one group has no row."""
    generator = torch.Generator().manual_seed(rows)
    group = torch.randint(1, groups, (rows,), generator=generator).to(DEVICE)
    x = randn(rows, width, dtype=dtype)
    order, ends = group.argsort(stable=True), torch.bincount(group, minlength=groups).cumsum(0)
    expected = torch.stack([x[group == i].double().sum(0) for i in range(groups)]).to(dtype)
    return max(difference([f.sum_rows(x, order, ends)], [expected]) for f in (fused, kernels))


def added_to_each(dtype, count, size, padding):
    """Totals that lie in reverse in one buffer, with something else between them that has to stay as it is."""
    buffer, parts = randn(count, size + padding), randn(count, 3, size // 3, dtype=dtype)
    expected = buffer.clone()
    totals, wanted = ([b[i, :size].view(3, -1) for i in reversed(range(count))] for b in (buffer, expected))
    for total, part in zip(wanted, parts, strict=True):
        total += part
    fused.add_to_each(totals[0], -(size + padding), parts)
    return difference([buffer], [expected])


def vocabulary(dtype, rows, width, keep, entropy, scale=0.7):
    logits = 3 * randn(rows, width)
    # Targets of other ranks' slices lie outside.
    local = torch.randint(-width // 4, width + width // 4, (rows,), generator=torch.Generator().manual_seed(rows)).to(
        DEVICE
    )
    mine, theirs = (f.vocabulary_statistics(logits, local, scale, dtype if keep else None) for f in (fused, kernels))
    held = (local >= 0) & (local < width)
    errors = [difference([mine[0][:3], mine[0][3][held]], [theirs[0][:3], theirs[0][3][held]])]
    largest, total, weighted, chosen = theirs[0]
    log_total = largest + total.log()
    by = randn(rows, seed=1), randn(rows, seed=2) if entropy else None
    rest = (
        log_total,
        torch.where(held, chosen - log_total, 0.0).exp(),
        total.log() - weighted / total,
        local,
        *by,
        scale,
        dtype,
    )
    sources = [(parts[1], parts[2]) if keep else (logits, None) for parts in (mine, theirs)]
    gradients = [f.vocabulary_gradient(*source, *rest) for f, source in zip((fused, kernels), sources, strict=True)]
    # The definition, by autograd and in fp64.
    exact = logits.double().requires_grad_()
    logp = torch.log_softmax(exact * scale, -1)
    value = (
        logp.gather(1, local.clamp(0, width - 1)[:, None]).squeeze(1) * held
        - torch.logsumexp(exact * scale, -1) * ~held
    ) @ by[0].double()
    if entropy:
        value = value - (logp.exp() * logp).sum(-1) @ by[1].double()
    (expected,) = torch.autograd.grad(value, exact)
    return max(*errors, difference([gradients[0]], [gradients[1]]), difference([gradients[0]], [expected.to(dtype)]))


def topk_head_logprobs(dtype, rows, width, keep):
    """head_logprobs_of, through these functions and those in plain torch."""
    generator = torch.Generator().manual_seed(rows)
    ids = torch.stack([torch.randperm(width, generator=generator)[:6] for _ in range(rows)])
    targets = torch.where(torch.arange(rows) % 3 == 0, ids[:, 2], (ids[:, 0] + 1) % width).to(DEVICE)
    results = []
    for functions in (fused, kernels):
        statistics = functions.vocabulary_statistics
        topk_head.vocabulary_statistics = lambda *given, f=statistics: f(*given, *[None] * (4 - len(given)))
        topk_head.vocabulary_gradient = functions.vocabulary_gradient
        hidden, weight = (randn(n, 8, dtype=dtype).requires_grad_() for n in (rows, width))
        found = topk_head.head_logprobs_of(
            hidden, weight, targets, ids.to(DEVICE), temperature=0.7, vocab_size=width, chunk=5, keep=keep
        )
        sum((torch.arange(x.numel(), device=DEVICE).view(x.shape).cos() * x).sum() for x in found).backward()
        results.append([*(x.detach() for x in found), hidden.grad, weight.grad])
    return difference(*results)


def main() -> None:
    kernels.compile_on_cuda(False)  # what fused is compared with
    fused.VOCABULARY_BLOCK = 64
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        for centered in (False, True):
            found[f"norm {name} {centered}"] = norm(dtype, (37, 1, 96), centered)
            found[f"norm of heads {name} {centered}"] = norm(dtype, (9, 1, 4, 32), centered)
        found[f"rotation {name}"] = rotation(dtype, 11, 3, 24)
        found[f"split {name}"] = split(dtype, 11, 3, 2, 24, True)
        found[f"split {name} one group"] = split(dtype, 5, 1, 5, 32, True)
        found[f"split {name} no bias"] = split(dtype, 7, 2, 1, 64, False)
        found[f"split {name} many heads"] = split(dtype, 3, 4, 7, 128, True)
        found[f"gated {name}"] = gated(dtype, (7, 1, 2 * 2100))
        found[f"gated and scaled {name}"] = gated_and_scaled(dtype, 7, 2100)
        found[f"gated and clamped {name}"] = gated_and_clamped(dtype, 7, 2100)
        found[f"convolved {name}"] = convolved(dtype, (1, 300, 2, 4, 3, 40), 150, 4)
        found[f"convolved {name} one tap"] = convolved(dtype, (5, 7), 3, 1)
        found[f"convolved {name} three taps"] = convolved(dtype, (2, 9), 20, 3)
        found[f"rows summed {name}"] = rows_summed(dtype, 41, 96, 9)
        found[f"added to each {name}"] = added_to_each(dtype, 3, 2400, 7)
        for keep in (False, True):
            found[f"top-k head {name} {keep}"] = topk_head_logprobs(dtype, 13, 203, keep)
            for entropy in (False, True):
                found[f"vocabulary {name} {keep} {entropy}"] = vocabulary(dtype, 13, 203, keep, entropy)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
