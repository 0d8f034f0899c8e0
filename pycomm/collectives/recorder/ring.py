"""Recorder of the last operations on one group of ranks, and of the lines of the script that called them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import site
import sysconfig
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pycomm._native as _native

DIRECTORY = "PYCOMM_FLIGHT_DIR"
"""Environment variable that names the folder of the files; if it is set and empty, nothing is ever written."""
TRACE_FOLDER = "PYCOMM_TRACE"
"""Environment variable that ``pycomm trace`` sets for its ranks: the folder to write the trace of a step to."""

LENGTH = 256
"""Number of operations that are kept."""

Line = tuple[str, int, str]
"""File, number of the line in it, and name of the function."""

_TORCH = importlib.util.find_spec("torch")  # not imported: `pycomm explain` answers without it
assert _TORCH is not None
OWN = (
    *(os.path.join(folder, "") for folder in (Path(__file__).parents[2], Path(str(_TORCH.origin)).parent)),
    threading.__file__,
    "<frozen ",
)
# A trainer always calls pycomm from the same line of its own, which says nothing about the script.
LIBRARIES = tuple(
    os.path.join(folder, "")
    for folder in (
        *(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        site.getusersitepackages(),
    )
)
_native.set_origins(list(OWN), list(LIBRARIES))

T = TypeVar("T")


class Entry(NamedTuple):
    """Operation that was called.

    Attributes:
        number: number of the collective in its group, from 1; a message has the number of the collective before it.
        operation: name.
        dtype, elements: of this rank's input, if known.
        detail: further arguments, such as the reduction or a root.
        label: its purpose, such as a bucket.
        line: line of the script that called it.
        began, ended: on the monotonic clock, in seconds; ``ended`` is ``None`` while it lasts.
        error: text of its error.
    """

    number: int
    operation: str
    dtype: str | None
    elements: int | None
    detail: tuple[int | str | None, ...]
    label: str | None
    line: Line | None
    began: float
    ended: float | None
    error: str | None


class Recorder:
    """Recorder of the operations of one group of ranks.

    Args:
        group: unique name of the group, the same on all of its ranks.
        rank: rank of this process in it.
        ranks: global ranks of its members.

    Attributes:
        pid: process that made it, and whose operations it records.
        store: torch's store that all of the ranks share; ``None`` if there is none.
        tells: what this rank tells the others if they call different operations now; "" for nothing.
    """

    def __init__(self, group: str, rank: int, ranks: Sequence[int]) -> None:
        self.group, self.rank, self.ranks = group, rank, tuple(ranks)
        self.ring = _native.FlightRing(LENGTH)
        self.pid = os.getpid()
        self.store: Any = None
        self.tells = ""
        _recorders[id(self)] = self

    @property
    def global_rank(self) -> int:
        """Rank of this process among all ranks."""
        return self.ranks[self.rank] if self.ranks else self.rank

    @property
    def count(self) -> int:
        """Number of collectives so far."""
        return self.ring.count

    @contextlib.contextmanager
    def telling(self, what: str) -> Iterator[None]:
        """Have this rank tell ``what`` in the block. If all ranks tell something, their operations may differ."""
        self.tells = what
        try:
            yield
        finally:
            self.tells = ""

    def entries(self) -> list[Entry]:
        """Return the last operations, oldest first."""
        found = (Entry(*entry) for entry in self.ring.entries())
        return [entry if isinstance(entry.detail, tuple) else entry._replace(detail=(entry.detail,)) for entry in found]


def told_with(error: BaseException) -> list[str]:
    """Return what each rank has told with an ``error`` of ranks that called different operations; else []."""
    told: list[str] = getattr(error, "told", [])
    return told


_recorders: weakref.WeakValueDictionary[int, Recorder] = weakref.WeakValueDictionary()


def recorders() -> list[Recorder]:
    """Return this process's recorders, in no particular order."""
    return [recorder for recorder in _known() if recorder.pid == os.getpid()]


def is_forked() -> bool:
    """Return whether this process was forked from a rank, as DataLoader's workers are, and has only its recorders."""
    known = _known()
    return bool(known) and all(recorder.pid != os.getpid() for recorder in known)


def _known() -> list[Recorder]:
    # Not by iteration: another thread may add one meanwhile.
    return [found for reference in _recorders.valuerefs() if (found := reference()) is not None]


def from_here(job: Callable[[], T]) -> Callable[[], T]:
    """Return ``job`` for another thread; its operations are recorded as called from the current line."""
    line = _native.line_of_caller()

    def run() -> T:
        label, before = _native.exchange_mark(None, line)
        try:
            return job()
        finally:
            _native.exchange_mark(label, before)

    return run


def run_labelled(text: str, job: Callable[[], T]) -> T:
    """Return the result of ``job``, whose operations are labelled with ``text``."""
    label, line = _native.exchange_mark(None, None)
    _native.exchange_mark(text, line)
    try:
        return job()
    finally:
        _native.exchange_mark(label, line)


@contextlib.contextmanager
def listened_to(listener: Callable[[bool], None]) -> Iterator[None]:
    """Call ``listener(True)`` before and ``listener(False)`` after each operation of this thread in the block."""
    before = _native.exchange_listener(listener)
    try:
        yield
    finally:
        _native.exchange_listener(before)


def array_of(x: Any) -> tuple[str | None, int]:
    """Return dtype and number of elements of an array or tensor; of a list, the first dtype and the sum."""
    if isinstance(x, (list, tuple)):
        parts = [array_of(part) for part in x if part is not None]
        return (parts[0][0] if parts else None), sum(count for _, count in parts)
    count = x.numel() if hasattr(x, "numel") else x.size
    return str(x.dtype).removeprefix("torch."), int(count)
