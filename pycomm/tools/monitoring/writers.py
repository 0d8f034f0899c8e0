"""Rows of figures, and their writers: files, TensorBoard, a live table, functions."""

from __future__ import annotations

import csv
import io
import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from pycomm import untrusted

Row = dict[str, Any]

_PER_STEP = ("wait_seconds", "pack_seconds", "wire_seconds", "unpack_seconds")
_AS_IT_IS = (
    "compression_ratio",
    "compression_error",
    "residual_norm",
    "miss_rate",
    "nonfinite_steps",
    "last_nonfinite",
)

FIELDS = (
    "step",
    "time",
    "seconds",
    *_PER_STEP,
    "hidden_share",
    "bytes_sent",
    *_AS_IT_IS,
    "waited_for_rank",
    "waited_for_seconds",
)
"""Keys of a row, in the order of columns."""

TABLE = "table"
_TAG = "pycomm/"
_LONGEST_SHOWN = 200  # characters
_LONGEST_LINE = 1 << 16  # bytes; csv refuses fields of more


def row_between(earlier: Mapping[str, Any], now: Mapping[str, Any], seconds: float, time: float) -> Row:
    """Return the row for the steps between two results of ``Reducer.stats``, ``seconds`` apart; see :func:`monitor`.

    Keys that ``now`` lacks are ``None``; counters that only ``earlier`` lacks began at 0.
    """
    steps = now["steps"] - earlier.get("steps", 0)
    row: Row = dict.fromkeys(FIELDS)
    row["step"], row["time"], row["seconds"] = now["steps"], time, seconds / steps
    for key in (*_PER_STEP, "bytes_sent"):
        row[key] = (now[key] - earlier.get(key, 0)) / steps if key in now else None
    for key in _AS_IT_IS:
        row[key] = now.get(key)
    row["hidden_share"] = _hidden(row)
    row["waited_for_rank"], row["waited_for_seconds"] = _waited_for(earlier, now, steps)
    return row


def _hidden(row: Row) -> float | None:
    if row["pack_seconds"] is None or row["wait_seconds"] is None:
        return None
    busy = row["pack_seconds"] + row["wire_seconds"]
    exposed = max(0.0, row["wait_seconds"] - row["unpack_seconds"])
    return max(0.0, 1.0 - exposed / busy) if busy > 0.0 else None


def _waited_for(earlier: Mapping[str, Any], now: Mapping[str, Any], steps: int) -> tuple[int | None, float | None]:
    """Return the rank that the others have waited for longest, and for how long per step."""
    before = earlier.get("waits", {}).get("by_rank", {})
    costs = {
        rank: account["seconds"] - before.get(rank, {"seconds": 0.0})["seconds"]
        for rank, account in now.get("waits", {}).get("by_rank", {}).items()
    }
    if not costs:
        return None, None
    slowest = max(costs, key=costs.__getitem__)
    return slowest, costs[slowest] / steps


class Writer(Protocol):
    """Writer of rows."""

    def write(self, row: Row) -> None:
        """Write one row."""

    def close(self) -> None:
        """Finish what has been written."""


class FileWriter:
    """Writer of a file that is named by its path: comma-separated values or JSON lines, by its suffix.

    A file that is there already is continued. Deprecated: a function does the same, as in docs/seeing.md.

    Raises:
        ValueError: that file has other columns, or is no regular file.
    """

    def __init__(self, path: Path) -> None:
        advice = "pass a function that is called with each row, as docs/seeing.md shows"
        warnings.warn(f"to={str(path)!r} of pycomm.monitor is deprecated: {advice}", DeprecationWarning, stacklevel=6)
        self._comma = path.suffix == ".csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        if self._comma:
            _require_columns(path)
        self._path = path
        self._file = io.TextIOWrapper(
            untrusted.open_output(path), encoding="utf-8", newline="" if self._comma else None
        )
        self._file.seek(0, os.SEEK_END)
        if self._comma and self._file.tell() == 0:
            csv.writer(self._file).writerow(FIELDS)

    def write(self, row: Row) -> None:
        with untrusted.naming(self._path):
            if self._comma:
                csv.DictWriter(self._file, FIELDS).writerow(row)
            else:
                self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def _require_columns(path: Path) -> None:
    """Raise ValueError if there is a file at ``path`` whose first line is not that of rows."""
    if not path.exists():
        return
    with untrusted.reading(path) as file:
        first = file.readline(_LONGEST_LINE).decode(errors="replace")
    try:
        names = next(csv.reader([first] if first else []), None)
    except csv.Error:
        names = [first]
    if names is not None and names != list(FIELDS):
        found = untrusted.one_line(", ".join(names))[:_LONGEST_SHOWN]
        raise ValueError(
            f"to is {str(path)!r}, a file with other columns than these rows: {found}. It may be of another "
            "version of pycomm, or of something else; choose another name"
        )


class ScalarsWriter:
    """Writer of numbers to a ``SummaryWriter`` of TensorBoard's, or what has its ``add_scalar``."""

    def __init__(self, summary: Any, owned: bool) -> None:
        self._summary, self._owned = summary, owned

    def write(self, row: Row) -> None:
        for name, value in row.items():
            if name not in ("step", "time") and isinstance(value, (int, float)):
                self._summary.add_scalar(_TAG + name, value, row["step"])

    def close(self) -> None:
        if self._owned:
            self._summary.close()


class CallWriter:
    """Writer that calls a function with each row."""

    def __init__(self, function: Callable[[Row], object]) -> None:
        self._function = function

    def write(self, row: Row) -> None:
        self._function(row)

    def close(self) -> None:
        pass


def writers_of(to: Any, rank: int) -> list[Writer]:
    """Return the writers that the argument ``to`` of :func:`pycomm.monitor` stands for, on this rank.

    Raises:
        TypeError, ValueError: ``to``, or a part of it, stands for none.
        ImportError: a package is missing.
    """
    targets: Iterable[Any] = to if isinstance(to, (list, tuple)) else [to]
    made: list[Writer] = []
    try:
        for target in targets:
            writer = _writer_of(target, rank)
            if writer is not None:
                made.append(writer)
    except BaseException:
        for writer in made:
            writer.close()
        raise
    return made


def _writer_of(target: Any, rank: int) -> Writer | None:
    if isinstance(target, (str, os.PathLike)):
        return _writer_at(os.fspath(target), rank)
    if hasattr(target, "add_scalar"):
        return ScalarsWriter(target, owned=False)
    if callable(target):
        return CallWriter(target)
    raise TypeError(
        f"to is {target!r}, wanted {TABLE!r}, the path of a .csv or .jsonl file or of TensorBoard's folder, a "
        "SummaryWriter, a function, or a list of these"
    )


def _writer_at(text: str, rank: int) -> Writer | None:
    """Return the writer for a path: on rank 0, unless each rank has its own."""
    if rank != 0 and "{rank}" not in text:
        return None
    if text == TABLE:
        return _live_table()
    path = Path(text.replace("{rank}", str(rank)))
    if path.suffix in (".csv", ".jsonl", ".ndjson"):
        return FileWriter(path)
    if path.suffix:
        raise ValueError(f"to is {text!r}, wanted a path that ends in .csv or .jsonl, or a folder for TensorBoard")
    return ScalarsWriter(_summary_writer(path), owned=True)


def _summary_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            f"to is {str(folder)!r}, a folder for TensorBoard, which requires: pip install tensorboard"
        ) from error
    writer: Any = SummaryWriter
    return writer(str(folder))


def _live_table() -> Writer:
    try:
        from pycomm.tools.monitoring.live import LiveTable
    except ImportError as error:
        raise ImportError(f"to is {TABLE!r}, which requires: pip install 'pycomm-torch[demo]'") from error
    return LiveTable()
