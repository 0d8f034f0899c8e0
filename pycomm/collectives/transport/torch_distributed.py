"""Collectives of torch.distributed by the user's own backend, for ranks that cannot or must not use our transports.

An all-reduce is the backend's, a reduction of half types an all-to-all, whose sums in float32 are gathered: MPI has no
half types, and Gloo rounds after every addition. Before every operation the ranks all-gather 48 bytes each that
describe it, so that a disagreement is an error, not a hang. A failure is reported as torch reports it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist

import pycomm._native as _native
from pycomm import checks, kernels
from pycomm.agreement import prepared
from pycomm.collectives.recorder import Recorder
from pycomm.collectives.transport.base import AllReduceApart, HostMemory, OwnShare, ReduceScatterApart
from pycomm.collectives.transport.host_tensors import (
    OPS,
    contributions,
    pair_for,
    parts_apart,
    private_tensor,
    rank_of,
    reducible,
    tensor_of,
)
from pycomm.collectives.transport.torch_group import TorchGroup
from pycomm.collectives.transport.torch_messages import TorchMessages
from pycomm.kernels.arrays import DTYPES
from pycomm.torch_internals import all_gather_single
from pycomm.untrusted import escaped

if TYPE_CHECKING:
    from pycomm.schedule.program import Program

T = TypeVar("T")

_KINDS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "barrier",
    "refused",
    "all_to_all",
    "reduce",
    "all_to_all_v",
    "reduce_scatter_v",
    "all_gather_v",
)
_DTYPES = tuple(getattr(torch, name) for name in DTYPES)
_HALVES = (torch.float16, torch.bfloat16)
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
_REASON_BYTES = 512  # of why a rank cannot take part


class TorchTransport:
    """Transport over a process ``group`` of its own, which it destroys."""

    name = "torch"
    interruptible = False
    recorder: Recorder
    own_share: OwnShare | None = None
    all_reduce_apart: AllReduceApart | None = None
    reduce_scatter_apart: ReduceScatterApart | None = None
    host_memory: HostMemory | None = None

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.skip_checks: bool | Literal["after the next"] = False
        self._group = TorchGroup(group)
        self.rank, self.size = self._group.rank, self._group.size
        self.hosts: Sequence[Sequence[int]] = [(p,) for p in range(self.size)]
        self._messages = TorchMessages(self._group)
        self.send, self.receive = self._messages.send, self._messages.receive
        self.hand_over, self.empty = self._messages.hand_over, private_tensor

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

    def give_up_stopped_after(self, seconds: float) -> None:
        """Do nothing: whether a process is stopped is known on its own host only."""

    def close(self, reason: str) -> None:
        """Destroy the group. The ``reason`` cannot be sent."""
        self._group.close()

    # Reductions.

    def all_reduce(self, x: Any, op: str, timeout: float) -> None:
        tensor = self._checked(timeout, lambda: reducible("x", x, op, writes=True))
        self._agree("all_reduce", tensor, op, 0, timeout)
        self._all_reduce(tensor, op, timeout)

    def _all_reduce(self, tensor: torch.Tensor, op: str, timeout: float) -> None:
        """Reduce flat ``tensor`` in place."""
        count, reduction = tensor.numel(), _REDUCTIONS[op]
        if count == 0:
            return
        if tensor.dtype not in _HALVES:
            self._group.run(
                *("all_reduce", timeout),
                lambda group: dist.all_reduce(tensor, reduction, group=group, async_op=True),
            )
            _divide(tensor, op, self.size)
            return
        padded = torch.zeros(-(-count // self.size) * self.size, dtype=tensor.dtype)
        padded[:count] = tensor
        part = torch.empty(padded.numel() // self.size, dtype=tensor.dtype)
        self._reduce_parts("all_reduce", part, list(padded.view(self.size, -1)), op, timeout)
        self._gather("all_reduce", padded, part, timeout)
        tensor.copy_(padded[:count])

    def reduce(self, x: Any, dst: int, op: str, timeout: float) -> None:
        tensor, root = self._checked(
            timeout, lambda: (reducible("x", x, op, writes=True), rank_of(dst, "dst", self.size))
        )
        self._agree("reduce", tensor, op, root, timeout)
        # A copy: backends use the memory of the other ranks too.
        result, reduction = tensor.clone(), _REDUCTIONS[op]
        if tensor.dtype in _HALVES:
            self._all_reduce(result, op, timeout)
        elif tensor.numel() > 0:
            self._group.run(
                *("reduce", timeout),
                lambda group: dist.reduce(
                    result, dist.get_global_rank(group, root), reduction, group=group, async_op=True
                ),
            )
            _divide(result, op, self.size)
        if self.rank == root:
            tensor.copy_(result)

    def reduce_scatter(self, out: Any, x: Any, op: str, timeout: float) -> None:
        pair = self._checked(timeout, lambda: pair_for("reduce_scatter", out, x, self.rank, self.size, (op,)))
        self._agree("reduce_scatter", pair.x, op, 0, timeout)
        self._reduce_parts("reduce_scatter", pair.out, list(pair.x.view(self.size, -1)), op, timeout)

    def reduce_scatter_v(self, out: Any, xs: Sequence[Any], op: str, timeout: float) -> None:
        target, sources = self._checked(timeout, lambda: contributions(out, xs, op, self.rank, self.size))
        receives = [target.nbytes] * self.size
        self._agree_on_parts("reduce_scatter_v", sources, receives, timeout, target.dtype, op)
        self._reduce_parts("reduce_scatter_v", target, sources, op, timeout)

    def _reduce_parts(
        self, kind: str, target: torch.Tensor, sources: Sequence[torch.Tensor], op: str, timeout: float
    ) -> None:
        """Write the reduction of all ranks' ``sources[rank]``, in rank order, into ``target``."""
        terms = [torch.empty_like(target) for _ in range(self.size)]
        self._exchange(kind, [x.view(torch.uint8) for x in terms], [x.view(torch.uint8) for x in sources], timeout)
        if target.numel() > 0:
            kernels.reduce(target, terms, op)

    def run_program(self, program: Program, x: Any, op: str, timeout: float) -> None:
        def check() -> None:
            raise ValueError(
                f'algorithm is {program.name}, but transport "torch" has only the process group\'s own: wanted '
                '"native", or another transport'
            )

        self._checked(timeout, check)

    # Movements.

    def all_gather(self, out: Any, x: Any, timeout: float) -> None:
        pair = self._checked(timeout, lambda: pair_for("all_gather", out, x, self.rank, self.size))
        self._agree("all_gather", pair.x, "sum", 0, timeout, pair.tag)
        if pair.x.numel() > 0:
            self._gather("all_gather", pair.out.view(torch.uint8), pair.x.view(torch.uint8), timeout)

    def _gather(self, kind: str, out: torch.Tensor, x: torch.Tensor, timeout: float) -> None:
        self._group.run(kind, timeout, lambda group: all_gather_single(out, x, group=group, async_op=True))

    def all_gather_v(self, outs: Sequence[Any], x: Any, timeout: float) -> None:
        targets, sources = self._checked(timeout, lambda: parts_apart(outs, [x] * self.size, self.rank, self.size))
        self._agree_on_parts("all_gather_v", sources, [out.nbytes for out in targets], timeout)
        if targets[self.rank].data_ptr() != sources[self.rank].data_ptr():
            targets[self.rank].copy_(sources[self.rank])
        for p, target in enumerate(targets):
            self._broadcast("all_gather_v", target, p, timeout)

    def all_to_all(self, out: Any, x: Any, timeout: float) -> None:
        pair = self._checked(timeout, lambda: pair_for("all_to_all", out, x, self.rank, self.size))
        self._agree("all_to_all", pair.x, "sum", 0, timeout, pair.tag)
        targets, sources = (list(array.view(torch.uint8).view(self.size, -1)) for array in (pair.out, pair.x))
        self._exchange("all_to_all", targets, sources, timeout)

    def all_to_all_v(self, outs: Sequence[Any], xs: Sequence[Any], timeout: float) -> None:
        targets, sources = self._checked(timeout, lambda: parts_apart(outs, xs, self.rank, self.size))
        self._agree_on_parts("all_to_all_v", sources, [out.nbytes for out in targets], timeout)
        self._exchange("all_to_all_v", targets, sources, timeout)

    def _exchange(
        self, kind: str, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], timeout: float
    ) -> None:
        """Send ``sources[p]``, bytes, to every rank p, and receive ``targets[p]`` from it."""
        sizes = [x.numel() for x in targets], [x.numel() for x in sources]
        sent, received = torch.cat(list(sources)), torch.empty(sum(sizes[0]), dtype=torch.uint8)
        self._group.run(
            *(kind, timeout),
            lambda group: dist.all_to_all_single(received, sent, *sizes, group=group, async_op=True),
        )
        for target, part in zip(targets, torch.split(received, sizes[0]), strict=True):
            target.copy_(part)

    def broadcast(self, x: Any, src: int, timeout: float) -> None:
        array, source = self._checked(
            timeout, lambda: (_native.HostArray(x, "x", True, True), rank_of(src, "src", self.size))
        )
        tensor = tensor_of(array)
        self._agree("broadcast", tensor, "sum", source, timeout, array.tag)
        self._broadcast("broadcast", tensor.view(torch.uint8), source, timeout)

    def _broadcast(self, kind: str, x: torch.Tensor, source: int, timeout: float) -> None:
        """Overwrite ``x``, bytes, with the ``x`` of ``source``."""
        if x.numel() > 0:
            self._group.run(
                *(kind, timeout),
                lambda group: dist.broadcast(x, dist.get_global_rank(group, source), group=group, async_op=True),
            )

    def barrier(self, timeout: float) -> None:
        self._agree("barrier", torch.empty(0), "sum", 0, timeout)

    # Comparisons.

    def refuse(self, reason: str, timeout: float) -> None:
        self._agree("refused", torch.empty(0), "sum", 0, timeout, reason=reason)

    def _agree(
        self, kind: str, x: torch.Tensor, op: str, root: int, timeout: float, tag: int = 0, reason: str = ""
    ) -> None:
        """Compare the ranks' next operations, unless that is skipped. Collective.

        Args:
            kind: name of the operation.
            x: its array, of which dtype and number of elements are compared.
            op: its reduction.
            root: its source or destination rank.
            timeout: limit of every wait, in seconds.
            tag: tag of the array's dtype if the operation only moves bytes, else 0.
            reason: why this rank cannot take part, for the others.

        Raises:
            ValueError: on every rank: the operations differ, or a rank cannot take part.
            CommError: a rank sent an invalid description, or failed.
        """
        if self.skip_checks is True and kind != "barrier":  # a barrier is nothing but the comparison
            return
        mine = torch.tensor([_KINDS.index(kind), _DTYPES.index(x.dtype), OPS.index(op), root, x.numel(), tag])
        rows = self._rows_of(kind, mine, timeout)
        if self.skip_checks:
            self.skip_checks = True
        for p, row in enumerate(rows):
            if not (row[0] in range(len(_KINDS)) and row[1] in range(len(_DTYPES)) and row[2] in range(len(OPS))):
                raise self._group.fail(kind, p, f"rank {p} announced an impossible operation", 0.0)
        refused = [p for p, row in enumerate(rows) if _KINDS[row[0]] == "refused"]
        if refused:
            text = bytearray(reason.encode("utf-8", "replace")[:_REASON_BYTES].ljust(_REASON_BYTES))
            reasons = self._rows_of(kind, torch.frombuffer(text, dtype=torch.uint8), timeout)
            if kind == "refused":
                return  # this rank has its own error to report
            why = escaped(bytes(reasons[refused[0]]).decode(errors="replace").rstrip())
            raise ValueError(f"{kind}: rank {refused[0]} could not take part: {why}")
        for p, row in enumerate(rows):
            if row != rows[0]:
                raise ValueError(
                    f"the ranks disagree: rank {p} called {_describe(row)} where rank 0 called {_describe(rows[0])}"
                )

    def _agree_on_parts(
        self,
        kind: str,
        sends: Sequence[torch.Tensor],
        receives: Sequence[int],
        timeout: float,
        dtype: torch.dtype = torch.uint8,
        op: str = "sum",
    ) -> None:
        """Compare the operation, and the bytes that each rank has for another with what that one expects."""
        self._agree(kind, torch.empty(0, dtype=dtype), op, 0, timeout)
        if self.skip_checks:
            return
        rows = self._rows_of(kind, torch.tensor([*(x.nbytes for x in sends), *receives]), timeout)
        for p, row in enumerate(rows):
            for q in range(self.size):
                if row[q] != rows[q][self.size + p]:
                    raise ValueError(
                        f"{kind}: rank {p} has {row[q]} bytes for rank {q}, which expects {rows[q][self.size + p]}"
                    )

    def _rows_of(self, kind: str, mine: torch.Tensor, timeout: float) -> list[list[int]]:
        """Return every rank's ``mine``."""
        gathered = torch.empty(self.size * mine.numel(), dtype=mine.dtype)
        self._gather(kind, gathered.view(torch.uint8), mine.view(torch.uint8), timeout)
        rows: list[list[int]] = gathered.view(self.size, -1).tolist()
        return rows

    def _checked(self, timeout: float, check: Callable[[], T]) -> T:
        """Return the result of ``check``; if it raises, refuse the operation first."""
        return prepared(check, lambda reason: self.refuse(reason, timeout))


def _divide(x: torch.Tensor, op: str, size: int) -> None:
    """Divide the sums ``x`` by the number of ranks if ``op`` is "mean"."""
    if op == "mean":
        x.mul_(1.0 / size)


def _describe(row: list[int]) -> str:
    kind, dtype, op, root, count, tag = row
    what = f"{count} elements of {DTYPES[dtype] if tag == 0 else 'bytes of another dtype'}"
    if _KINDS[kind] in ("all_reduce", "reduce_scatter"):
        return f'{_KINDS[kind]}({what}, op="{OPS[op]}")'
    if _KINDS[kind] == "reduce":
        return f'reduce({what}, dst={root}, op="{OPS[op]}")'
    if _KINDS[kind] == "reduce_scatter_v":  # counts are compared later
        return f'reduce_scatter_v({DTYPES[dtype]}, op="{OPS[op]}")'
    if _KINDS[kind] == "broadcast":
        return f"broadcast({what}, src={root})"
    return f"{_KINDS[kind]}({what if _KINDS[kind] in ('all_gather', 'all_to_all') else ''})"
