"""Files that are either complete or absent, with checksums that reveal damage."""

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

import torch

from pycomm.untrusted import ANYTHING, ListOf, MapOf, creating, naming, open_file, parse, read_file, require
from pycomm.untrusted import read_json as read_json_file

_CHUNK_BYTES = 4 << 20
_LARGEST_JSON = 1 << 30  # bytes: a part has about 1 KB per tensor
_LARGEST_MANIFEST = 4 << 20  # bytes: a manifest has 75 per rank. Python's objects may take 30 times as much memory


class DamagedError(ValueError):
    """Error of an incomplete or damaged checkpoint, which is skipped in favor of the one before."""


def sync_directory(path: Path) -> None:
    """Flush the directory entries of ``path`` to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Write ``content`` to ``path`` atomically; return the size and digest for :func:`read_json`."""
    data = json.dumps(content).encode()
    temporary = path.with_name(f"{path.name}.part")
    with creating(temporary) as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)
    return sum_of(data)


def sum_of(data: bytes) -> dict[str, Any]:
    """Return the size and digest of ``data``, as :func:`read_json` requires them."""
    return {"bytes": len(data), "blake2b": _digest(data)}


def read_json(path: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the content that :func:`write_json` wrote to ``path`` when it returned ``wanted``."""
    check_size(path, wanted["bytes"])
    data = read_part(path)
    if _digest(data) != wanted["blake2b"]:
        raise DamagedError(f"{path} is not what was written: its checksum differs")
    return parsed(data, MapOf(ANYTHING), path)


def write_sealed(path: Path, content: dict[str, Any]) -> None:
    """Write ``content`` and its checksum to ``path`` atomically."""
    write_json(path, {"checksum": _seal_of(content), "content": content})


def read_sealed(path: Path) -> dict[str, Any]:
    """Return the content that :func:`write_sealed` wrote. Raise DamagedError if the file is damaged."""
    data = read_part(path, _LARGEST_MANIFEST)
    outer = parsed(data, {"content": MapOf(ANYTHING), "checksum": str}, path)
    content: dict[str, Any] = outer["content"]
    try:
        is_whole = _seal_of(content) == outer["checksum"] and json.dumps(outer).encode() == data
    except RecursionError:  # write_sealed() could not have encoded it
        is_whole = False
    if not is_whole:
        raise DamagedError(f"{path} is not what was written: its checksum differs")
    return content


@contextmanager
def damaged(what: str = "") -> Iterator[None]:
    """Make an OSError or ValueError inside a DamagedError, whose message begins with ``what``."""
    try:
        yield
    except DamagedError:
        raise
    except (OSError, ValueError) as error:  # a damaged byte may be anything
        raise DamagedError(f"{what}{error}") from None


def parsed(data: bytes, shape: Any, path: Path) -> dict[str, Any]:
    """Return the JSON in ``data``, the content of ``path``. Raise DamagedError unless it has ``shape``."""
    with damaged():
        found: dict[str, Any] = parse(data, shape, str(path))
    return found


def checked(value: Any, shape: Any, what: str) -> Any:
    """Return ``value``. Raise DamagedError unless it has ``shape``, see :func:`pycomm.untrusted.parse`."""
    with damaged():
        require(value, shape, what)
    return value


def check_file(path: Path, wanted: dict[str, Any]) -> None:
    """Raise DamagedError unless ``path`` has the bytes, and the CRC-32, of ``wanted``. Reads the file once."""
    check_size(path, wanted["bytes"])
    crc = 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with opened(path) as stream:
        while count := stream.readinto(buffer):  # type: ignore[attr-defined]
            crc = zlib.crc32(buffer[:count], crc)
    if crc != wanted["crc32"]:
        raise DamagedError(f"{path} is not what was written: its checksum differs")


def check_size(path: Path, wanted: int) -> None:
    """Raise DamagedError unless ``path`` is a file of ``wanted`` bytes."""
    with opened(path) as stream:
        found = os.fstat(stream.fileno()).st_size
    if found != wanted:
        raise DamagedError(f"{path} has {found} bytes, wanted {wanted}")


class Summed(io.RawIOBase):
    """Stream that writes to another one and computes the CRC-32 of what it writes.

    Attributes:
        crc32, num_bytes: checksum and size of what has been written.
        error: error of the last write, which torch.save hides behind another one.
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
        self._stream.flush()  # the caller is about to call fsync
        return self._stream.fileno()


class Reserve:
    """File of a fixed size, created in advance to report an error later by a new name and content.

    A full disk takes no new file, but an existing one can be overwritten and renamed.
    """

    NUM_BYTES = 4096

    def __init__(self, path: Path) -> None:
        self.path = path
        with creating(path) as stream:
            stream.write(b" " * self.NUM_BYTES)
            stream.flush()
            os.fsync(stream.fileno())

    def report(self, kind: str, text: str, name: str) -> None:
        """Rename the file to ``name``, with the ``text`` of an exception and its ``kind`` in it."""
        data = json.dumps([kind, text[:320]]).encode()[: self.NUM_BYTES].ljust(self.NUM_BYTES)
        with open(self.path, "r+b") as stream:
            stream.write(data)
        os.replace(self.path, self.path.with_name(name))

    def touch(self) -> None:
        """Update the file's modification time, as a sign of life."""
        os.utime(self.path)

    def remove(self) -> None:
        """Remove the file, as there is no error to report."""
        self.path.unlink(missing_ok=True)


def read_report(path: Path) -> tuple[str, str] | None:
    """Return the kind and text that a :class:`Reserve` has reported at ``path``; ``None`` if there is no report."""
    try:
        kind, text = read_json_file(path, ListOf(str, 2), most=Reserve.NUM_BYTES)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return "RuntimeError", f"{path} cannot be read"
    return kind, text


@contextmanager
def summed(path: Path, sums: dict[str, Any]) -> Iterator[Summed]:
    """Create ``path`` for writing, then add its size and checksum to ``sums`` under its name."""
    with creating(path) as stream:
        found = Summed(stream)
        try:
            yield found
        except Exception:
            if found.error is not None:
                raise found.error from None
            raise
        stream.flush()
        sums[path.name] = {"bytes": found.num_bytes, "crc32": found.crc32}


def save_values(path: Path, value: Any) -> None:
    """Write ``value`` to ``path`` by ``torch.save``, and to disk."""
    with summed(path, {}) as stream:
        torch.save(value, stream)  # type: ignore[arg-type]
        os.fsync(stream.fileno())


def read_part(path: Path, most: int = _LARGEST_JSON) -> bytes:
    """Return the content of a file of JSON of at most ``most`` bytes. Raise DamagedError if it cannot be read."""
    with damaged(f"{path} cannot be read: "):
        return read_file(path, most=most)


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open an untrusted file for reading; errors are DamagedErrors that name it."""
    with damaged(f"{path} cannot be read: "), open_file(path) as stream:
        yield stream


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _seal_of(content: Any) -> str:
    return _digest(json.dumps(content, sort_keys=True).encode())
