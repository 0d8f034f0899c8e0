"""Pool of ranks: processes that run functions, all at once, until the pool is closed. Their output is passed on."""

from __future__ import annotations

import codecs
import contextlib
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import torch

from pycomm.tools.launching.processes import PATIENCE, Outputs, Pipe, RankProcesses, join, rendezvous, variables_of
from pycomm.tools.launching.serialize import deserialize, serialize
from pycomm.tools.launching.serving import (
    UNKNOWN,
    WHERE,
    Failure,
    RankCall,
    RankError,
    Returned,
    explain,
    serve_and_end,
)

_PIECE_BYTES = 1 << 16
_KEPT = 4000  # last characters, for the error if the rank dies


class Stream:
    """Standard output or standard error of one rank.

    Args:
        pipe: read end of the stream.
        show: called with text as it arrives; ``None``: nothing is shown.
        whole: show whole lines only.
    """

    def __init__(self, pipe: Pipe, show: Callable[[str], None] | None, whole: bool) -> None:
        self.pipe = pipe
        self.last = ""
        self._show, self._whole = show, whole
        self._begun = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self) -> bool:
        """Pass on text that has arrived; return False at the end of the stream."""
        try:
            piece = os.read(self.pipe.fileno(), _PIECE_BYTES)
        except OSError:  # closed meanwhile
            piece = b""
        self._pass_on(self._decoder.decode(piece, final=not piece))
        if not piece and self._begun:
            self._pass_on("\n")
        return bool(piece)

    def finish(self) -> None:
        """Pass on the rest after the rank has ended, even if its children hold the stream open."""
        while self.pipe.poll(0) and self.read():
            pass
        if self._begun:
            self._pass_on("\n")

    def _pass_on(self, text: str) -> None:
        self.last = (self.last + text)[-_KEPT:]
        if self._show is None or not text:
            return
        if self._whole:
            lines, end, self._begun = (self._begun + text).rpartition("\n")
            text = lines + end
        if text:
            self._show(text)


def streams_of(rank: int, pipes: tuple[Pipe, Pipe], chosen: str | int | None) -> list[Stream]:
    """Return the two streams of a rank.

    Args:
        chosen: "all": lines of all ranks, each with its rank's number; a rank: its output, unchanged; ``None``:
            nothing is shown.
    """
    shown = chosen in ("all", rank)
    prefix = f"[rank {rank}] " if chosen == "all" else ""
    shows = (_writer(1, prefix), _writer(2, prefix)) if shown else (None, None)
    return [Stream(pipe, show, whole=chosen == "all") for pipe, show in zip(pipes, shows, strict=True)]


def _writer(descriptor: int, prefix: str) -> Callable[[str], None]:
    def write(text: str) -> None:
        # Looked up each time, since notebooks and progress bars replace these streams.
        stream = sys.stdout if descriptor == 1 else sys.stderr
        if prefix:
            text = "".join(f"{prefix}{line}\n" for line in _lines_of(text))
        stream.write(text)
        stream.flush()

    return write


def _lines_of(text: str) -> list[str]:
    """Return lines without their ends; of a progress bar that overwrites itself, only the last state."""
    # Not by splitlines(), which splits at further characters.
    return [line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n")[:-1]]


OnMessage = Callable[[Any], None]

_CAUSE_SECONDS = 1.0  # seconds to wait after a failure for its cause on another rank
_DUMP_SECONDS = 0.5  # for ranks to print their stacks


@dataclass
class PerRank:
    """An argument that differs between the ranks."""

    values: Sequence[Any]


@dataclass
class RankOutcome:
    """Outcome of a function on one rank.

    Attributes:
        error: the exception that it raised; a ``ChildProcessError`` if the rank died.
        trace: its traceback, as text.
    """

    result: Any = None
    error: BaseException | None = None
    trace: str = ""


class StartedRanks(Protocol):
    """Ranks that run ``serving.serve`` at the other ends of ``pipes``, however they were started.

    Attributes:
        processes: by rank; empty if they are not children of this process.
        outputs: by rank; empty if their output is not captured.
    """

    pipes: list[Pipe]
    processes: list[BaseProcess]
    outputs: list[Outputs]

    def end(self) -> None: ...

    def kill(self) -> None: ...


@dataclass
class _Rank:
    """State of a rank; ``exitcode`` is set once it has ended."""

    number: int
    pipe: Pipe
    process: BaseProcess | None
    streams: list[Stream]
    asked: bool = False
    answer: Returned | Failure | None = None
    exitcode: int | None = None

    @property
    def is_busy(self) -> bool:
        return self.asked and self.answer is None and self.exitcode is None

    def outcome(self) -> RankOutcome:
        if isinstance(self.answer, Returned):
            return RankOutcome(deserialize(self.answer.result))
        if self.answer is not None:
            error = _exception_of(self.answer) or RankError(self.answer.traceback, self.number, self.answer.traceback)
            return RankOutcome(error=error, trace=self.answer.traceback)
        died = f"died, with exit code {self.exitcode}"
        return RankOutcome(error=ChildProcessError(f"rank {self.number} died"), trace=died)


class RankPool:
    """``size`` ranks that run functions. A context manager, whose end ends the ranks.

    Args:
        backend: of the default process group that they join first. ``None``: no group, only the environment variables
            for making one.
        patience: limit of every wait of a rank for another.
        threads: torch's threads in each rank.
        environment: variables that are added to this process's.
        output: "inherit": ranks write where this process writes; otherwise what to show of their output, see
            :func:`pycomm.tools.launching.pool.streams_of`.
        mortal: ranks that may be killed. The others continue, and only these are waited for.
        limit: seconds that all calls may take together, from now on.
        preload: see :class:`RankProcesses`.
        start: starts the ranks in another way, given their number and environment; they join no group.

    Attributes:
        port: of the ranks' store.
    """

    def __init__(
        self,
        size: int,
        *,
        backend: str | None = "gloo",
        patience: timedelta = PATIENCE,
        threads: int = 1,
        environment: Mapping[str, str] | None = None,
        output: str | int | None = "inherit",
        mortal: Collection[int] = (),
        limit: float = math.inf,
        preload: Sequence[str] | None = None,
        start: Callable[[int, Mapping[str, str]], StartedRanks] | None = None,
    ) -> None:
        self.size = size
        self._mortal, self._limit, self._begun = frozenset(mortal), limit, time.monotonic()
        self._on_message: OnMessage = lambda _: None
        self._finishing = False
        with contextlib.ExitStack() as stack:
            self.port = stack.enter_context(rendezvous()) if start is None else None
            captured, variables = output != "inherit", environment or {}
            self._started: StartedRanks
            if start is not None:
                self._started = start(size, variables)
            else:
                self._started = RankProcesses(serve_and_end, size, (), variables, captured=captured, preload=preload)
            stack.callback(self._started.end)
            self._listen_to(self._started, output)
            if self.port is not None:
                place = PerRank(range(size)), size, self.port
                self.run(_set_up_rank, *place, backend, patience, threads, leaves=True)
            self._stack = stack.pop_all()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = math.inf,
        on_message: OnMessage | None = None,
        leaves: bool = False,
    ) -> list[Any]:
        """Call ``function(*args)`` on all ranks; return the results by rank (``None`` of a dead one).

        Args:
            args: of a :class:`PerRank` among them, each rank gets its own value.
            timeout: in seconds.
            on_message: called with what ranks :func:`pycomm.tools.launching.send` meanwhile.
            leaves: whether a rank ends at once if the function fails there, so that its peers notice.

        Raises:
            RankError: a rank failed or died, or they were not done in time. The pool cannot be used again.
        """
        self._on_message = on_message or self._on_message
        self.ask(function, *args, leaves=leaves)
        needed = [rank for rank in self._ranks if rank.number not in self._mortal]
        self._wait_or_raise(timeout, lambda: not any(rank.is_busy for rank in needed))
        answers = [rank.answer for rank in self._ranks]
        return [deserialize(answer.result) if isinstance(answer, Returned) else None for answer in answers]

    def outcomes(self, function: Callable[..., Any], *args: Any, timeout: float = math.inf) -> list[RankOutcome]:
        """Call ``function(*args)`` on all ranks; return the outcome on each, exceptions and deaths included.

        Raises:
            RankError: they were not done in time. They have been killed.
        """
        self.ask(function, *args)
        found = self.answers(timeout)
        if len(found) < self.size:
            error = self._timeout_error(timeout)
            self.kill()
            raise error
        return [found[rank] for rank in range(self.size)]

    def ask(
        self, function: Callable[..., Any], *args: Any, ranks: Iterable[int] | None = None, leaves: bool = False
    ) -> None:
        """Start ``function(*args)`` on ``ranks``, by default all, without waiting."""
        what = "the function, with its arguments,"
        dealt = any(isinstance(arg, PerRank) for arg in args)
        same = b"" if dealt else serialize(what, (function, args))
        for rank in self._chosen(ranks):
            own = [arg.values[rank.number] if isinstance(arg, PerRank) else arg for arg in args]
            rank.asked, rank.answer = True, None
            with contextlib.suppress(OSError):  # it has died, which _end() notices
                rank.pipe.send(RankCall(rank.number, same or serialize(what, (function, own)), leaves))

    def answers(self, timeout: float, ranks: Iterable[int] | None = None) -> dict[int, RankOutcome]:
        """Wait for the answers of ``ranks``, by default all; return those that arrive in time."""
        chosen = self._chosen(ranks)
        deadline = time.monotonic() + timeout
        while any(rank.is_busy for rank in chosen) and (left := deadline - time.monotonic()) > 0:
            self._listen(left)
        return {rank.number: rank.outcome() for rank in chosen if not rank.is_busy}

    def finish(self) -> None:
        """Let the ranks end as programs do, with exit handlers."""
        self._ask_to_finish()
        self._wait_or_raise(math.inf, lambda: not self._sources)

    def is_alive(self) -> bool:
        """Return whether all ranks are alive."""
        return all(process.is_alive() for process in self._started.processes)

    def kill(self) -> None:
        """End all ranks at once."""
        self._started.kill()

    def close(self, patience: float = 0.0) -> None:
        """Let the ranks finish their call and end, for up to ``patience`` seconds; then end them at once."""
        try:
            if patience and not self._finishing:
                self._ask_to_finish()
                deadline = time.monotonic() + patience
                while self._sources and (left := deadline - time.monotonic()) > 0:
                    self._listen(left)
        finally:
            self._stack.close()

    def _chosen(self, ranks: Iterable[int] | None) -> list[_Rank]:
        return self._ranks if ranks is None else [self._ranks[rank] for rank in ranks]

    def _ask_to_finish(self) -> None:
        self._finishing = True
        for rank in self._ranks:
            with contextlib.suppress(OSError):  # it has died, which its exit code will show
                rank.pipe.send(None)

    # Listening to all ranks at once: each message and piece of output as it comes.

    def _listen_to(self, started: StartedRanks, output: str | int | None) -> None:
        self._sources: dict[Any, Callable[[], bool]] = {}
        self._ranks: list[_Rank] = []
        for number, pipe in enumerate(started.pipes):
            process = started.processes[number] if started.processes else None
            streams = streams_of(number, started.outputs[number], output) if started.outputs else []
            rank = _Rank(number, pipe, process, streams)
            self._ranks.append(rank)
            self._sources[pipe] = functools.partial(self._receive, rank)
            self._sources.update({stream.pipe: stream.read for stream in streams})
            if process is not None:
                self._sources[process.sentinel] = functools.partial(self._end, rank)

    def _listen(self, seconds: float) -> None:
        for source in wait(list(self._sources), None if seconds == math.inf else seconds):
            goes_on = self._sources.get(source)
            if goes_on is not None and not goes_on():
                self._sources.pop(source, None)

    def _receive(self, rank: _Rank) -> bool:
        """Read a message; return False at the end of the pipe."""
        try:
            message = rank.pipe.recv()
        except (EOFError, OSError):
            if rank.process is None:
                rank.exitcode = UNKNOWN
            return False
        if isinstance(message, Failure | Returned):
            rank.answer = message
        else:
            self._on_message(message)
        return True

    def _end(self, rank: _Rank) -> bool:
        """Read what an ended rank left in its pipes. There may be no end of file: its children may hold them open."""
        assert rank.process is not None
        rank.process.join()
        while rank.pipe in self._sources and rank.pipe.poll(0) and self._receive(rank):
            pass
        self._sources.pop(rank.pipe, None)
        for stream in rank.streams:
            if self._sources.pop(stream.pipe, None) is not None:
                stream.finish()
        rank.exitcode = rank.process.exitcode
        return False

    # The outcome of a call.

    def _wait_or_raise(self, timeout: float, is_done: Callable[[], bool]) -> None:
        """Listen until ``is_done()``."""
        deadline = late = min(time.monotonic() + timeout, self._begun + self._limit)
        while not is_done() and (left := deadline - time.monotonic()) > 0:
            self._listen(left)
            if deadline == late and self._has_failed():
                deadline = time.monotonic() + _CAUSE_SECONDS
        if self._has_failed():
            raise self._failure_error()
        if not is_done():
            raise self._timeout_error(min(timeout, self._limit))

    def _has_failed(self) -> bool:
        return bool(self._failures()) or any(code is not None for code in self._exitcodes())

    def _failures(self) -> list[Failure]:
        return [rank.answer for rank in self._ranks if isinstance(rank.answer, Failure)]

    def _exitcodes(self) -> list[int | None]:
        """Return exit codes by rank, ``None`` for ranks that are alive or ended as they should."""
        return [
            None
            if rank.number in self._mortal or (self._finishing and rank.exitcode in (0, UNKNOWN))
            else rank.exitcode
            for rank in self._ranks
        ]

    def _stderr_ends(self) -> dict[int, str]:
        return {rank.number: rank.streams[1].last for rank in self._ranks if rank.streams}

    def _failure_error(self) -> RankError:
        failures = sorted(self._failures(), key=lambda failure: failure.when)
        error = explain(self._exitcodes(), failures, self._stderr_ends())
        error.__cause__ = _exception_of(failures[0]) if failures else None
        return error

    def _timeout_error(self, seconds: float) -> RankError:
        """Return the error that names the unfinished ranks and shows their stacks."""
        late = [rank for rank in self._ranks if rank.is_busy]
        if not late:  # all have returned, but some have threads or exit handlers that do not end
            late = [rank for rank in self._ranks if rank.exitcode is None]
        for rank in late:
            if rank.process is not None and rank.process.pid is not None:
                with contextlib.suppress(ProcessLookupError):  # of a forked one that has ended
                    os.kill(rank.process.pid, WHERE)
        until = time.monotonic() + _DUMP_SECONDS
        while (left := until - time.monotonic()) > 0 and self._sources:
            self._listen(left)
        where = "".join(f"\n\nrank {rank}:\n{words.rstrip()}" for rank, words in self._stderr_ends().items() if words)
        message = f"not done after {seconds:g} s: rank {', '.join(str(rank.number) for rank in late)}{where}"
        return RankError(message, late[0].number if len(late) == 1 else None)


def _exception_of(failure: Failure) -> BaseException | None:
    try:
        error: BaseException = deserialize(failure.exception)
    except Exception:  # cannot be unpickled here; its text is in the traceback
        return None
    return error


def _set_up_rank(rank: int, size: int, port: int, backend: str | None, patience: timedelta, threads: int) -> None:
    """Set up a rank: its environment, threads and process group."""
    os.environ.update(variables_of(port, rank, size))
    if backend is None:
        torch.set_num_threads(threads)
        return
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    join(port, rank, size, patience, backend, threads)
