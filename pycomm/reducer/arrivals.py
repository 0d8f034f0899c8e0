"""Arrivals: when each rank had all gradients of a reduction, by which it is known who is, and was, waited for.

Ranks of one host write theirs on a board, a page of memory that all of them see. It takes no message, and can be
read while the others are waited for. Ranks that survive failures tell theirs in the exchange with which each
step ends, on however many hosts they are.
"""

from __future__ import annotations

import logging
import statistics
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pycomm.communicator import Communicator
from pycomm.elastic.agreement_store import shared_file
from pycomm.elastic.ready import ReadyPage
from pycomm.recorder import Recorder
from pycomm.transport import late_ranks

_LOG = logging.getLogger("pycomm")

_FACTOR = 10
"""How many times the usual wait is worth a warning."""
_LEAST_WARNED = 1.0
"""Shortest wait that is: shorter ones are the operating system's."""
_FEWEST_KNOWN = 10
"""Number of steps after which it is known what is usual."""
_REMEMBERED = 100
"""Number of steps by which it is known."""
_NOTHING = (0.0, 0.0, 0)
_WARN_EVERY = 60.0
"""Seconds from one warning about a rank to the next."""


def open_board(communicator: Communicator, on_gpu: bool) -> ReadyPage | None:
    """Return the board of the ranks of ``communicator``. Collective.

    ``None`` if they are on several hosts; and on GPUs, where the host runs ahead of the gradients.
    """
    if on_gpu or communicator.size == 1 or communicator.transport != "shared_memory":
        return None
    file = shared_file(communicator, "pycomm-board", "Reducer.stats() does not say which rank is waited for")
    return None if file < 0 else ReadyPage(file, communicator.rank, communicator.size)


class Ranks(Protocol):
    """Ranks that reduce together, by the numbers that they got when they came, and what they reduce by."""

    lanes: Sequence[Communicator]

    @property
    def world(self) -> tuple[int, ...]: ...


class Waits:
    """Account of who was waited for. One thread keeps it; any may ask for the :meth:`report`.

    A reduction ends when the last rank has arrived. It is that rank that the others wait for: from when half of them
    were there, so that neither another late one nor an early one counts.

    Args:
        board: of the ranks, if they have one.
        ranks: who reduces together; they are not kept alive. While this rank waits for others, these are named in the
            log (see :mod:`pycomm.transport.late_ranks`).

    Attributes:
        seconds: time that this rank has waited, for whatever reason.
    """

    def __init__(self, board: ReadyPage | None = None, ranks: Ranks | None = None) -> None:
        self.seconds = 0.0
        self._ranks = None if ranks is None else weakref.ref(ranks)
        if ranks is not None:
            late_ranks.add_reductions(self)
        self._board = board
        self._reduction: int | None = None  # the present one, once this rank has arrived at it
        self._arrived = 0.0
        self._began: tuple[float, float] | None = None  # the present wait, by the monotonic clock and the wall's
        self._accounts: dict[int, tuple[float, float, int]] = {}  # seconds in all and at most, times
        self._usual: deque[float] = deque(maxlen=_REMEMBERED)
        self._warned: dict[int, float] = {}

    def arrive(self, reduction: int) -> None:
        """Note that this rank has all gradients of ``reduction``; only the first call for it counts."""
        if self._reduction is not None:
            return
        self._reduction, self._arrived = reduction, time.monotonic()
        if self._board is not None:
            self._board.write(reduction)

    def microseconds_here(self) -> int:
        """Return for how long this rank has been there, at least 1; 0 if it has not arrived."""
        return 0 if self._reduction is None else 1 + int((time.monotonic() - self._arrived) * 1e6)

    def on_board(self) -> dict[int, float]:
        """Return when the ranks have arrived at the present reduction, as far as the board tells; in seconds."""
        board, reduction = self._board, self._reduction  # which another thread may change
        return {} if board is None or reduction is None else board.read(reduction)

    def begin(self) -> None:
        """Note that this rank waits from now on."""
        self._began = (time.monotonic(), time.time())

    def end(self) -> None:
        """Note that it does not any more, and that the reduction is over."""
        if self._began is not None:
            self.seconds += time.monotonic() - self._began[0]
        self._began = self._reduction = None

    def count(self, arrivals: Mapping[int, float], *, warn: bool) -> None:
        """Charge the last of the ranks that arrived at these times, in seconds; ``warn`` of it if that is unusual."""
        if len(arrivals) < 2:
            return
        last = max(arrivals, key=arrivals.__getitem__)
        seconds = arrivals[last] - sorted(arrivals.values())[(len(arrivals) - 1) // 2]
        total, longest, times = self._accounts.get(last, _NOTHING)
        self._accounts[last] = (total + seconds, max(longest, seconds), times + 1)
        if warn and seconds >= _LEAST_WARNED and len(self._usual) >= _FEWEST_KNOWN:
            self._warn(last, seconds)
        self._usual.append(seconds)

    def _warn(self, rank: int, seconds: float) -> None:
        usual, now = statistics.median(self._usual), time.monotonic()
        if seconds < _FACTOR * usual or now - self._warned.get(rank, -_WARN_EVERY) < _WARN_EVERY:
            return
        self._warned[rank] = now
        _LOG.warning(
            "rank %d is slow: the others have waited %.2g s for it in this step, %.0f times the median of %.2g s",
            rank,
            seconds,
            seconds / max(usual, 1e-6),
            usual,
        )

    def awaited(self) -> late_ranks.Reduction | None:
        """Return the reduction for which this rank waits now, if any. On any thread."""
        began, reduction, ranks = self._began, self._reduction, self._present_ranks()
        if began is None or reduction is None or ranks is None:
            return None
        return late_ranks.Reduction(reduction, began[0], self.on_board(), ranks.world)

    def recorders(self) -> list[Recorder]:
        """Return the recorders of what the ranks reduce by. On any thread."""
        ranks = self._present_ranks()
        return [] if ranks is None else [lane.channel.recorder for lane in ranks.lanes]

    def _present_ranks(self) -> Ranks | None:
        return None if self._ranks is None else self._ranks()

    def close(self) -> None:
        """Let go of the board; name nobody any more."""
        self._board = self._ranks = None
        late_ranks.forget_reductions(self)

    def report(self, world: Sequence[int]) -> dict[str, Any]:
        """Return the account of ``world``; see ``Reducer.stats``. On any thread, and without waiting."""
        accounts, began = dict(self._accounts), self._began
        names = ("seconds", "longest", "times")
        by_rank = {rank: dict(zip(names, accounts.get(rank, _NOTHING), strict=True)) for rank in world}
        return {
            "now": None if began is None else self._present(began, world),
            "by_rank": by_rank if accounts else {},
        }

    def _present(self, began: tuple[float, float], world: Sequence[int]) -> dict[str, Any]:
        there, board = self.on_board(), self._board
        # Without this rank among them the reduction is over, and the next has not begun.
        absent = tuple(rank for rank in world if rank < board.size and rank not in there) if board and there else ()
        return {"seconds": time.monotonic() - began[0], "since": began[1], "ranks": absent}
