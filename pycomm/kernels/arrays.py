"""Making results in the library that the arguments came from."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack


def like(array: Any, length: int, dtype: str | None = None) -> Any:
    """An uninitialised 1-d array of ``array``'s library; ``dtype`` (a name) defaults to its own."""
    if not isinstance(array, torch.Tensor) and not hasattr(array, "__dlpack__"):
        array = np.asarray(array)
    if isinstance(array, np.ndarray):
        return np.empty(length, dtype or array.dtype)
    if not isinstance(array, torch.Tensor):
        array = from_dlpack(array)
    return torch.empty(length, dtype=getattr(torch, dtype) if dtype else array.dtype, device=array.device)


def scalar_like(array: Any, value: bool | float) -> Any:
    """``value`` as a 0-d array of ``array``'s library, on its device."""
    if isinstance(array, np.ndarray) or not hasattr(array, "device"):
        return np.asarray(value)
    return torch.tensor(value, device=array.device)
