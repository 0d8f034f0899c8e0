"""What the fuzz of the kernels puts where it does not belong, and what kind of thing belongs where."""

from __future__ import annotations

import ctypes
import mmap
import warnings
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import torch

from tests.kernels.fuzz_arrays import NUMPY

# A kind with a question mark may be None.
_STEP = {"weights": "arrays", "grads": "arrays", "scale": "factor", "copies": "arrays?", "scratch": "scratch"}
_MOMENTS = {"exp_avgs": "arrays", "exp_avg_sqs": "arrays", "moments": "moments", "weight_decay": "number"}
_ACCUMULATE = {
    "acc": "array",
    "residual": "array?",
    "scale": "factor",
    "clip": "number?",
    "momentum": "momentum?",
    "decay": "decay?",
    "scratch": "scratch",
}
_EACH = {"tensors": "arrays", "out": "array?", "scratch": "scratch"}
SIGNATURES: dict[str, dict[str, str]] = {
    "absmax": {"tensors": "arrays", "scratch": "scratch"},
    "accumulate": {**_ACCUMULATE, "grads": "grads"},
    "accumulate_chunks": {**_ACCUMULATE, "config": "config", "out": "array", "packing_decay": "number"},
    "accumulate_low_rank": {
        **{name: kind for name, kind in _ACCUMULATE.items() if name != "scratch"},
        "config": "config",
        "q": "array",
        "p": "array",
    },
    "accumulate_quantized": {**_ACCUMULATE, "config": "config", "keeps": "bool"},
    "adam_step": {**_STEP, **_MOMENTS, "max_exp_avg_sqs": "arrays?", "lr": "number", "decoupled": "bool"},
    "add_entries": {
        "gathered": "gathered",
        "factor": "factor",
        "out": "array",
        "states": "states",
        "finite": "array?",
        "used": "array?",
        "last_sources": "array?",
    },
    "dequantize": {
        "scales": "arrays",
        "codes": "arrays",
        "config": "config",
        "out": "array",
        "scale": "factor",
        "scratch": "scratch",
    },
    "expand_low_rank": {"out": "array", "config": "config", "p": "array", "q": "array", "scale": "factor"},
    "hashes": _EACH,
    "lamb_apply": {**_MOMENTS, "weights": "arrays", "rates": "array", "copies": "arrays?", "scratch": "scratch"},
    "lamb_moments": {**_MOMENTS, "weights": "arrays", "grads": "arrays", "scale": "factor", "scratch": "scratch"},
    "momentum_step": {
        **_STEP,
        "buffers": "arrays?",
        "rates": "array?",
        "lr": "number",
        "momentum": "number",
        "dampening": "number",
        "weight_decay": "number",
        "nesterov": "bool",
    },
    "orthogonalize": {"p": "array", "config": "config", "scratch": "scratch"},
    "pack": {
        "tensors": "arrays",
        "out": "array",
        "scale": "factor",
        "limit": "number",
        "unless": "array?",
        "scratch": "scratch",
    },
    "pack_chunks": {"x": "array", "config": "config", "out": "array?", "remainder": "array?", "decay": "number"},
    "pack_entries": {"message": "array", "taken": "taken", "gathered": "gathered"},
    "pack_flagged": {
        "tensors": "arrays",
        "out": "array",
        "flags": "array",
        "bits": "array?",
        "scale": "factor",
        "limit": "number",
        "scratch": "scratch",
    },
    "pack_indices": {"indices": "array", "limit": "integer", "out": "array?"},
    "pack_signs": {"x": "array", "magnitude": "array", "out": "array?", "remainder": "array?"},
    "packed_words": {"limit": "integer", "count": "integer"},
    "quantize": {"x": "array", "config": "config", "out": "pair?", "seed": "array?", "remainder": "array?"},
    "reduce": {"out": "array", "inputs": "arrays", "op": "text", "scratch": "scratch"},
    "requantize": {
        "scales": "arrays",
        "codes": "arrays",
        "config": "config",
        "out": "pair",
        "seed": "array?",
        "remainder": "array?",
        "count": "integer",
        "scratch": "scratch",
    },
    "adagrad_step": {**_STEP, "sums": "arrays", "lr": "number", "eps": "number", "weight_decay": "number"},
    "rmsprop_step": {
        **_STEP,
        "square_avgs": "arrays",
        "momentum_buffers": "arrays?",
        "grad_avgs": "arrays?",
        "lr": "number",
        "alpha": "number",
        "eps": "number",
        "momentum": "number",
        "weight_decay": "number",
    },
    "scatter_add": {"out": "array", "indices": "array", "values": "array", "scale": "factor", "scratch": "scratch"},
    "set_num_threads": {"count": "integer?"},
    "sign_words": {"count": "integer"},
    "sparsify": {
        **_ACCUMULATE,
        "grads": "arrays",
        "counts": "integers",
        "out": "pair",
        "thresholds": "array",
        "num_missed": "array?",
        "largest": "array?",
    },
    "split_low_rank": {"m": "array", "config": "config", "p": "array", "q": "array"},
    "squared_norms": _EACH,
    "topk": {"x": "array", "k": "integer", "out": "pair?", "threshold": "array?", "scratch": "scratch"},
    "unpack": {"flat": "array", "tensors": "arrays", "scale": "factor", "scratch": "scratch"},
    "unpack_chunks": {
        "words": "arrays",
        "config": "config",
        "out": "array",
        "scale": "factor",
        "scratch": "scratch",
    },
    "unpack_entries": {"gathered": "gathered", "factor": "factor", "most": "number", "scratch": "scratch"},
    "unpack_indices": {"words": "array", "limit": "integer", "count": "integer", "out": "array?", "scratch": "scratch"},
    "unpack_signs": {
        "words": "arrays",
        "magnitudes": "arrays",
        "out": "array",
        "scale": "factor",
        "scratch": "scratch",
    },
}
LOW_RANK = ("accumulate_low_rank", "expand_low_rank", "orthogonalize", "split_low_rank")
FIELDS: dict[str, dict[str, str]] = {
    "momentum": {"velocity": "array?", "old_velocity": "array?", "factor": "number", "nesterov": "bool"},
    "decay": {"weights": "arrays", "factor": "number"},
    "moments": {"betas": "betas", "eps": "number", "step": "integer", "bias_correction": "bool"},
    "taken": {
        **dict.fromkeys(("values", "indices", "flat", "finite"), "array"),
        **dict.fromkeys(("largest", "velocity", "keeps", "fingerprint"), "array?"),
    },
    "gathered": {
        "layout": "layout",
        "num_ranks": "integer",
        **dict.fromkeys(("messages", "indices", "verdict"), "array"),
    },
    "pack_entries.gathered": {
        "layout": "layout",
        "num_ranks": "integer",
        **dict.fromkeys(("messages", "indices"), "not read?"),
        "verdict": "array",
    },
    "config": {"block": "integer", "levels": "integer", "bits": "integer", "norm": "text", "element": "text"},
    **{
        key: {"k": "integer", "chunk": "integer", "bits": "integer"}
        for key in ("accumulate_chunks.config", "pack_chunks.config", "unpack_chunks.config")
    },
}


FIELDS |= {f"{function}.config": {"shapes": "shapes", "rank": "integer"} for function in LOW_RANK}


def fields_of(function: str, name: str) -> dict[str, str]:
    """Kinds of the fields of a function's argument of that name."""
    return FIELDS.get(f"{function}.{name}", FIELDS.get(name, {}))


ALIASES: dict[str, tuple[str, ...]] = {
    "out": ("words", "indices", "values", "scales", "codes", "squares", "out"),
    "limit": ("range", "limit"),
    "count": ("indices", "count"),
    "factor": ("factor", "decay", "momentum"),
    "words": ("words", "out"),
    "values": ("values", "out"),
    "indices": ("indices", "out"),
    "scales": ("scales", "out"),
    "codes": ("codes", "out"),
}
"""What messages call arguments besides."""


def names_of(*names: str) -> tuple[str, ...]:
    """That one may find in a message about these."""
    plain = [name.partition("[")[0] for name in names]
    return tuple(dict.fromkeys([*names, *plain, *(alias for name in plain for alias in ALIASES.get(name, ()))]))


class _OnlyArray:
    """Can be made an array by numpy, which is not asked."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        return np.ones(3, np.float32)


class _Thorny:
    """Answers no question about what it has."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("thorny")


def _junk(*values: Any) -> list[Callable[[], Any]]:
    def always(value: Any) -> Callable[[], Any]:
        return lambda: value

    return [always(value) for value in values]


_ANYTHING = [*_junk("text", b"", 1j, {}, Ellipsis, int), object, lambda: [object()]]
_NO_ARRAY = [*_ANYTHING[:1], *_ANYTHING[2:], *_junk([1.0, 2.0], 3, 1.5, True, (), set()), _OnlyArray, _Thorny]
_NO_NUMBER = [*_ANYTHING, *_junk([], 10**400, -(10**400), "1", (1.0,)), _Thorny]
_HUGE = _junk(2**63, -(2**63) - 1, 2**64, 10**400)
_NO_INTEGER = [*_ANYTHING, *_HUGE, *_junk(1.5, "3", [3], float("nan"), Decimal("1.5")), _Thorny]
JUNK: dict[str, list[Callable[[], Any]]] = {
    "array": _NO_ARRAY,
    "arrays": [*_ANYTHING, *_junk([], 3, 1.5, True, [None], ["x"], [[1.0]]), _Thorny],
    "grads": [*_ANYTHING, *_junk([], 3, True, [None], "x"), _Thorny],
    "factor": [*_NO_NUMBER, lambda: torch.ones(2), lambda: torch.ones(1).int(), lambda: np.ones(0, np.float32)],
    "number": [*_NO_NUMBER, lambda: torch.ones(2)],
    "integer": [*_NO_INTEGER, *_junk(-1, -(2**31))],
    "integers": [*_ANYTHING, *_junk(3, [1.5] * 99, ["x"], [None], [2**63], [10**400], "12"), _Thorny],
    "text": [*_junk("", "median", "Sum", "sum\0", "\ud800", 3, 1.5, [], ["sum"]), object],
    "scratch": [*_ANYTHING, *_junk(3, [], True), lambda: torch.ones(300)],
    "pair": [*_junk("text", 3, 1.5, object(), (), [None], (None, None), (1, 2), "ab", {}), lambda: torch.ones(3)],
    "config": [*_ANYTHING, *_junk(3, "max", (256, 127, 8, "max"))],
    "momentum": [*_ANYTHING, *_junk(0.9, True)],
    "decay": [*_ANYTHING, *_junk(0.1, [])],
    "taken": [*_ANYTHING, *_junk(3, [], ())],
    "gathered": [*_ANYTHING, *_junk(3, [], ())],
    "layout": [*_ANYTHING, *_junk(3, (1, 1, 1, 1, "float32", False))],
    "states": [*_junk("text", 1j, Ellipsis, int, 3, [None], [3], [(1,)], [(1.0, 2.0)]), object, _Thorny],
    "moments": [*_ANYTHING, *_junk(0.9, (0.9, 0.999))],
    "betas": [*_ANYTHING, *_junk(0.9, (0.9,), (0.9, 0.99, 0.999), ("a", "b"), (None, 0.9), (1.0, 1j))],
}
"""What certainly does not belong there, by kind."""
DOUBTFUL: dict[str, list[Callable[[], Any]]] = {
    "arrays": [lambda: torch.ones(3), lambda: iter([torch.ones(3)]), lambda: np.ones((2, 3)), lambda: {1: 2}.keys()],
    "factor": [*_junk(True, False, np.float16(0.5), np.int64(2)), lambda: torch.tensor(2)],
    "number": [*_junk(True, np.float32(0.5), np.int64(2), Decimal("0.5")), lambda: torch.tensor(0.5)],
    "integer": _junk(True, Decimal(3), np.int64(3), 0, 2**31, 2**31 - 1, 2**40, 2**62, np.float64(2.0)),
    "integers": [lambda: np.zeros(2, np.int64), lambda: torch.zeros(1).long(), lambda: iter([0]), lambda: (True,)],
    "bool": [*_junk("text", "", b"", None, 0, 1, 7, [], 0.5, np.bool_(True)), object],
    "text": _junk(b"sum", np.str_("max")),
    "betas": [
        *_junk((1.0, 1.0), (0.9, 1.0), (2.0, 2.0), (-1.0, -3.0), (1e300, 1e300), (float("nan"), 0.9), [0.9, 0.99]),
    ],
    "array": [lambda: np.float32(1.0), lambda: torch.tensor(1.0)],
    "grads": [lambda: torch.ones(3), lambda: (torch.ones(3),)],
}
"""What may be taken or refused, as long as nothing worse happens."""


class Dispatching(torch.Tensor):
    """A tensor that has no memory of its own."""

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> Dispatching:
        made: Dispatching = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)
        return made

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        raise RuntimeError("nothing can be done with this tensor")


class _Lie:
    """Promises a DLPack capsule."""

    def __init__(self, capsule: Callable[[], Any], device: Any = (1, 0)) -> None:
        self._capsule = capsule
        self._device = device

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule()

    def __dlpack_device__(self) -> Any:
        if isinstance(self._device, Exception):
            raise self._device
        return self._device


class _Interface:
    """With an ``__array_interface__`` that is none."""

    def __init__(self, interface: Any) -> None:
        self.__array_interface__ = interface


def _raises(error: Exception) -> Callable[[], Any]:
    def capsule() -> Any:
        raise error

    return capsule


def _freed(values: torch.Tensor) -> torch.Tensor:
    tensor = values.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def _sparse_rows(values: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are in beta state
        return values.view(1, -1).to_sparse_csr()


def _released(values: torch.Tensor) -> memoryview:
    view = memoryview(bytes(4 * values.numel()))
    view.release()
    return view


def _closed(values: torch.Tensor) -> mmap.mmap:
    closed = mmap.mmap(-1, 4096)
    closed.close()
    return closed


_CAPSULES: list[Callable[[], Any]] = [
    *_junk(3, None, "capsule"),
    object,
    *(_raises(kind("lie")) for kind in (RuntimeError, BufferError, AttributeError, KeyError, OverflowError)),
]
_FLOATS: dict[str, Any] = {"typestr": "<f4", "version": 3}
_INTERFACES: list[Any] = [
    *(3, None, {}, "x", [], {"shape": (3,)}, {**_FLOATS, "shape": "x"}),
    *({"shape": (3,), "typestr": typestr, "version": 3} for typestr in ("zz", "<f3", 5, "", None)),
    *({**_FLOATS, "shape": shape, "data": b"0123"} for shape in ((-1,), (3,), 3, (1.5,), (2**62,))),
    {**_FLOATS, "shape": (1,), "data": b"0123", "strides": (4, 4)},
    {**_FLOATS, "shape": (1,), "data": ("x", False)},
]
LIARS: dict[str, list[Callable[[torch.Tensor], Any]]] = {
    "torch": [
        lambda x: x.to("meta"),
        lambda x: x.to_sparse(),
        _sparse_rows,
        _freed,
        Dispatching,
    ],
    "dlpack": [
        *(lambda x, capsule=capsule: _Lie(capsule) for capsule in _CAPSULES),
        *(
            lambda x, device=device: _Lie(lambda: x.__dlpack__(), device)
            for device in ((2, 0), (2, 99), (99, 0), 3, None, (1,), RuntimeError("lie"))
        ),
    ],
    "buffer": [
        *(lambda x, interface=interface: _Interface(interface) for interface in _INTERFACES),
        _released,
        _closed,
        lambda x: _OnlyArray(),
    ],
    "dtype": [
        lambda x: np.full(x.numel(), None, object),
        lambda x: np.zeros(x.numel(), [("a", "<f4"), ("b", "<i4")]),
        lambda x: np.zeros(x.numel(), "datetime64[s]"),
        lambda x: np.zeros(x.numel(), "S4"),
        lambda x: np.zeros(x.numel(), "U1"),
        lambda x: np.zeros(x.numel(), "V2"),
        lambda x: np.zeros(x.numel(), np.longdouble),
        lambda x: np.zeros(
            x.numel(), np.dtype(NUMPY.get(x.dtype, np.float32) if x.itemsize > 1 else "f4").newbyteorder(">")
        ),
        lambda x: (ctypes.c_uint32 * x.numel())(),
        lambda x: torch.zeros(x.numel(), dtype=torch.complex64),
    ],
}
"""Arrays that are none, made of what the right one would hold; "dtype": those whose dtype alone is wrong."""
