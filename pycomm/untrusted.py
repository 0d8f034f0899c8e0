"""Reading of files and messages that nobody vouches for: what is malformed is an error that names the place in it.

Whoever can write to a folder, or reach a socket, may have written what is read there. So a file is opened without
waiting for a writer, and only if it is a regular one; JSON is compared with the shape that is wanted before anything
of it is used; and texts are printed without the control characters that a terminal would obey.
"""

from __future__ import annotations

import contextlib
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
    """List whose items have all the shape ``item``, ``length`` of them if that is given."""

    item: Any
    length: int | None = None

    def require_of(self, value: Any, what: str, where: str) -> None:
        """Raise ValueError unless ``value`` is one, see :func:`require`."""
        _require_kind(value, list, "a list", what, where)
        if self.length not in (None, len(value)):
            raise _malformed(where, f"a list of {len(value)}", f"one of {self.length}", what)
        for index, item in enumerate(value):
            require(item, self.item, what, f"{where}[{index}]")


@dataclass(frozen=True)
class PairOf:
    """List of two items, of the shapes ``first`` and ``second``."""

    first: Any
    second: Any

    def require_of(self, value: Any, what: str, where: str) -> None:
        """Raise ValueError unless ``value`` is one, see :func:`require`."""
        ListOf(ANYTHING, 2).require_of(value, what, where)
        for index, inner in enumerate((self.first, self.second)):
            require(value[index], inner, what, f"{where}[{index}]")


@dataclass(frozen=True)
class MapOf:
    """Object with any keys that have the shape ``key``, whose values have all the shape ``value``."""

    value: Any
    key: Any = str

    def require_of(self, value: Any, what: str, where: str) -> None:
        """Raise ValueError unless ``value`` is one, see :func:`require`."""
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
ANYTHING = object()
"""Shape that any value has."""


def parse(text: str | bytes, shape: Any, what: str) -> Any:
    """Return the JSON value in ``text``, which has ``shape``.

    Args:
        text: JSON, in UTF-8.
        shape: ``str``, ``bool`` or ``None``; a string or an int for that very value; :class:`Number`,
            :class:`ListOf`, :class:`PairOf`, :class:`MapOf`, :class:`OneOf`, :data:`ANYTHING`; a dict for an object
            with those keys, of which those that end with "?" may be missing. Other keys are not looked at.
        what: what errors call it: a path, "a message of worker 3".

    Raises:
        ValueError: it is no JSON, nested too deeply, or of another shape. The message begins with ``what``.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"{what} is nested too deeply to be read") from None
    except ValueError as error:  # UnicodeDecodeError is one, and what a number with too many digits raises
        raise ValueError(f"{what} is not valid JSON: {escaped(str(error))}") from error
    require(value, shape, what)
    return value


def require(value: Any, shape: Any, what: str, where: str = "") -> None:
    """Raise ValueError unless ``value`` has ``shape``, see :func:`parse`; ``where`` is the place of it in ``what``."""
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
    """Return of ``value``, which has ``shape``, what the shape names, with all texts as :func:`one_line` has them."""
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
    """Return whether ``value`` has a shape without parts, or one of several."""
    if isinstance(shape, OneOf):
        return any(_has(value, one) for one in shape.shapes)
    if isinstance(shape, Number):
        kinds = int if shape.whole else (int, float)
        # Not math.isfinite, which raises for an int that is too large for a float.
        return isinstance(value, kinds) and not isinstance(value, bool) and _is_within(value, shape)
    if isinstance(shape, type):
        return isinstance(value, shape)
    return shape is ANYTHING or (type(value) is type(shape) and bool(value == shape))


def _is_within(value: float, shape: Number) -> bool:
    return shape.least <= value <= shape.most and -math.inf < value < math.inf


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
    """Return ``text`` with control and other unprintable characters written as escapes; line ends and tabs stay."""
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" else _escape(c) for c in text)


def one_line(text: str) -> str:
    """Return ``text`` as :func:`escaped` has it, with line ends and tabs as escapes too: it cannot forge a line."""
    return text if text.isprintable() else "".join(map(_escape, text))


def _escape(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape", "replace").decode()


def open_file(path: str | Path, *, own: bool = False) -> BinaryIO:
    """Open a regular file for reading. What is no regular file is not waited for: a FIFO, a device.

    Args:
        path: of the file.
        own: whether it must belong to this user (or to root), and be writable by nobody else.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is something else than a regular file, or ``own`` and not so. The message begins with the path.
    """
    descriptor = _opened(path, os.O_RDONLY)
    try:
        if own:
            _require_own(path, os.fstat(descriptor))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


@contextlib.contextmanager
def reading(path: str | Path, *, own: bool = False) -> Iterator[BinaryIO]:
    """Open a file for reading, see :func:`open_file`; an error of reading, which does not say of what, names it too."""
    with open_file(path, own=own) as file:
        try:
            yield file
        except OSError as error:
            if error.filename is not None or error.errno is None:
                raise
            raise OSError(error.errno, error.strerror, str(path)) from error


def open_output(path: str | Path) -> BinaryIO:
    """Open a regular file for writing, which is made if it is not there. What was in it stays until it is cut.

    A FIFO, of which nobody may ever read, is not waited for. Raises as :func:`open_file`.
    """
    return os.fdopen(_opened(path, os.O_WRONLY | os.O_CREAT), "wb")


def create_file(path: str | Path) -> BinaryIO:
    """Open a new file for writing, in the place of whatever had that name: no link is followed, nothing is waited for.

    Raises OSError if it cannot be made.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb")


def _opened(path: str | Path, flags: int) -> int:
    """Return a descriptor of the regular file at ``path``."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, 0o666)
    except ValueError as error:  # a null byte
        raise ValueError(f"{str(path)!r} is no path: {error}") from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise ValueError(f"{path} is {_kind_of(mode)}, wanted a regular file")
    return descriptor


def read_file(path: str | Path, *, most: int, own: bool = False) -> bytes:
    """Return the content of a regular file of at most ``most`` bytes; see :func:`open_file`."""
    with reading(path, own=own) as file:
        is_larger = os.fstat(file.fileno()).st_size > most
        content = b"" if is_larger else file.read(most + 1)
    if content is None:  # a file of the kernel's, of which there is nothing to read at present
        raise ValueError(f"{path} has nothing to read, wanted a regular file")
    if is_larger or len(content) > most:
        raise ValueError(f"{path} has more than {most} bytes")
    return content


def read_json(path: str | Path, shape: Any, *, most: int = _LARGEST, own: bool = False) -> Any:
    """Return the JSON value in the file ``path``, see :func:`read_file` and :func:`parse`."""
    return parse(read_file(path, most=most, own=own), shape, str(path))


def require_own_folder(path: str | Path) -> None:
    """Raise ValueError unless ``path`` is a folder that belongs to this user, and in which nobody else may write.

    A link to one is none: whoever made it may have it lead elsewhere. Raises OSError if it is not there.
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
