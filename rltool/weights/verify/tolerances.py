"""How far the log-probabilities of trainer and engines may differ, by what both compute in. Pure."""

from __future__ import annotations

from collections.abc import Iterable

EXACT_CHECK = 1e-3
"""Value check with float32 on both sides and the engine on a CPU, where two implementations of one model agree within
1e-5."""
GPU_CHECK = 1e-2
"""The same with the engine elsewhere: vLLM's attention for float32 multiplies in TF32 (10 bits of mantissa) on GPUs; a
135M model was measured 1.7e-3 apart on an H200."""
EXACT_LIMIT = 0.1
"""A step's mean with float32 on both sides: kernels of GPUs and experts' routes differ by more than a CPU's 1e-6."""
ROUNDED = 0.2
"""Both, where one side computes in 16 bits or does not report it: two bf16 implementations were measured 0.037 to 0.055
apart (means over samples of a 135M model on an H200), and an engine that holds other weights is off by 1 and more."""


def check_tolerance(
    configured: float | None, trainer_dtype: str, engine_dtype: str | None, engine_device: str | None
) -> float:
    """Mean |difference| that the value check of one engine allows. configured: weights.verify_tolerance;
    engine_device: "cpu", "cuda", or None if not reported."""
    if configured is not None:
        return configured
    if not _exact(trainer_dtype, [engine_dtype]):
        return ROUNDED
    return EXACT_CHECK if engine_device == "cpu" else GPU_CHECK


def difference_limit(configured: float | None, trainer_dtype: str, engine_dtypes: Iterable[str | None]) -> float:
    """Mean |difference| of a step above which a run stops. configured: monitor.logprob_difference_limit."""
    if configured is not None:
        return configured
    return EXACT_LIMIT if _exact(trainer_dtype, engine_dtypes) else ROUNDED


def _exact(trainer_dtype: str, engine_dtypes: Iterable[str | None]) -> bool:
    return all(dtype == "float32" for dtype in (trainer_dtype, *engine_dtypes))
