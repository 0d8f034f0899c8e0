"""A function on ranks in a process group, from their start to their end: what they tell, return, write and die of."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import math
import os
import signal
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pycomm.launching import cargo, meeting
from pycomm.launching.failures import Failure, RankError, explain
from pycomm.launching.local_ranks import LocalRanks, Pipe, finish, leave
from pycomm.launching.output import Stream, streams_of

Tell = Callable[[Any], None]
OnMessage = Callable[[Any], None]

_AFTERMATH = 1.0  # seconds in which a failure's cause, if it is another rank's, shows itself
_DUMP_SECONDS = 0.5  # for ranks to say where they are
_WHERE = signal.SIGUSR1
"""Lets a rank write where its threads are."""


@dataclass(frozen=True)
class RankJob:
    """What every rank does.

    Attributes:
        program: called with ``arguments`` and ``tell``; importable by name.
        backend: of the default process group; ``None``: there is none, but the environment that makes one.
        patience: for every wait of a rank for another.
        threads: of each rank.
    """

    program: Callable[..., Any]
    arguments: Sequence[Any] = ()
    backend: str | None = "gloo"
    patience: timedelta = meeting.PATIENCE
    threads: int = 1


@dataclass(frozen=True)
class Returned:
    """From each rank, once, when its program has."""

    result: bytes


def run_ranks(
    program: Callable[..., None],
    size: int,
    arguments: Sequence[Any],
    on_message: OnMessage,
    *,
    mortal: Collection[int] = (),
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run ``program(*arguments, tell)`` on ``size`` ranks, in a default process group, until all have ended well.

    They are gone when this returns. What they ``tell`` is passed on to ``on_message``.

    Args:
        mortal: ranks that may be killed: the others go on, and are all that is waited for.
        environment: variables that the ranks have besides this process's.

    Raises:
        RankError: a rank raised an exception, or one that is not ``mortal`` was killed.
    """
    job = RankJob(program, arguments)
    with meeting.rendezvous() as port, LocalRanks(run_rank, size, (size, port, job), environment) as ranks:
        listen(ranks, on_message, mortal=mortal)


# In a rank.


def run_rank(rank: int, pipe: Pipe, size: int, port: int, job: RankJob) -> None:
    """Do ``job`` as one of the ranks, and end the process."""
    faulthandler.register(_WHERE)
    try:
        _join(job, rank, size, port)
        result = _call(job, pipe.send)
        pipe.send(Returned(cargo.pack(f"the result of rank {rank}, a {type(result).__name__},", result)))
        _wait_for_all(pipe)
        finish()  # with the group, which threads and handlers may use as all ranks are here
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:
        with contextlib.suppress(OSError):  # nobody listens any more
            pipe.send(_failure(rank, error))
        leave(1)
    leave(0)


def _join(job: RankJob, rank: int, size: int, port: int) -> None:
    meeting.announce(port, rank, size)
    if job.backend is None:
        torch.set_num_threads(job.threads)
        return
    if "nccl" in job.backend:
        torch.cuda.set_device(rank)
    meeting.join(port, rank, size, job.patience, job.backend, job.threads)


def _call(job: RankJob, tell: Tell) -> Any:
    try:
        return job.program(*job.arguments, tell)
    except SystemExit as error:
        if error.code in (None, 0):  # a script's way to say that it is done
            return None
        raise


def _wait_for_all(pipe: Pipe) -> None:
    """Wait until all ranks are done, so that nobody's messages are lost because another one has gone."""
    try:
        pipe.recv()
    except (EOFError, OSError):  # another one has failed
        leave(1)


def _failure(rank: int, error: BaseException) -> Failure:
    return Failure(rank, time.monotonic(), _as_text(error), _as_bytes(error))


def _as_text(error: BaseException) -> str:
    """Return the traceback from what the program called on, if the error is the program's."""
    trace = error.__traceback__
    inner = trace
    while inner is not None and Path(inner.tb_frame.f_code.co_filename).parent == Path(__file__).parent:
        inner = inner.tb_next
    return "".join(traceback.format_exception(type(error), error, inner or trace))


def _as_bytes(error: BaseException) -> bytes:
    """Return the pickled exception; nothing if it cannot be pickled, or not be made again of that."""
    try:
        packed = cargo.pack("the exception", error)
        cargo.unpack(packed)
    except Exception:
        return b""
    return packed


# In the process that started them.


@dataclass
class _Rank:
    """What is known of a rank."""

    number: int
    streams: list[Stream] = field(default_factory=list)
    result: bytes | None = None


def listen(
    ranks: LocalRanks,
    on_message: OnMessage,
    output: str | int | None = None,
    seconds: float = math.inf,
    mortal: Collection[int] = (),
) -> list[bytes]:
    """Pass on what ranks tell and write until all have ended well; return the packed results by rank.

    Args:
        output: whose is shown; see :func:`pycomm.launching.output.streams_of`.
        seconds: how long it may take.
        mortal: ranks that may be killed, which is then no failure.

    Raises:
        RankError: a rank failed, or they were not done in time.
    """
    return _Listener(ranks, on_message, output, mortal).listen(seconds)


class _Listener:
    """Listener to all ranks at once: each message and piece of output as it comes."""

    def __init__(
        self, ranks: LocalRanks, on_message: OnMessage, output: str | int | None, mortal: Collection[int]
    ) -> None:
        self._mortal = frozenset(mortal)
        self._processes, self._pipes, self._on_message = ranks.processes, ranks.pipes, on_message
        self._ranks = [_Rank(number) for number in range(len(ranks.processes))]
        self._failures: list[Failure] = []
        self._sources: dict[Any, Callable[[], bool]] = {}
        for rank, pipe, process in zip(self._ranks, ranks.pipes, ranks.processes, strict=True):
            self._sources[pipe] = functools.partial(self._receive, rank, pipe)
            self._sources[process.sentinel] = functools.partial(self._end, rank, pipe)
        for rank, pipes in zip(self._ranks, ranks.outputs, strict=False):
            rank.streams = streams_of(rank.number, pipes, output)
            self._sources.update({stream.pipe: stream.read for stream in rank.streams})

    def listen(self, seconds: float) -> list[bytes]:
        deadline = late = time.monotonic() + seconds
        while self._sources and (left := deadline - time.monotonic()) > 0:
            self._listen_once(left)
            if deadline == late and self._has_failed():
                deadline = time.monotonic() + _AFTERMATH
        if self._has_failed():
            raise self._explained()
        if self._sources:
            raise self._too_late(seconds)
        return [rank.result for rank in self._ranks if rank.result is not None]

    def _listen_once(self, seconds: float) -> None:
        for source in wait(list(self._sources), None if seconds == math.inf else seconds):
            goes_on = self._sources.get(source)
            if goes_on is not None and not goes_on():
                self._sources.pop(source, None)

    def _receive(self, rank: _Rank, pipe: Pipe) -> bool:
        """Take a message; return False at the end."""
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            return False
        if isinstance(message, Failure):
            self._failures.append(message)
        elif isinstance(message, Returned):
            rank.result = message.result
            if all(other.result is not None or other.number in self._mortal for other in self._ranks):
                self._let_go()
        else:
            self._on_message(message)
        return True

    def _let_go(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # it has died since, which its exit code will say
                pipe.send(None)

    def _end(self, rank: _Rank, pipe: Pipe) -> bool:
        """Take what a rank that has ended left: what it started may hold the other ends open."""
        self._processes[rank.number].join()
        while pipe in self._sources and pipe.poll(0) and self._receive(rank, pipe):
            pass
        self._sources.pop(pipe, None)
        for stream in rank.streams:
            if self._sources.pop(stream.pipe, None) is not None:
                stream.finish()
        return False

    def _has_failed(self) -> bool:
        return bool(self._failures) or any(code is not None for code in self._exitcodes())

    def _exitcodes(self) -> list[int | None]:
        """Return the codes of the ranks that ended otherwise than they should: with 0 after a result."""
        codes = [(rank, self._processes[rank.number].exitcode) for rank in self._ranks]
        fine = [(not code and rank.result is not None) or rank.number in self._mortal for rank, code in codes]
        return [None if well else code for well, (_, code) in zip(fine, codes, strict=True)]

    def _last_words(self) -> dict[int, str]:
        return {rank.number: rank.streams[1].last for rank in self._ranks if rank.streams}

    def _explained(self) -> RankError:
        error = explain(self._exitcodes(), self._failures, self._last_words())
        if self._failures:
            first = min(self._failures, key=lambda failure: failure.when)
            with contextlib.suppress(Exception):  # not to be made again here; the text says what it was
                error.__cause__ = cargo.unpack(first.exception) if first.exception else None
        return error

    def _too_late(self, seconds: float) -> RankError:
        """Return the error that names the ranks that were not done, and says where they were."""
        late = [rank.number for rank in self._ranks if rank.result is None]
        if not late:  # all have returned, but some have threads or exit handlers that do not end
            late = [rank for rank, process in enumerate(self._processes) if process.exitcode is None]
        for number in late:
            os.kill(self._processes[number].pid or 0, _WHERE)  # a child of ours, until it is joined
        until = time.monotonic() + _DUMP_SECONDS
        while (left := until - time.monotonic()) > 0 and self._sources:
            self._listen_once(left)
        where = "".join(f"\n\nrank {rank}:\n{words.rstrip()}" for rank, words in self._last_words().items() if words)
        message = f"not done after {seconds:g} s: rank {', '.join(map(str, late))}{where}"
        return RankError(message, late[0] if len(late) == 1 else None)
