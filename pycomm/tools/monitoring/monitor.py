"""Monitor of a Reducer: writes a row of figures every few steps."""

from __future__ import annotations

import difflib
import importlib.util
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from pycomm import checks
from pycomm.optim.parameters import unwrapped

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
_WANTED = f"wanted {TABLE!r}, the path of TensorBoard's folder, a SummaryWriter, a function, or a list of these"
_TAG = "pycomm/"


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
    """Return the writers that the argument ``to`` of :func:`pycomm.monitor` stands for, on this rank."""
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
    raise TypeError(f"to is {target!r}, {_WANTED}")


def _writer_at(text: str, rank: int) -> Writer | None:
    """Return the writer for a path: on rank 0, unless each rank has its own. What is wrong is an error on all ranks."""
    path = Path(text.replace("{rank}", str(rank)))
    if text != TABLE and path.suffix:
        raise ValueError(f"to is {text!r}, {_WANTED}; a function writes a file, see docs/seeing.md")
    if text != TABLE and os.sep not in text and difflib.get_close_matches(text, [TABLE]) and not path.exists():
        raise ValueError(f"to is {text!r}, {_WANTED}. A folder of that name is './{text}'")
    package, extra = ("rich", "'pycomm-torch[demo]'") if text == TABLE else ("tensorboard", "tensorboard")
    if importlib.util.find_spec(package) is None:
        raise ImportError(f"to is {text!r}, which requires: pip install {extra}; {_WANTED}")
    if rank != 0 and "{rank}" not in text:
        return None
    return _live_table() if text == TABLE else ScalarsWriter(_summary_writer(path), owned=True)


def _summary_writer(folder: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter
    return writer(str(folder))


def _live_table() -> Writer:
    from pycomm.tools.monitoring.live import LiveTable

    return LiveTable()


_LOG = logging.getLogger("pycomm")


class Monitor:
    """Monitor that :func:`monitor` has made. It lives as long as the optimizer, even if you do not keep it."""

    def __init__(self, watched: Any, optimizer: torch.optim.Optimizer, every: int, writers: list[Writer]) -> None:
        self._watched, self._every, self._writers = watched, every, writers
        self._steps = 0
        self._last: Mapping[str, Any] = watched.stats() if writers else {}
        self._when = time.monotonic()
        self._handle = optimizer.register_step_post_hook(lambda *_: self._stepped()) if writers else None
        self._closer = weakref.finalize(self, _close, writers)

    def _stepped(self) -> None:
        self._steps += 1
        if self._steps % self._every == 0:
            self.write()

    def write(self) -> None:
        """Write a row for the steps since the last one; nothing if there were none, or if it is closed."""
        if not self._writers:
            return
        try:
            row = self._row()
        except Exception as error:  # training matters more
            _LOG.warning("pycomm.monitor stops, as there are no figures: %s: %s", type(error).__name__, error)
            self._closer()
            self._writers.clear()
            return
        if row is None:
            return
        for writer in list(self._writers):
            try:
                writer.write(row)
            except Exception as error:  # the same here
                self._writers.remove(writer)
                _LOG.warning("pycomm.monitor stops writing to %s: %s", type(writer).__name__, error)
                _close([writer])

    def _row(self) -> Row | None:
        """Return the row for the steps since the last one; ``None`` if there were none, or nobody counts them."""
        stats, now = self._watched.stats(), time.monotonic()
        if stats.get("steps", 0) == self._last.get("steps", 0):
            return None
        row = row_between(self._last, stats, now - self._when, time.time())
        self._last, self._when = stats, now
        return row

    def close(self) -> None:
        """Write what is left, close files, and remove the hook. Idempotent."""
        if self._handle is None:
            return
        self._handle.remove()
        self._handle = None
        self.write()
        self._closer()
        self._writers.clear()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(writers: list[Writer]) -> None:
    for writer in writers:
        try:
            writer.close()
        except Exception as error:  # what is left of a full disk's file, for one; the others are closed all the same
            _LOG.warning("pycomm.monitor could not close %s: %s", type(writer).__name__, error)


def monitor(
    reducer: Any, every: int = 50, to: Any = TABLE, *, optimizer: torch.optim.Optimizer | None = None
) -> Monitor:
    """Write figures of ``reducer`` every ``every`` steps of its optimizer.

    Not collective, and sends nothing: each rank sees what it knows itself. Rank 0 writes, and the others do nothing,
    but for functions, summary writers, and paths that contain "{rank}".

    Args:
        reducer: what ``attach`` or ``pycomm.ddp.register`` has returned, or another object with their ``stats()``.
        every: number of steps from one row to the next.
        to: "table" shows the last rows on the terminal (stderr; extra ``[demo]``); a function that is called with each
            row, a dict; a ``SummaryWriter``; the path of a folder for TensorBoard; or a list of these.
        optimizer: whose steps are counted; by default, the optimizer of ``reducer``, if it has one.

    Returns:
        The :class:`Monitor`. Rows have the keys :data:`pycomm.tools.monitoring.FIELDS`: ``step`` (reductions so far),
        ``time`` (as of ``time.time()``); per step since the last row ``seconds``, ``wait_seconds``, ``pack_seconds``,
        ``wire_seconds``, ``unpack_seconds`` and ``bytes_sent``; the ``hidden_share``, and ``compression_ratio``,
        ``compression_error``, ``residual_norm``, ``miss_rate``, ``nonfinite_steps`` and ``last_nonfinite`` as
        ``Reducer.stats`` has them; ``waited_for_rank``, for which the others have waited longest, and
        ``waited_for_seconds``, for how long per step. ``None``: not known, or not there.

    Raises:
        TypeError, ValueError: an argument is wrong.
        ImportError: ``to`` requires a missing package, which the message names.
    """
    if not callable(getattr(reducer, "stats", None)):
        raise TypeError(
            f"reducer is of type {type(reducer).__name__}, wanted what attach() or pycomm.ddp.register() returned"
        )
    every = checks.count("every", every, 1)
    stepper = getattr(reducer, "optimizer", None) if optimizer is None else optimizer
    if not isinstance(stepper, torch.optim.Optimizer):
        raise TypeError(f"optimizer is {stepper!r}, wanted the torch optimizer whose steps are counted")
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return Monitor(reducer, unwrapped(stepper), every, writers_of(to, rank))
