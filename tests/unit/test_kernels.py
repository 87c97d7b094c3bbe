"""The small functions of the model against their definitions, and that each compiles as one graph for any length.

On CUDA they run compiled. Here the tracing is tested with the compiler that needs no C++; the arithmetic, eager.
"""

import inspect

import pytest
import torch
import torch.nn.functional as F

from rltool.megatron import kernels

BF16 = torch.bfloat16


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def ids(count):
    return torch.randint(-5, 35, (count,), generator=torch.Generator().manual_seed(count))


CASES = {
    "rms_norm": lambda n: (randn(n, 1, 16, dtype=BF16), randn(16, dtype=BF16), 1e-6),
    "rms_norm_zero_centered": lambda n: (randn(n, 1, 16, dtype=BF16), randn(16, dtype=BF16), 1e-6),
    "rotate": lambda n: (randn(n, 1, 4, 16, dtype=BF16), randn(n, 1, 1, 16).sin()),
    "swiglu": lambda n: (randn(n, 1, 32, dtype=BF16),),
    "vocabulary_statistics": lambda n: (randn(n, 30), ids(n), 0.7),
    "vocabulary_gradient": lambda n: (randn(n, 30), randn(n) + 5, randn(n), ids(n), randn(n), randn(n), 0.7, BF16),
}


def values_and_gradients(function, arguments):
    given = [x.clone().requires_grad_() if torch.is_tensor(x) and x.is_floating_point() else x for x in arguments]
    results = function(*given)
    results = results if isinstance(results, tuple) else (results,)
    sum((result.float() * torch.arange(result.numel()).view(result.shape).cos()).sum() for result in results).backward()
    return [*results, *[x.grad for x in given if torch.is_tensor(x) and x.grad is not None]]


@pytest.mark.parametrize("name", CASES)
def test_one_graph_serves_every_length(name):
    plain = getattr(kernels, name).__wrapped__
    counted = []

    def backend(graph, inputs):
        counted.append(graph)
        return graph.forward

    fast = torch.compile(plain, dynamic=False, fullgraph=True, backend=backend)
    by_token = [parameter != "weight" for parameter in inspect.signature(plain).parameters]

    def compiled(*arguments):
        return fast(*kernels.rows_vary(arguments, by_token))

    for length in (5, 9, 23):
        for found, expected in zip(values_and_gradients(compiled, CASES[name](length)), values_and_gradients(plain, CASES[name](length)), strict=True):
            assert torch.equal(found, expected)
    assert len(counted) == 1
    traced = [node.meta["example_value"] for node in counted[0].graph.nodes if torch.is_tensor(node.meta.get("example_value"))]
    assert any(not isinstance(value.shape[0], int) for value in traced), "the number of tokens is a constant of the kernel"
    assert all(isinstance(size, int) for value in traced for size in value.shape[1:]), "a width is a variable of the kernel"


def test_rms_norm_is_that_of_torch():
    x, weight = randn(7, 16), randn(16)
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-6), F.rms_norm(x, (16,), weight, 1e-6))
    torch.testing.assert_close(kernels.rms_norm_zero_centered(x, weight, 1e-6), F.rms_norm(x, (16,), 1 + weight, 1e-6))


def test_rotation_keeps_lengths_and_depends_on_differences_of_positions_only():
    frequencies = torch.tensor([1.0, 0.1])
    query, key = randn(1, 4), randn(1, 4, seed=1)

    def at(x, position):
        return kernels.rotate(x, torch.cat(((position * frequencies).cos(), (position * frequencies).sin()))[None])

    assert torch.allclose(at(query, 5).norm(), query.norm())
    assert torch.allclose((at(query, 7) * at(key, 3)).sum(), (at(query, 14) * at(key, 10)).sum(), atol=1e-6)
    assert not torch.allclose((at(query, 7) * at(key, 3)).sum(), (at(query, 7) * at(key, 4)).sum(), atol=1e-2)


def test_swiglu_gates_the_second_half_by_the_first():
    x = randn(3, 8)
    torch.testing.assert_close(kernels.swiglu(x), F.silu(x[:, :4]) * x[:, 4:])
