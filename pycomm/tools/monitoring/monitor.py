"""Monitor of a Reducer: every so many steps a row of figures."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from pycomm import checks
from pycomm.optim.parameters import unwrapped
from pycomm.tools.monitoring.writers import TABLE, Row, Writer, row_between, writers_of

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
    """Write figures of ``reducer`` after every so many steps of its optimizer.

    Not collective, and sends nothing: each rank sees what it knows itself. Rank 0 writes, and the others do nothing,
    but for functions, summary writers, and paths that contain "{rank}".

    Args:
        reducer: what ``attach`` or ``pycomm.ddp.register`` has returned, or another object with their ``stats()``.
        every: number of steps from one row to the next.
        to: "table" shows the last rows on the terminal (stderr; extra ``[demo]``); a function that is called with each
            row, a dict; a ``SummaryWriter``; the path of a folder for TensorBoard; or a list of these. Deprecated: the
            path of a ``.csv`` or ``.jsonl`` file, which is continued if it has the same columns.
        optimizer: whose steps are counted; that of ``reducer``, unless it has none.

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
