"""Executors of programs on arrays in CPU memory, one for each kind of transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch

import pycomm._native as _native
from pycomm.schedule.program import Program
from pycomm.transport.base import Transport
from pycomm.transport.messages import Messenger, run_program
from pycomm.transport.shared_memory import SharedMemoryTransport


class Runner(Protocol):
    """Executor of programs over one transport."""

    def run(self, program: Program, x: Any, op: str, timeout: float) -> None:
        """All-reduce ``x`` by this rank's part of a schedule that all ranks have.

        Raises:
            ValueError, TypeError: on every rank: an argument is wrong on some rank, or ranks differ.
            CommError: as from any collective.
        """


@runtime_checkable
class MessageTransport(Messenger, Protocol):
    """Transport that can send and receive, and compare what the ranks are about to run."""

    def run_schedule(
        self, program: Program, x: Any, op: str, timeout: float, run: Callable[[torch.Tensor], None]
    ) -> None:
        """Compare ``program`` and ``x`` with the other ranks', then let ``run`` all-reduce ``x`` by messages."""


class CompiledRunner:
    """Executor in C++ (csrc/execute) over shared memory."""

    def __init__(self, transport: SharedMemoryTransport) -> None:
        self._transport = transport
        self._compiled: WeakKeyDictionary[Program, _native.Program] = WeakKeyDictionary()

    def run(self, program: Program, x: Any, op: str, timeout: float) -> None:
        """See :class:`Runner`."""
        if program not in self._compiled:
            name = program.name.encode("ascii", "replace").decode()  # for errors; not all text is UTF-8
            words = (program.words(), program.rank, program.num_ranks, name, program.digest)
            self._compiled[program] = _native.Program(*words)
        self._transport.run_compiled(self._compiled[program], x, op, timeout)


class MessageRunner:
    """Executor that goes round by round through a transport's sends and receives."""

    def __init__(self, transport: MessageTransport) -> None:
        self._transport = transport

    def run(self, program: Program, x: Any, op: str, timeout: float) -> None:
        """See :class:`Runner`."""
        transport = self._transport
        transport.run_schedule(program, x, op, timeout, lambda flat: run_program(program, flat, op, transport, timeout))


def runner_for(transport: Transport) -> Runner:
    """Return the executor of programs that goes with ``transport``."""
    if isinstance(transport, SharedMemoryTransport):
        return CompiledRunner(transport)
    assert isinstance(transport, MessageTransport)
    return MessageRunner(transport)
