"""What lets Megatron-core run without CUDA: a context that turns its hard-coded "cuda" into the CPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rltool.megatron.patches.registry import Target, patch, replace

CUDA_FUNCTIONS = (
    "current_device",
    "synchronize",
    "current_stream",
    "Stream",
    "stream",
    "default_stream",
    "manual_seed",
    "get_rng_state",
    "set_rng_state",
)
"""Of torch.cuda, those that Megatron calls whatever the device."""

CPU = torch.device("cpu")
_state = threading.local()


class _NullStream:
    """Stands for a CUDA stream: everything on the CPU is already in order."""

    device = CPU

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, *_: Any) -> None:
        pass

    wait_event = synchronize = wait_stream

    def record_event(self, *_: Any) -> _NullStream:
        """An event of nothing to wait for."""
        return self


def _is_cuda(device: Any) -> bool:
    return device is not None and str(device).split(":")[0] == "cuda"


class _CudaToCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], (str, torch.device)) and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        result = func(*args, **(kwargs or {}))
        # DistributedDataParallel and the optimizers sort gradients by `tensor.type()` and know only CUDA's names.
        if func is torch.Tensor.type and len(args) == 1 and not kwargs and not result.startswith("torch.cuda."):
            result = result.replace("torch.", "torch.cuda.", 1)
        return result


def replacements() -> list[tuple[Any, str, Any]]:
    """(owner, name, what stands there inside of the context) for every function that is replaced."""
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import token_dispatcher

    stream = _NullStream()

    def as_numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        # Megatron's own converts only what lies on a GPU, and gloo takes no tensors for the sizes of an all-to-all.
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return [
        (torch.cuda, "current_device", lambda: CPU),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "current_stream", lambda *_: stream),
        (torch.cuda, "Stream", _NullStream),
        (torch.cuda, "stream", lambda *_: nullcontext()),
        (torch.cuda, "default_stream", lambda *_: stream),
        (token_dispatcher, "maybe_move_tensor_to_cpu", as_numbers),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state()),
        (torch.cuda, "set_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
        (megatron_random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
        (megatron_random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
    ]


@patch(
    "0.16",
    "0.19",
    targets=(
        *(Target(f"torch.cuda:{name}") for name in CUDA_FUNCTIONS),
        Target(
            "megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",
            ("tensor", "as_numpy", "record_stream"),
        ),
        Target("megatron.core.tensor_parallel.random:_get_cuda_rng_state", ("device", "clone", "graph_safe")),
        Target("megatron.core.tensor_parallel.random:_set_cuda_rng_state", ("new_state", "device", "graph_safe")),
    ),
)
@contextmanager
def cpu_mode() -> Iterator[None]:
    """Lets Megatron run without CUDA: a context that turns its hard-coded "cuda" into the CPU.

    Megatron creates tensors with device="cuda", asks torch.cuda for streams and RNG states, and compares type strings
    with "torch.cuda.FloatTensor". Inside the context those land on the CPU; outside, torch is untouched.

    Re-entrant. The mode is thread-local and the replaced functions are process-wide: enter it from one thread only.
    """
    if getattr(_state, "active", False):
        yield
        return
    saved = []
    _state.active = True
    try:
        for owner, name, replacement in replacements():
            saved.append((owner, name, getattr(owner, name)))
            replace(owner, name, replacement)
        with _CudaToCpu():
            yield
    finally:
        _state.active = False
        for owner, name, original in reversed(saved):
            setattr(owner, name, original)
