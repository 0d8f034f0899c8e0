"""Archives that ``torch.save`` writes: zip files whose parts are stored as they are.

What the directory of an archive says of itself is compared with the size of the file before any memory is taken for it,
and every part with its checksum, which torch's own reader does not look at.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

import torch

from pycomm.checkpoint.files import DamagedError

_CHUNK_BYTES = 4 << 20
_LARGEST_DIRECTORY = 16 << 20
"""Bytes of an archive's directory: those of some hundred thousand tensors."""

_LOCAL = struct.Struct("<4s22xHH")  # signature; lengths of the name and of what else there is before the part


class Archive:
    """Archive in ``size`` bytes of ``stream``, from ``begin`` on.

    Args:
        what: name of it, for errors.

    Raises:
        DamagedError: it is none.
    """

    def __init__(self, stream: BinaryIO, begin: int, size: int, what: str) -> None:
        self._stream, self._begin, self._size, self._what = stream, begin, size, what
        try:
            with zipfile.ZipFile(_Window(stream, begin, size)) as opened:
                parts = opened.infolist()
        except Exception as error:  # of what a file may make it raise there is no list
            raise DamagedError(f"{what} is no archive of torch.save: {type(error).__name__}: {error}") from error
        if any(part.file_size != part.compress_size for part in parts) or sum(p.file_size for p in parts) > size:
            raise DamagedError(f"{what} has parts that are larger than the file")
        self._parts = {part.filename: part for part in parts}
        self._prefix = next((name[: -len("data.pkl")] for name in self._parts if name.endswith("/data.pkl")), "")

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._parts

    def bytes_of(self, name: str, most: int) -> bytes:
        """Return the content of a part of at most ``most`` bytes. Raises DamagedError if it is missing or damaged."""
        size = self.size_of(name)
        if size > most:
            raise DamagedError(f"{self._what} has {size} bytes of {name}, wanted at most {most}")
        return b"".join(map(bytes, self._chunks(name, memoryview(bytearray(size)))))

    def tensor_of(self, name: str) -> torch.Tensor:
        """Return the content of a part as a tensor of bytes. Raises as :meth:`bytes_of`."""
        found = torch.empty(self.size_of(name), dtype=torch.uint8)
        memory: Any = found.numpy()
        for _ in self._chunks(name, memoryview(memory)):
            pass
        return found

    def size_of(self, name: str) -> int:
        """Return how many bytes a part has. Raises DamagedError if there is none of that name."""
        if name not in self:
            raise DamagedError(f"{self._what} is no archive of torch.save: it has no {name}")
        return self._parts[self._prefix + name].file_size

    def _chunks(self, name: str, out: memoryview) -> Iterator[memoryview]:
        """Read a part into ``out``, a chunk at a time; compare its checksum in the end."""
        part, crc = self._parts[self._prefix + name], 0
        self._seek(part)
        for begin in range(0, len(out), _CHUNK_BYTES):
            chunk = out[begin : begin + _CHUNK_BYTES]
            if self._stream.readinto(chunk) != len(chunk):  # type: ignore[attr-defined]
                raise DamagedError(f"{self._what} ends within {name}")
            crc = zlib.crc32(chunk, crc)
            yield chunk
        if crc != part.CRC and part.CRC != 0:  # which torch leaves out if it is told to
            raise DamagedError(f"{self._what} is not what was written: the checksum of {name} differs")

    def _seek(self, part: zipfile.ZipInfo) -> None:
        """Go to where ``part`` begins, behind what comes before it."""
        begin = part.header_offset
        head = b""
        if 0 <= begin < self._size:
            self._stream.seek(self._begin + begin)
            head = self._stream.read(_LOCAL.size)
        if len(head) == _LOCAL.size:
            signature, num_name, num_extra = _LOCAL.unpack(head)
            begin += _LOCAL.size + num_name + num_extra
            if signature == b"PK\3\4" and begin + part.file_size <= self._size:
                self._stream.seek(self._begin + begin)
                return
        raise DamagedError(f"{self._what} has no {part.filename} where its directory says")


class _Window(io.RawIOBase):
    """Part of a file, of which not much is read at a time."""

    def __init__(self, stream: BinaryIO, begin: int, size: int) -> None:
        super().__init__()
        self._stream, self._begin, self._size, self._at = stream, begin, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if at < 0:
            raise OSError("a place before the file")
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._size - self._at)
        count = left if size is None or size < 0 else min(size, left)
        if count > _LARGEST_DIRECTORY:
            raise OSError(f"a directory of {count} bytes")
        self._stream.seek(self._begin + self._at)
        found = self._stream.read(count)
        self._at += len(found)
        return found
