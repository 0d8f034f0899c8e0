"""Flight-recorder files: the last operations of this process on all of its groups, as JSON."""

from __future__ import annotations

import contextlib
import getpass
import json
import logging
import os
import re
import socket
import stat
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from pycomm.collectives.recorder.ring import DIRECTORY, LIBRARIES, OWN, Entry, Line, Recorder, is_forked, recorders
from pycomm.logs import prefix

FORMAT = 1
_MOST_FILES = 128
_DAY = 24 * 3600.0
_STDERR = 2
_LOG = logging.getLogger("pycomm")
_lock = threading.RLock()  # reentrant: the signal may arrive while this thread writes
_failed: set[str] = set()  # groups whose failure has been written


def folder() -> Path | None:
    """Return the folder of the files: the environment's, or this user's in the temporary directory."""
    named = os.environ.get(DIRECTORY)
    if named is not None:
        return Path(named) if named else None
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # this user has no name
        user = str(os.getuid())
    return Path(tempfile.gettempdir()) / f"pycomm_flight_{user}"


def dump(reason: str) -> Path | None:
    """Write the operations of all groups of this process, replacing its earlier file; return the file.

    Returns ``None`` if writing is disabled, or in a rank's forked children. Also if writing fails, which is only
    logged: callers are handling another error.
    """
    place = folder()
    if place is None or is_forked():
        return None
    found = recorders()
    largest = max(found, key=lambda each: len(each.ranks), default=None)
    name = f"rank{largest.global_rank if largest else 0}-{socket.gethostname()}-{os.getpid()}.json"
    with _lock:
        try:
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
            is_named = DIRECTORY in os.environ  # then its content and permissions are the user's affair
            if not is_named:
                _check(place)
                _drop_old(place)
            partial = place / f".{name}.partial"
            _write_new(partial, json.dumps(_content(reason, found)), 0o666 if is_named else 0o600)
            return partial.replace(place / name)
        except OSError as error:
            _LOG.warning("the flight recorder could not write to %s: %s", place, error)
            return None


def dump_failure(recorder: Recorder, why: str) -> None:
    """Write the file after a failed operation of ``recorder``, once for each group."""
    if recorder.group in _failed or len(recorder.ranks) < 2:
        return
    _failed.add(recorder.group)
    file = dump(why)
    if file is not None:
        _LOG.warning("the last operations of this rank are in %s; `pycomm explain` compares all ranks' files", file)


def dump_for_signal() -> None:
    """Write the file, and say so on the standard error."""
    file = dump("SIGUSR2")
    if file is not None:
        line = f"{prefix()} the last operations of this rank are in {file}\n"
        with contextlib.suppress(OSError):  # not by sys.stderr: the signal may have interrupted a write to it
            os.write(_STDERR, line.encode("utf-8", "replace"))


def _check(place: Path) -> None:
    """Refuse a folder that is not this user's alone: in /tmp, any user may have created one of this name."""
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionError("it is not a folder, or is a link to one")
    if found.st_uid != os.geteuid():
        raise PermissionError(f"it belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"other users may write to it (mode {stat.S_IMODE(found.st_mode):o})")


def _write_new(path: Path, text: str, mode: int) -> None:
    """Write a new file, without following links. One left by an earlier process of the same number is replaced."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "w") as file:
        file.write(text)


def _drop_old(place: Path) -> None:
    """Delete this host's oldest files beyond the newest ``_MOST_FILES``, except files of the last day."""
    name = re.compile(rf"rank\d+-{re.escape(socket.gethostname())}-\d+\.json")
    files = sorted((_time_of(path), path) for path in place.iterdir() if name.fullmatch(path.name))
    for written, path in files[: max(0, len(files) - _MOST_FILES)]:
        if written < time.time() - _DAY:
            path.unlink(missing_ok=True)


def _time_of(file: Path) -> float:
    with contextlib.suppress(OSError):
        return file.stat().st_mtime
    return 0.0


def _content(reason: str, found: list[Recorder]) -> dict[str, Any]:
    wall = time.time() - time.monotonic()  # makes times comparable between hosts, roughly
    return {
        "format": FORMAT,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "command": sys.argv,
        "directory": _directory(),
        "time": time.time(),
        "reason": reason,
        "main_thread": _as_json(_line_of_main_thread()),
        "groups": [
            {
                "name": recorder.group,
                "rank": recorder.rank,
                "ranks": list(recorder.ranks),
                "count": recorder.count,
                "operations": [_operation(entry, wall) for entry in recorder.entries()],
            }
            for recorder in found
        ],
    }


def _directory() -> str:
    with contextlib.suppress(OSError):  # it may have been removed
        return os.getcwd()
    return ""


def _line_of_main_thread() -> Line | None:
    ident = threading.main_thread().ident
    frame = None if ident is None else sys._current_frames().get(ident)
    return line_of(frame)


def _operation(entry: Entry, wall: float) -> dict[str, Any]:
    return {
        "number": entry.number,
        "operation": entry.operation,
        "dtype": entry.dtype,
        "elements": entry.elements,
        "detail": list(entry.detail),
        "label": entry.label,
        "line": _as_json(entry.line),
        "began": entry.began + wall,
        "seconds": None if entry.ended is None else entry.ended - entry.began,
        "error": entry.error,
    }


def _as_json(line: Line | None) -> dict[str, Any] | None:
    return None if line is None else dict(zip(("file", "line", "function"), line, strict=True))


def line_of(frame: FrameType | None) -> Line | None:
    """Return the innermost line of the script, from ``frame`` outwards.

    Without one, return the innermost line of a library other than pycomm and torch. Without either, as on threads that
    pycomm and torch have started, return ``None``.
    """
    found, _ = frame_of_script(frame)
    return None if found is None else (found.f_code.co_filename, found.f_lineno, found.f_code.co_name)


def frame_of_script(frame: FrameType | None) -> tuple[FrameType | None, list[str]]:
    """Return the frame of :func:`line_of`, and the names of the functions in it, outermost first."""
    inside, found, called = list[str](), None, list[str]()
    while frame is not None:
        file = frame.f_code.co_filename
        is_library = file.startswith(LIBRARIES) or re.search(r"\b(site|dist)-packages\b", file) is not None
        if not file.startswith(OWN) and (found is None or not is_library):
            found, called = frame, inside[::-1]
            if not is_library:
                break
        inside.append(frame.f_code.co_name)
        frame = frame.f_back
    return found, called
