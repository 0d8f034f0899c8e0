"""Collectives of torch.distributed, by the user's own backend, for ranks that are not all on one host.

Before every operation the ranks all-gather 56 bytes each that describe it, so that a disagreement is an error, not a
hang. An all-reduce that begins with messages does not wait for that: two ranks that have announced the same exchange
their first messages while others are still to come.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist

import pycomm._native as _native
from pycomm import checks, kernels
from pycomm.agreement import prepared
from pycomm.collectives.recorder import Recorder
from pycomm.collectives.transport.announcements import OperationComparison, agree_on_lengths
from pycomm.collectives.transport.base import AllReduceApart, OwnShare, ReduceScatterApart
from pycomm.collectives.transport.failure_notes import FailureNotes
from pycomm.collectives.transport.host_tensors import (
    contributions,
    pair_for,
    parts_apart,
    rank_of,
    reducible,
    require,
    tensor_of,
)
from pycomm.collectives.transport.messages import run_program
from pycomm.collectives.transport.torch_collectives import TorchCollectives, messages
from pycomm.collectives.transport.torch_group import TorchGroup
from pycomm.collectives.transport.torch_messages import TorchMessages
from pycomm.errors import CommError
from pycomm.schedule.program import Program

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., None])

_WORD_BYTES = 8  # of an array that travels with the announcements


def counted(operation: F) -> F:
    """Count calls of ``operation``; one also counts as finished if it raises the same error on all ranks."""

    @functools.wraps(operation)
    def count(self: TorchTransport, *args: Any) -> None:
        self._group.begun += 1
        try:
            operation(self, *args)
        except CommError as error:
            _forget_frames(error)
            raise
        except Exception:
            self._group.finished = self._group.begun
            raise
        self._group.finished = self._group.begun

    return cast(F, count)


def _forget_frames(error: BaseException) -> None:
    """Drop the objects in the frames behind ``error``: a work would keep connections open that other ranks wait on.

    A cleared frame of a nested function still refers to the outer one's variables, so causes, such as torch's errors,
    lose their tracebacks.
    """
    traceback.clear_frames(error.__traceback__)
    cause = error.__cause__ or error.__context__
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__


class TorchTransport:
    """Transport over a ``group`` of its own, which it destroys. It checks and compares operations.

    :class:`TorchCollectives` then runs them.

    Args:
        group: all ranks.
        failure_notes: finds the rank to blame for a failure.
    """

    interruptible = False
    recorder: Recorder
    own_share: OwnShare | None = None
    all_reduce_apart: AllReduceApart | None = None
    reduce_scatter_apart: ReduceScatterApart | None = None

    def __init__(self, group: dist.ProcessGroup, failure_notes: FailureNotes) -> None:
        self.skip_checks: bool | Literal["after the next"] = False
        self._group = TorchGroup(group, failure_notes)
        self.rank, self.size = self._group.rank, self._group.size
        self._over = over = TorchCollectives(self._group)
        self.name, self.hosts, self.host_memory = over.name, over.hosts, over.host_memory
        self.empty, self.give_up_stopped_after = over.empty, over.give_up_stopped_after
        self._messages = TorchMessages(self._group)
        self.send, self.receive = self._messages.send, self._messages.receive
        self.hand_over = self._messages.hand_over

    @property
    def buffer_limit(self) -> int:
        return self._messages.buffer_limit

    @buffer_limit.setter
    def buffer_limit(self, num_bytes: int) -> None:
        checks.integer("buffer_limit", num_bytes, 0)
        self._messages.buffer_limit = num_bytes

    @property
    def buffered_bytes(self) -> int:
        """Number of bytes of messages that were sent and not yet acknowledged."""
        return self._messages.buffered_bytes

    # Reductions.

    @counted
    def all_reduce(self, x: Any, op: str, timeout: float) -> None:
        tensor = self._checked(timeout, lambda: reducible("x", x, op, writes=True))
        if 0 < tensor.nbytes <= _WORD_BYTES and self.skip_checks is not True:
            self._reduce_words(tensor, op, timeout)
            return
        reduced = tensor.float() if _widens(tensor, op) else tensor
        with self._agreeing("all_reduce", tensor, op, timeout, meanwhile=self._over.begins_with_messages(reduced)):
            self._over.all_reduce(reduced, op, timeout)
        if reduced is not tensor:
            tensor.copy_(reduced)

    def _reduce_words(self, tensor: torch.Tensor, op: str, timeout: float) -> None:
        """Reduce ``tensor``, which is so small that the announcements carry it."""
        word = torch.zeros(1, dtype=torch.int64)
        mine = word.view(tensor.dtype)[: len(tensor)]
        mine.copy_(tensor)
        words = torch.tensor(self._agree("all_reduce", tensor, op, 0, timeout, word=int(word)), dtype=torch.int64)
        kernels.reduce(tensor, [word.view(tensor.dtype)[: len(tensor)] for word in torch.split(words, 1)], op)

    @counted
    def run_program(self, program: Program, x: Any, op: str, timeout: float) -> None:
        def check() -> torch.Tensor:
            wanted = f"wanted one for rank {self.rank} of {self.size}"
            mine = (program.rank, program.num_ranks) == (self.rank, self.size)
            require(mine, f"the program is for rank {program.rank} of {program.num_ranks}, {wanted}")
            return reducible("x", x, op, writes=True)

        tensor = self._checked(timeout, check)
        self._agree("schedule", tensor, op, program.digest >> 1, timeout)  # 63 bits
        run_program(program, tensor, op, self._group, timeout)

    @counted
    def reduce(self, x: Any, dst: int, op: str, timeout: float) -> None:
        tensor, root = self._checked(
            timeout, lambda: (reducible("x", x, op, writes=True), rank_of(dst, "dst", self.size))
        )
        self._agree("reduce", tensor, op, root, timeout)
        if tensor.numel() > 0:
            self._over.reduce(tensor, root, op, timeout)

    @counted
    def reduce_scatter(self, out: Any, x: Any, op: str, timeout: float) -> None:
        pair = self._checked(timeout, lambda: pair_for("reduce_scatter", out, x, self.rank, self.size, (op,)))
        target, source = pair.out, pair.x
        self._agree("reduce_scatter", source, op, 0, timeout)
        if target.numel() == 0:
            return
        if _widens(target, op):
            result = torch.empty(target.shape, dtype=torch.float32)
            self._over.reduce_scatter(result, source.float(), op, timeout)
            target.copy_(result)
        else:
            self._over.reduce_scatter(target, source, op, timeout)

    @counted
    def reduce_scatter_v(self, out: Any, xs: Sequence[Any], op: str, timeout: float) -> None:
        target, sources = self._checked(timeout, lambda: contributions(out, xs, op, self.rank, self.size))
        receives = [target.nbytes] * self.size
        self._agree_on_parts("reduce_scatter_v", sources, receives, timeout, target.dtype, op)
        self._over.reduce_scatter_v(target, sources, op, timeout)

    # Movements.

    @counted
    def all_gather(self, out: Any, x: Any, timeout: float) -> None:
        pair = self._checked(timeout, lambda: pair_for("all_gather", out, x, self.rank, self.size))
        self._agree("all_gather", pair.x, "sum", 0, timeout, pair.tag)
        self._over.all_gather(pair.out.view(torch.uint8), pair.x.view(torch.uint8), timeout)

    @counted
    def all_gather_v(self, outs: Sequence[Any], x: Any, timeout: float) -> None:
        targets, sources = self._checked(timeout, lambda: parts_apart(outs, [x] * self.size, self.rank, self.size))
        self._agree_on_parts("all_gather_v", sources, [out.nbytes for out in targets], timeout)
        self._over.all_gather_v(targets, sources[self.rank], timeout)

    @counted
    def all_to_all(self, out: Any, x: Any, timeout: float) -> None:
        pair = self._checked(timeout, lambda: pair_for("all_to_all", out, x, self.rank, self.size))
        self._agree("all_to_all", pair.x, "sum", 0, timeout, pair.tag)
        if pair.x.numel() > 0:
            targets, sources = (list(array.view(self.size, -1)) for array in (pair.out, pair.x))
            self._exchange("all_to_all", targets, sources, timeout)

    @counted
    def all_to_all_v(self, outs: Sequence[Any], xs: Sequence[Any], timeout: float) -> None:
        targets, sources = self._checked(timeout, lambda: parts_apart(outs, xs, self.rank, self.size))
        self._agree_on_parts("all_to_all_v", sources, [out.nbytes for out in targets], timeout)
        self._exchange("all_to_all_v", targets, sources, timeout)

    def _exchange(
        self, kind: str, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], timeout: float
    ) -> None:
        """Send ``sources[p]`` to every rank p, and receive ``targets[p]`` from it."""
        if targets[self.rank].data_ptr() != sources[self.rank].data_ptr():
            targets[self.rank].copy_(sources[self.rank])
        self._group.exchange(messages(sources, self.rank), messages(targets, self.rank), timeout, kind)

    @counted
    def broadcast(self, x: Any, src: int, timeout: float) -> None:
        array, source = self._checked(
            timeout, lambda: (_native.HostArray(x, "x", True, True), rank_of(src, "src", self.size))
        )
        tensor = tensor_of(array)
        self._agree("broadcast", tensor, "sum", source, timeout, array.tag)
        self._over.broadcast(tensor.view(torch.uint8), source, timeout)

    @counted
    def barrier(self, timeout: float) -> None:
        self._agree("barrier", torch.empty(0), "sum", 0, timeout)

    # Comparisons, and the end.

    @counted
    def refuse(self, reason: str, timeout: float) -> None:
        self._group.note_refusal(reason)
        self._agree("refused", torch.empty(0), "sum", 0, timeout)

    def close(self, reason: str) -> None:
        self._group.close(reason)  # first: it writes the note with the reason
        self._over.close(reason)

    def _agree(
        self, kind: str, x: torch.Tensor, op: str, root: int, timeout: float, tag: int = 0, word: int = 0
    ) -> list[int]:
        """Compare the ranks' operations and return every rank's ``word``; return nothing if checks are skipped."""
        if self.skip_checks is True and kind != "barrier":  # a barrier is nothing but the comparison
            return []
        announcements = OperationComparison(self._group, kind, x, op, root, timeout, tag, word)
        if self.skip_checks:
            self.skip_checks = True
        return announcements.finish()

    @contextlib.contextmanager
    def _agreeing(self, kind: str, x: torch.Tensor, op: str, timeout: float, *, meanwhile: bool) -> Iterator[None]:
        """Compare the ranks' operations before the one inside, or ``meanwhile``, if that begins with messages.

        These need not wait for the slowest rank: each goes once its two ranks have announced the same operation.
        """
        if self.skip_checks is True or not meanwhile:
            self._agree(kind, x, op, 0, timeout)
            yield
            return
        self._group.comparison = OperationComparison(self._group, kind, x, op, 0, timeout)
        if self.skip_checks:
            self.skip_checks = True
        try:
            yield
        finally:
            self._group.settle()  # where no message was needed, or no memory left for it

    def _agree_on_parts(
        self,
        kind: str,
        sends: Sequence[torch.Tensor],
        receives: Sequence[int],
        timeout: float,
        dtype: torch.dtype = torch.uint8,
        op: str = "sum",
    ) -> None:
        self._agree(kind, torch.empty(0, dtype=dtype), op, 0, timeout)
        if not self.skip_checks:
            agree_on_lengths(self._group, kind, sends, receives, timeout)

    def _checked(self, timeout: float, check: Callable[[], T]) -> T:
        """Return the result of ``check``; if it raises, refuse the operation first."""
        return prepared(check, lambda _: self._agree("refused", torch.empty(0), "sum", 0, timeout))


def _widens(x: torch.Tensor, op: str) -> bool:
    """Return whether ``x`` is reduced in float32: the sum may not fit the half type although the mean does."""
    return op == "mean" and x.dtype in (torch.float16, torch.bfloat16)
