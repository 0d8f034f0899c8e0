"""Files that are whole or not there, and checksums by which others are found out."""

from __future__ import annotations

import hashlib
import io
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

_CHUNK_BYTES = 4 << 20


class DamagedError(ValueError):
    """A checkpoint that is not whole. It is left aside, and the one before is taken."""


def sync_directory(path: Path) -> None:
    """Have the names in ``path`` written to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Write ``content`` to ``path``, by renaming; return what :func:`read_json` checks it with."""
    data = json.dumps(content).encode()
    beside = path.with_name(f"{path.name}.part")
    with open(beside, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(beside, path)
    sync_directory(path.parent)
    return sum_of(data)


def sum_of(data: bytes) -> dict[str, Any]:
    """Return what :func:`read_json` checks a file with ``data`` in it with."""
    return {"bytes": len(data), "blake2b": _digest(data)}


def read_json(path: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return what :func:`write_json` has written to ``path``, for which it returned ``wanted``.

    Raises:
        DamagedError: the file is not that one.
    """
    data = _read(path)
    if len(data) != wanted["bytes"]:
        raise DamagedError(f"{path} has {len(data)} bytes, wanted {wanted['bytes']}")
    if _digest(data) != wanted["blake2b"]:
        raise DamagedError(f"{path} is not what was written: its checksum differs")
    content: dict[str, Any] = json.loads(data)
    return content


def write_sealed(path: Path, content: dict[str, Any]) -> None:
    """Write ``content`` to ``path``, by renaming, with its own checksum in it."""
    write_json(path, {"checksum": _seal_of(content), "content": content})


def read_sealed(path: Path) -> dict[str, Any]:
    """Return what :func:`write_sealed` has written. Raise DamagedError if the file is not whole."""
    data = _read(path)
    try:
        outer = json.loads(data)
        content, seal = outer["content"], outer["checksum"]
    except (ValueError, KeyError, TypeError):  # a byte of it may have become anything
        raise DamagedError(f"{path} is cut short, or is none of pycomm's") from None
    if not isinstance(content, dict) or _seal_of(content) != seal or json.dumps(outer).encode() != data:
        raise DamagedError(f"{path} is not what was written: its checksum differs")
    return content


def check_file(path: Path, wanted: dict[str, Any]) -> None:
    """Raise DamagedError unless ``path`` has the bytes, and the CRC-32, of ``wanted``. Reads the file once."""
    check_size(path, wanted["bytes"])
    crc = 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    try:
        with open(path, "rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                crc = zlib.crc32(buffer[:count], crc)
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error}") from error
    if crc != wanted["crc32"]:
        raise DamagedError(f"{path} is not what was written: its checksum differs")


def check_size(path: Path, wanted: int) -> None:
    """Raise DamagedError unless ``path`` is a file of ``wanted`` bytes."""
    try:
        found = path.stat().st_size
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error}") from error
    if found != wanted:
        raise DamagedError(f"{path} has {found} bytes, wanted {wanted}")


class Summed(io.RawIOBase):
    """Stream that writes to another, and knows the CRC-32 of all that it was given.

    Attributes:
        crc32, num_bytes: of what has been written.
        error: why something could not be written; torch.save raises another in its place.
    """

    error: OSError | None = None

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__()
        self._stream = stream
        self.crc32 = self.num_bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            self._stream.write(view)
        except OSError as error:
            self.error = error
            raise
        self.crc32 = zlib.crc32(view, self.crc32)
        self.num_bytes += len(view)
        return len(view)

    def tell(self) -> int:
        return self.num_bytes

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        self._stream.flush()  # who asks is about to call fsync
        return self._stream.fileno()


class Reserve:
    """File of a fixed size, made while there is room, that says later, by its new name, what has gone wrong.

    On a full disk a file cannot be made any more, but one that is there can be written over and renamed.
    """

    _BYTES = 4096

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "wb") as stream:
            stream.write(b" " * self._BYTES)
            stream.flush()
            os.fsync(stream.fileno())

    def tell(self, kind: str, text: str, name: str) -> None:
        """Rename the file to ``name``, with ``text`` in it; ``kind`` says which exception it is of."""
        data = json.dumps([kind, text[:320]]).encode()[: self._BYTES].ljust(self._BYTES)
        with open(self.path, "r+b") as stream:
            stream.write(data)
        os.replace(self.path, self.path.with_name(name))

    def touch(self) -> None:
        """Change the file's time: all is well so far."""
        os.utime(self.path)

    def remove(self) -> None:
        """Remove the file: nothing has gone wrong."""
        self.path.unlink(missing_ok=True)


def told_in(path: Path) -> tuple[str, str] | None:
    """Return the kind and the text that a :class:`Reserve` has told under the name ``path``; ``None`` if it has not."""
    try:
        kind, text = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return "RuntimeError", f"{path} cannot be read"
    return str(kind), str(text)


@contextmanager
def summed(path: Path, sums: dict[str, Any]) -> Iterator[Summed]:
    """Open ``path`` to write; its size and checksum are put into ``sums`` under its name."""
    with open(path, "wb", buffering=1 << 20) as stream:
        found = Summed(stream)
        try:
            yield found
        except Exception as error:
            if found.error is not None:
                raise found.error from error
            raise
        stream.flush()
        sums[path.name] = {"bytes": found.num_bytes, "crc32": found.crc32}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error}") from error


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _seal_of(content: Any) -> str:
    return _digest(json.dumps(content, sort_keys=True).encode())
