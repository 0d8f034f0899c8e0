"""torch.distributed's collectives, by the backend that the user already has: for ranks that are not all on one host.

Every operation is preceded by an all-gather of 48 bytes per rank in which the ranks say what they
are about to do, so that ranks that disagree get an error instead of a hang.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.dlpack import from_dlpack

from pycomm import kernels
from pycomm.errors import CommError
from pycomm.kernels.arrays import DTYPES
from pycomm.schedule.program import Program
from pycomm.transport.messages import Message, run_program
from pycomm.transport.own_group import destroy_group

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


class TorchTransport:
    """torch.distributed's own collectives on ``group``, which nobody else uses, and which it destroys."""

    name = "torch"
    sums_half_exactly = False
    interruptible = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.trusts = False
        self._own: dist.ProcessGroup | None = group
        self.rank = group.rank()
        self.size = group.size()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def all_reduce(self, x: Any, op: str, timeout: float) -> None:
        tensor = self._look("x", x, op, timeout)
        self._agree("all_reduce", tensor, op, 0, timeout)
        if op == "mean" and tensor.dtype in (torch.float16, torch.bfloat16):
            wide = tensor.float()  # the sum may not fit the half type although the mean does
            self._reduce(wide, op, timeout)
            tensor.copy_(wide)
        else:
            self._reduce(tensor, op, timeout)

    def run(self, program: Program, x: Any, op: str, timeout: float) -> None:
        tensor = self._look("x", x, op, timeout)
        self._require(
            (program.rank, program.num_ranks) == (self.rank, self.size),
            f"the program is of rank {program.rank} of {program.num_ranks}, wanted one of rank {self.rank} of "
            f"{self.size}",
            timeout,
        )
        self._agree("schedule", tensor, op, program.digest >> 1, timeout)  # 63 bits
        run_program(program, tensor, op, self, timeout)

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], timeout: float, operation: str = "all_reduce"
    ) -> None:
        """See :class:`pycomm.transport.messages.Messenger`."""
        # As bytes: not every backend knows every type.
        receiving = [dist.irecv(t.view(torch.uint8), self._global(peer), self._group) for peer, t in receives]
        sending = [dist.isend(t.view(torch.uint8), self._global(peer), self._group) for peer, t in sends]
        for (peer, _), work in zip([*receives, *sends], [*receiving, *sending], strict=True):
            self._wait(operation, work, timeout, peer)

    def _global(self, peer: int) -> int:
        return dist.get_global_rank(self._group, peer)

    def _gather(self, operation: str, out: torch.Tensor, x: torch.Tensor, timeout: float) -> None:
        """Everybody's ``x`` into ``out``, both flat."""
        if self.size > _DIRECT_RANKS or x.nbytes > _DIRECT_BYTES:
            work = _all_gather(out, x, group=self._group, async_op=True)
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
        work = dist.all_reduce(tensor, _REDUCTIONS[op], group=self._group, async_op=True)
        self._wait("all_reduce", work, timeout)
        if op == "mean":
            tensor.mul_(1.0 / self.size)

    def reduce_scatter(self, out: Any, x: Any, op: str, timeout: float) -> None:
        target = self._look("out", out, op, timeout)
        source = self._look("x", x, op, timeout, writes=False)
        self._require(
            source.numel() == self.size * target.numel() and source.dtype == target.dtype,
            f"x has {source.numel()} elements of {source.dtype}, wanted {self.size} ranks times "
            f"the {target.numel()} of {target.dtype} of out",
            timeout,
        )
        self._agree("reduce_scatter", source, op, 0, timeout)
        wide = op == "mean" and target.dtype in (torch.float16, torch.bfloat16)
        if wide:
            source, result = source.float(), torch.empty(target.shape, dtype=torch.float32)
        else:
            result = target
        work = _reduce_scatter(result.view(-1), source.view(-1), _REDUCTIONS[op], group=self._group, async_op=True)
        self._wait("reduce_scatter", work, timeout)
        if op == "mean":
            result.mul_(1.0 / self.size)
        if wide:
            target.copy_(result)

    def all_gather(self, out: Any, x: Any, timeout: float) -> None:
        target = self._look("out", out, None, timeout)
        source = self._look("x", x, None, timeout, writes=False)
        self._require(
            target.numel() == self.size * source.numel() and source.dtype == target.dtype,
            f"out has {target.numel()} elements of {target.dtype}, wanted {self.size} ranks times "
            f"the {source.numel()} of {source.dtype} of x",
            timeout,
        )
        self._agree("all_gather", source, "sum", 0, timeout)
        self._gather("all_gather", target.view(-1), source.view(-1), timeout)

    def all_to_all(self, out: Any, x: Any, timeout: float) -> None:
        target = self._look("out", out, None, timeout)
        source = self._look("x", x, None, timeout, writes=False)
        self._require(
            target.numel() == source.numel() and source.dtype == target.dtype,
            f"out has {target.numel()} elements of {target.dtype}, wanted the {source.numel()} of {source.dtype} of x",
            timeout,
        )
        problem = f"x has {source.numel()} elements, wanted a multiple of the {self.size} ranks"
        self._require(source.numel() % self.size == 0, problem, timeout)
        self._agree("all_to_all", source, "sum", 0, timeout)
        if source.numel() == 0:
            return
        theirs, ours = target.view(self.size, -1), source.view(self.size, -1)
        peers = [p for p in range(self.size) if p != self.rank]
        theirs[self.rank].copy_(ours[self.rank])
        self.exchange([(p, ours[p]) for p in peers], [(p, theirs[p]) for p in peers], timeout, "all_to_all")

    def broadcast(self, x: Any, src: int, timeout: float) -> None:
        tensor = self._look("x", x, None, timeout)
        self._require(0 <= src < self.size, f"src is {src}, wanted 0 <= src < {self.size}", timeout)
        self._agree("broadcast", tensor, "sum", src, timeout)
        root = dist.get_global_rank(self._group, src)
        work = dist.broadcast(tensor, root, group=self._group, async_op=True)
        self._wait("broadcast", work, timeout)

    def barrier(self, timeout: float) -> None:
        self._agree("barrier", torch.empty(0), "sum", 0, timeout)

    def refuse(self, reason: str, timeout: float) -> None:
        self._agree("refused", torch.empty(0), "sum", 0, timeout)

    @property
    def _group(self) -> dist.ProcessGroup:
        if self._own is None:  # which torch would take for the default group
            raise RuntimeError("the communicator is closed")
        return self._own

    def close(self, reason: str) -> None:
        # With the last reference to it go its connections, which is how peers notice.
        group, self._own = self._own, None
        if group is not None:
            destroy_group(group)

    def _require(self, good: bool, problem: str, timeout: float, kind: type[Exception] = ValueError) -> None:
        if not good:
            self.refuse(problem, timeout)
            raise kind(problem)

    def _look(self, name: str, x: Any, op: str | None, timeout: float, writes: bool = True) -> torch.Tensor:
        """``x`` as a contiguous CPU tensor; ``op`` is the reduction wanted, ``None`` for none."""

        def require(good: bool, problem: str, kind: type[Exception] = ValueError) -> None:
            self._require(good, problem, timeout, kind)

        is_array = isinstance(x, torch.Tensor | np.ndarray) or hasattr(x, "__dlpack__")
        require(
            is_array,
            f"{name} is a {type(x).__name__}, wanted a torch tensor, a numpy array or an object with __dlpack__",
            TypeError,
        )
        tensor = x if isinstance(x, torch.Tensor) else from_dlpack(x)
        require(tensor.layout is torch.strided, f"{name} has layout {tensor.layout}, wanted torch.strided")
        require(tensor.is_cpu, f"{name} is on device {tensor.device}, wanted an array in CPU memory")
        if op is not None:
            require(op in _OPS, f"op is '{op}', wanted one of {', '.join(_OPS)}")
            require(
                tensor.dtype in _DTYPES,
                f"{name} has dtype {tensor.dtype}, wanted one of {_DTYPES}",
                TypeError,
            )
            require(
                op != "mean" or tensor.is_floating_point(),
                f"op 'mean' wants a floating dtype, {name} has {tensor.dtype}",
                TypeError,
            )
        if writes:
            require(tensor.is_contiguous(), f"{name} is not contiguous, wanted a contiguous array to write to")
        return tensor.detach().contiguous()

    def _agree(self, kind: str, x: torch.Tensor, op: str, root: int, timeout: float) -> None:
        if self.trusts and kind != "barrier":  # whose comparison is the waiting
            return
        dtype = _DTYPES.index(x.dtype) if x.dtype in _DTYPES else -x.element_size()
        mine = [_KINDS.index(kind), dtype, _OPS.index(op), root, x.numel(), x.element_size()]
        everyone = torch.empty(self.size * len(mine), dtype=torch.int64)
        self._gather(kind, everyone, torch.tensor(mine, dtype=torch.int64), timeout)
        rows = everyone.view(self.size, len(mine)).tolist()
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
            elapsed = time.monotonic() - start
            whom = "" if peer is None else f", with rank {peer},"
            raise CommError(
                f"rank {self.rank}: {operation}: torch.distributed{whom} failed after {elapsed:.2f} s: {error}",
                rank=self.rank,
                peer=peer,
                operation=operation,
                elapsed=elapsed,
            ) from error


def _describe(row: list[int]) -> str:
    kind, dtype, op, root, count, _ = row
    what = f"{count} elements of {str(_DTYPES[dtype]).removeprefix('torch.') if dtype >= 0 else 'another dtype'}"
    if _KINDS[kind] in ("all_reduce", "reduce_scatter"):
        return f'{_KINDS[kind]}({what}, op="{_OPS[op]}")'
    if _KINDS[kind] == "schedule":
        return f'all_reduce({what}, op="{_OPS[op]}", algorithm=a schedule with digest {root:x})'
    if _KINDS[kind] == "broadcast":
        return f"broadcast({what}, src={root})"
    return f"{_KINDS[kind]}({what if _KINDS[kind] == 'all_gather' else ''})"
