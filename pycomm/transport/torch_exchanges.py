"""What operations over a process group of torch.distributed have in common, and those that are nothing but messages."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist

from pycomm import kernels
from pycomm.errors import CommError
from pycomm.recorder import Recorder
from pycomm.transport.announcements import agree
from pycomm.transport.base import AllReduceApart, HostMemory, OwnShare
from pycomm.transport.between_hosts import BetweenHosts
from pycomm.transport.host_tensors import apart, require
from pycomm.transport.parts import agree_on_lengths, contributions, messages, parts_apart
from pycomm.transport.roll_call import RollCall
from pycomm.transport.torch_group import TorchGroup
from pycomm.transport.torch_messages import BufferedMessages, TorchMessages

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., None])


def counted(operation: F) -> F:
    """Count calls of ``operation``; one also counts as finished if it raises the same error on all ranks."""

    @functools.wraps(operation)
    def count(self: TorchExchanges, *args: Any) -> None:
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
    """Drop what the frames behind ``error`` refer to: a work keeps connections open, on whose end other ranks wait.

    So does a frame of a function inside another, which has what both refer to even when it is cleared: of the errors
    that this one is about, torch's among them, only their words stay.
    """
    traceback.clear_frames(error.__traceback__)
    cause = error.__cause__ or error.__context__
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__


class TorchExchanges(BufferedMessages):
    """Checks, messages and exchanges between the ranks of ``group``."""

    interruptible = False
    recorder: Recorder
    host_memory: HostMemory | None = None
    own_share: OwnShare | None = None
    all_reduce_apart: AllReduceApart | None = None

    def __init__(self, group: dist.ProcessGroup, roll_call: RollCall) -> None:
        self.skip_checks: bool | Literal["after the next"] = False
        self._group = TorchGroup(group, roll_call)
        self.rank, self.size = self._group.rank, self._group.size
        self.hosts: Sequence[Sequence[int]] = [(p,) for p in range(self.size)]
        self._messages = TorchMessages(self._group)
        self.send, self.receive = self._messages.send, self._messages.receive
        # Gloo adds float16 element by element: its own sums take twice as long as the schedules.
        self._by_messages: BetweenHosts | None = None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        try:
            return torch.empty(shape, dtype=dtype)
        except RuntimeError as error:  # torch's allocator
            raise MemoryError(f"a tensor of shape {shape} ({dtype}) needed more memory than there is") from error

    @counted
    def all_to_all(self, out: Any, x: Any, timeout: float) -> None:

        def check() -> tuple[torch.Tensor, torch.Tensor, int]:
            target, source, tag, elements = apart(out, x, self.rank, self.size)
            problem = f"out has {target.numel()} elements, wanted {source.numel()}, as x"
            require(target.numel() == source.numel(), problem)
            problem = f"x has {elements} elements, wanted a multiple of the {self.size} ranks"
            require(elements % self.size == 0, problem)
            return target, source, tag

        target, source, tag = self._checked(timeout, check)
        self._agree("all_to_all", source, "sum", 0, timeout, tag)
        if source.numel() == 0:
            return
        received, sent = target.view(self.size, -1), source.view(self.size, -1)
        peers = [p for p in range(self.size) if p != self.rank]
        received[self.rank].copy_(sent[self.rank])
        self._group.exchange([(p, sent[p]) for p in peers], [(p, received[p]) for p in peers], timeout, "all_to_all")

    @counted
    def all_to_all_v(self, outs: Sequence[Any], xs: Sequence[Any], timeout: float) -> None:
        targets, sources = self._checked(timeout, lambda: parts_apart(outs, xs, self.rank, self.size))
        self._agree_on_parts("all_to_all_v", sources, [out.nbytes for out in targets], timeout)
        if targets[self.rank].data_ptr() != sources[self.rank].data_ptr():
            targets[self.rank].copy_(sources[self.rank])
        sends, receives = messages(sources, self.rank), messages(targets, self.rank)
        self._group.exchange(sends, receives, timeout, "all_to_all_v")

    @counted
    def reduce_scatter_v(self, out: Any, xs: Sequence[Any], op: str, timeout: float) -> None:
        target, sources = self._checked(timeout, lambda: contributions(out, xs, op, self.rank, self.size))
        self._agree_on_parts("reduce_scatter_v", sources, [target.nbytes] * self.size, timeout, target.dtype, op)
        self._scatter_parts(target, sources, op, timeout)

    def _scatter_parts(self, target: torch.Tensor, sources: list[torch.Tensor], op: str, timeout: float) -> None:
        # No backend reduces parts of different lengths. Each travels once, straight to the rank whose it is.
        inputs = [sources[p] if p == self.rank else torch.empty_like(target) for p in range(self.size)]
        sends, receives = messages(sources, self.rank), messages(inputs, self.rank)
        self._group.exchange(sends, receives, timeout, "reduce_scatter_v")
        if target.numel() > 0:
            kernels.reduce(target, inputs, op)

    @counted
    def all_gather_v(self, outs: Sequence[Any], x: Any, timeout: float) -> None:
        targets, sources = self._checked(timeout, lambda: parts_apart(outs, [x] * self.size, self.rank, self.size))
        self._agree_on_parts("all_gather_v", sources, [out.nbytes for out in targets], timeout)
        self._gather_parts(targets, sources[self.rank], timeout)

    def _gather_parts(self, targets: list[torch.Tensor], source: torch.Tensor, timeout: float) -> None:
        if targets[self.rank].data_ptr() != source.data_ptr():
            targets[self.rank].copy_(source)
        sends, receives = messages([source] * self.size, self.rank), messages(targets, self.rank)
        self._group.exchange(sends, receives, timeout, "all_gather_v")

    @counted
    def barrier(self, timeout: float) -> None:
        self._agree("barrier", torch.empty(0), "sum", 0, timeout)

    @counted
    def refuse(self, reason: str, timeout: float) -> None:
        self._group.note_refusal(reason)
        self._announce_refusal(timeout)

    def _announce_refusal(self, timeout: float) -> None:
        self._agree("refused", torch.empty(0), "sum", 0, timeout)

    def give_up_stopped_after(self, seconds: float) -> None:
        pass  # nothing shows it here

    def hand_over(self, patience: float) -> None:
        self._messages.hand_over(patience)

    def close(self, reason: str) -> None:
        self._group.close(reason)

    def _agree(
        self, kind: str, x: torch.Tensor, op: str, root: int, timeout: float, tag: int = 0, word: int = 0
    ) -> list[int]:
        """Compare the ranks' operations, unless that is to be skipped; if they are compared, return all ``word``."""
        if self.skip_checks is True and kind != "barrier":  # which consists of nothing but the comparison
            return []
        words = agree(self._group, kind, x, op, root, timeout, tag, word)
        if self.skip_checks:
            self.skip_checks = True
        return words

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
        """Return the result of ``check``; if it raises, tell the other ranks before passing on the error."""
        try:
            return check()
        except Exception:
            self._announce_refusal(timeout)
            raise
