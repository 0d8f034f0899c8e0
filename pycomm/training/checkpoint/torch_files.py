"""Files written by ``torch.save``, and safe reading of them: no code in them is run.

``torch.load(weights_only=True)`` checks no checksum, and allocates whatever size a file names. So this module first
compares the archive's parts with their checksums, and scans the pickle program: it may call only what makes plain
values. Afterwards it compares the tensors' memory with the parts, and limits how deep and how large the value is.
"""

from __future__ import annotations

import io
import os
import pickletools
import re
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from pycomm.training.checkpoint.files import DamagedError, opened, summed, sync_directory
from pycomm.training.checkpoint.values import dtype_called
from pycomm.untrusted import reading

_FILE = "tensors"
_CHUNK_BYTES = 4 << 20
_PROTOCOL = 2  # in which the names of calls are literal
_LARGEST_PROGRAM = 64 << 20  # bytes; of an archive's directory too
_DEEPEST = 100  # lists in lists
_MOST_LARGE, _LARGE = 1000, 2**63
"""Limit of integers beyond 64 bits, since crafted ones collide as keys of a dict."""

_NAME = re.compile(
    r"torch\._utils _rebuild_(tensor_v2|tensor_v3|parameter)|torch \w{1,40}Storage|torch\.storage UntypedStorage"
    r"|torch Size|collections (OrderedDict|Counter)|_codecs encode|(__builtin__|builtins) (set|bytes|complex)"
)
"""Names that the pickle program of a plain value may use, in addition to dtypes."""

_MOST_EXPANDED = 1 << 24
"""Largest number of elements of an expanded tensor, whose memory is smaller."""


Index = dict[str, Any]
"""Index of one directory: ``files``, each with its size and checksum, and ``tensors``, each with its place."""


def load_values(path: str | Path) -> Any:
    """Return what ``torch.save`` has written to the file ``path``, with all tensors in CPU memory."""
    try:
        with reading(path) as stream:
            return read_values(stream, 0, stream.seek(0, os.SEEK_END), str(path))
    except DamagedError:
        raise
    except ValueError as error:  # it is no regular file
        raise DamagedError(str(error)) from None


def read_values(stream: BinaryIO, begin: int, size: int, what: str) -> Any:
    """Return the value that ``torch.save`` has written to ``size`` bytes of ``stream``, from ``begin`` on.

    Raises DamagedError, which names the value ``what``.
    """
    window = _Window(stream, begin, size)
    try:
        sizes, most = _check_parts(_Window(stream, begin, size, _LARGEST_PROGRAM), size)
        value = torch.load(window, map_location="cpu", weights_only=True)  # type: ignore[arg-type]
        _require_plain(value, sizes, most)
    except Exception as error:  # a crafted file may make it raise anything
        raise DamagedError(f"{what} is damaged, or holds more than plain values: {_words(error)}") from None
    return value


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> Index:
    """Write ``tensors``, in CPU memory, to one file in the new directory ``path``, and to disk; return their index.

    Not by ``torch.distributed.checkpoint``: it gathers pickled plans over the default process group, which is unusable
    once ranks are lost, and pickles an index of its own.
    """
    path.mkdir()
    files, places = Index(), Index()
    with summed(path / _FILE, files) as stream:
        for name, tensor in tensors.items():
            begin = stream.num_bytes
            is_all = tensor.untyped_storage().nbytes() == tensor.nbytes
            torch.save(tensor if is_all else tensor.clone(), stream)  # type: ignore[arg-type]
            places[name] = {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "stride": list(tensor.stride()),
                "file": _FILE,
                "offset": begin,
                "length": stream.num_bytes - begin,
            }
        os.fsync(stream.fileno())
    sync_directory(path)
    return {"files": files, "tensors": places}


def read_tensors(path: Path, index: Index, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the tensors ``names`` of the directory ``path``, in CPU memory.

    Raises DamagedError if they do not match ``index``.
    """
    found: dict[str, torch.Tensor] = {}
    for name in names:
        entry = index["tensors"].get(name)
        if entry is None:
            raise DamagedError(f"{path} has no place of {name}")
        if entry["file"] not in index["files"]:
            raise DamagedError(f"{path} has no checksum of the file of {name}")
        found[name] = _read(path / entry["file"], entry, name)
    return found


def _read(path: Path, entry: dict[str, Any], name: str) -> torch.Tensor:
    what, dtype = f"{path}: {name}", dtype_called(entry["dtype"], name)
    with opened(path) as stream:
        if entry["offset"] + entry["length"] > os.fstat(stream.fileno()).st_size:
            raise DamagedError(f"{what} is beyond the file's end")
        value = read_values(stream, entry["offset"], entry["length"], what)
    if not isinstance(value, torch.Tensor) or value.dtype != dtype or list(value.shape) != entry["shape"]:
        raise DamagedError(f"{what} is not of the shape and dtype that were saved")
    if value.numel() * dtype.itemsize > entry["length"]:
        raise DamagedError(f"{what} has more elements than its file has room for")
    if list(value.stride()) == entry["stride"] or not _is_dense(entry["shape"], entry["stride"]):
        return value.detach()
    return torch.empty_strided(entry["shape"], entry["stride"], dtype=dtype).copy_(value)


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether the elements are contiguous for some order of the dimensions."""
    expected = 1
    for step, length in sorted((s, n) for s, n in zip(stride, shape, strict=True) if n != 1):
        if step != expected:
            return False
        expected *= length
    return True


def _words(error: Exception) -> str:
    """Return torch's message without its advice to load the file unsafely."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = next((line for line in lines if "nsupported" in line or "WeightsUnpickler" in line), (lines or [""])[0])
    return told.partition(". Please")[0] or type(error).__name__


def _check_parts(window: _Window, size: int) -> tuple[Counter[int], int]:
    """Raise an error unless all parts of the archive match their checksums and make plain values.

    Returns:
        Sizes of the tensors' memory, and the largest number of values.
    """
    most = 1000
    with zipfile.ZipFile(window) as archive:
        parts = archive.infolist()
        if any(part.compress_type != zipfile.ZIP_STORED for part in parts) or sum(p.file_size for p in parts) > size:
            raise ValueError("it has parts that are larger than the file")
        for part in parts:
            if part.CRC == 0:  # torch can be told to leave checksums out
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
    """Raise an error unless ``value`` has at most ``most`` parts, and tensors in memory of exactly these ``sizes``.

    A list may contain another one many times, or itself, so that a loop over it would not end.
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
    """Part of a file; a single read takes at most ``most`` bytes."""

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
