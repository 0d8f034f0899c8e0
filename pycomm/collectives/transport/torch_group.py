"""Private process group of torch.distributed: messages, waits, and the search for the rank that caused a failure.

Operations of one group must be called in the same order on all ranks. A communicator works on a thread of its own, so
in the user's group its operations would interleave with others, and hang or, over Gloo, abort the process.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from pycomm.collectives.transport.base import Message
from pycomm.collectives.transport.failure_notes import FailureNotes
from pycomm.collectives.transport.own_group import PYCOMM, Place
from pycomm.errors import CommError
from pycomm.torch_internals import (
    all_gather_single,
    make_process_group,
    number_process_group,
    owns_process_group,
)

T = TypeVar("T")

# Up to this many ranks and bytes per rank, messages go directly to every rank. Over Gloo that takes at most half as
# long as its ring, each step of which waits for a process to wake up.
DIRECT_RANKS = 16
_DIRECT_BYTES = 256 << 10
_MESSAGES = ("send", "recv")  # not counted, as ranks send different numbers of them
NUM_FREE_TAGS = 64
"""Number of the largest tags that no message uses."""
_FIRST_FREE_TAG = 2**31 - NUM_FREE_TAGS


class Comparison(Protocol):
    """Comparison of what the ranks do next, under way."""

    def agrees_with(self, rank: int) -> bool:
        """Wait for what ``rank`` does; return whether it is the same as here."""

    def finish(self) -> object:
        """Wait for what all ranks do; raise ValueError if they disagree."""


class TorchGroup:
    """Owner of a private process group, which it destroys when it is closed.

    After a failure, every further use raises an error that names the first failure.

    Attributes:
        rank, size: rank of this process, and number of ranks.
        is_gloo: whether its messages go over Gloo.
        comparison: comparison of the ranks' present operation, if it lasts while that operation begins.
        begun, finished: numbers of operations begun and finished; the same on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup, failure_notes: FailureNotes) -> None:
        self._own: dist.ProcessGroup | None = group
        self._failure_notes = failure_notes
        self._pid = os.getpid()
        self._closed = False
        self._broken = ""  # the reason, once an operation has failed
        self._broken_by: int | None = None
        self._waits: list[Any] = []  # works for which threads wait
        self.comparison: Comparison | None = None
        self.begun = self.finished = 0
        self.rank = group.rank()
        self.size = group.size()
        self.is_gloo = dist.get_backend(group) == dist.Backend.GLOO

    @property
    def group(self) -> dist.ProcessGroup:
        """Process group to use."""
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
        """Return whether operations are still possible."""
        return not (self._closed or self._broken) and os.getpid() == self._pid

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], timeout: float, operation: str = "all_reduce"
    ) -> None:
        """Send and receive messages; the interface is :class:`pycomm.collectives.transport.messages.Messenger`.

        A rank sends to one peer after the other, to the next rank first. So no rank receives from several at once,
        which would fill its link's queue, and leave others' links idle when the last of them catches up.

        While :attr:`comparison` lasts, messages go only between ranks that have announced the same operation. It ends
        here: a disagreement is raised once those messages are done, so that none is left for the next operation.
        """
        comparison, self.comparison = self.comparison, None

        def receive_of(rank: int | None) -> list[tuple[int, Any]]:
            return [(p, self.begin_receive(p, x, operation)) for p, x in receives if rank is None or p == rank]

        # All receives first, so that partners exchange in both directions at once.
        works = receive_of(None) if comparison is None else []
        for distance in range(1, self.size):
            source, target = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            if comparison is not None and comparison.agrees_with(source):
                works += receive_of(source)
            if comparison is None or comparison.agrees_with(target):
                sent = [self.begin_send(target, x, operation) for p, x in sends if p == target]
                for work in sent:
                    self.wait(operation, work, timeout, target)
        for peer, work in works:
            self.wait(operation, work, timeout, peer)
        if comparison is not None:
            comparison.finish()

    def settle(self) -> None:
        """End :attr:`comparison`, if there is one; raise ValueError if the ranks disagree."""
        comparison, self.comparison = self.comparison, None
        if comparison is not None:
            comparison.finish()

    # Messages by the group's own methods: the checks of torch.distributed's functions take longer than a small message.
    # As bytes, because not every backend supports every dtype.

    def begin_send(self, peer: int, tensor: torch.Tensor, operation: str, tag: int = 0) -> Any:
        """Begin to send ``tensor`` to ``peer``; return the work."""
        group = self.group
        return self.begin(operation, lambda: group.send([tensor.view(torch.uint8)], peer, tag), peer)

    def begin_receive(self, peer: int | None, tensor: torch.Tensor, operation: str, tag: int = 0) -> Any:
        """Begin to receive ``tensor`` from ``peer``, or from any rank; return the work."""
        group, tensors = self.group, [tensor.view(torch.uint8)]
        if peer is None:
            return self.begin(operation, lambda: group.recv_anysource(tensors, tag))
        return self.begin(operation, lambda: group.recv(tensors, peer, tag), peer)

    def gather(self, operation: str, out: torch.Tensor, x: torch.Tensor, timeout: float) -> None:
        """Write the ``x`` of all ranks into ``out`` in rank order; both are flat."""
        if self.size > DIRECT_RANKS or x.nbytes > _DIRECT_BYTES:
            group = self.group
            work = self.begin(operation, lambda: all_gather_single(out, x, group=group, async_op=True))
            self.wait(operation, work, timeout)
            return
        by_rank = out.view(self.size, -1)
        by_rank[self.rank].copy_(x)
        if x.numel() > 0:
            peers = [p for p in range(self.size) if p != self.rank]
            self.exchange([(p, x) for p in peers], [(p, by_rank[p]) for p in peers], timeout, operation)

    def wait(
        self, operation: str, work: Any, timeout: float, peer: int | None = None, since: float | None = None
    ) -> None:
        """Wait for ``work`` of ``operation`` for at most ``timeout`` seconds; raise CommError if it fails.

        ``since``: when the wait has begun, on the monotonic clock, if that was not now.
        """
        start = time.monotonic() if since is None else since
        try:
            self._wait_until_closed(work, timeout)
        except RuntimeError as error:
            raise self.fail_with_culprit(operation, peer, error, time.monotonic() - start) from None

    def _wait_until_closed(self, work: Any, timeout: float) -> None:
        self._waits.append(work)
        try:
            if self._own is None:  # sever() on another thread may have missed this wait
                raise RuntimeError("the connections were closed")
            work.wait(timedelta(seconds=timeout))
        finally:
            self._waits.remove(work)

    def begin(self, operation: str, start: Callable[[], T], peer: int | None = None) -> T:
        """Return the result of ``start``, which begins a part of ``operation``; raise CommError if it fails."""
        try:
            return start()
        except RuntimeError as error:
            raise self.fail_with_culprit(operation, peer, error, 0.0) from None

    def fail_with_culprit(self, operation: str, peer: int | None, error: Exception, elapsed: float) -> CommError:
        """Mark the group as broken by the rank that caused ``error``, possibly ``peer``; return the error to raise."""
        if self._closed:
            what = f"the communicator was closed meanwhile, after {elapsed:.2f} s"
            return self._error(what, operation, peer, elapsed)
        find = self._failure_notes.culprit_of_message if operation in _MESSAGES else self._failure_notes.culprit
        culprit, what = find(peer, self.begun)
        return self.fail(operation, culprit, f"{what or 'failed'}; torch.distributed: {error}", elapsed)

    def fail(self, operation: str, peer: int | None, what: str, elapsed: float) -> CommError:
        """Mark the group as broken, note that for the other ranks, and return the error to raise."""
        error = self._error(f"{what} after {elapsed:.2f} s", operation, peer, elapsed)
        if not self._broken:
            self._broken, self._broken_by = str(error), peer
        self._failure_notes.leave(peer, str(error), self.finished)
        return error

    def note_refusal(self, reason: str) -> None:
        """Note why this rank cannot take part in the present operation, for :meth:`refusal_of` on the others."""
        self._failure_notes.refuse(reason, self.begun)

    def refusal_of(self, rank: int) -> str:
        """Return why ``rank`` cannot take part in the present operation; "" if it is not known."""
        return self._failure_notes.refusal_of(rank, self.begun)

    def sever(self) -> None:
        """Close the connections, so that ranks that wait for this one notice; end the waits of other threads."""
        group, self._own = self._own, None
        if group is not None:
            if self._waits and self.is_gloo:
                self._end_waits(group)
            destroy_group(group)

    def _end_waits(self, group: dist.ProcessGroup) -> None:
        """Make all waits in ``group`` fail: torch's ``abort()`` does nothing over Gloo.

        A receive that times out closes Gloo's connections, which ends all waits for them. A group has a set of
        connections for each interface; the tag of a message selects the set.
        """
        num_sets = os.environ.get("GLOO_SOCKET_IFNAME", "").count(",") + 1
        for tag in range(_FIRST_FREE_TAG, _FIRST_FREE_TAG + min(num_sets, NUM_FREE_TAGS)):
            with contextlib.suppress(RuntimeError):  # the timeout, or they are closed already
                group.recv([torch.empty(1)], 0 if self.rank > 0 else 1, tag).wait(timedelta(milliseconds=1))

    def close(self, reason: str) -> None:
        """Destroy the group, and note the ``reason`` for ranks that still wait for this one."""
        # Its connections close with the last reference to it, which makes peers notice.
        if not self._closed:
            self._closed = True
            self._failure_notes.leave(self.rank, f"rank {self.rank}: {reason}", self.finished)
            self.sever()

    def _error(self, what: str, operation: str = "use", peer: int | None = None, elapsed: float = 0.0) -> CommError:
        return CommError.during(operation, what, rank=self.rank, peer=peer, elapsed=elapsed)


def cpu_backend_of(place: Place) -> str:
    """Return the name of the backend for CPU tensors of a second group at ``place``."""
    names = dict(part.split(":", 1) for part in place.backends.split(",") if ":" in part)
    if "cpu" not in names:
        raise ValueError(
            f"process_group has no backend for CPU tensors, only {place.backends}: call "
            'init_process_group("cpu:gloo,cuda:nccl"), since the ranks first agree over the CPU on what they do'
        )
    if names["cpu"] == dist.Backend.MPI and place.size < dist.get_world_size():
        raise ValueError(
            "process_group is a sub-group over MPI, whose groups only all ranks together can make: pass a group of "
            "all ranks, or one over Gloo"
        )
    return dist.Backend.GLOO if names["cpu"] == PYCOMM else names["cpu"]


def own_group(place: Place, name: str, timeout: float) -> dist.ProcessGroup:
    """Make a group for CPU tensors with the ranks, rank order and backend of ``place``. Collective among its ranks.

    Args:
        place: where the ranks of the user's group meet.
        name: unique among all groups that these ranks will ever have.
        timeout: of its creation and of every operation, in seconds.

    Raises:
        ValueError: the backend can only make groups on all ranks together.
        CommError: a rank did not arrive in time, or could not be reached.
    """
    backend = cpu_backend_of(place)
    patience = min(timeout, place.patience)
    try:
        made = make_process_group(place.store, place.rank, place.ranks, backend, name, timeout, patience)
    except RuntimeError as error:
        what = f"a process group of pycomm's own could not be made: {error}"
        raise CommError.during("rendezvous", what, rank=place.rank, elapsed=patience) from None
    number_process_group(made, place.ranks)
    return made


def destroy_group(group: dist.ProcessGroup) -> None:
    """Destroy ``group``, unless ``destroy_process_group()`` has already destroyed all groups."""
    if owns_process_group(group):
        dist.destroy_process_group(group)
