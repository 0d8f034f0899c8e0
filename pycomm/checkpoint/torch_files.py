"""Values that ``torch.save`` has written, read without unpickling anything.

Inside an archive lies a program that makes the value. It is followed here, an instruction at a time, as far as it makes
tensors, numbers, texts, and lists, tuples, sets and dicts of them: whatever else it asks for is an error. What it says
of sizes is compared with what is there. So nothing that a file holds is run, and no file makes more than it has.

``torch.load(weights_only=True)`` runs nothing foreign either, but it looks at no checksum, makes empty tensors of any
size, and older ones believe what a file says of the size of its parts.
"""

from __future__ import annotations

import math
import os
import pickletools
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from pycomm.checkpoint.archive import Archive
from pycomm.checkpoint.files import DamagedError
from pycomm.untrusted import reading

_LARGEST_PROGRAM = 16 << 20  # bytes
_MOST_DIMENSIONS = 64
_LONGEST_DIMENSION = 2**48
_MOST_EXPANDED = 1 << 24
"""Elements of a tensor that has more of them than its memory, as :meth:`torch.Tensor.expand` makes it."""

_DEEPEST = 100  # lists in lists
_LARGEST_KEY = 2**63  # integers beyond may be chosen so that a dict compares each of them with all

_STORAGES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexDouble": torch.complex128,
    "ComplexFloat": torch.complex64,
}


class _ProgramError(Exception):
    """A program does what no program of plain values does."""


@dataclass(frozen=True)
class _Name:
    """Name of a function or class, which is not looked up."""

    text: str


@dataclass(frozen=True)
class _Storage:
    """Memory of tensors: bytes, and the dtype that they are of; ``None`` if each tensor says its own."""

    content: torch.Tensor
    dtype: torch.dtype | None


def load_values(path: str | Path) -> Any:
    """Return what ``torch.save`` has written to the file ``path``, with all tensors in CPU memory.

    Raises:
        DamagedError: the file is not whole, or holds something else than plain values; it is named.
        OSError: it cannot be read.
    """
    try:
        with reading(path) as stream:
            return read_values(stream, 0, stream.seek(0, os.SEEK_END), str(path))
    except DamagedError:
        raise
    except ValueError as error:  # it is no regular file
        raise DamagedError(str(error)) from error


def read_values(stream: BinaryIO, begin: int, size: int, what: str) -> Any:
    """Return what ``torch.save`` has written to ``size`` bytes of ``stream``, from ``begin`` on.

    Raises DamagedError, in which they are called ``what``.
    """
    archive = Archive(stream, begin, size, what)
    if "byteorder" in archive and archive.bytes_of("byteorder", 16).decode("ascii", "replace") != sys.byteorder:
        raise DamagedError(f"{what} was written on a machine of another byte order")
    text = archive.bytes_of("data.pkl", _LARGEST_PROGRAM)
    program = _Program(archive)
    try:
        value = program.run(text)
        _require_plain(value, 1000 + 4 * program.length)
    except DamagedError:
        raise
    except Exception as error:  # of what a program may make of a dict, a tensor or a number there is no list
        told = str(error) if isinstance(error, _ProgramError) else f"{type(error).__name__}: {error}"
        raise DamagedError(f"{what} holds something else than plain values: {told}") from error
    return value


class _Program:
    """Program that makes a value.

    Attributes:
        length: number of instructions that were followed.
    """

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._storages: dict[str, torch.Tensor] = {}
        self.length = 0

    def run(self, text: bytes) -> Any:
        """Return the value."""
        for instruction, argument, _ in pickletools.genops(text):
            self.length += 1
            if instruction.name == "STOP":
                break
            follow = _INSTRUCTIONS.get(instruction.name)
            if follow is None:
                raise _ProgramError(f"it has the instruction {instruction.name}")
            follow(self, argument)
        (value,) = self._stack
        return value

    # Instructions.

    def push(self, value: Any) -> None:
        """Put ``value`` on the stack."""
        self._stack.append(value)

    def mark(self, _: Any) -> None:
        """Remember where the stack ends."""
        self._marks.append(len(self._stack))

    def _from_mark(self) -> list[Any]:
        """Return what was put on the stack since the last mark, and take it off."""
        begin = self._marks.pop()
        found = self._stack[begin:]
        del self._stack[begin:]
        return found

    def take_tuple(self, count: int) -> None:
        """Make a tuple of the last ``count`` values."""
        items = tuple(self._stack.pop() for _ in range(count))
        self.push(items[::-1])

    def take_marked_tuple(self, _: Any) -> None:
        """Make a tuple of what came since the last mark."""
        self.push(tuple(self._from_mark()))

    def append(self, _: Any) -> None:
        """Append the last value to a list."""
        self._extend([self._stack.pop()])

    def appends(self, _: Any) -> None:
        """Append what came since the last mark to a list."""
        self._extend(self._from_mark())

    def _extend(self, items: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise _ProgramError("it appends to what is no list")
        self._stack[-1].extend(items)

    def set_item(self, _: Any) -> None:
        """Put the last two values, a key and what belongs to it, into a dict."""
        value, key = self._stack.pop(), self._stack.pop()
        self._update([key, value])

    def set_items(self, _: Any) -> None:
        """Put what came since the last mark into a dict."""
        self._update(self._from_mark())

    def _update(self, items: list[Any]) -> None:
        keys, target = items[::2], self._stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise _ProgramError("it puts items into what is no dict")
        target.update(zip(map(_key, keys), items[1::2], strict=True))

    def put(self, number: int) -> None:
        """Remember the last value by ``number``."""
        self._memo[number] = self._stack[-1]

    def get(self, number: int) -> None:
        """Put on the stack what is remembered by ``number``."""
        self.push(self._memo[number])

    def name(self, text: str) -> None:
        """Put a name on the stack; the name of a dtype is that dtype."""
        module, _, name = text.partition(" ")
        found = vars(torch).get(name) if module == "torch" else None
        self.push(found if isinstance(found, torch.dtype) else _Name(f"{module}.{name}"))

    def call(self, _: Any) -> None:
        """Make what a function would that is known here, and is not called."""
        arguments, function = self._stack.pop(), self._stack.pop()
        make = _MAKERS.get(function.text) if isinstance(function, _Name) else None
        if make is None or type(arguments) is not tuple:
            raise _ProgramError(f"it calls {function.text if isinstance(function, _Name) else 'what is no function'}")
        self.push(make(*arguments))

    def leave_attributes(self, _: Any) -> None:
        """Drop attributes of a dict, such as the versions in a module's state."""
        self._stack.pop()
        if not isinstance(self._stack[-1], dict):
            raise _ProgramError("it sets attributes")

    def storage(self, _: Any) -> None:
        """Put memory on the stack, of which a tuple says where it is in the archive."""
        kind, name, key, _, count = self._stack.pop()
        if kind != "storage" or not isinstance(name, _Name) or type(key) is not str or type(count) is not int:
            raise _ProgramError("it has an object that is no memory")
        module, _, storage = name.text.rpartition(".")
        dtype = _STORAGES.get(storage.removesuffix("Storage"))
        if name.text != "torch.storage.UntypedStorage" and (module != "torch" or dtype is None):
            raise _ProgramError(f"it has memory of {name.text}")
        if key not in self._storages:
            self._storages[key] = self._archive.tensor_of(f"data/{key}")
        content = self._storages[key]
        if len(content) != count * (1 if dtype is None else dtype.itemsize):
            raise _ProgramError(f"it has {len(content)} bytes of memory, wanted {count} elements")
        self.push(_Storage(content, dtype))


def _key(key: Any) -> Any:
    """Return what may be a key: what is compared with few others whatever the others are."""
    is_small = type(key) is int and -_LARGEST_KEY <= key < _LARGEST_KEY
    if is_small or key is None or type(key) in (str, bool, float, bytes):
        return key
    raise _ProgramError(f"it has a {type(key).__name__} as a key")


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, requires_grad: Any, _hooks: Any, *more: Any) -> Any:
    """Return a tensor in memory that has room for it."""
    if not isinstance(storage, _Storage):
        raise _ProgramError("it has a tensor without memory")
    dtype = storage.dtype
    if dtype is None:
        dtype = more[0] if more and isinstance(more[0], torch.dtype) else torch.uint8
    numbers = (offset, *shape, *stride)
    if len(shape) != len(stride) or len(shape) > _MOST_DIMENSIONS:
        raise _ProgramError(f"it has a tensor of {len(shape)} lengths and {len(stride)} strides")
    if not all(type(number) is int and 0 <= number <= _LONGEST_DIMENSION for number in numbers):
        raise _ProgramError("it has a tensor of negative or very long dimensions")
    room = len(storage.content) // dtype.itemsize
    end = offset + (0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)))
    if end > room or math.prod(shape) > max(room, _MOST_EXPANDED):
        raise _ProgramError(f"it has a tensor of shape {list(shape)} in the memory of {room} elements")
    flat = storage.content[: room * dtype.itemsize]
    flat = flat != 0 if dtype is torch.bool else flat.view(dtype)  # a byte of a bool may be anything in a file
    return flat.as_strided(shape, stride, offset).requires_grad_(requires_grad is True)


def _parameter(data: Any, requires_grad: Any, _hooks: Any) -> torch.nn.Parameter:
    if not isinstance(data, torch.Tensor):
        raise _ProgramError("it has a parameter that is no tensor")
    return torch.nn.Parameter(data, requires_grad is True)


def _encoded(text: Any, encoding: Any) -> bytes:
    if type(text) is not str or encoding != "latin1":
        raise _ProgramError("it has bytes in a form of its own")
    return text.encode(encoding)


def _counter(counts: Any = None) -> Counter[Any]:
    if counts is not None and type(counts) is not dict:
        raise _ProgramError("it counts what is no dict")
    return Counter(counts)


def _set(items: Any) -> set[Any]:
    if type(items) is not list:
        raise _ProgramError("it makes a set of what is no list")
    return set(map(_key, items))


def _size(lengths: Any) -> torch.Size:
    if type(lengths) is not tuple or not all(type(n) is int and 0 <= n < _LARGEST_KEY for n in lengths):
        raise _ProgramError("it has a shape of other things than lengths")
    return torch.Size(lengths)


def _complex(real: Any, imaginary: Any) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise _ProgramError("it has a complex number of other things than numbers")
    return complex(real, imaginary)


_MAKERS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "collections.OrderedDict": lambda: OrderedDict(),
    "collections.Counter": _counter,
    "torch.Size": _size,
    "_codecs.encode": _encoded,
    **{f"{module}.{name}": make for module in ("__builtin__", "builtins") for name, make in (
        ("set", _set),
        ("bytes", lambda: b""),
        ("complex", _complex),
    )},
}  # fmt: skip

_INSTRUCTIONS: dict[str, Callable[[_Program, Any], None]] = {
    "PROTO": lambda program, version: None,
    "MARK": _Program.mark,
    "NONE": lambda program, _: program.push(None),
    "NEWTRUE": lambda program, _: program.push(True),
    "NEWFALSE": lambda program, _: program.push(False),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), _Program.push),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES"), _Program.push),
    "EMPTY_LIST": lambda program, _: program.push([]),
    "EMPTY_DICT": lambda program, _: program.push({}),
    "EMPTY_TUPLE": lambda program, _: program.push(()),
    "TUPLE1": lambda program, _: program.take_tuple(1),
    "TUPLE2": lambda program, _: program.take_tuple(2),
    "TUPLE3": lambda program, _: program.take_tuple(3),
    "TUPLE": _Program.take_marked_tuple,
    "APPEND": _Program.append,
    "APPENDS": _Program.appends,
    "SETITEM": _Program.set_item,
    "SETITEMS": _Program.set_items,
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Program.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Program.get),
    "GLOBAL": _Program.name,
    "REDUCE": _Program.call,
    "BUILD": _Program.leave_attributes,
    "BINPERSID": _Program.storage,
}


def _require_plain(value: Any, most: int) -> None:
    """Raise an error unless ``value`` is finite, of at most ``most`` parts, and has nothing but values in it.

    A list may be in another one many times, or in itself: who goes through it would never end.
    """
    stack: list[tuple[Any, int]] = [(value, 0)]
    count = 0
    while stack:
        one, depth = stack.pop()
        count += 1
        if depth > _DEEPEST:
            raise _ProgramError(f"it is nested more than {_DEEPEST} levels deep")
        if count > most:
            raise _ProgramError(f"it has more than {most} parts")
        if isinstance(one, _Name | _Storage):
            raise _ProgramError(f"it has {one.text if isinstance(one, _Name) else 'memory'} as a value")
        stack.extend((part, depth + 1) for part in _parts_of(one))


def _parts_of(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        return iter(value.values())
    return iter(value) if isinstance(value, list | tuple) else iter(())
