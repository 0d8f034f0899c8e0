"""Arrays: results in the library that the arguments came from, and parts of device arrays."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

import pycomm._native as _native
from pycomm import checks
from pycomm.checks import first_of

_MOST_THREADS = 4096

_chosen: int | None = None


def num_threads() -> int:
    """Return the number of threads per kernel call: as :func:`set_num_threads` chose, else torch's own number."""
    return torch.get_num_threads() if _chosen is None else _chosen


def set_num_threads(count: int | None) -> None:
    """Use ``count`` threads per kernel call; ``None`` follows ``torch.get_num_threads()`` again.

    Raises:
        ValueError: ``count`` is not positive, or absurdly large. TypeError: it is not an int.
    """
    global _chosen
    if count is not None:
        count = checks.count("count", count, 1)
        if count > _MOST_THREADS:
            raise ValueError(f"count is {count}, wanted at most {_MOST_THREADS}")
    _chosen = count


def cuda_devices() -> tuple[int, str]:
    """Return how many GPUs the kernels can use and, if none, why and what to install. Never raises."""
    return _native.cuda_devices()


class Scratch(_native.Scratch):
    """Scratch memory on a GPU, kept from call to call; without one, every call allocates its own.

    It is allocated at first use, in the library of the arrays at hand, and grows as needed. It also
    remembers the arrays of the last call, so that their addresses are sent to the GPU only when they
    change. Calls that share one must be on one stream. Calls on CPU arrays need none and ignore it.
    """


DTYPES = ("float32", "float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64")
"""Names of the dtypes of kernels and reductions, in the order of csrc/base/dtype.h."""

FLOATING = DTYPES[:4]
_CUDA_TYPES = dict(zip(DTYPES, ("<f4", "<f2", "<V2", "<f8", "|i1", "|u1", "<i4", "<i8"), strict=True))


class Part:
    """Part of a contiguous device array: ``count`` elements from ``first`` on, for use on ``stream`` (as an integer).

    Attributes:
        whole: the array. dtype: the name of its dtype.
    """

    def __init__(self, whole: Any, first: int, count: int, stream: int) -> None:
        self.whole = whole
        self.dtype = dtype_of(whole)
        self._stream = stream
        self._count = count
        self._typestr = _CUDA_TYPES[self.dtype]
        self._address = address_of(whole) + first * int(self._typestr[2:])

    def __len__(self) -> int:
        return self._count

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        # 0 would mean "no stream"; 1 is the same stream's other name.
        return {
            "shape": (self._count,),
            "typestr": self._typestr,
            "data": (self._address, False),
            "strides": None,
            "version": 3,
            "stream": self._stream or 1,
        }


def address_of(array: Any) -> int:
    """Return the address of a device array."""
    if isinstance(array, torch.Tensor):
        return array.data_ptr()
    address: int = array.__cuda_array_interface__["data"][0]
    return address


def empty(array: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """Return an uninitialized array of ``array``'s library, on its device; ``dtype`` is a name."""
    if isinstance(array, Part):
        array = array.whole
    try:
        if isinstance(array, torch.Tensor):
            return torch.empty(shape, dtype=getattr(torch, dtype), device=array.device)
        if _has(array, "__cuda_array_interface__"):
            return _empty_on_gpu(array, shape, dtype)
        if isinstance(array, np.ndarray) or not _has(array, "__dlpack__"):
            return np.empty(shape, dtype)
        return torch.empty(shape, dtype=getattr(torch, dtype), device=_device_of(array))
    except (RuntimeError, MemoryError, ValueError) as error:
        raise MemoryError(f"there is no memory for a result of shape {shape} ({dtype}): {error}") from None


def _has(array: Any, attribute: str) -> bool:
    try:
        return hasattr(array, attribute)
    except Exception:  # a strange object may raise anything
        return False


def _device_of(array: Any) -> torch.device:
    """Return the device of the tensor that ``array`` exports; the CPU if it exports none, which the kernel refuses."""
    try:
        return from_dlpack(array).device
    except Exception:  # a strange object may raise anything
        return torch.device("cpu")


def look(name: str, array: Any) -> tuple[int, str]:
    """Return the number of elements of ``array`` and the name of its dtype, one of ``DTYPES``.

    Raises:
        TypeError, ValueError: kernels do not take such an array; the error names it.
    """
    return _native.look(array, name)


def dtype_of(array: Any) -> str:
    """Return the name of ``array``'s dtype."""
    return str(array.dtype).removeprefix("torch.")


def one_for_each(tensors: Sequence[Any], dtype: str, out: Any) -> Any:
    """Return ``out`` or, if it is ``None``, a new array with an element for each of ``tensors``, on their device."""
    return empty(first_of("tensors", tensors), (len(tensors),), dtype) if out is None else out


def device_bytes(array: Any, num_bytes: int) -> Any:
    """Return scratch memory on the device of ``array``. Called by the extension."""
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


class FittingScale(NamedTuple):
    """Factor of a kernel, with a power of two that lets values of a known magnitude fit a dtype of little range.

    It is 2**e with the largest e, between -126 and 126, for which ``largest`` times 2**e is below 2**``room``; 1 if
    ``largest`` is 0 or not finite.

    Attributes:
        scale: the rest of the factor, a number or one float32.
        largest: one float32, on the arrays' device, which is read when the kernel runs.
        room: exponent.
        inverse: whether to divide by the power of two.
    """

    scale: Any
    largest: Any
    room: int
    inverse: bool = False


class PackScaling(NamedTuple):
    """Scaling of gradients before a step. Arrays of one float32 are on the gradients' device.

    Attributes:
        factor: what they are multiplied by, a number or one float32.
        divisor: one float32, which divides the factor first.
        found: one float32: no step is taken if it is not 0 when the kernel runs.
    """

    factor: Any = 1.0
    divisor: Any = None
    found: Any = None


class PreparedGroup(_native.PreparedGroup):
    """Kernel calls of one parameter group, found again by its tensors; see csrc/bindings/prepared_step.h."""


class PreparedStep(_native.PreparedStep):
    """One kernel call of a step, on flat torch tensors of one dtype on one device.

    Args:
        rule: name of the kernel's rule; the two rules of LAMB may run on the same arrays.
        weights, grads, copies: as in :mod:`pycomm.kernels.step`.
        states: for each state of the rule, the arrays of all weights, or ``None``.
        counts: ``None``, or for each weight one float32 on its device: the number of steps taken, which the
            kernel then counts itself.
        mirrors: lists of arrays, one for each weight, which receive what is written to ``copies``, or to ``weights``
            if there are no copies. They are in CPU memory, which may be shared with other processes; references to
            them are kept.

    Attributes:
        taken: number of steps, including this one.

    Raises:
        TypeError, ValueError: dtypes, sizes or devices do not match, or arrays overlap; the array is named.
    """

    def step(
        self,
        rule: str,
        coefficients: _native.Coefficients,
        scaling: PackScaling,
        *,
        rates: Any = None,
        squares: Any = None,
        scratch: Scratch | None = None,
    ) -> None:
        """Run the kernel ``rule``; the other arguments are as in :mod:`pycomm.kernels.step`."""
        scale, divisor, found = scaling
        self.run(rule, coefficients, rates, squares, scale, divisor, found, scratch, num_threads())

    def squared_norms(self, squares: Any, scratch: Scratch | None = None) -> None:
        """Write the squared norms of all weights, then of all gradients, to ``squares``, which is float64."""
        self.norms(squares, scratch, num_threads())
