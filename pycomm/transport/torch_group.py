"""A process group of torch.distributed that nobody else uses: messages, waits, and who is to blame."""

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

# Newer releases have another name for it, and warn of the old one.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# So few ranks, and so few bytes of each, go straight to everybody: over Gloo that takes half as long as its ring, or
# less, since each step of a ring waits for a process to be woken.
DIRECT_RANKS = 16
_DIRECT_BYTES = 256 << 10


class TorchGroup:
    """Owner of ``group``, which is destroyed with it.

    After a failure every use is an error that says what failed first.

    Attributes:
        rank, size: of this process, and how many there are.
        begun, finished: how many operations have been; all ranks count alike.
    """

    def __init__(self, group: dist.ProcessGroup, roll_call: RollCall) -> None:
        self._own: dist.ProcessGroup | None = group
        self._roll_call = roll_call
        self._pid = os.getpid()
        self._broken = ""  # why, once an operation failed
        self._broken_by: int | None = None
        self.begun = self.finished = 0
        self.rank = group.rank()
        self.size = group.size()

    @property
    def group(self) -> dist.ProcessGroup:
        """The group; CommError once it is closed, broken, or inherited by a fork."""
        if os.getpid() != self._pid:
            raise self._error(
                f"this communicator belongs to process {self._pid} and was inherited by a fork; make one in the new "
                "process"
            )
        if self._own is None:  # which torch would take for the default group
            raise self._error("this communicator is closed")
        if self._broken:
            what = f"this communicator is broken since an earlier failure ({self._broken})"
            raise self._error(what, peer=self._broken_by)
        return self._own

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], timeout: float, operation: str = "all_reduce"
    ) -> None:
        """See :class:`pycomm.execute.messages.Messenger`."""
        # As bytes: not every backend knows every type.
        group = self.group

        def start(way: Callable[..., Any], peer: int, tensor: torch.Tensor) -> Any:
            return lambda: way(tensor.view(torch.uint8), dist.get_global_rank(group, peer), group)

        messages = [(peer, start(dist.irecv, peer, t)) for peer, t in receives]
        messages += [(peer, start(dist.isend, peer, t)) for peer, t in sends]
        works = [(peer, self.begin(operation, begin, peer)) for peer, begin in messages]
        for peer, work in works:
            self.wait(operation, work, timeout, peer)

    def gather(self, operation: str, out: torch.Tensor, x: torch.Tensor, timeout: float) -> None:
        """Write the ``x`` of all ranks into ``out``, both flat."""
        if self.size > DIRECT_RANKS or x.nbytes > _DIRECT_BYTES:
            group = self.group
            work = self.begin(operation, lambda: _all_gather(out, x, group=group, async_op=True))
            self.wait(operation, work, timeout)
            return
        everyones = out.view(self.size, -1)
        everyones[self.rank].copy_(x)
        if x.numel() > 0:
            peers = [p for p in range(self.size) if p != self.rank]
            self.exchange([(p, x) for p in peers], [(p, everyones[p]) for p in peers], timeout, operation)

    def wait(self, operation: str, work: Any, timeout: float, peer: int | None = None) -> None:
        start = time.monotonic()
        try:
            work.wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            raise self._look_for_culprit(operation, peer, error, time.monotonic() - start) from error

    def begin(self, operation: str, start: Callable[[], T], peer: int | None = None) -> T:
        try:
            return start()
        except RuntimeError as error:
            raise self._look_for_culprit(operation, peer, error, 0.0) from error

    def _look_for_culprit(self, operation: str, peer: int | None, error: Exception, elapsed: float) -> CommError:
        culprit, what = self._roll_call.culprit(peer, self.begun)
        return self.fail(operation, culprit, f"{what or 'failed'}; torch.distributed: {error}", elapsed)

    def fail(self, operation: str, peer: int | None, what: str, elapsed: float) -> CommError:
        error = self._error(f"{what} after {elapsed:.2f} s", operation, peer, elapsed)
        if not self._broken:
            self._broken, self._broken_by = str(error), peer
        self._roll_call.leave(peer, str(error), self.finished)
        return error

    def close(self, reason: str) -> None:
        # With the last reference to it go its connections, which is how peers notice.
        group, self._own = self._own, None
        if group is not None:
            self._roll_call.leave(self.rank, f"rank {self.rank}: {reason}", self.finished)
            destroy_group(group)

    def _error(self, what: str, operation: str = "use", peer: int | None = None, elapsed: float = 0.0) -> CommError:
        return CommError.during(operation, what, rank=self.rank, peer=peer, elapsed=elapsed)
