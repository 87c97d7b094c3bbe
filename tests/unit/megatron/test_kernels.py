"""The small functions of the model against their definitions, and those for a GPU, written in Triton, against them."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from rltool.megatron import kernels
from tests.e2e.megatron_models import DEVICE


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


@pytest.fixture(scope="module")
def differences():
    """Of every function and its fused form, on a GPU where these tests run on one, else by Triton's interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"} if DEVICE == "cpu" else dict(os.environ)
    command = [sys.executable, "-m", "tests.unit.megatron.fused_cases", DEVICE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "function",
    ["norm", "norm of heads", "rotation", "split", "gated", "gated and scaled", "convolved", "rows summed",
     "added to each", "vocabulary", "top-k head"],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 1e-2)])
def test_fused_functions_are_those_in_plain_torch(differences, function, dtype, tolerance):
    found = {name: error for name, error in differences.items() if name.startswith(f"{function} {dtype}")}
    # A GPU sums its matrix products in another order for other sizes of chunks.
    most = max(tolerance, 2e-5) if DEVICE == "cuda" and function == "top-k head" else tolerance
    assert found and max(found.values()) < most, found


def test_without_fusion_a_gpu_takes_plain_torch(monkeypatch):
    class OnGpu:
        is_cuda = True

        def numel(self):
            return 1

    monkeypatch.setattr(kernels, "_eager", False)
    assert kernels._on_gpu(OnGpu())
    kernels.compile_on_cuda(False)
    assert not kernels._on_gpu(OnGpu())


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


def test_another_kind_of_swiglu_clamps_both_halves_and_adds_to_the_second():
    x = torch.tensor([[0.5, 3.0, -3.0, 0.25, 3.0, -3.0]])
    gate, up = torch.tensor([0.5, 2.0, -3.0]), torch.tensor([0.25, 2.0, -2.0])
    expected = gate * torch.sigmoid(1.5 * gate) * (up + 1)
    torch.testing.assert_close(kernels.swiglu(x, kind=kernels.Gate(1.5, 1.0, 2.0))[0], expected)


def test_swiglu_gates_the_second_half_by_the_first():
    x = randn(3, 8)
    torch.testing.assert_close(kernels.swiglu(x), F.silu(x[:, :4]) * x[:, 4:])
