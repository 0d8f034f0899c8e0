"""Reading of untrusted files and messages: malformed input is an error that names the place in it.

Anybody who can write to a folder, or reach a socket, may be the author. So only regular files are opened, without
waiting for a writer; JSON is checked against the expected shape before use; and texts are printed without control
characters.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

_LONGEST_SHOWN = 80  # characters
_LARGEST = 64 << 20  # bytes


@dataclass(frozen=True)
class Number:
    """Finite number from ``least`` to ``most``; an int if ``whole``."""

    least: float = -math.inf
    most: float = math.inf
    whole: bool = False

    def __str__(self) -> str:
        kind = "an integer" if self.whole else "a finite number"
        bounds = [f">= {self.least:g}"] * (self.least > -math.inf) + [f"<= {self.most:g}"] * (self.most < math.inf)
        return " ".join([kind, " and ".join(bounds)]).rstrip()


@dataclass(frozen=True)
class ListOf:
    """List of items of the shape ``item``, of this ``length`` if given, else of ``least`` items or more."""

    item: Any
    length: int | None = None
    least: int = 0

    def require_of(self, value: Any, what: str, where: str) -> None:
        """Raise ValueError unless ``value`` has this shape, see :func:`require`."""
        _require_kind(value, list, "a list", what, where)
        if self.length not in (None, len(value)):
            raise _malformed(where, f"a list of {len(value)}", f"one of {self.length}", what)
        if len(value) < self.least:
            raise _malformed(where, f"a list of {len(value)}", f"one of >= {self.least}", what)
        for index, item in enumerate(value):
            require(item, self.item, what, f"{where}[{index}]")


@dataclass(frozen=True)
class PairOf:
    """List of two items, of the shapes ``first`` and ``second``."""

    first: Any
    second: Any

    def require_of(self, value: Any, what: str, where: str) -> None:
        ListOf(ANYTHING, 2).require_of(value, what, where)
        for index, inner in enumerate((self.first, self.second)):
            require(value[index], inner, what, f"{where}[{index}]")


@dataclass(frozen=True)
class MapOf:
    """Object with any keys of the shape ``key``, and values of the shape ``value``."""

    value: Any
    key: Any = str

    def require_of(self, value: Any, what: str, where: str) -> None:
        _require_kind(value, dict, "an object", what, where)
        for key, item in value.items():
            if not _has(key, self.key):
                raise _malformed(f"a key of {where or 'it'}", _shown(key), _wanted(self.key), what)
            require(item, self.value, what, f"{where}[{_shown(key)}]")


@dataclass(frozen=True)
class OneOf:
    """Value that has one of the ``shapes``."""

    shapes: tuple[Any, ...]

    def __init__(self, *shapes: Any) -> None:
        object.__setattr__(self, "shapes", shapes)


COUNT = Number(0, 2**63 - 1, whole=True)
INTEGER = Number(-(2**63), 2**63 - 1, whole=True)
PROCESS_ID = Number(0, 2**31 - 1, whole=True)
"""Shape of a process's number, which the kernel keeps in a C int."""
ANYTHING = object()
"""Shape that any value has."""


def parse(text: str | bytes, shape: Any, what: str) -> Any:
    """Return the JSON value in ``text``, which has ``shape``.

    Args:
        text: JSON, in UTF-8.
        shape: ``str``, ``bool`` or ``None``; a string or an int for that very value; :class:`Number`,
            :class:`ListOf`, :class:`PairOf`, :class:`MapOf`, :class:`OneOf`, :data:`ANYTHING`; a dict for an object
            with those keys, where keys that end with "?" are optional. Other keys are ignored.
        what: name of the source in errors: a path, "a message of worker 3".

    Raises:
        ValueError: it is no JSON, nested too deeply, of another shape, or takes more memory than there is. The message
            begins with ``what``.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"{what} is nested too deeply to be read") from None
    except MemoryError:
        raise ValueError(f"{what} takes more memory than there is") from None
    except ValueError as error:  # also UnicodeDecodeError, and the error of a number with too many digits
        raise ValueError(f"{what} is not valid JSON: {escaped(str(error))}") from None
    require(value, shape, what)
    return value


def require(value: Any, shape: Any, what: str, where: str = "") -> None:
    """Raise ValueError unless ``value`` has ``shape``, see :func:`parse`; ``where`` is its place in ``what``."""
    if isinstance(shape, dict):
        _require_object(value, shape, what, where)
    elif isinstance(shape, ListOf | PairOf | MapOf):
        shape.require_of(value, what, where)
    elif not _is(value, shape):
        raise _malformed(where, _shown(value), _wanted(shape), what)


def _require_object(value: Any, shape: dict[str, Any], what: str, where: str) -> None:
    _require_kind(value, dict, "an object", what, where)
    for key, inner in shape.items():
        name = key.removesuffix("?")
        if name in value:
            require(value[name], inner, what, f"{where}.{name}".lstrip("."))
        elif name == key:
            raise ValueError(f"{what} is malformed: it has no {f'{where}.{name}'.lstrip('.')!r}")


def printable(value: Any, shape: Any) -> Any:
    """Return the parts of ``value`` that its ``shape`` names, with all texts escaped by :func:`one_line`."""
    if isinstance(value, str):
        return one_line(value)
    if isinstance(shape, OneOf):
        return printable(value, next(one for one in shape.shapes if _has(value, one)))
    if isinstance(shape, dict):
        names = (key.removesuffix("?") for key in shape)
        inner = dict(zip(names, shape.values(), strict=True))
        return {name: printable(value[name], one) for name, one in inner.items() if name in value}
    if isinstance(shape, ListOf):
        return [printable(item, shape.item) for item in value]
    if isinstance(shape, PairOf):
        return [printable(value[0], shape.first), printable(value[1], shape.second)]
    if isinstance(shape, MapOf):
        return {printable(key, shape.key): printable(item, shape.value) for key, item in value.items()}
    return value


def _is(value: Any, shape: Any) -> bool:
    """Return whether ``value`` has ``shape``, a scalar or a :class:`OneOf`."""
    if isinstance(shape, OneOf):
        return any(_has(value, one) for one in shape.shapes)
    if isinstance(shape, Number):
        kinds = int if shape.whole else (int, float)
        # Not math.isfinite, which raises for an int that is too large for a float.
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        return is_number and shape.least <= value <= shape.most and -math.inf < value < math.inf
    if isinstance(shape, type):
        return isinstance(value, shape)
    return shape is ANYTHING or (type(value) is type(shape) and bool(value == shape))


def _has(value: Any, shape: Any) -> bool:
    if not isinstance(shape, dict | ListOf | PairOf | MapOf):
        return _is(value, shape)
    try:
        require(value, shape, "it")
    except ValueError:
        return False
    return True


def _wanted(shape: Any) -> str:
    if isinstance(shape, OneOf):
        return " or ".join(_wanted(one) for one in shape.shapes)
    if isinstance(shape, dict | MapOf):
        return "an object"
    if isinstance(shape, ListOf | PairOf):
        return "a list"
    if isinstance(shape, type):
        return {str: "a string", bool: "true or false"}.get(shape, shape.__name__)
    return str(shape) if isinstance(shape, Number) else json.dumps(shape)


def _require_kind(value: Any, kind: type, wanted: str, what: str, where: str) -> None:
    if not isinstance(value, kind):
        raise _malformed(where, _shown(value), wanted, what)


def _malformed(where: str, found: str, wanted: str, what: str) -> ValueError:
    return ValueError(f"{what} is malformed: {where or 'it'} is {found}, wanted {wanted}")


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and abs(value) >= 2**64:
        return "an integer beyond 64 bits"  # Python refuses to write out very long ones
    if not isinstance(value, str | int | float | None):
        return f"a {type(value).__name__}"
    text = json.dumps(value[: _LONGEST_SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def escaped(text: str) -> str:
    """Return ``text`` with unprintable characters, except newlines and tabs, as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" else _escape(c) for c in text)


def one_line(text: str) -> str:
    """Return ``text`` with all unprintable characters as escapes, so that it cannot forge a line."""
    return text if text.isprintable() else "".join(map(_escape, text))


def _escape(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape", "replace").decode()


def open_file(path: str | Path, *, own: bool = False) -> BinaryIO:
    """Open a regular file for reading, without waiting for a FIFO or a device.

    Args:
        path: path of the file.
        own: whether the file must belong to this user (or root), and be writable by nobody else.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is not a regular file, or ``own`` is violated. The message begins with the path.
    """
    descriptor = opened(path, os.O_RDONLY)
    try:
        if own:
            _require_own(path, os.fstat(descriptor))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def path_of(path: str | os.PathLike[str]) -> Path:
    """Return ``path`` as a Path. Raise ValueError if it has a null byte; TypeError if it is none."""
    if "\0" in os.fspath(path):
        raise ValueError(f"{os.fspath(path)!r} is not a path: it has a null byte")
    return Path(path)


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Add the file name ``path`` to OSErrors without one. Raise ValueError if :func:`path_of` does."""
    path_of(path)
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


@contextlib.contextmanager
def reading(path: str | Path, *, own: bool = False) -> Iterator[BinaryIO]:
    """Open a file for reading as :func:`open_file` does; OSErrors of reading get its name."""
    with naming(path), open_file(path, own=own) as file:
        yield file


@contextlib.contextmanager
def creating(path: str | Path) -> Iterator[BinaryIO]:
    """Create a file for writing as :func:`create_file` does; OSErrors of writing get its name."""
    with naming(path), create_file(path) as file:
        yield file


def open_output(path: str | Path) -> BinaryIO:
    """Open a regular file for writing, creating it if necessary, without truncating it or waiting for a FIFO.

    Raises as :func:`open_file`.
    """
    return os.fdopen(opened(path, os.O_WRONLY | os.O_CREAT), "wb")


def create_file(path: str | Path) -> BinaryIO:
    """Create a file for writing, replacing any entry of that name without following links or waiting for it.

    Raises OSError if it cannot be created.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb")


def opened(path: str | Path, flags: int) -> int:
    """Return a descriptor of the regular file at ``path``. Raises as :func:`open_file`."""
    with naming(path):
        try:
            descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, 0o666)
        except OSError as error:
            if error.errno not in (errno.EISDIR, errno.ENXIO):  # these say what it is, not what is wrong
                raise
            raise ValueError(f"{path} is {_kind_of(os.stat(path).st_mode)}, wanted a regular file") from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise ValueError(f"{path} is {_kind_of(mode)}, wanted a regular file")
    return descriptor


def read_file(path: str | Path, *, most: int, own: bool = False) -> bytes:
    """Return the content of a regular file of at most ``most`` bytes; see :func:`open_file`."""
    with reading(path, own=own) as file:
        size = os.fstat(file.fileno()).st_size
        is_larger = size > most
        # Not always one of most + 1 bytes, for which Python allocates memory. Kernel files have size 0.
        content = b"" if is_larger else file.read((size or most) + 1)
    if content is None:  # a kernel file with nothing to read at present
        raise ValueError(f"{path} has nothing to read, wanted a regular file")
    if is_larger or len(content) > most:
        raise ValueError(f"{path} has more than {most} bytes")
    return content


def read_json(path: str | Path, shape: Any, *, most: int = _LARGEST, own: bool = False) -> Any:
    """Return the JSON value in the file ``path``, see :func:`read_file` and :func:`parse`."""
    return parse(read_file(path, most=most, own=own), shape, str(path))


def require_own_folder(path: str | Path) -> None:
    """Raise ValueError unless ``path`` is a folder of this user that nobody else may write to; OSError without one.

    A link to a folder is refused: its owner can redirect it.
    """
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise ValueError(f"{path} is {_kind_of(status.st_mode)}, wanted a folder")
    _require_own(path, status)


def _require_own(path: str | Path, status: os.stat_result) -> None:
    if status.st_uid not in (os.geteuid(), 0):
        raise ValueError(f"{path} belongs to another user ({status.st_uid}), who may have written anything there")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(f"{path} can be written by other users: chmod go-w {path}")


def _kind_of(mode: int) -> str:
    for is_kind, kind in (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISLNK, "a link"),
        (stat.S_ISREG, "a regular file"),
    ):
        if is_kind(mode):
            return kind
    return "a device"
