"""Values that ``torch.save`` has written, read by torch with ``weights_only=True``: nothing that a file holds is run.

torch looks at no checksum, makes bytes and tensors of any size if it is told to, and older ones make memory of the size
that a value says, whatever part it lies in. So before, parts are compared with their checksums, and the program that
makes the value is looked through: it may name what makes plain values, and nothing else. Afterwards memory is compared
with the parts, and the value must not have more parts than somebody can go through.
"""

from __future__ import annotations

import io
import os
import pickletools
import re
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from pycomm.checkpoint.files import DamagedError
from pycomm.untrusted import reading

_CHUNK_BYTES = 4 << 20
_PROTOCOL = 2  # which names what it calls as it is
_LARGEST_PROGRAM = 64 << 20  # bytes; of an archive's directory too
_DEEPEST = 100  # lists in lists
_MOST_LARGE, _LARGE = 1000, 2**63
"""Integers beyond 64 bits: keys may be chosen among them so that a dict compares each of them with all others."""

_NAME = re.compile(
    r"torch\._utils _rebuild_(tensor_v2|tensor_v3|parameter)|torch \w{1,40}Storage|torch\.storage UntypedStorage"
    r"|torch Size|collections (OrderedDict|Counter)|_codecs encode|(__builtin__|builtins) (set|bytes|complex)"
)
"""What the program of a plain value names, besides dtypes."""

_MOST_EXPANDED = 1 << 24
"""Elements of a tensor that has more of them than its memory, as :meth:`torch.Tensor.expand` makes it."""


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
    window = _Window(stream, begin, size)
    try:
        sizes, most = _check_parts(_Window(stream, begin, size, _LARGEST_PROGRAM), size)
        value = torch.load(window, map_location="cpu", weights_only=True)  # type: ignore[arg-type]
        _require_plain(value, sizes, most)
    except Exception as error:  # of what a file may make it raise there is no list
        raise DamagedError(f"{what} is damaged, or holds more than plain values: {_words(error)}") from error
    return value


def _words(error: Exception) -> str:
    """Return what torch says of the file, without its advice to load it otherwise."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = next((line for line in lines if "nsupported" in line or "WeightsUnpickler" in line), (lines or [""])[0])
    return told.partition(". Please")[0] or type(error).__name__


def _check_parts(window: _Window, size: int) -> tuple[Counter[int], int]:
    """Raise an error unless all parts of the archive are there as they were written, and make plain values.

    Returns:
        The sizes of memory, and how many values there may be.
    """
    most = 1000
    with zipfile.ZipFile(window) as archive:
        parts = archive.infolist()
        if any(part.compress_type != zipfile.ZIP_STORED for part in parts) or sum(p.file_size for p in parts) > size:
            raise ValueError("it has parts that are larger than the file")
        for part in parts:
            if part.CRC == 0:  # torch leaves checksums out if it is told to
                part.CRC = None  # type: ignore[assignment]
            with archive.open(part) as content:
                is_program = part.filename.endswith("/data.pkl") and part.file_size <= _LARGEST_PROGRAM
                program = content.read() if is_program else b""
                while content.read(_CHUNK_BYTES):  # compares the checksum at the end
                    pass
            most += 4 * _check_program(program)
        return Counter(part.file_size for part in parts if "/data/" in part.filename and part.file_size > 0), most


def _check_program(program: bytes) -> int:
    """Raise an error unless ``program`` makes plain values; return the number of its instructions."""
    count = num_large = 0
    for instruction, argument, _ in pickletools.genops(program) if program else ():
        count += 1
        if instruction.name == "GLOBAL" and not _is_plain(str(argument)):
            raise ValueError(f"it calls {str(argument)[:80]!r}")
        if instruction.name == "STACK_GLOBAL" or (instruction.name == "PROTO" and argument != _PROTOCOL):
            raise ValueError("it is not in the form in which torch.save writes")
        num_large += isinstance(argument, int) and not -_LARGE <= argument < _LARGE
        if num_large > _MOST_LARGE:
            raise ValueError(f"it has more than {_MOST_LARGE} integers beyond 64 bits")
    return count


def _is_plain(name: str) -> bool:
    module, _, inner = name.partition(" ")
    return bool(_NAME.fullmatch(name)) or (module == "torch" and isinstance(vars(torch).get(inner), torch.dtype))


def _require_plain(value: Any, sizes: Counter[int], most: int) -> None:
    """Raise an error unless ``value`` is finite, of at most ``most`` parts, in whose memory there are these sizes.

    A list may be in another one many times, or in itself: who goes through it would never end.
    """
    stack: list[tuple[Any, int]] = [(value, 0)]
    count, memory = 0, dict[int, int]()
    while stack:
        one, depth = stack.pop()
        count += 1
        if depth > _DEEPEST or count > most:
            raise ValueError(f"it is nested more than {_DEEPEST} levels deep, or has more than {most} parts")
        if isinstance(one, torch.Tensor):
            _require_dense(one)
            memory[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        stack.extend((part, depth + 1) for part in _parts_of(one))
    if Counter(num_bytes for num_bytes in memory.values() if num_bytes > 0) != sizes:
        raise ValueError("it has tensors in other memory than the file has")


def _require_dense(x: torch.Tensor) -> None:
    if x.layout != torch.strided or x.device.type != "cpu":
        raise ValueError(f"it has a tensor of layout {x.layout} on {x.device}")
    if x.numel() > max(_MOST_EXPANDED, x.untyped_storage().nbytes()):
        raise ValueError(f"it has a tensor of shape {list(x.shape)} in {x.untyped_storage().nbytes()} bytes")


def _parts_of(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        return iter([*value.keys(), *value.values()])
    return iter(value) if isinstance(value, list | tuple | set) else iter(())


class _Window(io.RawIOBase):
    """Part of a file, of which at most ``most`` bytes are read at once, if that is given."""

    def __init__(self, stream: BinaryIO, begin: int, size: int, most: int | None = None) -> None:
        super().__init__()
        self._stream, self._begin, self._size, self._at, self._most = stream, begin, size, 0, most

    def read(self, size: int = -1, /) -> bytes:
        left = max(0, self._size - self._at)
        count = left if size < 0 else min(size, left)
        if self._most is not None and count > self._most:
            raise OSError(f"it has {count} bytes where {self._most} are enough")
        return super().read(count) or b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if at < 0:
            raise OSError("a place before the file")
        self._at = at
        return at

    def readinto(self, out: Any) -> int:
        self._stream.seek(self._begin + self._at)
        view = memoryview(out)[: max(0, self._size - self._at)]
        num_bytes: int = self._stream.readinto(view)  # type: ignore[attr-defined]
        self._at += num_bytes
        return num_bytes
