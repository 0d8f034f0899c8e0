"""Processes of this host as ranks: started anew or forked, with a pipe to each, gone when their starter is."""

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
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext, ForkServerContext
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any, TextIO, TypeAlias

Pipe: TypeAlias = "Connection[Any, Any]"
Outputs: TypeAlias = "tuple[Pipe, Pipe]"
"""Where a rank's standard output and standard error are read, or written."""

_NAME = "pycomm rank"
_GRACE = 2.0  # seconds between asking a rank to end and killing it
_PR_SET_PDEATHSIG = 1
_APART = 1 << 30  # bytes of addresses
_NO_ACCESS = 0
_kept: list[mmap.mmap] = []
_starting = threading.Lock()  # whoever has it changes the environment, which is the process's
_begun = False  # whether this process is a rank, and past the import of its script


class RankProcesses:
    """Processes of this host, with a pipe to each. A context manager: they are gone when it ends.

    They end with the process that started them, however that ends.

    torch.distributed.elastic.multiprocessing starts processes too, but its output goes through files, it has no
    messages while they run, and it imports everything anew in each.

    Args:
        main: called in every process with its rank, its end of the pipe and ``arguments``; importable by name.
        environment: variables that they have besides this process's.
        captured: whether what they write is to be read from ``outputs``, and does not go where this process's goes.
        preload: modules that a server imports, from which ranks are then forked: in a hundredth of a second, not in
            seconds. A process has one such server, so only the first list counts. All forked ranks have the server's
            hash seed, so they do not show that an order depends on it. ``None``: ranks are started anew.

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
        resource_tracker.ensure_running()  # the first start of a rank would do it, and let Ctrl-C through afterwards
        try:
            # Ctrl-C waits until all that was started is known; and so do other threads that start ranks.
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
        """Hang up, ask the ranks to end, then kill them."""
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
    """Return the context in which processes are forked, from a server that runs after this.

    The server looks for modules where this process does. By itself it would begin where it is started, in the sources,
    whose package may not have been built.
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
    """Add the ends that are read to ``read``, and yield those that a rank writes to, which are for it alone."""
    if not captured:
        yield None
        return
    out, err = context.Pipe(duplex=False), context.Pipe(duplex=False)
    read.append((out[0], err[0]))
    with out[1], err[1]:
        yield out[1], err[1]


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """Make Ctrl-C wait until the end. What is started meanwhile begins with it blocked."""
    noted: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    # Python acts on signals in its main thread only. To block them there would not do: the kernel then gives them to
    # another thread, of which notebooks always have some, and the main thread is told.
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
    """Return the file that ``__main__`` was read from; ``None`` if it was typed, or came by another way."""
    path = getattr(main, "__file__", None)
    return path if path is not None and os.path.exists(path) else None


@contextlib.contextmanager
def _importable_script() -> Iterator[None]:
    """Let processes that are started import no script where there is none: multiprocessing looks for "<stdin>"."""
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


def is_being_started() -> bool:
    """Return whether this process is to be a rank, and still imports the script that it comes from."""
    return mp.current_process().name.startswith(_NAME) and not _begun


def finish() -> None:
    """Do what is left to the end of a program: wait for threads, run exit handlers, write what files have in buffers.

    As Python does it, but that the interpreter goes on: see :func:`leave`.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # executors too: joining their threads would wait for ever
    atexit._run_exitfuncs()
    for each in gc.get_objects():
        if issubclass(type(each), io.IOBase):
            try:
                if not each.closed:
                    each.flush()
            except ValueError:  # detached, as sys.stdout is where a script has put another encoding over its buffer
                continue
            except Exception:  # of one file, as with a pipe that nobody reads; others are still to be written
                traceback.print_exc()


def leave(code: int) -> None:
    """End this rank at once, without tidying up, which after a failure could wait for peers.

    After :func:`finish` too: a thread that comes out of torch's code when the interpreter has ended takes the process
    along.
    """
    with contextlib.suppress(OSError, ValueError):  # nobody reads any more, or it was closed
        sys.stdout.flush()
        sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)  # what C code has written, and keeps while it goes to no terminal
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
    # On Ctrl-C there is nothing to say and nothing to tidy up. Until now it was blocked: interrupted imports print
    # tracebacks.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if environment is None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # it died before the kernel was asked to tell
    else:
        _be_as_if_new(rank, environment)
    if outputs is not None:
        sys.stdout, sys.stderr = (_opened(*each) for each in zip((1, 2), outputs, strict=True))
    main(rank, pipe, *arguments)


def _be_as_if_new(rank: int, environment: Mapping[str, str]) -> None:
    """Have what a forked rank does not get from the process that asked for it: variables, addresses, its end."""
    os.environ.clear()
    os.environ.update(environment)
    # Lest what ranks map has the same addresses on all: taking a peer's address for one's own would go unnoticed.
    _kept.append(mmap.mmap(-1, (rank + 1) * _APART, prot=_NO_ACCESS))
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Wait until the process that asked for this one has ended; the server, its parent, would wait for its children."""
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _opened(descriptor: int, written: Pipe) -> TextIO:
    """Let a pipe take a descriptor's place, for whatever writes to it; return a new file for Python's own, by lines."""
    with written:
        os.dup2(written.fileno(), descriptor)
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
