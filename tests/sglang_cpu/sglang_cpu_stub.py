"""Lets the stock SGLang wheel import, and serve, where there is no GPU. For tests; copied into a venv by setup.sh.

On a CPU without AMX, SGLang 0.5.23 computes with plain torch, but some of its code assumes CUDA (of torchvision's:
requirements/torchvision_on_cpu.py):

- `sgl_kernel`, its kernel package, has no CPU wheel. Here every submodule and attribute of that name exists, and raises
  NotImplementedError when it is called: a code path that really needs a kernel fails by name, instead of computing
  nonsense. So do those of its operators that a module of SGLang's looks up when it is imported.
- NIXL, where it is installed: SGLang calls its KV cache VRAM wherever it lies, and UCX refuses host memory under that
  name. Here it is called DRAM, which it is.
- memory of the host that it copies from a GPU to, such as that of routed experts, or to one from, such as adapters, is
  page-locked by CUDA. Here it is not.

A .pth file imports this module at the start of every interpreter of the environment, so it imports nothing heavy
itself.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

KERNEL_PACKAGE = "sgl_kernel"
KERNEL_VERSION = "0.4.10"
"""SGLang compares `sgl_kernel.__version__` with the minimum that it wants."""


NIXL = "nixl_cu12._api"
NIXL_METHODS = ("register_memory", "get_xfer_descs", "prep_xfer_dlist")


def _of_host_memory(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return method(
            *("DRAM" if isinstance(arg, str) and arg == "VRAM" else arg for arg in args),
            **{name: "DRAM" if isinstance(arg, str) and arg == "VRAM" else arg for name, arg in kwargs.items()},
        )

    return call


def _nixl_of_host_memory(module: types.ModuleType) -> None:
    for name in NIXL_METHODS:
        setattr(module.nixl_agent, name, _of_host_memory(getattr(module.nixl_agent, name)))


def _without_page_locks(module: types.ModuleType) -> None:
    module._cuda_host_register = lambda *_args: None


PINNING = ("tensor", "zeros", "empty", "ones", "arange", "full")


def _without_pinned_memory(_module: types.ModuleType) -> None:
    import torch

    def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
            return make(*args, **kwargs)

        return made

    for name in PINNING:
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_args: self  # type: ignore[method-assign]


CHANGED = {
    NIXL: _nixl_of_host_memory,
    "sglang.srt.mem_cache.pool_host.common": _without_page_locks,
    "sglang.srt.lora.lora": _without_pinned_memory,
}
"""What is done to a module once it is imported."""


OPERATORS = {
    "sglang.srt.models.qwen3_5": (
        "fused_sigmoid_mul_cpu", "fused_qk_gemma_rmsnorm_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu",
        "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    ),
}  # fmt: skip
"""Of torch.ops.sgl_kernel: what a module looks up when it is imported. All of Qwen's models with pictures import this
one."""


class _ChangingLoader(importlib.abc.Loader):
    def __init__(self, inner: importlib.abc.Loader, change: Callable[[types.ModuleType], None]) -> None:
        self.inner, self.change = inner, change

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self.inner.exec_module(module)
        self.change(module)


class AbsentKernel:
    """A kernel, class or constant of sgl_kernel that exists in name only."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self.__name__} has no CPU implementation in this test environment")

    def __getattr__(self, name: str) -> AbsentKernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return AbsentKernel(f"{self.__name__}.{name}")


class _AbsentModule(types.ModuleType):
    def __getattr__(self, name: str) -> AbsentKernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return AbsentKernel(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] == KERNEL_PACKAGE:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        if name in OPERATORS:
            import torch

            for operator in OPERATORS[name]:
                setattr(torch.ops.sgl_kernel, operator, AbsentKernel(operator))
        if name in CHANGED:
            found = importlib.machinery.PathFinder.find_spec(name, path)
            if found is not None and found.loader is not None:
                found.loader = _ChangingLoader(found.loader, CHANGED[name])
            return found
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _AbsentModule(spec.name)
        module.__path__ = []
        module.__version__ = KERNEL_VERSION
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())
