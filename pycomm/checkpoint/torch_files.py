"""Values that ``torch.save`` has written, read by torch with ``weights_only=True``: nothing that a file holds is run.

torch looks at no checksum, and older ones make memory of the size that a value says, whatever part it lies in. So parts
are compared with their checksums before, and memory with the parts afterwards. Only plain values are taken, and not
more of them than somebody can go through.
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
_MOST_PARTS, _DEEPEST = 1 << 18, 100
"""Values in a file, and how deep they are nested."""
_NAME = re.compile(r"[\w.]{1,80} [\w.]{1,80}")
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
        sizes = _check_parts(window, size)
        window.seek(0)
        value = torch.load(window, map_location="cpu", weights_only=True)  # type: ignore[arg-type]
        _require_plain(value, sizes)
    except Exception as error:  # of what a file may make it raise there is no list
        raise DamagedError(f"{what} is damaged, or holds more than plain values: {_words(error)}") from error
    return value


def _words(error: Exception) -> str:
    """Return what torch says of the file, without its advice to load it otherwise."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = next((line for line in lines if "nsupported" in line or "WeightsUnpickler" in line), (lines or [""])[0])
    return told.partition(". Please")[0] or type(error).__name__


def _check_parts(window: _Window, size: int) -> Counter[int]:
    """Raise an error unless all parts of the archive are there as they were written; return the sizes of memory."""
    with zipfile.ZipFile(window) as archive:
        parts = archive.infolist()
        if any(part.compress_type != zipfile.ZIP_STORED for part in parts) or sum(p.file_size for p in parts) > size:
            raise ValueError("it has parts that are larger than the file")
        for part in parts:
            if part.CRC == 0:  # torch leaves checksums out if it is told to
                part.CRC = None  # type: ignore[assignment]
            with archive.open(part) as content:
                program = content.read() if part.filename.endswith("/data.pkl") else b""
                while content.read(_CHUNK_BYTES):  # compares the checksum at the end
                    pass
            _check_names(program)
        return Counter(part.file_size for part in parts if "/data/" in part.filename and part.file_size > 0)


def _check_names(program: bytes) -> None:
    """Raise an error unless names of functions and classes are such; torch takes very long to refuse a long one."""
    for instruction, argument, _ in pickletools.genops(program) if program else ():
        name = str(argument)
        if instruction.name == "GLOBAL" and not _NAME.fullmatch(name):
            raise ValueError(f"it calls {name[:80]!r}")


def _require_plain(value: Any, sizes: Counter[int]) -> None:
    """Raise an error unless ``value`` is finite, and has nothing but plain values in it, whose memory has these sizes.

    A list may be in another one many times, or in itself: who goes through it would never end.
    """
    stack: list[tuple[Any, int]] = [(value, 0)]
    count, memory = 0, dict[int, int]()
    while stack:
        one, depth = stack.pop()
        count += 1
        if depth > _DEEPEST or count > _MOST_PARTS:
            raise ValueError(f"it is nested more than {_DEEPEST} levels deep, or has more than {_MOST_PARTS} parts")
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
    """Part of a file."""

    def __init__(self, stream: BinaryIO, begin: int, size: int) -> None:
        super().__init__()
        self._stream, self._begin, self._size, self._at = stream, begin, size, 0

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
