"""Statistics of a Reducer: what ``Reducer.stats`` returns about buckets, time, waits and compression.

Each rank records when it had all gradients of a reduction, which shows whom the others wait for. Ranks of one host
write these times to a shared page of memory: that takes no message, and can be read while a rank waits. Ranks that
survive failures send them in the exchange that ends each step, on any number of hosts.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pycomm.collectives.communicator import Communicator
from pycomm.collectives.recorder import TRACE_FOLDER, Recorder, listened_to, run_labelled
from pycomm.collectives.transport import late_ranks
from pycomm.compression.base import Exchange, method_stats
from pycomm.torch_internals import is_profiling, profiled_range
from pycomm.training.elastic.agreement_store import ReadyPage
from pycomm.training.reducer.parameters import ParameterTable

if TYPE_CHECKING:
    from pycomm.training.reducer.step_trace import StepTrace

INTERVAL = 10
"""Number of reductions between two measurements: to measure each could cost a tenth of a step's time."""

_TINY = 1e-300
"""Square that replaces zero in a division."""


class CompressionFigures:
    """Error of this rank's compression, measured again once it is ``INTERVAL`` reductions old."""

    def __init__(self) -> None:
        self._looked_at: int | None = None
        self._residual: float | None = None
        self._error: float | None = None

    def forget(self) -> None:
        """Measure again at the next report, as the state has been replaced."""
        self._looked_at = None

    def report(self, exchanges: Sequence[Exchange], num_reductions: int) -> dict[str, float]:
        """Return ``residual_norm`` and ``compression_error`` if they are known; see ``Reducer.stats``."""
        if self._looked_at is None or num_reductions >= self._looked_at + INTERVAL:
            self._looked_at = num_reductions
            self._look(exchanges)
        measured = [found for exchange in exchanges if (found := exchange.measured()) is not None]
        if measured:
            there_was, left = (sum(squares) for squares in zip(*measured, strict=True))
            if math.isfinite(there_was):  # else the step was left out
                self._error = math.sqrt(left / max(there_was, _TINY))
        known = {"residual_norm": self._residual, "compression_error": self._error}
        return {name: figure for name, figure in known.items() if figure is not None}

    def _look(self, exchanges: Sequence[Exchange]) -> None:
        """Read the residuals, and measure the next reduction."""
        residuals = [square for exchange in exchanges if (square := exchange.squared_residual()) is not None]
        self._residual = math.sqrt(sum(residuals)) if residuals else None
        for exchange in exchanges:
            exchange.measure_next()


class Untraced:
    """Trace that nobody requests: it ignores every event of a :class:`pycomm.training.reducer.step_trace.StepTrace`."""

    def _ignore(self, *_arguments: object) -> None:
        pass

    begin_forward = begin_backward = end_backward = add = add_operations = _ignore
    end_reduction = begin_step = end_step = _ignore


def trace_of(rank: int, size: int) -> Untraced | StepTrace:
    """Return the trace of one step that the environment requests of ``rank``; raise ValueError if it is unclear."""
    folder = os.environ.get(TRACE_FOLDER)
    if not folder:
        return Untraced()
    from pycomm.training.reducer.step_trace import StepTrace

    return StepTrace.wanted(folder, rank, size)


class PhaseTimes:
    """Times of the phases of all reductions of a rank, in seconds.

    The communication thread packs (with compression: encodes and decodes) and calls collectives. The thread of
    ``backward()`` waits for it, and unpacks: hands out the gradients and commits compression's state.

    Attributes:
        seconds: time of each phase: "pack", "wire", "wait" and "unpack".
        trace: records the spans of one step, if requested.
    """

    def __init__(self, trace: Untraced | StepTrace) -> None:
        self.seconds = dict.fromkeys(("pack", "wire", "wait", "unpack"), 0.0)
        self.trace = trace
        self._profiling = False

    def begin(self) -> None:
        self._profiling = is_profiling()
        self.trace.begin_backward()

    def exchange(self, number: int, recorder: Recorder | None, job: Callable[[], None]) -> None:
        """Run the ``job`` that exchanges the bucket launched as ``number``; without ``recorder``, only enqueue it."""
        label = f"bucket {number}"
        began = time.monotonic()
        before = 0.0 if recorder is None else recorder.ring.seconds
        run_labelled(label, functools.partial(_run_in_ranges, label, job) if self._profiling else job)
        if recorder is None:
            return
        ended = time.monotonic()
        wire = recorder.ring.seconds - before
        self.seconds["wire"] += wire
        self.seconds["pack"] += ended - began - wire
        if not isinstance(self.trace, Untraced):
            self.trace.add("communication", label, began, ended)
            self.trace.add_operations(recorder, label, began)

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Count the time inside towards ``phase``, on the thread of ``backward()``."""
        began = time.monotonic()
        try:
            with profiled_range(f"pycomm::{phase}") if self._profiling else contextlib.nullcontext():
                yield
        finally:
            ended = time.monotonic()
            self.seconds[phase] += ended - began
            self.trace.add("training", phase, began, ended)

    def report(self) -> dict[str, float | None]:
        """Return the times; see ``Reducer.stats``."""
        busy = self.seconds["pack"] + self.seconds["wire"]
        times = {f"{phase}_seconds": self.seconds[phase] for phase in ("pack", "wire", "unpack")}
        return {**times, "hidden_share": max(0.0, 1.0 - self.seconds["wait"] / busy) if busy > 0.0 else None}


def _run_in_ranges(label: str, job: Callable[[], None]) -> None:
    """Run ``job``, marked for a profiler: collectives as ``pycomm::wire``, everything else as ``pycomm::pack``."""
    with contextlib.ExitStack() as present:

        def change(on_the_wire: bool) -> None:
            present.close()
            present.enter_context(profiled_range(f"pycomm::{'wire' if on_the_wire else 'pack'} {label}"))

        change(False)
        with listened_to(change):
            job()


_LOG = logging.getLogger("pycomm")

_FACTOR = 10
"""Ratio to the usual wait from which a wait is worth a warning."""
_LEAST_WARNED = 1.0
"""Shortest wait, in seconds, that is worth a warning: the operating system causes shorter ones."""
_FEWEST_KNOWN = 10
"""Number of steps before the usual wait is known."""
_REMEMBERED = 100
"""Number of last steps that define the usual wait."""
_NOTHING = (0.0, 0.0, 0)
_WARN_EVERY = 60.0
"""Seconds from one warning about a rank to the next."""


def open_ready_page(communicator: Communicator, on_gpu: bool) -> ReadyPage | None:
    """Return the page on which the ranks of ``communicator`` write their arrivals. Collective.

    ``None`` on several hosts, and on GPUs, where the host runs ahead of the gradients.
    """
    if on_gpu or communicator.size == 1 or communicator.transport != "shared_memory":
        return None
    return ReadyPage.shared(communicator, "pycomm-board", "Reducer.stats() does not say which rank is waited for")


class ReducingRanks(Protocol):
    """Ranks that reduce together, by their numbers, and their communicators."""

    lanes: Sequence[Communicator]

    @property
    def world(self) -> tuple[int, ...]: ...


class Waits:
    """Account of which ranks were waited for. One thread writes it; any thread may read the :meth:`report`.

    A reduction ends when the last rank has arrived. The wait for that rank counts from the moment when half of the
    ranks had arrived, so that neither another late rank nor an early one changes it.

    Args:
        ranks: ranks that reduce together, not kept alive. While this rank waits for some, the log names them (see
            :mod:`pycomm.collectives.transport.late_ranks`).
    """

    def __init__(self, page: ReadyPage | None = None, ranks: ReducingRanks | None = None) -> None:
        self.seconds = 0.0
        self._ranks = None if ranks is None else weakref.ref(ranks)
        if ranks is not None:
            late_ranks.add_reductions(self)
        self._page = page
        self._reduction: int | None = None  # the present one, once this rank has arrived at it
        self._arrived = 0.0
        self._began: tuple[float, float] | None = None  # the present wait, by the monotonic clock and the wall's
        self._accounts: dict[int, tuple[float, float, int]] = {}  # seconds in all and at most, times
        self._usual: deque[float] = deque(maxlen=_REMEMBERED)
        self._warned: dict[int, float] = {}

    def arrive(self, reduction: int) -> None:
        """Note that this rank has all gradients of ``reduction``; later calls for it are ignored."""
        if self._reduction is not None:
            return
        self._reduction, self._arrived = reduction, time.monotonic()
        if self._page is not None:
            self._page.write(reduction)

    def microseconds_here(self) -> int:
        """Return the time since this rank has arrived, at least 1; 0 if it has not."""
        return 0 if self._reduction is None else 1 + int((time.monotonic() - self._arrived) * 1e6)

    def arrivals(self) -> dict[int, float]:
        """Return when ranks arrived at the present reduction, in seconds, as far as the page shows it."""
        page, reduction = self._page, self._reduction  # which another thread may change
        return {} if page is None or reduction is None else page.read(reduction)

    def begin(self) -> None:
        self._began = (time.monotonic(), time.time())

    def end(self) -> None:
        """Note that the wait and the reduction have ended."""
        if self._began is not None:
            self.seconds += time.monotonic() - self._began[0]
        self._began = self._reduction = None

    def count(self, arrivals: Mapping[int, float], *, warn: bool) -> None:
        """Count the wait for the last of the ``arrivals``, in seconds; ``warn`` if it is unusually long."""
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

    def awaited(self) -> late_ranks.AwaitedReduction | None:
        """Return the reduction for which this rank waits now, if any. On any thread."""
        began, reduction, ranks = self._began, self._reduction, self._present_ranks()
        if began is None or reduction is None or ranks is None:
            return None
        return late_ranks.AwaitedReduction(reduction, began[0], self.arrivals(), ranks.world)

    def recorders(self) -> list[Recorder]:
        """Return the recorders of what the ranks reduce by. On any thread."""
        ranks = self._present_ranks()
        return [] if ranks is None else [lane.channel.recorder for lane in ranks.lanes]

    def _present_ranks(self) -> ReducingRanks | None:
        return None if self._ranks is None else self._ranks()

    def close(self) -> None:
        """Release the page, and log no late ranks any more."""
        self._page = self._ranks = None
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
        there, page = self.arrivals(), self._page
        # If this rank is missing, the reduction is over and the next one has not begun.
        absent = tuple(rank for rank in world if rank < page.size and rank not in there) if page and there else ()
        return {"seconds": time.monotonic() - began[0], "since": began[1], "ranks": absent}


class Statistics:
    """Statistics of all reductions of a rank."""

    def __init__(self, waits: Waits, phases: PhaseTimes) -> None:
        self.waits, self.phases, self.figures = waits, phases, CompressionFigures()

    def report(self, table: ParameterTable, num_reductions: int, world: tuple[int, ...]) -> dict[str, Any]:
        """Return the counters, by the names that ``Reducer.stats`` documents."""
        exchanges = [sent.exchange for sent in table.buckets]
        sent = sum(exchange.bytes_sent for exchange in exchanges) + table.earlier.get("bytes_sent", 0)
        gradients = sum(sent.bucket.flat.nbytes for sent in table.buckets) * num_reductions
        stats: dict[str, Any] = {
            **method_stats(exchanges, table.earlier),
            "bytes_sent": sent,
            "steps": num_reductions,
            "wait_seconds": self.waits.seconds,
            "waits": self.waits.report(world),
            "num_buckets": len(exchanges),
            **self.phases.report(),
            "compression_ratio": gradients / sent if sent else None,
            **self.figures.report(exchanges, num_reductions),
        }
        if table.partition is not None and table.partition.whole is not None:
            stats["step_shares"] = table.partition.spans.stats()
        return stats
