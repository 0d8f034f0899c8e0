"""Private process group of torch.distributed: its operations, its messages, and their failures.

Operations of one group must be called in the same order on all ranks. A communicator works on a thread of its own, so
in the user's group its operations would interleave with others, and hang or, over Gloo, abort the process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pycomm.collectives.transport.own_group import PYCOMM, Place
from pycomm.errors import CommError
from pycomm.torch_internals import make_process_group, number_process_group, owns_process_group

T = TypeVar("T")


class TorchGroup:
    """Owner of a private process group, which it destroys when it is closed, and after a failure.

    After a failure, every further use raises an error that names the first failure.

    Attributes:
        rank, size: rank of this process, and number of ranks.
        is_gloo: whether its messages go over Gloo.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._own: dist.ProcessGroup | None = group
        self._pid = os.getpid()
        self._closed = False
        self._broken = ""  # the reason, once an operation has failed
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
            raise self._error(f"this communicator is broken since an earlier failure ({self._broken})")
        assert self._own is not None  # torch would take None for the default group
        return self._own

    def works(self) -> bool:
        """Return whether operations are still possible."""
        return not (self._closed or self._broken) and os.getpid() == self._pid

    def run(self, operation: str, timeout: float, start: Callable[[dist.ProcessGroup], Any]) -> None:
        """Wait for the work that ``start`` begins in the group, for at most ``timeout`` seconds.

        Raises:
            CommError: the ``operation`` failed.
        """
        self.wait(operation, self._begin(operation, None, start), timeout)

    # Messages by the group's own methods: the checks of torch.distributed's functions take longer than a small message.
    # As bytes, because not every backend supports every dtype.

    def begin_send(self, peer: int, tensor: torch.Tensor, operation: str, tag: int = 0) -> Any:
        """Begin to send ``tensor`` to ``peer``; return the work."""
        return self._begin(operation, peer, lambda group: group.send([tensor.view(torch.uint8)], peer, tag))

    def begin_receive(self, peer: int | None, tensor: torch.Tensor, operation: str, tag: int = 0) -> Any:
        """Begin to receive ``tensor`` from ``peer``, or from any rank; return the work."""
        tensors = [tensor.view(torch.uint8)]
        if peer is None:
            return self._begin(operation, None, lambda group: group.recv_anysource(tensors, tag))
        return self._begin(operation, peer, lambda group: group.recv(tensors, peer, tag))

    def wait(
        self, operation: str, work: Any, timeout: float, peer: int | None = None, since: float | None = None
    ) -> None:
        """Wait for ``work`` of ``operation`` for at most ``timeout`` seconds; raise CommError if it fails.

        ``since``: when the wait has begun, on the monotonic clock, if that was not now.
        """
        start = time.monotonic() if since is None else since
        problem = _problem_of(lambda: work.wait(timedelta(seconds=timeout)))
        if isinstance(problem, RuntimeError):
            del work  # it would keep connections open that other ranks wait on, as long as somebody keeps the error
            raise self.fail(operation, peer, f"torch.distributed: {problem}", time.monotonic() - start)

    def _begin(self, operation: str, peer: int | None, start: Callable[[dist.ProcessGroup], T]) -> T:
        group = self.group
        begun = _problem_of(lambda: start(group))
        if isinstance(begun, RuntimeError):
            del group
            raise self.fail(operation, peer, f"torch.distributed: {begun}", 0.0)
        return begun

    def fail(self, operation: str, peer: int | None, what: str, elapsed: float) -> CommError:
        """Mark the group as broken, destroy it, so that ranks that wait for this one notice; return the error."""
        if self._closed:
            what = "the communicator was closed meanwhile"
        error = self._error(f"{what} after {elapsed:.2f} s", operation, peer, elapsed)
        self._broken = self._broken or str(error)
        self._sever()
        return error

    def close(self) -> None:
        """Destroy the group."""
        self._closed = True
        self._sever()

    def _sever(self) -> None:
        # Its connections close with the last reference to it.
        group, self._own = self._own, None
        if group is not None and os.getpid() == self._pid:
            destroy_group(group)

    def _error(self, what: str, operation: str = "use", peer: int | None = None, elapsed: float = 0.0) -> CommError:
        return CommError.during(operation, what, rank=self.rank, peer=peer, elapsed=elapsed)


def _problem_of(call: Callable[[], T]) -> T | RuntimeError:
    """Return what ``call`` returns; of an error of torch its text alone, as its traceback holds works and groups."""
    try:
        return call()
    except RuntimeError as error:
        return RuntimeError(str(error))


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
