"""Arguments that are wrong, each by itself: arrays that must be refused, and values that are no such argument."""

from __future__ import annotations

import contextlib
import datetime
import mmap
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pycomm import schedule
from tests.transport.fuzz_arrays import Foreign, Held, dtype_of

Make = Callable[[Held, str, int], Any]


@dataclass(frozen=True)
class Flaw:
    """Way to make an array that is wrong.

    Attributes:
        make: from a sound array in ordinary memory, its dtype and its number of elements.
        read, write: whether it is wrong to read from it, and to write to it.
    """

    make: Make
    read: bool = True
    write: bool = True


def _tensor(held: Held, dtype: str, count: int) -> torch.Tensor:
    flat = torch.from_numpy(held.memory)[held.begin : held.begin + count * dtype_of(dtype).itemsize]
    return flat.view(dtype_of(dtype))


def _numpy(held: Held, count: int) -> Any:
    return held.memory[held.begin : held.begin + count]


def _view(array: Any) -> memoryview:
    return memoryview(array)


def _freed(held: Held, dtype: str, count: int) -> torch.Tensor:
    tensor = _tensor(held, dtype, count).clone()
    tensor.untyped_storage().resize_(0)
    return tensor


class _Wrapper(torch.Tensor):
    """A tensor that has no memory of its own; what is done with it is somebody else's business."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{function} of a wrapper")


def _wrapper(held: Held, dtype: str, count: int) -> Any:
    make: Any = torch.Tensor._make_wrapper_subclass
    return make(_Wrapper, (count,), dtype=dtype_of(dtype))


def _fake(held: Held, dtype: str, count: int) -> Any:
    with FakeTensorMode():
        return torch.empty(count, dtype=dtype_of(dtype))


def _released(held: Held, dtype: str, count: int) -> Any:
    view = memoryview(_numpy(held, count))
    view.release()
    return view


def _closed_map(held: Held, dtype: str, count: int) -> Any:
    found = mmap.mmap(-1, 16)
    found.close()
    return found


def _read_only_map(held: Held, dtype: str, count: int) -> Any:
    return mmap.mmap(-1, max(1, count), prot=mmap.PROT_READ)


def _compressed(held: Held, dtype: str, count: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a beta state
        return torch.sparse_csr_tensor([0, 1], [0], [1.0], size=(1, 1))


def _structured(held: Held, dtype: str, count: int) -> Any:
    return np.zeros(count, np.dtype([("name", object), ("value", np.float32)]))


def _lying(answer: Any = None, error: Exception | None = None, device: Any = (1, 0)) -> Make:
    """An object whose DLPack is not what it should be; no ``__dlpack_device__`` for a ``device`` of ``None``."""

    class Lying:
        def __dlpack__(self, **_: object) -> Any:
            if error is not None:
                raise error
            return answer

    if device is not None:
        Lying.__dlpack_device__ = lambda self: device  # type: ignore[attr-defined]
    return lambda held, dtype, count: Lying()


def _spent(held: Held, dtype: str, count: int) -> Any:
    """One whose memory was handed over already."""
    capsule = _tensor(held, "float32", count).__dlpack__()
    torch.utils.dlpack.from_dlpack(capsule)
    return _lying(capsule)(held, dtype, count)


def _raising(attribute: str, error: Exception) -> Make:
    """An object of which not even this attribute can be looked at."""

    def look(self: object) -> Any:
        raise error

    return lambda held, dtype, count: type("Raising", (), {attribute: property(look)})()


def _old_interface(interface: Any) -> Make:
    return lambda held, dtype, count: type("Old", (), {"__array_interface__": interface})()


def _of(value: Callable[[], Any]) -> Make:
    return lambda held, dtype, count: value()


def _read_only_foreign(held: Held, dtype: str, count: int) -> Any:
    frozen: Any = _numpy(held, count).view()
    frozen.flags.writeable = False

    class Frozen:
        def __dlpack__(self, **rest: Any) -> Any:
            return frozen.__dlpack__(**rest)

        def __dlpack_device__(self) -> tuple[int, int]:
            kind, index = frozen.__dlpack_device__()
            return int(kind), index

    return Frozen()


_NOT_ARRAYS: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "text": lambda: "abc",
    "list": lambda: [1.0, 2.0],
    "object": object,
    "2**31": lambda: 2**31,
    "2**63": lambda: 2**63,
    "-1": lambda: -1,
    "1.5": lambda: 1.5,
    "True": lambda: True,
    "class": lambda: torch.Tensor,
    "surrogate": lambda: type("\u00e9\u00e8" * 300, (), {})(),
}

_FOREIGN: dict[str, Flaw] = {
    "dlpack raising RuntimeError": Flaw(_lying(error=RuntimeError("no"))),
    "dlpack raising BufferError": Flaw(_lying(error=BufferError("no"))),
    "dlpack raising AttributeError": Flaw(_lying(error=AttributeError("no"))),
    "dlpack raising OverflowError": Flaw(_lying(error=OverflowError("no"))),
    "dlpack of None": Flaw(_lying(None)),
    "dlpack of 42": Flaw(_lying(42)),
    "dlpack of another capsule": Flaw(_lying(getattr(datetime, "datetime_CAPI"))),  # noqa: B009
    "dlpack without device": Flaw(_lying(None, device=None)),
    "dlpack on junk": Flaw(_lying(None, device="here")),
    "dlpack on CUDA": Flaw(_lying(None, device=(2, 0))),
    "dlpack handed over": Flaw(_spent),
    "raising __dlpack__": Flaw(_raising("__dlpack__", RuntimeError("no"))),
    "raising __cuda_array_interface__": Flaw(_raising("__cuda_array_interface__", RuntimeError("no"))),
    "raising __array_interface__": Flaw(_raising("__array_interface__", RuntimeError("no"))),
    "interface of 42": Flaw(_old_interface(42)),
    "interface of nothing": Flaw(_old_interface({})),
    "interface of lies": Flaw(_old_interface({"shape": (-1,), "typestr": "?", "version": 3, "data": (0, False)})),
}

_UNUSUAL: dict[str, Flaw] = {
    "object dtype": Flaw(lambda held, dtype, count: np.array([object()] * count, object)),
    "view of objects": Flaw(lambda held, dtype, count: _view(np.array([object()] * count, object))),
    "structured with objects": Flaw(_structured),
    "meta": Flaw(lambda held, dtype, count: torch.empty(count, dtype=dtype_of(dtype), device="meta")),
    "freed": Flaw(_freed),
    "wrapper": Flaw(_wrapper),
    "fake": Flaw(_fake),
    "sparse": Flaw(lambda held, dtype, count: torch.ones(count).to_sparse()),
    "csr": Flaw(_compressed),
    "mkldnn": Flaw(lambda held, dtype, count: torch.ones(count).to_mkldnn()),
    "released view": Flaw(_released),
    "closed map": Flaw(_closed_map),
}

_NOT_TO_WRITE: dict[str, Flaw] = {
    "frozen numpy": Flaw(lambda held, dtype, count: np.frombuffer(_numpy(held, count).tobytes(), np.uint8), read=False),
    "bytes": Flaw(lambda held, dtype, count: bytes(count), read=False),
    "frozen view": Flaw(lambda held, dtype, count: memoryview(_numpy(held, count)).toreadonly(), read=False),
    "read-only map": Flaw(_read_only_map, read=False),
    "frozen dlpack": Flaw(_read_only_foreign, read=False),
    "numpy scalar": Flaw(lambda held, dtype, count: np.float32(3), read=False),
    "every other": Flaw(lambda held, dtype, count: _tensor(held, dtype, count)[::2], read=False),
    "backwards": Flaw(lambda held, dtype, count: _numpy(held, count)[::-1], read=False),
    "expanded": Flaw(lambda held, dtype, count: _tensor(held, dtype, count)[:1].expand(count), read=False),
    "every other of view": Flaw(lambda held, dtype, count: memoryview(_numpy(held, count))[::2], read=False),
    "every other of dlpack": Flaw(lambda held, dtype, count: Foreign(_tensor(held, dtype, count)[::2]), read=False),
    "negated": Flaw(lambda held, dtype, count: torch._neg_view(_tensor(held, "float32", count)), read=False),
    "conjugated": Flaw(lambda held, dtype, count: _tensor(held, "complex64", count).conj(), read=False),
    "imaginary": Flaw(lambda held, dtype, count: _tensor(held, "complex64", count).conj().imag, read=False),
    "one imaginary": Flaw(lambda held, dtype, count: _tensor(held, "complex64", 1).conj().imag, read=False),
}

FLAWS: dict[str, Flaw] = {
    **{name: Flaw(_of(make)) for name, make in _NOT_ARRAYS.items()},
    **_FOREIGN,
    **_UNUSUAL,
    **_NOT_TO_WRITE,
}
FEWEST = 6  # elements of a flawed array: enough for every flaw to show


class _BadTable:
    """A schedule that cannot be read."""

    num_chunks = 1

    def __init__(self, size: int, error: Exception) -> None:
        self.num_ranks, self._error = size, error

    def rounds(self) -> Any:
        raise self._error


class _NothingDone(_BadTable):
    """A schedule that reduces nothing."""

    def rounds(self) -> Any:
        return []


def wrong_ops() -> list[Any]:
    """Values that are no reduction."""
    named = ["average", "SUM", "", "sum\0", " sum", "\udc80", "x" * 5000, "\u00e9" * 400, b"sum", ["sum"]]
    return [None, object(), 1, True, 1.5, -1, 2**31, 2**63, *named, torch.distributed.ReduceOp.SUM]


def wrong_srcs(size: int) -> list[Any]:
    """Values that are no rank of a group of ``size``."""
    numbers = [2**31, 2**63, -(2**63) - 1, -1, size, 1.5, float("nan"), np.float64(0.5)]
    return [None, "0", object(), [0], b"0", torch.ones(2), *numbers]


def other_srcs(src: int) -> list[Any]:
    """Values that may be taken for rank ``src``."""
    return [np.int64(src), np.uint8(src), float(src), torch.tensor(src), *([bool(src)] if src < 2 else [])]


def wrong_algorithms(size: int) -> list[Any]:
    """Values that name no algorithm for ``size`` ranks."""
    names = ["magic", "", "ring(", "ring(0)", "ring(-1)", "double_tree(x)", "double_tree(1.5)", "\udc80", "x" * 5000]
    names += [name for name in schedule.names() if name not in algorithms(size)]
    tables = [
        schedule.ring(size + 1),
        _BadTable(size, RuntimeError("no rounds")),
        _BadTable(size, KeyError("no rounds")),
        _NothingDone(size, ValueError()),
    ]
    return [None, object(), 1, True, 2**63, 1.5, b"ring", ["ring"], {}, torch.ones(2), *names, *tables]


@cache
def algorithms(size: int) -> list[str]:
    """The names of those that there are for ``size`` ranks."""
    found = ["auto", "native"]
    for name in (*schedule.names(), "double_tree(5)"):
        with contextlib.suppress(ValueError):
            schedule.verify(schedule.by_name(name, size))
            found.append(name)
    return found


def wrong_bytes() -> list[Any]:
    """Values that are no bytes."""
    return [None, "abc", 5, [1, 2], object(), 1.5, np.array([object()]), ["a"]]


def other_bytes(data: bytes) -> list[Any]:
    """Values that may be taken for ``data``."""
    return [bytearray(data), memoryview(data), np.frombuffer(data, np.uint8)]


def wrong_shapes() -> list[tuple[Any, Any]]:
    """Shapes and dtypes that no memory can be had of."""
    f32 = torch.float32
    shapes: list[Any] = [None, "a", -1, 1.5, 2**63, 2**62, 2**40, (2**32, 2**32), (3, -1), object(), (None,), ("a",)]
    pairs = [(shape, f32) for shape in [*shapes, (1.5,), [[1]], (2**63, 0), 2**31 * 2**30]]
    return [*pairs, (3, None), (3, "float32"), (3, np.float32), (3, 1)]
