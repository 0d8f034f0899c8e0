"""Executors of programs on arrays in CPU memory, one for each kind of transport."""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakKeyDictionary

import pycomm._native as _native
from pycomm.execute.messages import run_program
from pycomm.schedule.program import Program
from pycomm.transport.base import Transport
from pycomm.transport.shared_memory import SharedMemoryTransport
from pycomm.transport.torch_distributed import TorchTransport


class Runner(Protocol):
    """Executor of programs over one transport."""

    def run(self, program: Program, x: Any, op: str, timeout: float) -> None:
        """All-reduce ``x`` by this rank's part of a schedule that all ranks have.

        Raises:
            ValueError, TypeError: on every rank: an argument is wrong on some rank, or ranks differ.
            CommError: as from any collective.
        """


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
    """Executor that goes round by round through the sends and receives of torch.distributed."""

    def __init__(self, transport: TorchTransport) -> None:
        self._transport = transport

    def run(self, program: Program, x: Any, op: str, timeout: float) -> None:
        """See :class:`Runner`."""
        transport = self._transport
        transport.run_schedule(program, x, op, timeout, lambda flat: run_program(program, flat, op, transport, timeout))


def runner_for(transport: Transport) -> Runner:
    """Return the executor of programs that goes with ``transport``."""
    if isinstance(transport, SharedMemoryTransport):
        return CompiledRunner(transport)
    assert isinstance(transport, TorchTransport)
    return MessageRunner(transport)
