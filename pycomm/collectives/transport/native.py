"""What transports in C++ have in common: the methods of csrc/transport/group.h, bound once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import pycomm._native as _native
from pycomm.collectives.recorder import Recorder
from pycomm.collectives.transport.base import buffer_limit

if TYPE_CHECKING:
    from pycomm.schedule.program import Program


class NativeTransport:
    """Transport with the operations of ``group``."""

    interruptible = True
    recorder: Recorder

    def __init__(self, group: _native.Group, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._bound = group
        group.buffer_limit = buffer_limit()
        # Bound once: these are on the path of every small collective.
        self.all_reduce = group.all_reduce
        self.reduce_scatter = group.reduce_scatter
        self.all_gather = group.all_gather
        self.all_to_all = group.all_to_all
        self.reduce = group.reduce
        self.all_to_all_v = group.all_to_all_v
        self.all_gather_v = group.all_gather_v
        self.reduce_scatter_v = group.reduce_scatter_v
        self.broadcast = group.broadcast
        self.barrier = group.barrier
        self.send = group.send
        self.receive = group.post_receive
        self.refuse = group.refuse
        self.close = group.close
        self._compiled: WeakKeyDictionary[Program, _native.Program] = WeakKeyDictionary()

    @property
    def buffer_limit(self) -> int:
        return self._bound.buffer_limit

    @buffer_limit.setter
    def buffer_limit(self, num_bytes: int) -> None:
        self._bound.buffer_limit = num_bytes

    @property
    def buffered_bytes(self) -> int:
        """Number of bytes of messages that were sent and not yet received."""
        return self._bound.buffered_bytes

    def run_program(self, program: Program, x: Any, op: str, timeout: float) -> None:
        if program not in self._compiled:
            name = program.name.encode("ascii", "replace").decode()  # for errors; not all text is UTF-8
            words = (program.words(), program.rank, program.num_ranks, name, program.digest)
            self._compiled[program] = _native.Program(*words)
        self._bound.run(self._compiled[program], x, op, timeout)
