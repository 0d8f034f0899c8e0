"""Private process group of torch.distributed: messages, waits, and the search for the rank that caused a failure."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pycomm.errors import CommError
from pycomm.transport.base import Message
from pycomm.transport.own_group import destroy_group
from pycomm.transport.roll_call import RollCall

T = TypeVar("T")

# Newer releases of torch renamed it, and warn about the old name.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# Up to this many ranks and bytes per rank, messages go directly to every rank. Over Gloo that takes at most half as
# long as its ring, since each step of a ring waits for a process to wake up.
DIRECT_RANKS = 16
_DIRECT_BYTES = 256 << 10


class TorchGroup:
    """Owner of a process group that nobody else uses, and which it destroys when it is closed.

    After a failure, every further use raises an error that names the first failure.

    Attributes:
        rank, size: rank of this process, and number of ranks.
        begun, finished: numbers of operations begun and finished; all ranks count alike.
        on_failure: called once, with the reason, when an operation has failed and the other ranks have been told.
    """

    def __init__(self, group: dist.ProcessGroup, roll_call: RollCall) -> None:
        self._own: dist.ProcessGroup | None = group
        self._roll_call = roll_call
        self._pid = os.getpid()
        self._closed = False
        self._broken = ""  # the reason, once an operation has failed
        self._broken_by: int | None = None
        self.on_failure: Callable[[str], None] | None = None
        self.begun = self.finished = 0
        self.rank = group.rank()
        self.size = group.size()

    @property
    def group(self) -> dist.ProcessGroup:
        """Process group to use.

        Raises:
            CommError: it is closed, broken, or was inherited by a fork.
        """
        if os.getpid() != self._pid:
            raise self._error(
                f"this communicator belongs to process {self._pid} and was inherited by a fork; make one in the new "
                "process"
            )
        if self._closed:
            raise self._error("this communicator is closed")
        if self._broken:
            what = f"this communicator is broken since an earlier failure ({self._broken})"
            raise self._error(what, peer=self._broken_by)
        assert self._own is not None  # torch would take None for the default group
        return self._own

    def works(self) -> bool:
        """Return whether operations are possible still."""
        return not (self._closed or self._broken) and os.getpid() == self._pid

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], timeout: float, operation: str = "all_reduce"
    ) -> None:
        """Send and receive messages; the interface is :class:`pycomm.transport.messages.Messenger`."""
        # As bytes, because not every backend supports every dtype.
        group = self.group

        def start(way: Callable[..., Any], peer: int, tensor: torch.Tensor) -> Any:
            return lambda: way(tensor.view(torch.uint8), dist.get_global_rank(group, peer), group)

        messages = [(peer, start(dist.irecv, peer, t)) for peer, t in receives]
        messages += [(peer, start(dist.isend, peer, t)) for peer, t in sends]
        works = [(peer, self.begin(operation, begin, peer)) for peer, begin in messages]
        for peer, work in works:
            self.wait(operation, work, timeout, peer)

    def gather(self, operation: str, out: torch.Tensor, x: torch.Tensor, timeout: float) -> None:
        """Write the ``x`` of all ranks into ``out`` in rank order; both are flat."""
        if self.size > DIRECT_RANKS or x.nbytes > _DIRECT_BYTES:
            group = self.group
            work = self.begin(operation, lambda: _all_gather(out, x, group=group, async_op=True))
            self.wait(operation, work, timeout)
            return
        by_rank = out.view(self.size, -1)
        by_rank[self.rank].copy_(x)
        if x.numel() > 0:
            peers = [p for p in range(self.size) if p != self.rank]
            self.exchange([(p, x) for p in peers], [(p, by_rank[p]) for p in peers], timeout, operation)

    def wait(self, operation: str, work: Any, timeout: float, peer: int | None = None) -> None:
        """Wait for ``work`` of ``operation`` for at most ``timeout`` seconds; raise CommError if it fails."""
        start = time.monotonic()
        try:
            work.wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            raise self.fail_with_culprit(operation, peer, error, time.monotonic() - start) from error

    def begin(self, operation: str, start: Callable[[], T], peer: int | None = None) -> T:
        """Return the result of ``start``, which begins a part of ``operation``; raise CommError if it fails."""
        try:
            return start()
        except RuntimeError as error:
            raise self.fail_with_culprit(operation, peer, error, 0.0) from error

    def fail_with_culprit(self, operation: str, peer: int | None, error: Exception, elapsed: float) -> CommError:
        """Mark the group as broken by the rank that caused ``error``, possibly ``peer``; return the error to raise."""
        culprit, what = self._roll_call.culprit(peer, self.begun)
        where = "shared memory" if isinstance(error, CommError) else "torch.distributed"
        return self.fail(operation, culprit, f"{what or 'failed'}; {where}: {error}", elapsed)

    def fail(self, operation: str, peer: int | None, what: str, elapsed: float) -> CommError:
        """Mark the group as broken, tell the other ranks, and return the error to raise."""
        error = self._error(f"{what} after {elapsed:.2f} s", operation, peer, elapsed)
        first = not self._broken
        if first:
            self._broken, self._broken_by = str(error), peer
        self._roll_call.leave(peer, str(error), self.finished)
        if first and self.on_failure is not None:
            self.on_failure(str(error))
        return error

    def note_refusal(self, reason: str) -> None:
        """Note why this rank cannot take part in the present operation, for :meth:`refusal_of` on the others."""
        self._roll_call.refuse(reason, self.begun)

    def refusal_of(self, rank: int) -> str:
        """Return why ``rank`` cannot take part in the present operation; "" if it is not known."""
        return self._roll_call.refusal_of(rank, self.begun)

    def sever(self) -> None:
        """Close the connections of a broken group, so that ranks that wait for this one notice."""
        group, self._own = self._own, None
        if group is not None:
            destroy_group(group)

    def close(self, reason: str) -> None:
        """Destroy the group, and tell ranks that still wait for this one the ``reason``."""
        # Its connections close with the last reference to it, which makes peers notice.
        if not self._closed:
            self._closed = True
            self._roll_call.leave(self.rank, f"rank {self.rank}: {reason}", self.finished)
            self.sever()

    def _error(self, what: str, operation: str = "use", peer: int | None = None, elapsed: float = 0.0) -> CommError:
        return CommError.during(operation, what, rank=self.rank, peer=peer, elapsed=elapsed)
