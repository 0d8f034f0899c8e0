"""Ranks that are forked from a process which has imported what they need: in a hundredth of a second, not in two.

For tests that use ranks up. All that outlives a test is started anew, as users' ranks are: ranks that are forked have
the hash seed of the one process that they come from, and would not show that an order of theirs depends on it.
"""

from __future__ import annotations

import mmap
import multiprocessing as mp
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from typing import Any
from unittest.mock import patch

from pycomm.launching import LocalRanks, Pipe

_LAZY = ("asynchronous.averaging", "asynchronous.gossip", "asynchronous.parameter_server", "backend.process_group")
_IMPORTED = (
    *("hypothesis", "pytest", "torch._dynamo", "torch.distributed.fsdp", "tests.on_ranks"),
    *(f"pycomm.{name}" for name in (*_LAZY, "checkpoint", "cost.auto", "ddp", "monitoring", "reducer")),
)
_APART = 1 << 30  # bytes of addresses
_NO_ACCESS = 0


class ForkedRanks(LocalRanks):
    """Processes of this host, with a pipe to each, as ``LocalRanks`` has them; with this process's environment."""

    def __init__(self, main: Callable[..., None], size: int, arguments: Sequence[Any] = ()) -> None:
        self.pipes, self.processes = [], []
        context = _context()
        try:
            for rank in range(size):
                ours, theirs = context.Pipe()
                self.pipes.append(ours)
                with theirs:
                    given = (main, dict(os.environ), rank, theirs, *arguments)
                    process = context.Process(target=_rank_main, args=given)
                    process.start()
                self.processes.append(process)
        except BaseException:
            self.end()
            raise


def _context() -> ForkServerContext:
    """Return the context in which processes are forked, from a server that runs after this.

    The server looks for modules where this process does. By itself it would begin where it is started, in the sources,
    whose package has not been built.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    here = os.getcwd()
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(path or here for path in sys.path)):
        os.chdir("/")
        try:
            forkserver.ensure_running()
        finally:
            os.chdir(here)
    return context


def _rank_main(main: Callable[..., None], environment: dict[str, str], rank: int, pipe: Pipe, *arguments: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    # Lest what ranks map has the same addresses on all: taking a peer's address for one's own would go unnoticed.
    room = mmap.mmap(-1, (rank + 1) * _APART, prot=_NO_ACCESS)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    main(rank, pipe, *arguments)
    del room


def _end_with_parent() -> None:
    """Wait until the tests' process has ended; the server, whose child this is, would wait for its children."""
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
