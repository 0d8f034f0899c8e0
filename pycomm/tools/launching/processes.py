"""Rank processes of this host, spawned or forked, with a pipe to each. They end with the process that started them."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import mmap
import multiprocessing as mp
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext, ForkServerContext
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any, TextIO, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from pycomm.collectives.transport.authentication import loopback, store_on_loopback

Pipe: TypeAlias = "Connection[Any, Any]"
Outputs: TypeAlias = "tuple[Pipe, Pipe]"
"""Pipe ends of a rank's standard output and standard error."""

_NAME = "pycomm rank"
_GRACE = 2.0  # seconds between asking a rank to end and killing it
_PR_SET_PDEATHSIG = 1
_ADDRESS_SHIFT = 1 << 30  # bytes of addresses
_NO_ACCESS = 0
_kept: list[mmap.mmap] = []
_starting = threading.Lock()  # held while the environment, which all threads share, is changed
_begun = False  # whether this process is a rank, and past the import of its script


class RankProcesses:
    """Processes of this host, with a pipe to each. A context manager, whose end ends them.

    They also end with the process that started them, however that ends.

    torch.distributed.elastic.multiprocessing starts processes too, but it passes output through files, has no messages
    while they run, and imports everything again in each.

    Args:
        main: called in every process with its rank, its end of the pipe and ``arguments``; importable by name.
        environment: variables that are added to this process's.
        captured: whether their output is read from ``outputs`` instead of going to this process's output.
        preload: modules that a fork server imports once. Ranks forked from it start in a hundredth of a second instead
            of seconds. A process has one such server, so only the first list counts. Forked ranks share the server's
            hash seed, which hides orders that depend on it. ``None``: ranks are spawned.

    Attributes:
        pipes, processes, outputs: by rank.
    """

    def __init__(
        self,
        main: Callable[..., None],
        size: int,
        arguments: Sequence[Any] = (),
        environment: Mapping[str, str] | None = None,
        *,
        captured: bool = False,
        preload: Sequence[str] | None = None,
    ) -> None:
        self.pipes: list[Pipe] = []
        self.processes: list[BaseProcess] = []
        self.outputs: list[Outputs] = []
        resource_tracker.ensure_running()  # otherwise the first start does it, and then unblocks Ctrl-C
        try:
            # Ctrl-C, and other threads that start ranks, wait until all started processes are recorded.
            with _starting, _no_interrupt(), _importable_script(), _variables(environment or {}):
                context = mp.get_context("spawn") if preload is None else _fork_server(preload)
                inherited = None if preload is None else dict(os.environ)
                for rank in range(size):
                    ours, theirs = context.Pipe()
                    self.pipes.append(ours)
                    with theirs, _output_pipes(context, captured, self.outputs) as written:
                        given = (main, os.getpid(), inherited, rank, theirs, written, *arguments)
                        process = context.Process(target=_rank_main, args=given, name=f"{_NAME} {rank}")
                        process.start()
                    self.processes.append(process)
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Close the pipes, ask the ranks to end, then kill them."""
        with _no_interrupt():  # a second Ctrl-C must not leave half of them
            try:
                for pipe in (*self.pipes, *(pipe for outputs in self.outputs for pipe in outputs)):
                    pipe.close()
                for process in self.processes:
                    process.terminate()
                deadline = time.monotonic() + _GRACE
                for process in self.processes:
                    process.join(max(0.0, deadline - time.monotonic()))
            finally:
                self.kill()

    def kill(self) -> None:
        """End all ranks at once."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def _fork_server(preload: Sequence[str]) -> ForkServerContext:
    """Start the fork server if it is not running, and return its context.

    The server searches modules where this process does. Otherwise it would first search its working directory, which
    may hold sources that are not built.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    here = os.getcwd()
    with _variables({"PYTHONPATH": os.pathsep.join(path or here for path in sys.path)}):
        os.chdir("/")
        try:
            forkserver.ensure_running()
        finally:
            os.chdir(here)
    return context


@contextlib.contextmanager
def _output_pipes(context: BaseContext, captured: bool, read: list[Outputs]) -> Iterator[Outputs | None]:
    """Append the read ends to ``read``; yield the write ends for a rank, and close them here afterwards."""
    if not captured:
        yield None
        return
    out, err = context.Pipe(duplex=False), context.Pipe(duplex=False)
    read.append((out[0], err[0]))
    with out[1], err[1]:
        yield out[1], err[1]


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block. Processes that are started meanwhile begin with it blocked."""
    noted: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    # Python handles signals in its main thread only. Blocking them there is not enough: the kernel then delivers them
    # to another thread (notebooks always have some), and Python still runs the handler in the main thread.
    waits = callable(handler) and threading.current_thread() is threading.main_thread()
    if waits:
        signal.signal(signal.SIGINT, lambda number, _: noted.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if waits:
            signal.signal(signal.SIGINT, handler)
            if noted:
                signal.raise_signal(signal.SIGINT)


def script_of(main: ModuleType) -> str | None:
    """Return the file that ``__main__`` was read from; ``None`` if there is no such file."""
    path = getattr(main, "__file__", None)
    return path if path is not None and os.path.exists(path) else None


@contextlib.contextmanager
def _importable_script() -> Iterator[None]:
    """Keep started processes from importing a script that is no file: multiprocessing looks for "<stdin>"."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path is None or script_of(main) is not None:
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = path


@contextlib.contextmanager
def _variables(added: Mapping[str, str]) -> Iterator[None]:
    """Add variables to the environment during the block."""
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


def is_being_started() -> bool:
    """Return whether this process will be a rank, but is still importing its script."""
    return mp.current_process().name.startswith(_NAME) and not _begun


def finish() -> None:
    """Do what Python does at the end of a program: wait for threads, run exit handlers, flush files.

    Unlike at Python's end, the interpreter stays alive: see :func:`leave`.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # executors too: joining their threads would wait forever
    atexit._run_exitfuncs()
    for each in gc.get_objects():
        if issubclass(type(each), io.IOBase):
            try:
                if not each.closed:
                    each.flush()
            except ValueError:  # detached, as sys.stdout is where a script has put another encoding over its buffer
                continue
            except Exception:  # such as a broken pipe; the other files are still flushed
                traceback.print_exc()


def leave(code: int) -> None:
    """End this rank at once, without cleanup, which could wait for peers after a failure.

    Use it after :func:`finish`, too: a thread that returns from torch after the interpreter has ended would crash the
    process.
    """
    with contextlib.suppress(OSError, ValueError):  # broken pipe, or closed
        sys.stdout.flush()
        sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)  # C code buffers output unless it goes to a terminal
    os._exit(code)


def _rank_main(
    main: Callable[..., None],
    parent: int,
    environment: Mapping[str, str] | None,
    rank: int,
    pipe: Pipe,
    outputs: Outputs | None,
    *arguments: Any,
) -> None:
    global _begun
    _begun = True
    # Ctrl-C ends a rank without output or cleanup. It was blocked until now, as interrupted imports print tracebacks.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if environment is None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # the parent died before prctl()
    else:
        _initialize_forked(rank, environment)
    if outputs is not None:
        sys.stdout, sys.stderr = (_opened(*each) for each in zip((1, 2), outputs, strict=True))
    main(rank, pipe, *arguments)


def _initialize_forked(rank: int, environment: Mapping[str, str]) -> None:
    """Give a forked rank its starter's environment, addresses of its own, and an end with its starter."""
    os.environ.clear()
    os.environ.update(environment)
    # Shifts later mappings, so that addresses differ between ranks. Otherwise, taking a peer's address for one's own
    # would go unnoticed.
    _kept.append(mmap.mmap(-1, (rank + 1) * _ADDRESS_SHIFT, prot=_NO_ACCESS))
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this rank once its starter has ended. Its parent, the fork server, does not end before its children."""
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _opened(descriptor: int, written: Pipe) -> TextIO:
    """Redirect ``descriptor`` to a pipe; return a line-buffered file on it for Python's own output."""
    with written:
        os.dup2(written.fileno(), descriptor)
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)


PATIENCE = timedelta(seconds=120)
"""Default limit of a rank's wait for another that hangs; one that dies is noticed at once."""


@contextlib.contextmanager
def rendezvous() -> Iterator[int]:
    """Keep a store for ranks of this host; yield its port for :func:`join`. Other hosts cannot reach it."""
    store = store_on_loopback(PATIENCE)
    yield store.port
    del store


def join(
    port: int,
    rank: int,
    size: int,
    patience: timedelta = PATIENCE,
    backend: str = "gloo",
    threads: int = 1,
) -> None:
    """Join the default process group of the ranks that meet at ``port``, over the loopback device.

    Args:
        patience: limit of every wait of a rank for another.
        threads: torch's threads in this rank; ranks with more would compete for cores.
    """
    torch.set_num_threads(threads)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(backend, store=connect(port, patience), rank=rank, world_size=size, timeout=patience)


def connect(port: int, patience: timedelta = PATIENCE) -> Store:
    """Connect to the store at ``port``."""
    return TCPStore(loopback(), port, is_master=False, timeout=patience)


def variables_of(port: int, rank: int, size: int) -> dict[str, str]:
    """Return torchrun's environment variables, through which a script's ``init_process_group()`` finds the others."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0}
    return {
        **{name: str(value) for name, value in place.items()},
        "MASTER_ADDR": loopback(),
        "MASTER_PORT": str(port),
        # The store exists: rank 0 must not make one.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
