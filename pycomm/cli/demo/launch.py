"""Starting the ranks, listening to them, and leaving none of them behind."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pycomm.cli.demo.messages import Failure, Message, Tell
from pycomm.cli.demo.settings import PATIENCE, Settings

_HOST = "127.0.0.1"
_AFTERMATH = 1.0  # seconds in which a failure's cause, if it is another rank's, shows itself
_GRACE = 2.0  # seconds between asking a rank to end and killing it


class RankError(RuntimeError):
    """A rank failed; the message says which, and how."""


Program = Callable[[Settings, Tell], None]
"""What a rank does, on the default process group; importable by name, as the ranks are new processes."""


def run_ranks(program: Program, settings: Settings, on_message: Tell) -> None:
    """Run ``program`` on ``settings.ranks`` processes until all have ended well; they are gone when this returns.

    Raises:
        RankError: a rank raised an exception or was killed.
    """
    store = _store()
    pipes = [Pipe(duplex=False) for _ in range(settings.ranks)]
    readers, writers = [reader for reader, _ in pipes], [writer for _, writer in pipes]
    with _no_interrupt():  # until there is something that ends what was started
        arguments = (program, os.getpid(), store.port, settings, writers)
        context: Any = mp.spawn(  # type: ignore[attr-defined, no-untyped-call]
            _rank_main, arguments, nprocs=settings.ranks, join=False, daemon=True
        )
    try:
        for writer in writers:
            writer.close()
        _listen(context.processes, readers, on_message)
    finally:
        _end(context.processes)
        for reader in readers:
            reader.close()


def _store() -> TCPStore:
    """Where the ranks find each other, on a free port that only this host can reach."""
    with socket.create_server((_HOST, 0)) as server:
        port = server.getsockname()[1]
        return TCPStore(
            _HOST, port, is_master=True, wait_for_workers=False, timeout=PATIENCE, master_listen_fd=server.detach()
        )


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """Ctrl-C waits. What is started meanwhile begins with it blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# In a rank.


def _rank_main(
    rank: int, program: Program, parent: int, port: int, settings: Settings, writers: Sequence[Connection[Any, Any]]
) -> None:
    # torch makes the death of the parent a SIGINT here; then, and on Ctrl-C, there is nothing to say and nothing to
    # tidy up. Until now it was blocked: interrupted imports print tracebacks.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if os.getppid() != parent:
        os._exit(1)  # it died before torch asked to be told
    for other in writers:
        if other is not writers[rank]:
            other.close()
    try:
        _join(rank, port, settings.ranks)
        program(settings, writers[rank].send)
        dist.destroy_process_group()
    except Exception:
        failure = Failure(rank, time.monotonic(), traceback.format_exc())
        with contextlib.suppress(OSError):  # nobody listens any more
            writers[rank].send(failure)
        # At once: tidying up could wait for the peers, and nothing outlives the process.
        os._exit(1)


def _join(rank: int, port: int, ranks: int) -> None:
    torch.set_num_threads(1)  # per rank, so that two ranks on two cores do not fight over them
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = TCPStore(_HOST, port, is_master=False, timeout=PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=PATIENCE)


# In the process that started them.


def _listen(processes: list[BaseProcess], readers: list[Connection[Any, Any]], on_message: Tell) -> None:
    """Pass messages on until all ranks have ended well."""
    ends = {process.sentinel: process for process in processes}
    sources: set[Any] = {*readers, *ends}
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
        if deadline == math.inf and (failures or any(process.exitcode for process in processes)):
            deadline = time.monotonic() + _AFTERMATH
    if deadline < math.inf:
        raise RankError(explain([process.exitcode for process in processes], failures))


def _receive(reader: Connection[Any, Any]) -> Message | None:
    try:
        message: Message = reader.recv()
    except (EOFError, OSError):
        return None
    return message


def explain(exitcodes: Sequence[int | None], failures: Sequence[Failure]) -> str:
    """Who began it: a rank that ended without a word, else the first to complain; the others only noticed."""
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


def _end(processes: list[BaseProcess]) -> None:
    with _no_interrupt():  # a second Ctrl-C must not leave half of them
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + _GRACE
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
