"""Arrays in the emulator's device memory, which is the host's: what cupy's are on a real GPU.

Enough of the Python array API standard for ``pycomm.kernels`` to make its results here.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from functools import cache
from types import ModuleType
from typing import Any

import torch

import pycomm._native as _native

float32, float16, bfloat16, float64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
int8, uint8, int32, int64, bool = torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool

_TYPES = {
    float32: "<f4",
    float16: "<f2",
    bfloat16: "<V2",  # as ml_dtypes has it
    float64: "<f8",
    int8: "|i1",
    uint8: "|u1",
    int32: "<i4",
    int64: "<i8",
    bool: "|b1",
}


@cache
def library() -> ctypes.CDLL:
    """The extension itself, for the functions that only the emulator has."""
    lib = ctypes.CDLL(_native.__file__)
    lib.emulator_configure.argtypes = [ctypes.c_uint64, ctypes.c_int, ctypes.c_int, ctypes.c_int]
    lib.emulator_own.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    lib.emulator_disown.argtypes = [ctypes.c_void_p]
    lib.emulator_fail_launch.argtypes = [ctypes.c_int64]
    lib.emulator_stall.argtypes = [ctypes.c_bool]
    lib.emulator_wait.argtypes = [ctypes.c_int64, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_void_p)]
    lib.emulator_wait.restype = ctypes.c_bool
    lib.emulator_num_launches.restype = ctypes.c_int64
    lib.emulator_num_fills.restype = ctypes.c_int64
    lib.emulator_num_kernels.restype = ctypes.c_int64
    lib.emulator_num_unloaded_launches.restype = ctypes.c_int64
    lib.emulator_num_calls_elsewhere.restype = ctypes.c_int64
    return lib


def waits() -> list[tuple[int, int]]:
    """``(first, waiting)``: the second stream was told to wait for the first. Since the last call of this function."""
    found: list[Any] = []
    first, waiting = ctypes.c_void_p(), ctypes.c_void_p()
    while library().emulator_wait(len(found), ctypes.byref(first), ctypes.byref(waiting)):
        found.append((first.value or 0, waiting.value or 0))
    library().emulator_forget_waits()
    return found


class DeviceArray:
    """``host`` (not copied) as an array on GPU number ``device``, whose producer's stream is ``stream``.

    The memory is that of ``whole``, where that is given.
    """

    def __init__(
        self, host: torch.Tensor, device: int = 0, stream: int | None = None, whole: DeviceArray | None = None
    ) -> None:
        self.host = host
        self.device = device
        self.stream = stream
        self.whole = whole
        if whole is not None:
            return
        storage = host.untyped_storage()
        library().emulator_own(storage.data_ptr(), max(1, storage.nbytes()), device)
        weakref.finalize(self, library().emulator_disown, storage.data_ptr())

    @property
    def dtype(self) -> torch.dtype:
        return self.host.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.host.shape)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        strides = tuple(step * self.host.element_size() for step in self.host.stride())
        return {
            "shape": self.shape,
            "typestr": _TYPES[self.host.dtype],
            "data": (self.host.data_ptr(), False),
            "strides": None if self.host.is_contiguous() else strides,
            "version": 3,
            "stream": self.stream,
        }

    def __len__(self) -> int:
        return len(self.host)

    def __getitem__(self, places: slice) -> DeviceArray:
        return DeviceArray(self.host[places], self.device, self.stream, self)

    def __array_namespace__(self) -> ModuleType:
        return sys.modules[__name__]

    def copy(self) -> DeviceArray:
        return DeviceArray(self.host.contiguous(), self.device, self.stream)


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: int = 0) -> DeviceArray:
    """Filled with garbage, so that nothing can rely on zeros."""
    host = torch.empty(shape, dtype=dtype)
    host.view(-1).view(torch.uint8).fill_(0xA5)
    return DeviceArray(host, device)
