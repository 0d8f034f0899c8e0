"""Collectives of torch.distributed, by the user's own backend, for ranks that are not all on one host.

Every operation is preceded by an all-gather of 48 bytes per rank in which the ranks describe the
operation, so that ranks that disagree get an error instead of a hang.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist

import pycomm._native as _native
from pycomm import kernels
from pycomm.errors import CommError
from pycomm.schedule.program import Program
from pycomm.transport.announcements import agree
from pycomm.transport.base import HostMemory
from pycomm.transport.host_tensors import apart, rank_of, reducible, require, tensor_of
from pycomm.transport.parts import agree_on_lengths, contributions, messages, parts_apart
from pycomm.transport.roll_call import RollCall
from pycomm.transport.torch_group import DIRECT_RANKS, TorchGroup
from pycomm.transport.torch_messages import BufferedMessages, TorchMessages

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., None])

# Newer releases of torch renamed it, and warn about the old name.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# Small tensors are gathered, then reduced by every rank, as long as a rank receives at most this many bytes.
_GATHERED_BYTES = 256 << 10
_REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


def _counted(operation: F) -> F:
    """Count calls of ``operation``; one also counts as finished if it raises the same error on all ranks."""

    @functools.wraps(operation)
    def count(self: TorchTransport, *args: Any) -> None:
        self._group.begun += 1
        try:
            operation(self, *args)
        except CommError:
            raise
        except Exception:
            self._group.finished = self._group.begun
            raise
        self._group.finished = self._group.begun

    return cast(F, count)


class TorchTransport(BufferedMessages):
    """Transport by torch.distributed's collectives on ``group``, which nobody else uses, and which it destroys."""

    name = "torch"
    interruptible = False
    host_memory: HostMemory | None = None

    def __init__(self, group: dist.ProcessGroup, roll_call: RollCall) -> None:
        self.skip_checks: bool | Literal["after the next"] = False
        self._group = TorchGroup(group, roll_call)
        self.rank, self.size = self._group.rank, self._group.size
        self.exchange = self._group.exchange
        self._messages = TorchMessages(self._group)
        self.send, self.receive = self._messages.send, self._messages.receive

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        try:
            return torch.empty(shape, dtype=dtype)
        except RuntimeError as error:  # torch's allocator
            raise MemoryError(f"a tensor of shape {shape} ({dtype}) needed more memory than there is") from error

    @_counted
    def all_reduce(self, x: Any, op: str, timeout: float) -> None:
        tensor = self._checked(timeout, lambda: reducible("x", x, op, writes=True))
        self._agree("all_reduce", tensor, op, 0, timeout)
        if op == "mean" and tensor.dtype in (torch.float16, torch.bfloat16):
            wide = tensor.float()  # the sum may not fit the half type although the mean does
            self._reduce(wide, op, timeout)
            tensor.copy_(wide)
        else:
            self._reduce(tensor, op, timeout)

    @_counted
    def run_schedule(
        self, program: Program, x: Any, op: str, timeout: float, run: Callable[[torch.Tensor], None]
    ) -> None:
        """Compare ``program`` and ``x`` with the other ranks', then call ``run`` to all-reduce ``x`` by messages."""

        def check() -> torch.Tensor:
            require(
                (program.rank, program.num_ranks) == (self.rank, self.size),
                f"the program is of rank {program.rank} of {program.num_ranks}, wanted one of rank {self.rank} of "
                f"{self.size}",
            )
            return reducible("x", x, op, writes=True)

        tensor = self._checked(timeout, check)
        self._agree("schedule", tensor, op, program.digest >> 1, timeout)  # 63 bits
        run(tensor)

    @_counted
    def reduce(self, x: Any, dst: int, op: str, timeout: float) -> None:

        def check() -> tuple[torch.Tensor, int]:
            tensor = reducible("x", x, op, writes=True)
            return tensor, rank_of(dst, "dst", self.size)

        tensor, root = self._checked(timeout, check)
        self._agree("reduce", tensor, op, root, timeout)
        if tensor.numel() == 0:
            return
        if (self.size - 1) * tensor.nbytes <= _GATHERED_BYTES:
            self._reduce_at(tensor, root, op, timeout)
            return
        # A copy: backends use the memory of the other ranks too.
        wide = op == "mean" and tensor.dtype in (torch.float16, torch.bfloat16)
        work_on = tensor.float() if wide else tensor.clone()
        group = self._group.group
        place = dist.get_global_rank(group, root)
        work = self._group.begin(
            "reduce", lambda: dist.reduce(work_on, place, _REDUCTIONS[op], group=group, async_op=True)
        )
        self._group.wait("reduce", work, timeout)
        if self.rank == root:
            tensor.copy_(work_on.mul_(1.0 / self.size) if op == "mean" else work_on)

    def _reduce_at(self, tensor: torch.Tensor, root: int, op: str, timeout: float) -> None:
        """Send ``tensor`` to ``root``, who reduces all of them, in the order of the ranks."""
        if self.rank != root:
            self._group.exchange([(root, tensor)], [], timeout, "reduce")
            return
        inputs = [tensor if p == root else torch.empty_like(tensor) for p in range(self.size)]
        self._group.exchange([], messages(inputs, root), timeout, "reduce")
        kernels.reduce(tensor, inputs, op)

    def _reduce(self, tensor: torch.Tensor, op: str, timeout: float) -> None:
        if self.size <= DIRECT_RANKS and (self.size - 1) * tensor.nbytes <= _GATHERED_BYTES:
            gathered = torch.empty(self.size * tensor.numel(), dtype=tensor.dtype)
            self._group.gather("all_reduce", gathered, tensor.view(-1), timeout)
            kernels.reduce(tensor, list(gathered.view(self.size, *tensor.shape)), op)
            return
        group = self._group.group
        work = self._group.begin(
            "all_reduce", lambda: dist.all_reduce(tensor, _REDUCTIONS[op], group=group, async_op=True)
        )
        self._group.wait("all_reduce", work, timeout)
        if op == "mean":
            tensor.mul_(1.0 / self.size)

    @_counted
    def reduce_scatter(self, out: Any, x: Any, op: str, timeout: float) -> None:

        def check() -> tuple[torch.Tensor, torch.Tensor]:
            target, source, _, _ = apart(out, x, self.rank, self.size, (op,))
            require(
                source.numel() == self.size * target.numel(),
                f"x has {source.numel()} elements, wanted {self.size * target.numel()}: {self.size} ranks times the "
                f"{target.numel()} of out",
            )
            return target, source

        target, source = self._checked(timeout, check)
        self._agree("reduce_scatter", source, op, 0, timeout)
        if target.numel() == 0:
            return
        wide = op == "mean" and target.dtype in (torch.float16, torch.bfloat16)
        if wide:
            source, result = source.float(), torch.empty(target.shape, dtype=torch.float32)
        else:
            result = target
        self._scatter(result, source, op, timeout)
        if wide:
            target.copy_(result)

    def _scatter(self, out: torch.Tensor, x: torch.Tensor, op: str, timeout: float) -> None:
        group = self._group.group
        work = self._group.begin(
            "reduce_scatter", lambda: _reduce_scatter(out, x, _REDUCTIONS[op], group=group, async_op=True)
        )
        self._group.wait("reduce_scatter", work, timeout)
        if op == "mean":
            out.mul_(1.0 / self.size)

    @_counted
    def all_gather(self, out: Any, x: Any, timeout: float) -> None:

        def check() -> tuple[torch.Tensor, torch.Tensor, int]:
            target, source, tag, _ = apart(out, x, self.rank, self.size)
            require(
                target.numel() == self.size * source.numel(),
                f"out has {target.numel()} elements, wanted {self.size * source.numel()}: {self.size} ranks times the "
                f"{source.numel()} of x",
            )
            return target, source, tag

        target, source, tag = self._checked(timeout, check)
        self._agree("all_gather", source, "sum", 0, timeout, tag)
        self._gather(target.view(torch.uint8), source.view(torch.uint8), timeout)

    def _gather(self, out: torch.Tensor, x: torch.Tensor, timeout: float) -> None:
        self._group.gather("all_gather", out, x, timeout)

    @_counted
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

    @_counted
    def all_to_all_v(self, outs: Sequence[Any], xs: Sequence[Any], timeout: float) -> None:
        targets, sources = self._checked(timeout, lambda: parts_apart(outs, xs, self.rank, self.size))
        self._agree_on_parts("all_to_all_v", sources, [out.nbytes for out in targets], timeout)
        if targets[self.rank].data_ptr() != sources[self.rank].data_ptr():
            targets[self.rank].copy_(sources[self.rank])
        sends, receives = messages(sources, self.rank), messages(targets, self.rank)
        self._group.exchange(sends, receives, timeout, "all_to_all_v")

    @_counted
    def reduce_scatter_v(self, out: Any, xs: Sequence[Any], op: str, timeout: float) -> None:
        target, sources = self._checked(timeout, lambda: contributions(out, xs, op, self.rank, self.size))
        self._agree_on_parts("reduce_scatter_v", sources, [target.nbytes] * self.size, timeout, target.dtype, op)
        # No backend reduces parts of different lengths. Each travels once, straight to the rank whose it is.
        inputs = [sources[p] if p == self.rank else torch.empty_like(target) for p in range(self.size)]
        sends, receives = messages(sources, self.rank), messages(inputs, self.rank)
        self._group.exchange(sends, receives, timeout, "reduce_scatter_v")
        if target.numel() > 0:
            kernels.reduce(target, inputs, op)

    @_counted
    def broadcast(self, x: Any, src: int, timeout: float) -> None:

        def check() -> tuple[_native.HostArray, int]:
            array = _native.HostArray(x, "x", True, True)
            return array, rank_of(src, "src", self.size)

        array, source = self._checked(timeout, check)
        tensor = tensor_of(array)
        self._agree("broadcast", tensor, "sum", source, timeout, array.tag)
        self._spread(tensor.view(torch.uint8), source, timeout)

    def _spread(self, x: torch.Tensor, source: int, timeout: float) -> None:
        group = self._group.group
        root = dist.get_global_rank(group, source)
        work = self._group.begin("broadcast", lambda: dist.broadcast(x, root, group=group, async_op=True))
        self._group.wait("broadcast", work, timeout)

    @_counted
    def barrier(self, timeout: float) -> None:
        self._agree("barrier", torch.empty(0), "sum", 0, timeout)

    @_counted
    def refuse(self, reason: str, timeout: float) -> None:
        self._announce_refusal(timeout)

    def _announce_refusal(self, timeout: float) -> None:
        self._agree("refused", torch.empty(0), "sum", 0, timeout)

    def close(self, reason: str) -> None:
        self._group.close(reason)

    def _agree(self, kind: str, x: torch.Tensor, op: str, root: int, timeout: float, tag: int = 0) -> None:
        if self.skip_checks is True and kind != "barrier":  # which consists of nothing but the comparison
            return
        agree(self._group, kind, x, op, root, timeout, tag)
        if self.skip_checks:
            self.skip_checks = True

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
