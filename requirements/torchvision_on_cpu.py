"""Lets torchvision be imported where the registry's build of it, which is for CUDA, meets torch's for a CPU: its library
of operators does not load there, and it registers meta kernels for operators that do not exist then. Here the operators are
declared, not implemented, beforehand. Models of pictures need none of them: they resize with torch's own.

setup.sh copies it into an environment, with a .pth file that imports it at the start of every interpreter; so it imports
nothing heavy itself.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any


def _schema(name: str, tensors: int, floats: int, ints: int, bools: int, results: int) -> str:
    """An operator's signature in torch's schema language; only its name and types matter, nothing ever calls it."""
    kinds = ["Tensor"] * tensors + ["float"] * floats + ["SymInt"] * ints + ["bool"] * bools
    arguments = ", ".join(f"{kind} a{position}" for position, kind in enumerate(kinds))
    returns = "Tensor" if results == 1 else "(" + ", ".join(["Tensor"] * results) + ")"
    return f"{name}({arguments}) -> {returns}"


TORCHVISION_OPERATORS = (
    _schema("nms", 2, 1, 0, 0, 1),
    _schema("qnms", 2, 1, 0, 0, 1),
    _schema("roi_align", 2, 1, 3, 1, 1),
    _schema("_roi_align_backward", 2, 1, 7, 1, 1),
    _schema("roi_pool", 2, 1, 2, 0, 2),
    _schema("_roi_pool_backward", 3, 1, 6, 0, 1),
    _schema("ps_roi_align", 2, 1, 3, 0, 2),
    _schema("_ps_roi_align_backward", 3, 1, 7, 0, 1),
    _schema("ps_roi_pool", 2, 1, 2, 0, 2),
    _schema("_ps_roi_pool_backward", 3, 1, 6, 0, 1),
    _schema("deform_conv2d", 5, 0, 8, 1, 1),
    _schema("_deform_conv2d_backward", 6, 0, 8, 1, 5),
)

_declared: list[Any] = []  # torch drops a library's declarations when the object is collected


def _declare_torchvision_operators() -> None:
    if _declared:
        return
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in TORCHVISION_OPERATORS:
        library.define(schema)
    _declared.append(library)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "torchvision":
            _declare_torchvision_operators()
        return None


sys.meta_path.insert(0, _Finder())
