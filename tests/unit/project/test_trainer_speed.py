"""The table that benchmarks.trainer_speed makes of a profile."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.trainer_speed import busy_seconds, by_kind


def test_each_kernel_counts_once_and_a_product_by_its_own_kernel():
    """What torch 2.11 records of two products on an H200: each clears its workspace first, and an operator's kernels
    are also those of what the profiler does within it."""
    at = iter(range(0, 10_000, 1000))

    def on_gpu(name, took, **more):
        start = next(at)
        span = SimpleNamespace(start=start, end=start + took, elapsed_us=lambda: took)
        return SimpleNamespace(name=name, device_type="DeviceType.CUDA", time_range=span, **more, kernels=[],
                               input_shapes=[])  # fmt: skip

    kernels = [SimpleNamespace(name="Memset", duration=1), SimpleNamespace(name="nvjet", duration=100)]
    operator = {"device_type": "DeviceType.CPU", "kernels": kernels}
    events = [
        SimpleNamespace(name="aten::mm", input_shapes=[[64, 8], [8, 16]], **operator),
        SimpleNamespace(name="Command Buffer Full", input_shapes=[], **operator),
        SimpleNamespace(name="aten::addmm", input_shapes=[[16], [32, 8], [8, 16]], **operator),
        on_gpu("Memset", 1), on_gpu("nvjet", 100), on_gpu("Memset", 1), on_gpu("nvjet", 100), on_gpu("nvjet", 7),
        on_gpu("step", 500, is_user_annotation=True),
    ]  # fmt: skip
    recorded = SimpleNamespace(events=lambda: events)
    found = {kind: (calls, round(1e6 * took), flops) for kind, (calls, took, flops) in by_kind(recorded, True).items()}
    assert found == {
        "Memset": (2, 2, 0.0),
        "nvjet": (1, 7, 0.0),
        "product 8 x 16": (2, 200, 2.0 * (64 + 32) * 8 * 16),
    }
    assert round(1e6 * busy_seconds(recorded)) == 209


def test_on_a_cpu_products_are_told_by_their_shapes():
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        for _ in range(3):
            torch.nn.functional.linear(torch.ones(64, 8), torch.ones(16, 8), torch.ones(16))
    calls, seconds, flops = by_kind(recorded, False)["product 8 x 16"]
    assert (calls, flops) == (3, 3 * 2.0 * 64 * 8 * 16) and seconds > 0
