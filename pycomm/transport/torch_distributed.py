"""torch.distributed's collectives, by the backend that the user already has: for ranks that are not all on one host.

Every operation is preceded by an all-gather of 48 bytes per rank in which the ranks say what they
are about to do, so that ranks that disagree get an error instead of a hang.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from operator import index
from typing import Any, SupportsIndex, TypeVar, cast

import torch
import torch.distributed as dist

import pycomm._native as _native
from pycomm import kernels
from pycomm.errors import CommError
from pycomm.kernels.arrays import DTYPES, FLOATING
from pycomm.schedule.program import Program
from pycomm.transport.base import Message
from pycomm.transport.own_group import destroy_group
from pycomm.transport.roll_call import RollCall

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., None])

_KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier", "refused", "schedule", "all_to_all")
# Newer releases have other names for them, and warn of the old ones.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# So few ranks, and so few bytes of each, go straight to everybody: over Gloo that takes half as long as its ring, or
# less, since each step of a ring waits for a process to be woken. Even less is gathered, then reduced by every rank.
_DIRECT_RANKS = 16
_DIRECT_BYTES = 256 << 10
_GATHERED_BYTES = 256 << 10  # that every rank receives
_DTYPES = tuple(getattr(torch, name) for name in DTYPES)
_OPS = ("sum", "mean", "min", "max")
_REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


def _counted(operation: F) -> F:
    """``operation``, which ends well also where all ranks agree that one of them was wrong."""

    @functools.wraps(operation)
    def count(self: TorchTransport, *args: Any) -> None:
        self._begun += 1
        try:
            operation(self, *args)
        except CommError:
            raise
        except Exception:
            self._finished = self._begun
            raise
        self._finished = self._begun

    return cast(F, count)


class TorchTransport:
    """torch.distributed's own collectives on ``group``, which nobody else uses, and which it destroys."""

    name = "torch"
    sums_half_exactly = False
    interruptible = False

    def __init__(self, group: dist.ProcessGroup, roll_call: RollCall) -> None:
        self.skip_checks = False
        self._own: dist.ProcessGroup | None = group
        self._roll_call = roll_call
        self._pid = os.getpid()
        self._broken = ""  # why, once an operation failed
        self._broken_by: int | None = None
        self._begun = self._finished = 0  # operations; all ranks count alike
        self.rank = group.rank()
        self.size = group.size()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        try:
            return torch.empty(shape, dtype=dtype)
        except RuntimeError as error:  # torch's allocator
            raise MemoryError(f"a tensor of shape {shape} ({dtype}) needed more memory than there is") from error

    @_counted
    def all_reduce(self, x: Any, op: str, timeout: float) -> None:
        tensor = self._look(timeout, lambda: _reducible("x", x, op, writes=True))
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
        """Compare ``program`` and ``x`` with the other ranks', then let ``run`` all-reduce ``x`` by messages."""

        def look() -> torch.Tensor:
            _require(
                (program.rank, program.num_ranks) == (self.rank, self.size),
                f"the program is of rank {program.rank} of {program.num_ranks}, wanted one of rank {self.rank} of "
                f"{self.size}",
            )
            return _reducible("x", x, op, writes=True)

        tensor = self._look(timeout, look)
        self._agree("schedule", tensor, op, program.digest >> 1, timeout)  # 63 bits
        run(tensor)

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], timeout: float, operation: str = "all_reduce"
    ) -> None:
        """See :class:`pycomm.execute.messages.Messenger`."""
        # As bytes: not every backend knows every type.
        group = self._group

        def start(way: Callable[..., Any], peer: int, tensor: torch.Tensor) -> Any:
            return lambda: way(tensor.view(torch.uint8), dist.get_global_rank(group, peer), group)

        messages = [(peer, start(dist.irecv, peer, t)) for peer, t in receives]
        messages += [(peer, start(dist.isend, peer, t)) for peer, t in sends]
        works = [(peer, self._begin(operation, begin, peer)) for peer, begin in messages]
        for peer, work in works:
            self._wait(operation, work, timeout, peer)

    def _gather(self, operation: str, out: torch.Tensor, x: torch.Tensor, timeout: float) -> None:
        """Everybody's ``x`` into ``out``, both flat."""
        if self.size > _DIRECT_RANKS or x.nbytes > _DIRECT_BYTES:
            group = self._group
            work = self._begin(operation, lambda: _all_gather(out, x, group=group, async_op=True))
            self._wait(operation, work, timeout)
            return
        everyones = out.view(self.size, -1)
        everyones[self.rank].copy_(x)
        if x.numel() > 0:
            peers = [p for p in range(self.size) if p != self.rank]
            self.exchange([(p, x) for p in peers], [(p, everyones[p]) for p in peers], timeout, operation)

    def _reduce(self, tensor: torch.Tensor, op: str, timeout: float) -> None:
        if self.size <= _DIRECT_RANKS and (self.size - 1) * tensor.nbytes <= _GATHERED_BYTES:
            everyone = torch.empty(self.size * tensor.numel(), dtype=tensor.dtype)
            self._gather("all_reduce", everyone, tensor.view(-1), timeout)
            kernels.reduce(tensor, list(everyone.view(self.size, *tensor.shape)), op)
            return
        group = self._group
        work = self._begin("all_reduce", lambda: dist.all_reduce(tensor, _REDUCTIONS[op], group=group, async_op=True))
        self._wait("all_reduce", work, timeout)
        if op == "mean":
            tensor.mul_(1.0 / self.size)

    @_counted
    def reduce_scatter(self, out: Any, x: Any, op: str, timeout: float) -> None:

        def look() -> tuple[torch.Tensor, torch.Tensor]:
            target, source, _ = self._apart(out, x, (op,))
            _require(
                source.numel() == self.size * target.numel(),
                f"x has {source.numel()} elements, wanted {self.size * target.numel()}: {self.size} ranks times the "
                f"{target.numel()} of out",
            )
            return target, source

        target, source = self._look(timeout, look)
        self._agree("reduce_scatter", source, op, 0, timeout)
        if target.numel() == 0:
            return
        wide = op == "mean" and target.dtype in (torch.float16, torch.bfloat16)
        if wide:
            source, result = source.float(), torch.empty(target.shape, dtype=torch.float32)
        else:
            result = target
        group = self._group
        work = self._begin(
            "reduce_scatter", lambda: _reduce_scatter(result, source, _REDUCTIONS[op], group=group, async_op=True)
        )
        self._wait("reduce_scatter", work, timeout)
        if op == "mean":
            result.mul_(1.0 / self.size)
        if wide:
            target.copy_(result)

    @_counted
    def all_gather(self, out: Any, x: Any, timeout: float) -> None:

        def look() -> tuple[torch.Tensor, torch.Tensor, int]:
            target, source, tag = self._apart(out, x)
            _require(
                target.numel() == self.size * source.numel(),
                f"out has {target.numel()} elements, wanted {self.size * source.numel()}: {self.size} ranks times the "
                f"{source.numel()} of x",
            )
            return target, source, tag

        target, source, tag = self._look(timeout, look)
        self._agree("all_gather", source, "sum", 0, timeout, tag)
        self._gather("all_gather", target.view(torch.uint8), source.view(torch.uint8), timeout)

    @_counted
    def all_to_all(self, out: Any, x: Any, timeout: float) -> None:

        def look() -> tuple[torch.Tensor, torch.Tensor, int]:
            target, source, tag = self._apart(out, x)
            elements = _native.HostArray(x, "x", False, True).elements
            _require(
                target.numel() == source.numel(),
                f"out has {target.numel()} elements, wanted {source.numel()}, as x",
            )
            problem = f"x has {elements} elements, wanted a multiple of the {self.size} ranks"
            _require(elements % self.size == 0, problem)
            return target, source, tag

        target, source, tag = self._look(timeout, look)
        self._agree("all_to_all", source, "sum", 0, timeout, tag)
        if source.numel() == 0:
            return
        theirs, ours = target.view(self.size, -1), source.view(self.size, -1)
        peers = [p for p in range(self.size) if p != self.rank]
        theirs[self.rank].copy_(ours[self.rank])
        self.exchange([(p, ours[p]) for p in peers], [(p, theirs[p]) for p in peers], timeout, "all_to_all")

    @_counted
    def broadcast(self, x: Any, src: int, timeout: float) -> None:

        def look() -> tuple[_native.HostArray, int]:
            array = _native.HostArray(x, "x", True, True)
            whole = isinstance(src, SupportsIndex) and not isinstance(src, bool)
            _require(whole, f"src is {src!r}, wanted an int", TypeError)
            _require(0 <= index(src) < self.size, f"src is {src}, wanted 0 <= src < {self.size}")
            return array, index(src)

        array, source = self._look(timeout, look)
        tensor = _tensor(array)
        self._agree("broadcast", tensor, "sum", source, timeout, array.tag)
        group = self._group
        root = dist.get_global_rank(group, source)
        work = self._begin(
            "broadcast", lambda: dist.broadcast(tensor.view(torch.uint8), root, group=group, async_op=True)
        )
        self._wait("broadcast", work, timeout)

    @_counted
    def barrier(self, timeout: float) -> None:
        self._agree("barrier", torch.empty(0), "sum", 0, timeout)

    @_counted
    def refuse(self, reason: str, timeout: float) -> None:
        self._stand_in(timeout)

    def _stand_in(self, timeout: float) -> None:
        self._agree("refused", torch.empty(0), "sum", 0, timeout)

    @property
    def _group(self) -> dist.ProcessGroup:
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

    def close(self, reason: str) -> None:
        # With the last reference to it go its connections, which is how peers notice.
        group, self._own = self._own, None
        if group is not None:
            self._roll_call.leave(self.rank, f"rank {self.rank}: {reason}", self._finished)
            destroy_group(group)

    def _error(self, what: str, operation: str = "use", peer: int | None = None, elapsed: float = 0.0) -> CommError:
        return CommError.during(operation, what, rank=self.rank, peer=peer, elapsed=elapsed)

    def _look(self, timeout: float, look: Callable[[], T]) -> T:
        """What ``look`` comes to; the others are told before its error leaves."""
        try:
            return look()
        except Exception:
            self._stand_in(timeout)
            raise

    def _apart(self, out: Any, x: Any, ops: tuple[Any, ...] = ()) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Where to write and what to read, two arrays of one dtype, and its tag; of one that ``ops`` can do."""
        moves = not ops
        target, source = _native.HostArray(out, "out", True, moves), _native.HostArray(x, "x", False, moves)
        for op in ops:
            _require_op(op, source.dtype, "x")
            _require(
                source.dtype == target.dtype, f"x has dtype {source.dtype}, wanted {target.dtype} as out", TypeError
            )
        _require(source.tag == target.tag, "out and x have different dtypes", TypeError)
        _require(source.dtype == target.dtype, f"out has dtype {target.dtype}, wanted {source.dtype} as x", TypeError)
        _require(
            not target.overlaps(source, self.rank, self.size),
            "out overlaps x, wanted arrays apart, or one that is this rank's part of the other",
        )
        read = _tensor(source)
        lies_in = target.count > 0 and target.overlaps(source, -1, self.size)
        return _tensor(target), read.clone() if lies_in else read, source.tag  # not every backend works in place

    def _agree(self, kind: str, x: torch.Tensor, op: str, root: int, timeout: float, tag: int = 0) -> None:
        if self.skip_checks and kind != "barrier":  # whose comparison is the waiting
            return
        mine = [_KINDS.index(kind), _DTYPES.index(x.dtype), _OPS.index(op), root, x.numel(), tag]
        everyone = torch.empty(self.size * len(mine), dtype=torch.int64)
        self._gather(kind, everyone, torch.tensor(mine, dtype=torch.int64), timeout)
        rows = everyone.view(self.size, len(mine)).tolist()
        for p, row in enumerate(rows):
            if not _is_possible(row):
                raise self._fail(kind, p, f"rank {p} announced what cannot be", 0.0)
        if kind == "refused":
            return  # this rank has its own error to report
        for p, row in enumerate(rows):
            if _KINDS[row[0]] == "refused":
                raise ValueError(
                    f"{kind}: rank {p} could not take part: its arguments were wrong (its own error says how)"
                )
        for p, row in enumerate(rows):
            if row != rows[0]:
                raise ValueError(
                    f"the ranks disagree: rank {p} called {_describe(row)} where rank 0 called {_describe(rows[0])}"
                )

    def _wait(self, operation: str, work: Any, timeout: float, peer: int | None = None) -> None:
        start = time.monotonic()
        try:
            work.wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            raise self._look_for_culprit(operation, peer, error, time.monotonic() - start) from error

    def _begin(self, operation: str, start: Callable[[], T], peer: int | None = None) -> T:
        try:
            return start()
        except RuntimeError as error:
            raise self._look_for_culprit(operation, peer, error, 0.0) from error

    def _look_for_culprit(self, operation: str, peer: int | None, error: Exception, elapsed: float) -> CommError:
        culprit, what = self._roll_call.culprit(peer, self._begun)
        return self._fail(operation, culprit, f"{what or 'failed'}; torch.distributed: {error}", elapsed)

    def _fail(self, operation: str, peer: int | None, what: str, elapsed: float) -> CommError:
        error = self._error(f"{what} after {elapsed:.2f} s", operation, peer, elapsed)
        if not self._broken:
            self._broken, self._broken_by = str(error), peer
        self._roll_call.leave(peer, str(error), self._finished)
        return error


def _require(good: bool, problem: str, kind: type[Exception] = ValueError) -> None:
    if not good:
        raise kind(problem)


def _require_op(op: object, dtype: str, name: str) -> None:
    wanted = "wanted 'sum', 'mean', 'min' or 'max'"
    _require(isinstance(op, str), f"op is {op!r}, {wanted}", TypeError)
    _require(op in _OPS, f"op is {op!r}, {wanted}")
    floating = op != "mean" or dtype in FLOATING
    _require(floating, f"op 'mean' wants a floating dtype, {name} has {dtype}", TypeError)


def _reducible(name: str, x: Any, op: object, writes: bool) -> torch.Tensor:
    array = _native.HostArray(x, name, writes, False)
    _require_op(op, array.dtype, name)
    return _tensor(array)


def _tensor(array: _native.HostArray) -> torch.Tensor:
    """The memory of ``array`` as a tensor of one dimension, which keeps it."""
    dtype: torch.dtype = getattr(torch, array.dtype)
    return torch.frombuffer(array, dtype=dtype) if array.count > 0 else torch.empty(0, dtype=dtype)


def _is_possible(row: list[int]) -> bool:
    kind, dtype, op, _, count, _ = row
    return 0 <= kind < len(_KINDS) and 0 <= dtype < len(_DTYPES) and 0 <= op < len(_OPS) and count >= 0


def _describe(row: list[int]) -> str:
    kind, dtype, op, root, count, tag = row
    what = f"{count} elements of {DTYPES[dtype] if tag == 0 else 'bytes of another dtype'}"
    if _KINDS[kind] in ("all_reduce", "reduce_scatter"):
        return f'{_KINDS[kind]}({what}, op="{_OPS[op]}")'
    if _KINDS[kind] == "schedule":
        return f'all_reduce({what}, op="{_OPS[op]}", algorithm=a schedule with digest {root:x})'
    if _KINDS[kind] == "broadcast":
        return f"broadcast({what}, src={root})"
    return f"{_KINDS[kind]}({what if _KINDS[kind] in ('all_gather', 'all_to_all') else ''})"
