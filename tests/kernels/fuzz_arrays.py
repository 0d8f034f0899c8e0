"""Arrays for the fuzz of the kernels: what they hold, how they lie in memory and in which guise they come."""

from __future__ import annotations

import array
import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch

from tests.kernels.fuzz_memory import Block, Rng, block_of, owned_block
from tests.kernels.reference import interesting
from tests.kernels.test_arrays import OnlyInterface

SIZES = (0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257)
NUMPY = {
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.float64: np.float64,
    torch.bool: np.bool_,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.int16: np.int16,
    torch.complex64: np.complex64,
}
_CODES = {torch.float32: "f", torch.float64: "d", torch.int8: "b", torch.uint8: "B", torch.int32: "i", torch.int64: "q"}
_CTYPES: dict[torch.dtype, Any] = {
    torch.float32: ctypes.c_float,
    torch.float64: ctypes.c_double,
    torch.int8: ctypes.c_int8,
    torch.uint8: ctypes.c_uint8,
    torch.int32: ctypes.c_int32,
    torch.int64: ctypes.c_int64,
}
_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}


class PlainSubclass(torch.Tensor):
    """A tensor all the same."""


class NumpySubclass(np.ndarray):
    """An array all the same."""


class OnlyDlpack:
    """Has ``__dlpack__`` and nothing else."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


@dataclass(eq=False)
class Slot:
    """One array of a call.

    Attributes:
        name: as messages have it. values: what it holds at first, one after the other.
        solid: given as if it were written, which it is in other calls.
        only: dtypes that its place may have. aligned: whether it has to be; ``None``: nobody says.
        sized: whether another length is wrong. flat: whether the function may count on one dimension.
        form: the guise; ``None``: any. layout: where its elements lie; ``None``: any that suits.
        gap: bytes that it lies behind where an aligned one would begin.
        border: bytes that it has to be aligned to, if not those of an element.
    """

    name: str
    values: torch.Tensor
    written: bool = False
    solid: bool = False
    only: tuple[torch.dtype, ...] = ()
    aligned: bool | None = False
    sized: bool = True
    flat: bool = False
    form: str | None = None
    layout: str | None = None
    gap: int = 0
    border: int = 0
    block: Block | None = None
    offset: int = 0
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()  # in elements
    settled: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def count(self) -> int:
        return self.values.numel()

    @property
    def itemsize(self) -> int:
        return self.values.element_size()

    @property
    def alignment(self) -> int:
        return max(self.itemsize, self.border)

    @property
    def extent(self) -> int:
        """Elements from the first to the last in memory."""
        return 0 if self.count == 0 else 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    @property
    def lead(self) -> int:
        """Bytes before the first element that belong to it: the real part of a complex number."""
        return self.itemsize if self.form == "imaginary" else 0

    @property
    def is_dense(self) -> bool:
        """Whether a kernel works on this very memory instead of a copy of it."""
        if self.form in ("negative", "imaginary", "scalar", "bytes"):
            return False
        return self.count < 2 or (self.layout != "reversed" and self.view().is_contiguous())

    @property
    def span(self) -> tuple[int, int]:
        """Addresses of the first byte and of the one behind the last."""
        assert self.block is not None
        first = self.block.address + self.offset
        return first, first + self.extent * self.itemsize

    def view(self, memory: np.ndarray | None = None) -> torch.Tensor:
        """Its elements in its block, or in a snapshot of that, in logical order but for a change of sign."""
        assert self.block is not None
        if self.count == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        raw = self.block.memory if memory is None else memory
        flat = torch.frombuffer(raw, dtype=self.dtype, count=self.extent, offset=self.offset)
        return flat.as_strided(self.shape, self.strides)

    def read(self, memory: np.ndarray | None = None) -> torch.Tensor:
        """What the kernel is to read, one after the other, in memory of its own."""
        x = torch.empty(self.count, dtype=self.dtype)
        x.copy_(self.view(memory).flatten())
        if self.layout == "reversed":
            x = x.flip(0)
        return -x if self.form in ("negative", "imaginary") else x

    def __repr__(self) -> str:
        where = "" if self.block is None else f" at {self.span[0]:#x}"
        some = ", ".join(f"{value}" for value in self.values[:6].tolist())
        kind = f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"
        return f"<{self.name}: {kind} {self.form} {self.layout}{where} holds [{some}{', ...' * (self.count > 6)}]>"


def some_size(rng: Rng, most: int = 5000) -> int:
    kind = rng.random()
    if kind < 0.6:
        size = rng.choice(SIZES)
    elif kind < 0.93:
        size = rng.randrange(300)
    else:
        size = rng.randrange(300, 5000)
    return min(size, most)


def some_values(rng: Rng, size: int, dtype: torch.dtype, finite: bool = False) -> torch.Tensor:
    """Of any kind that a dtype has: special ones, ties, equal ones."""
    generator = torch.Generator().manual_seed(rng.torch_seed())
    if dtype == torch.bool:
        return torch.randint(0, 2, (size,), generator=generator).bool()
    if dtype.is_complex:
        return torch.randn(size, generator=generator).to(dtype)
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        low, high = (info.min, info.max) if rng.chance(0.7) else (0, 3)
        return torch.randint(low, high, (size,), generator=generator, dtype=dtype)
    kind = rng.random()
    if kind < 0.45 and not finite:
        return interesting(size, dtype, rng.torch_seed())
    if kind < 0.6:
        return torch.randint(-3, 4, (size,), generator=generator).to(dtype)
    if kind < 0.68:
        zeros = torch.zeros(size, dtype=dtype)
        return zeros if rng.chance(0.5) else zeros * -1.0
    if kind < 0.74:
        return torch.full((size,), rng.choice([1.0, -0.5, 65504.0, 1e-7, 1e-40]), dtype=torch.float64).to(dtype)
    return torch.randn(size, generator=generator).to(dtype)


def settle(rng: Rng, slot: Slot) -> None:
    """Choose the layout and the guise of a slot where they are still open."""
    if slot.settled:
        return
    slot.settled = True
    if slot.layout is None:
        slot.layout = _layout(rng, slot)
    slot.shape, slot.strides = _geometry(rng, slot)
    if slot.form is None:
        slot.form = rng.choice(_forms(slot)) if rng.chance(0.7) else ("torch" if slot.layout != "reversed" else "numpy")
    if slot.form == "imaginary":
        slot.layout, slot.shape, slot.strides = "strided", (slot.count,), (2,)
    if slot.form in ("bytearray", "array", "bytes", "scalar"):
        slot.gap = 0


def _layout(rng: Rng, slot: Slot) -> str:
    if slot.form in ("bytearray", "array", "bytes", "ctypes", "scalar", "negative"):
        return "flat"
    layouts = ["flat"] * 5
    if not slot.flat:
        layouts += ["nd", "nd"] if slot.written or slot.solid else ["nd", "nd", "transposed"]
    if not slot.written and not slot.solid:
        layouts += ["strided", "expanded"]
        layouts += ["reversed"] if slot.dtype in NUMPY else []
    return rng.choice(layouts)


def _geometry(rng: Rng, slot: Slot) -> tuple[tuple[int, ...], tuple[int, ...]]:
    n = slot.count
    if slot.layout == "expanded":
        if n > 0:
            slot.values = slot.values[:1].expand(n).clone()
        return (n,), (0,)
    if slot.layout in ("nd", "transposed"):
        rows = next((d for d in (rng.choice([2, 3, 4]), 5, 7) if n % d == 0), 1)
        if n == 1 and rng.chance(0.6):
            return (), ()
        shape = (rows, n // rows)
        if slot.layout == "nd":
            return shape, (max(n // rows, 1), 1)
        return shape, (1, rows)
    return (n,), (rng.choice([2, 3]) if slot.layout == "strided" else 1,)


def _forms(slot: Slot) -> list[str]:
    """Guises that suit: what a kernel has to take."""
    if slot.layout == "reversed":
        return ["numpy", "memoryview", "interface"]
    fixed = slot.written or slot.solid
    forms = ["torch", "subclass", "dlpack"]
    if slot.dtype.is_floating_point:
        forms.append("parameter")
        forms += [] if fixed else ["negative"]
    if slot.dtype in NUMPY:
        forms += ["numpy", "numpy subclass", "memoryview", "interface"]
        forms += [] if fixed else ["read-only", "read-only view"]
    if slot.layout == "flat":
        forms += ["array"] if slot.dtype in _CODES else []
        forms += ["ctypes"] if slot.dtype in _CTYPES else []
        forms += ["bytearray"] if slot.dtype == torch.uint8 else []
        if not fixed:
            forms += ["bytes"] if slot.dtype == torch.uint8 else []
            forms += ["imaginary"] if slot.dtype in _COMPLEX and slot.count > 0 else []
            forms += ["scalar"] if slot.dtype in NUMPY and slot.count == 1 and not slot.flat else []
    return forms


def place(rng: Rng, slot: Slot) -> None:
    """Give a settled slot memory of its own, unless it has some."""
    if slot.block is not None:
        return
    size = slot.extent * slot.itemsize
    if slot.form == "bytearray":
        slot.block = owned_block(bytearray(size))
    elif slot.form == "array":
        slot.block = owned_block(array.array(_CODES[slot.dtype], bytes(size)))
    else:
        # Before a fence the end is aligned; so that the beginning is, a gap is made good behind.
        filler = -slot.gap % slot.alignment
        slot.block = block_of(rng, slot.lead + slot.gap + size + filler)
        slot.offset = slot.block.begin + slot.lead + slot.gap


def fill(slot: Slot) -> None:
    """Write its values to its memory."""
    if slot.count == 0:
        return
    values = slot.values
    if slot.layout == "reversed":
        values = values.flip(0)
    if slot.form in ("negative", "imaginary"):
        # torch negates NaNs of half types now as bits, now as floats.
        values = torch.where(values.isnan(), torch.zeros_like(values), -values) if values.itemsize == 2 else -values
    view = slot.view()
    if slot.layout == "expanded":
        view[(0,) * view.ndim] = values[0]
    else:
        view.copy_(values.view(slot.shape))


def _numpy(slot: Slot) -> np.ndarray:
    assert slot.block is not None
    kind = NUMPY[slot.dtype]
    strides = tuple(stride * slot.itemsize for stride in slot.strides)
    array = np.ndarray(slot.shape, kind, slot.block.memory, slot.offset, strides)
    return array[::-1] if slot.layout == "reversed" else array


def _view_of(array: Any) -> memoryview:
    return memoryview(array)


def _read_only(slot: Slot) -> np.ndarray:
    array = _numpy(slot)
    array.flags.writeable = False
    return array


def _imaginary(slot: Slot) -> torch.Tensor:
    assert slot.block is not None
    kind, begin = _COMPLEX[slot.dtype], slot.offset - slot.itemsize
    whole = torch.frombuffer(slot.block.memory, dtype=kind, count=slot.count, offset=begin)
    return whole.conj().imag


def _ctypes(slot: Slot) -> Any:
    assert slot.block is not None
    return (_CTYPES[slot.dtype] * slot.count).from_buffer(slot.block.memory, slot.offset)


def _owner(slot: Slot) -> Any:
    assert slot.block is not None
    return slot.block.owner


_MAKERS: dict[str, Callable[[Slot], Any]] = {
    "torch": Slot.view,
    "subclass": lambda slot: slot.view().as_subclass(PlainSubclass),
    "parameter": lambda slot: torch.nn.Parameter(slot.view()),
    "negative": lambda slot: torch._neg_view(slot.view()),
    "imaginary": _imaginary,
    "dlpack": lambda slot: OnlyDlpack(slot.view()),
    "numpy": _numpy,
    "numpy subclass": lambda slot: _numpy(slot).view(NumpySubclass),
    "read-only": _read_only,
    "read-only view": lambda slot: _view_of(_read_only(slot)),
    "memoryview": lambda slot: _view_of(_numpy(slot)),
    "interface": lambda slot: OnlyInterface(_numpy(slot)),
    "ctypes": _ctypes,
    "array": _owner,
    "bytearray": _owner,
    "bytes": lambda slot: slot.read().numpy().tobytes(),
    "scalar": lambda slot: _numpy(slot).reshape(1)[0],
}


def materialised(tree: Any) -> Any:
    """Arguments with arrays in the place of slots."""
    if isinstance(tree, Slot):
        assert tree.form is not None
        return _MAKERS[tree.form](tree)
    if isinstance(tree, list):
        return [materialised(item) for item in tree]
    if isinstance(tree, tuple):
        return tuple(materialised(item) for item in tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        changed = {field.name: materialised(getattr(tree, field.name)) for field in fields(tree)}
        return replace(tree, **changed)
    return tree


def slots_in(tree: Any) -> Iterator[Slot]:
    if isinstance(tree, Slot):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from slots_in(item)
    elif isinstance(tree, dict):
        yield from slots_in(list(tree.values()))
    elif is_dataclass(tree) and not isinstance(tree, type):
        yield from slots_in([getattr(tree, field.name) for field in fields(tree)])


def substituted(tree: Any, old: Any, new: Any) -> Any:
    """``tree`` with ``new`` where ``old`` itself was."""
    if tree is old:
        return new
    if isinstance(tree, list | tuple):
        return type(tree)(substituted(item, old, new) for item in tree)
    if isinstance(tree, dict):
        return {key: substituted(item, old, new) for key, item in tree.items()}
    if is_dataclass(tree) and not isinstance(tree, type | Slot):
        return replace(tree, **{field.name: substituted(getattr(tree, field.name), old, new) for field in fields(tree)})
    return tree
