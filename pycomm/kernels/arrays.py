"""Making results in the library that the arguments came from."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack


def empty(array: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """An uninitialised array of ``array``'s library, on its device; ``dtype`` is a name."""
    if isinstance(array, torch.Tensor):
        return torch.empty(shape, dtype=getattr(torch, dtype), device=array.device)
    if hasattr(array, "__cuda_array_interface__"):
        return _empty_on_gpu(array, shape, dtype)
    if isinstance(array, np.ndarray) or not hasattr(array, "__dlpack__"):
        return np.empty(shape, dtype)
    return torch.empty(shape, dtype=getattr(torch, dtype), device=from_dlpack(array).device)


def dtype_of(array: Any) -> str:
    """The name of ``array``'s dtype."""
    if isinstance(array, torch.Tensor):
        return str(array.dtype).removeprefix("torch.")
    if not hasattr(array, "dtype"):
        array = np.asarray(array)
    return str(array.dtype).removeprefix("torch.")


def device_bytes(array: Any, num_bytes: int) -> Any:
    """Scratch memory beside ``array``. Called by the extension."""
    return empty(array, (num_bytes,), "uint8")


def _empty_on_gpu(array: Any, shape: tuple[int, ...], dtype: str) -> Any:
    library = type(array).__module__.partition(".")[0]
    if library == "cupy":
        with array.device:
            return sys.modules["cupy"].empty(shape, dtype)
    if hasattr(array, "__array_namespace__"):
        namespace = array.__array_namespace__()
        return namespace.empty(shape, dtype=getattr(namespace, dtype), device=array.device)
    raise TypeError(
        f"results cannot be made in the library of a {type(array).__name__}: pass torch or cupy arrays, or hand it "
        "over with torch.from_dlpack() or cupy.asarray()"
    )
