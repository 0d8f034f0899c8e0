"""Memory layouts of tensors: dense layouts and flat aliases."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

from pycomm.collectives.gradients import FirstKinds


def on_gpu(tensor: torch.Tensor) -> bool:
    """Return whether reading ``tensor`` on the host waits for a GPU."""
    return tensor.is_cuda


def is_capturing() -> bool:
    """Return whether torch's current stream is being captured into a CUDA graph.

    The host cannot wait for it then, and each launch of the graph repeats the work on the same addresses.
    """
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return CPU ``tensor`` on ``device``, without waiting for a GPU."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def view_like(part: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return ``part`` in the shape of ``param``, and in its memory order if dense (channels_last, say)."""
    # .data has a version counter of its own, which reveals writes to this gradient alone.
    return part.as_strided(param.shape, strides_of(param)).data


def strides_of(param: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of the memory order of ``param`` if it is dense, else the strides of a contiguous tensor."""
    if not param.is_contiguous() and is_dense(param):
        return param.stride()
    return torch.empty(param.shape, device="meta").stride()


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill memory without gaps, in any order of the dimensions."""
    if tensor.numel() == 0:
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def require_dense(param: torch.Tensor) -> None:
    """Raise ValueError unless ``param`` is dense."""
    if not param.is_contiguous() and not is_dense(param):
        raise ValueError(f"a parameter of shape {list(param.shape)} has gaps or overlaps in memory; see .contiguous()")


def flat_alias(grad: torch.Tensor, view: torch.Tensor) -> torch.Tensor | None:
    """Return ``grad`` as a flat tensor in the memory order of ``view``, uncopied; ``None`` if their layouts differ."""
    if grad.is_contiguous() and view.is_contiguous():
        return grad
    if grad.stride() == view.stride() and is_dense(grad):
        return grad.as_strided((grad.numel(),), (1,))
    return None


def laid_out_like(grad: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """Return ``grad``'s elements, flat, in the memory order of ``view``; a copy only if the orders differ."""
    raw = flat_alias(grad, view)
    if raw is None:
        copy = torch.empty_strided(view.shape, view.stride(), dtype=grad.dtype, device=grad.device).copy_(grad)
        raw = flat_alias(copy, view)
    assert raw is not None, "views are dense"
    return raw


_KIND = attrgetter("shape", "dtype", "device")


class Kinds:
    """Initial shapes, dtypes and devices of named tensors, to be compared with the present ones in each step."""

    def __init__(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        self._names, self._tensors = list(names), list(tensors)
        self._first, self._seen = list(map(_KIND, self._tensors)), FirstKinds(self._tensors)

    def change(self) -> str:
        """Return which parameter has changed, what it was and what it is now; "" if none has."""
        each = ((self._names[i], self._first[i], _KIND(self._tensors[i])) for i in self._seen.perhaps_changed())
        found = next((one for one in each if one[1] != one[2]), None)
        if found is None:
            return ""
        name, old, new = found
        texts = [f"of shape {list(k[0])}" if old[0] != new[0] else f"{k[1]} on {k[2]}" for k in (old, new)]
        return f"parameter {name!r} was {texts[0]} when it was attached, and is {texts[1]} now"


def gpu_of(array: Any) -> int | None:
    """Return the ordinal of the GPU that ``array`` is on; ``None`` for any other object."""
    if isinstance(array, torch.Tensor):
        return array.get_device() if array.is_cuda else None
    try:
        if not hasattr(array, "__cuda_array_interface__"):
            return None
        device = getattr(array, "device", 0)
        return int(getattr(device, "id", device))  # cupy's has an id
    except Exception:  # from a foreign object: it is refused later, on all ranks
        return None
