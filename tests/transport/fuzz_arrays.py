"""Arrays as a user might pass them: of any type, in any library's hands, anywhere in memory, between guard bytes."""

from __future__ import annotations

import array
import ctypes
import mmap
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pycomm.kernels.arrays import DTYPES

Bytes = npt.NDArray[np.uint8]
Allocate = Callable[[int], Bytes]

REDUCED = DTYPES
FLOATS = ("float32", "float16", "bfloat16", "float64")
_ONLY_MOVED = ("bool", "int16", "uint32", "uint64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2")
MOVED = (*REDUCED, *_ONLY_MOVED)
_UNKNOWN_TO_NUMPY = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
_TYPECODES = {"float32": "f", "float64": "d", "int8": "b", "uint8": "B", "int32": "i", "int64": "q", "uint32": "I"}
_C_TYPES: dict[str, Any] = {
    "float32": ctypes.c_float,
    "float64": ctypes.c_double,
    "int8": ctypes.c_int8,
    "uint8": ctypes.c_uint8,
    "int32": ctypes.c_int32,
    "int64": ctypes.c_int64,
}
_GUARD_BYTES = 64
_GUARD = 0xA5
_BORDERS = (512, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
_SMALL_COUNTS = (0, 1, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 255, 257, 1000, 1023, 4099)

HOLDERS = (
    "torch",
    "numpy",
    "empty",
    "dlpack",
    "memoryview",
    "parameter",
    "odd numpy",
    "empty numpy",
    "requires grad",
    "watched",
)
BUFFERS = ("bytearray", "array", "mmap", "ctypes", "memoryview", "interface")
READ_ONLY = ("frozen numpy", "bytes", "frozen memoryview")


@dataclass(frozen=True)
class Spec:
    """Description of an array.

    Attributes:
        holder: whose object it is. layout: how its elements lie. offset: of its first byte in the memory around it.
        style: what its values are like. flaw: what is wrong with it, a name in ``fuzz_flaws.FLAWS``; "" for nothing.
    """

    dtype: str
    count: int
    holder: str = "torch"
    layout: str = "whole"
    offset: int = _GUARD_BYTES
    style: str = "small"
    flaw: str = ""

    def __str__(self) -> str:
        if self.flaw:
            return f"<{self.flaw}> for {self.dtype}[{self.count}]"
        words = ["" if self.layout == "whole" else self.layout, self.holder, f"{self.dtype}[{self.count}]"]
        return " ".join(word for word in words if word)

    @property
    def itemsize(self) -> int:
        size: int = dtype_of(self.dtype).itemsize
        return size


@dataclass(frozen=True)
class Held:
    """An array and the memory around it.

    Attributes:
        given: what is passed to the communicator. memory: all of the allocation, guards included.
        begin: where the elements begin, if they lie one behind the other; what is written is found there.
    """

    given: Any
    memory: Bytes
    begin: int


class Foreign:
    """An array of a library that speaks DLPack and nothing else."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_: object) -> object:
        return self._tensor.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, index = self._tensor.__dlpack_device__()
        return int(kind), index


class Interface:
    """An array that has numpy's older protocol alone."""

    def __init__(self, owner: npt.NDArray[Any]) -> None:
        self._owner = owner
        self.__array_interface__ = owner.__array_interface__


class Watched(torch.Tensor):
    """A tensor with memory of its own, and operations that somebody looks at."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C._DisableTorchDispatch():
            return function(*args, **(kwargs or {}))


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype called ``name``."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def draw_count(rng: random.Random, itemsize: int) -> int:
    """A number of elements: mostly small, sometimes next to where the ways of moving change."""
    if rng.random() < 0.8:
        return rng.choice(_SMALL_COUNTS)
    border = rng.choices(_BORDERS, (2, 4, 4, 2, 2))[0]
    return border // itemsize + rng.choice((-1, 0, 1))


def draw_holding(rng: random.Random, spec: Spec, writes: bool) -> Spec:
    """``spec`` with a holder, a layout and a place that suit its type and what is done with it."""
    holders = [holder for holder in (*HOLDERS, rng.choice(BUFFERS)) if holds(holder, spec)]
    if not writes:
        holders += [holder for holder in READ_ONLY if holds(holder, spec)]
    spec = replace(spec, holder=rng.choice(["torch", *holders]))
    shift = rng.choice((0, 1, 3)) * spec.itemsize
    if "numpy" in spec.holder and spec.holder not in ("numpy", "frozen numpy"):
        shift = rng.choice((1, 3, 7))
    spec = replace(spec, offset=_GUARD_BYTES + shift)
    spec = replace(spec, layout=rng.choice(["whole", "whole", *layouts(spec, writes)]))
    return replace(spec, offset=_GUARD_BYTES) if spec.layout == "imaginary" else spec  # its elements are twice as wide


def holds(holder: str, spec: Spec) -> bool:
    """Return whether ``holder`` can have elements of ``spec``'s type, and as many."""
    if holder in ("torch", "dlpack", "empty", "watched"):
        return holder != "dlpack" or not spec.dtype.startswith("float8")
    if holder in ("parameter", "requires grad"):
        return spec.dtype in FLOATS or spec.dtype.startswith("complex")
    if holder in ("bytearray", "bytes"):
        return spec.dtype == "uint8"
    if holder == "mmap":
        return spec.dtype == "uint8" and spec.count > 0
    if holder == "array":
        return spec.dtype in _TYPECODES
    if holder == "ctypes":
        return spec.dtype in _C_TYPES
    return spec.dtype not in _UNKNOWN_TO_NUMPY


def layouts(spec: Spec, writes: bool) -> list[str]:
    """Ways that the elements of ``spec``'s holder may lie in memory, beside one behind the other in one dimension."""
    arrays = ("torch", "numpy", "empty", "odd numpy", "empty numpy", "dlpack", "frozen numpy", "memoryview")
    if spec.holder not in arrays:
        return []
    found = ["0-d"] if spec.count == 1 else []
    found += ["2-d"] if spec.count % 2 == 0 and spec.count > 0 else []
    if writes or spec.count < 2:
        return found
    found += ["strided", "repeated", *(["transposed"] if spec.count % 2 == 0 else [])]
    if "torch" not in spec.holder and spec.holder not in ("empty", "dlpack"):
        found.append("reversed")
    # Not half types, whose NaNs torch negates now as bits, now as floats.
    if spec.holder == "torch" and spec.dtype in ("float32", "float64"):
        found += ["negated", "imaginary"]
    if spec.holder == "torch" and spec.dtype.startswith("complex"):
        found.append("conjugated")
    return found


def values(seed: tuple[int, ...], spec: Spec) -> torch.Tensor:
    """The elements of an array, the same for every process that asks."""
    rng = np.random.Generator(np.random.SFC64(seed))
    dtype, count = dtype_of(spec.dtype), spec.count
    if count == 0:
        return torch.empty(0, dtype=dtype)
    if spec.style == "bits":
        raw = np.frombuffer(bytearray(rng.bytes(count * spec.itemsize)), np.uint8)
        raw &= 1 if spec.dtype == "bool" else 255
        found = torch.from_numpy(raw).view(dtype)
    elif spec.style == "normal":
        found = torch.from_numpy(rng.standard_normal(count) * 100).to(dtype)
    elif spec.style == "special":
        choice = np.array([0.0, -0.0, 1.0, -1.5, 65504.0, 3e38, 1e-40, 6e-8, np.inf, -np.inf, np.nan, 0.1])
        found = torch.from_numpy(choice[rng.integers(0, len(choice), count)]).to(dtype)
    else:
        found = torch.from_numpy(rng.integers(0 if spec.dtype == "uint8" else -3, 4, count)).to(dtype)
    if spec.layout == "repeated":
        found = found[:1].repeat(count)
    return found


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """The bytes of a tensor's elements, in order."""
    if tensor.numel() == 0:
        return np.empty(0, np.uint8)  # of which torch may not have a view
    raw: Bytes = tensor.reshape(-1).contiguous().view(torch.uint8).numpy()
    return raw


def hold(spec: Spec, elements: torch.Tensor, allocate: Allocate) -> Held:
    """The array that ``spec`` describes, with these elements. ``allocate`` is for memory of the communicator's."""
    if spec.holder in ("bytearray", "array", "mmap", "bytes"):
        return _hold_unguarded(spec, bytes_of(elements))
    stored, dtype = _stored(spec, elements)
    size = spec.offset + stored.size + _GUARD_BYTES
    memory = allocate(size) if spec.holder.startswith("empty") else np.empty(size, np.uint8)
    memory[:] = _GUARD
    memory[spec.offset : spec.offset + stored.size] = stored
    if spec.holder in ("torch", "empty", "dlpack", "parameter", "requires grad", "watched"):
        flat = torch.from_numpy(memory)[spec.offset : spec.offset + stored.size].view(dtype)
        return Held(_as_torch(spec, _laid_out(spec, flat)), memory, spec.offset)
    if spec.holder == "ctypes":
        c_array = (_C_TYPES[spec.dtype] * spec.count).from_buffer(memory[spec.offset :].data)
        return Held(c_array, memory, spec.offset)
    flat_numpy = np.frombuffer(memory.data, spec.dtype, stored.size // spec.itemsize, spec.offset)
    return Held(_as_buffer(spec, _laid_out(spec, flat_numpy)), memory, spec.offset)


def _hold_unguarded(spec: Spec, raw: Bytes) -> Held:
    given: Any
    if spec.holder == "bytes":
        given = raw.tobytes()
        return Held(given, np.frombuffer(given, np.uint8), 0)
    if spec.holder == "array":
        given = array.array(_TYPECODES[spec.dtype], raw.tobytes())
    elif spec.holder == "mmap":
        given = mmap.mmap(-1, raw.size)
        given[:] = raw.tobytes()
    else:
        given = bytearray(raw.tobytes())
    return Held(given, np.frombuffer(given, np.uint8), 0)


def _stored(spec: Spec, elements: torch.Tensor) -> tuple[Bytes, torch.dtype]:
    """Return what has to lie in memory so that the layout shows ``elements``, and its type there."""
    flat = elements.reshape(-1)
    if spec.layout == "negated":
        return bytes_of(-flat), flat.dtype
    if spec.layout == "conjugated":
        return bytes_of(flat.conj().resolve_conj()), flat.dtype
    if spec.layout == "imaginary":
        pair = torch.stack([torch.zeros_like(flat), -flat], 1)
        return bytes_of(pair), torch.complex64 if flat.dtype is torch.float32 else torch.complex128
    rows: npt.NDArray[np.uint8] = bytes_of(flat).reshape(spec.count, spec.itemsize)
    if spec.layout == "strided":
        rows = np.stack([rows, np.full_like(rows, _GUARD & 1)], 1)
    elif spec.layout == "reversed":
        rows = rows[::-1]
    elif spec.layout == "transposed":
        rows = rows.reshape(2, spec.count // 2, spec.itemsize).transpose(1, 0, 2)
    elif spec.layout == "repeated":
        rows = rows[:1]
    return np.ascontiguousarray(rows).reshape(-1), flat.dtype


def _laid_out(spec: Spec, flat: Any) -> Any:
    """``flat``, a tensor or a numpy array of what lies in memory, as the layout wants it seen."""
    match spec.layout:
        case "0-d":
            return flat.reshape(())
        case "2-d":
            return flat.reshape(2, -1)
        case "strided":
            return flat[::2]
        case "reversed":
            return flat[::-1]
        case "transposed":
            return flat.reshape(spec.count // 2, 2).T
        case "repeated":
            return flat.expand(spec.count) if isinstance(flat, torch.Tensor) else np.broadcast_to(flat, spec.count)
        case "negated":
            return torch._neg_view(flat)
        case "conjugated":
            return flat.conj()
        case "imaginary":
            return flat.conj().imag
    return flat


def _as_torch(spec: Spec, tensor: torch.Tensor) -> Any:
    if spec.holder == "dlpack":
        return Foreign(tensor)
    if spec.holder == "watched":
        return torch.Tensor._make_subclass(Watched, tensor)
    if spec.holder == "parameter":
        return torch.nn.Parameter(tensor)
    return tensor.requires_grad_() if spec.holder == "requires grad" else tensor


def _as_buffer(spec: Spec, found: Any) -> Any:
    if spec.holder.startswith("frozen"):
        found.flags.writeable = False
    if spec.holder.endswith("memoryview"):
        return memoryview(found)
    return Interface(found) if spec.holder == "interface" else found
