"""Ranks on this host: start their processes, join them in a group, listen to them, leave none of them behind."""

from __future__ import annotations

import contextlib
import ctypes
import math
import multiprocessing as mp
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

PATIENCE = timedelta(seconds=120)
"""For every wait of a rank for another: a rank that dies is noticed at once, this is for one that hangs."""

_HOST = "127.0.0.1"
_AFTERMATH = 1.0  # seconds in which a failure's cause, if it is another rank's, shows itself
_GRACE = 2.0  # seconds between asking a rank to end and killing it
_PR_SET_PDEATHSIG = 1

Pipe: TypeAlias = "Connection[Any, Any]"
Tell = Callable[[Any], None]


class RankError(RuntimeError):
    """A rank failed; the message says which, and how."""


@dataclass(frozen=True)
class Failure:
    """What a rank says before it gives up: its peers' failures that follow from this one are later."""

    rank: int
    when: float
    """On the clock that all processes of a host share."""
    traceback: str


class LocalRanks:
    """Processes of this host, with a pipe to each. A context manager: they are gone when it ends.

    They end with the process that started them, however that ends.

    Args:
        main: called in every process with its rank, its end of the pipe and ``arguments``; importable by name, as the
            processes are new ones.
        environment: variables that they have besides this process's.
    """

    def __init__(
        self,
        main: Callable[..., None],
        size: int,
        arguments: Sequence[Any] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.pipes: list[Pipe] = []
        self.processes: list[BaseProcess] = []
        context = mp.get_context("spawn")
        with _no_interrupt(), _variables(environment or {}):  # until there is something that ends what was started
            try:
                for rank in range(size):
                    ours, theirs = context.Pipe()
                    self.pipes.append(ours)
                    with theirs:
                        process = context.Process(target=_rank_main, args=(main, os.getpid(), rank, theirs, *arguments))
                        process.start()
                    self.processes.append(process)
            except BaseException:
                self.end()
                raise

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self, patience: float = 0.0) -> None:
        """Hang up, give the ranks ``patience`` seconds to end by themselves, then ask them to, then kill them."""
        with _no_interrupt():  # a second Ctrl-C must not leave half of them
            for pipe in self.pipes:
                pipe.close()
            self._join(patience)
            for process in self.processes:
                process.terminate()
            self._join(_GRACE)
            self.kill()

    def kill(self) -> None:
        """End all ranks at once."""
        for process in self.processes:
            process.kill()
            process.join()

    def _join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))


def run_ranks(program: Callable[..., None], size: int, arguments: Sequence[Any], on_message: Tell) -> None:
    """Run ``program(*arguments, tell)`` on ``size`` ranks, in a default process group, until all have ended well.

    They are gone when this returns. What they ``tell`` is passed on to ``on_message``.

    Raises:
        RankError: a rank raised an exception or was killed.
    """
    with rendezvous() as port, LocalRanks(_run, size, (size, port, program, arguments)) as ranks:
        _listen(ranks, on_message)


@contextlib.contextmanager
def rendezvous() -> Iterator[int]:
    """Let ranks of this host find each other: yields the port for :func:`join`, which only this host can reach."""
    with socket.create_server((_HOST, 0)) as server:
        port = server.getsockname()[1]
        # Without libuv, by which torch 2.4 takes no socket that listens already.
        options: dict[str, Any] = {"wait_for_workers": False, "timeout": PATIENCE, "use_libuv": False}
        store = TCPStore(_HOST, port, is_master=True, master_listen_fd=server.detach(), **options)
    yield port
    del store


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """Make Ctrl-C wait. What is started meanwhile begins with it blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _variables(added: Mapping[str, str]) -> Iterator[None]:
    """Have ``added`` in the environment."""
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# In a rank.


def join(port: int, rank: int, size: int, patience: timedelta = PATIENCE) -> None:
    """Join the ranks that meet at ``port`` in a default process group: Gloo over the loopback device, one thread."""
    torch.set_num_threads(1)  # per rank, so that two ranks on two cores do not fight over them
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=connect(port, patience), rank=rank, world_size=size, timeout=patience)


def connect(port: int, patience: timedelta = PATIENCE) -> Store:
    """Return the store of the ranks that meet at ``port``."""
    return TCPStore(_HOST, port, is_master=False, timeout=patience)


def _rank_main(main: Callable[..., None], parent: int, rank: int, pipe: Pipe, *arguments: Any) -> None:
    # On Ctrl-C there is nothing to say and nothing to tidy up. Until now it was blocked: interrupted imports print
    # tracebacks.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died before the kernel was asked to tell
    main(rank, pipe, *arguments)


def _run(rank: int, pipe: Pipe, size: int, port: int, program: Callable[..., None], arguments: Sequence[Any]) -> None:
    try:
        join(port, rank, size)
        program(*arguments, pipe.send)
        dist.destroy_process_group()
    except Exception:
        failure = Failure(rank, time.monotonic(), traceback.format_exc())
        with contextlib.suppress(OSError):  # nobody listens any more
            pipe.send(failure)
        # At once: tidying up could wait for the peers, and nothing outlives the process.
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    # At once, too: a thread that comes out of torch's code when the interpreter has ended takes the process along.
    os._exit(0)


# In the process that started them.


def _listen(ranks: LocalRanks, on_message: Tell) -> None:
    """Pass messages on until all ranks have ended well."""
    ends = {process.sentinel: process for process in ranks.processes}
    sources: set[Any] = {*ranks.pipes, *ends}
    failures: list[Failure] = []
    deadline = math.inf
    while sources and time.monotonic() < deadline:
        for source in wait(sources, None if deadline == math.inf else max(0.0, deadline - time.monotonic())):
            message = _receive(source) if isinstance(source, Connection) else None
            if isinstance(message, Failure):
                failures.append(message)
            elif message is not None:
                on_message(message)
            else:
                sources.discard(source)
            if source in ends:
                ends[source].join()
        if deadline == math.inf and (failures or any(process.exitcode for process in ranks.processes)):
            deadline = time.monotonic() + _AFTERMATH
    if deadline < math.inf:
        raise RankError(explain([process.exitcode for process in ranks.processes], failures))


def _receive(pipe: Pipe) -> Any:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return None


def explain(exitcodes: Sequence[int | None], failures: Sequence[Failure]) -> str:
    """Say who began it: a rank that ended without a word, else the first to complain; the others only noticed."""
    told = {failure.rank for failure in failures}
    lines = [f"rank {rank} {_ending(code)}" for rank, code in enumerate(exitcodes) if code and rank not in told]
    if failures:
        first = min(failures, key=lambda failure: failure.when)
        lines.append(f"rank {first.rank} failed{' after that' if lines else ''}:\n\n{first.traceback.rstrip()}")
    return "\n".join(lines)


def _ending(exitcode: int) -> str:
    if exitcode > 0:
        return f"ended with exit code {exitcode}"
    name = signal.Signals(-exitcode).name
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
