"""CUDA IPC through ctypes: memory of one process that others on the same host open by a handle of 64 bytes, on the same
GPU or, where the two have peer access, on another.

The memory is plain cudaMalloc's: torch's allocator cannot export its own with expandable segments, which the trainer
uses. Handles travel as base64, so nothing is unpickled. A process opens a handle once at a time, and never its
own.

Source: cudaIpcGetMemHandle, cudaIpcOpenMemHandle and cudaIpcCloseMemHandle in the CUDA runtime's documentation.
"""

from __future__ import annotations

import base64
import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rltool.errors import EngineError

HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1
"""cudaIpcMemLazyEnablePeerAccess, the one flag there is."""


class IpcError(EngineError):
    """The CUDA runtime refused; the message has what and why."""


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t."""

    _fields_ = [("reserved", ctypes.c_byte * HANDLE_BYTES)]


class ExportedBuffer:
    """`size` bytes of this process on `device`. handle: base64, for the processes that open it; flat: [size] uint8."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._device, self._address = device, ctypes.c_void_p()
        with torch.cuda.device(device):
            _call("cudaMalloc", ctypes.byref(self._address), ctypes.c_size_t(size))
            try:
                handle = _Handle()
                _call("cudaIpcGetMemHandle", ctypes.byref(handle), self._address)
            except IpcError:
                self.close()
                raise
        self.handle = base64.b64encode(bytes(handle)).decode()
        self.flat = _as_tensor(self._address, size, device)

    def close(self) -> None:
        """Free it. Whoever has opened it should have closed it by now. Idempotent."""
        address, self._address = self._address, ctypes.c_void_p()
        if address:
            with torch.cuda.device(self._device):
                _call("cudaFree", address)


class OpenedBuffer:
    """Another process's memory on `device`, or, with `peer`, on another GPU, which `device` reaches. Raises IpcError
    where it cannot be opened, ValueError for no handle."""

    def __init__(self, handle: str, device: torch.device, *, peer: bool = False) -> None:
        self._device, self._address, self._peer = device, ctypes.c_void_p(), peer
        raw = _Handle.from_buffer_copy(base64.b64decode(handle, validate=True))
        with torch.cuda.device(device):
            _call("cudaIpcOpenMemHandle", ctypes.byref(self._address), raw, ctypes.c_uint(LAZY_PEER_ACCESS))

    def flat(self, size: int) -> Tensor:
        """Its first bytes: [size] uint8, not to be used after `close`."""
        return (peer_tensor if self._peer else _as_tensor)(self._address, size, self._device)

    def close(self) -> None:
        """Idempotent."""
        address, self._address = self._address, ctypes.c_void_p()
        if address:
            with torch.cuda.device(self._device):
                torch.cuda.synchronize()
                _call("cudaIpcCloseMemHandle", address)


def gpu_uuid(device: torch.device) -> str:
    """The same in all processes, whatever its index there."""
    return str(torch.cuda.get_device_properties(device).uuid)


def host_id() -> str:
    """The same in all processes of a host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class _Memory:
    """https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html, of memory that another object owns."""

    def __init__(self, address: ctypes.c_void_p, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address.value, False), "strides": None, "version": 3,
        }  # fmt: skip


def _as_tensor(address: ctypes.c_void_p, size: int, device: torch.device) -> Tensor:
    if size == 0:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.as_tensor(_Memory(address, size), device=device)


def peer_tensor(address: ctypes.c_void_p, size: int, device: torch.device) -> Tensor:
    """[size] uint8 that torch takes for memory of `device`, whose kernels reach it. Asked where it is, as `_as_tensor`
    has it asked, CUDA would name the other GPU, which this process may not even see."""
    seen = torch.empty(0, dtype=torch.uint8, device=device)  # whose device has an index
    return seen.set_(torch._C._construct_storage_from_data_pointer(address.value or 0, seen.device, size))


@cache
def _runtime() -> Any:
    """The libcudart that torch has loaded into this process."""
    name = f"libcudart.so.{(torch.version.cuda or '').split('.')[0]}"
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise IpcError(f"cannot load the CUDA runtime: {error}") from error
    library.cudaGetErrorString.restype = ctypes.c_char_p
    return library


def _call(name: str, *arguments: Any) -> None:
    library = _runtime()
    error = getattr(library, name)(*arguments)
    if error:
        library.cudaGetLastError()  # or torch's next call would report it
        raise IpcError(f"{name}: {library.cudaGetErrorString(error).decode()}")
