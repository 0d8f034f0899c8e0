"""Collectives that ``pycomm bench`` times: torch.distributed's by any backend, and :class:`pycomm.Communicator`'s."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from pycomm.collectives.communicator import Communicator
from pycomm.tools.cli.bench.operations import Case

Call = Callable[[], object]
Into = Callable[[torch.Tensor], object]
"""A collective that writes its result to its argument."""

_REDUCTIONS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "avg": dist.ReduceOp.AVG,
}
_OWN_REDUCTIONS = {"sum": "sum", "max": "max", "min": "min", "avg": "mean"}

# Newer releases of torch renamed them, and warn about the old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class UnsupportedError(Exception):
    """The library does not have this collective, dtype or reduction; the message says which."""


def through_scratch(call: Into, result: torch.Tensor) -> Call:
    """Return ``call`` into a scratch tensor, then a copy to ``result``, for libraries that cannot work in place."""
    scratch = torch.empty_like(result)

    def then_copy() -> None:
        call(scratch)
        result.copy_(scratch)

    return then_copy


class Library:
    """Collectives of torch.distributed by ``backend``, in the default group, or in a new one if that exists already.

    Attributes:
        rank, size: of this process.
        in_place: the collectives of two arrays whose input may lie inside the result.
    """

    in_place: tuple[str, ...] = ("all_gather",)

    def __init__(
        self, backend: str, store: Store, rank: int, size: int, device: torch.device, timeout: timedelta
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._group: Any = None
        if dist.is_initialized():
            self._group = dist.new_group(backend=backend, timeout=timeout)
        else:
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)

    def bind(self, case: Case, given: torch.Tensor, result: torch.Tensor) -> Call:
        """Return the call for ``case`` that reads ``given`` and leaves the result in ``result``.

        If the two share memory, the call works in place. If the library supports only the other way, the call
        includes a copy, as the user would need one, too. An array that only the root needs may serve as scratch on
        other ranks.
        """
        if case.operation == "barrier":
            return self.barrier
        call, away = self.collective(case, given), case.spec.rooted and self.rank != case.root
        if case.operation in ("all_reduce", "reduce", "broadcast"):  # of one array
            # Ranks other than the root of a reduction copy, too: it leaves partial sums in their array.
            if given.data_ptr() == result.data_ptr() or (away and case.operation == "broadcast"):
                return lambda: call(result)
            return lambda: call(result.copy_(given))
        shared = given.untyped_storage().data_ptr() == result.untyped_storage().data_ptr()
        if not shared or away or case.operation in self.in_place:
            return lambda: call(result)
        return through_scratch(call, result)

    def collective(self, case: Case, given: torch.Tensor) -> Into:
        """Return the library's own function. Collectives of one array take it as the result."""
        group, root, op = self._group, case.root, _REDUCTIONS.get(case.redop)
        at_root = self.rank == root
        parts = list(given.chunk(self.size)) if case.operation == "scatter" and at_root else None
        of: dict[str, Into] = {
            "all_reduce": lambda x: dist.all_reduce(x, op, group=group),
            "reduce": lambda x: dist.reduce(x, root, op, group=group),
            "broadcast": lambda x: dist.broadcast(x, root, group=group),
            "all_gather": lambda x: _all_gather(x, given, group=group),
            "reduce_scatter": lambda x: _reduce_scatter(x, given, op, group=group),
            "all_to_all": lambda x: dist.all_to_all_single(x, given, group=group),
            "gather": lambda x: dist.gather(given, list(x.chunk(self.size)) if at_root else None, root, group=group),
            "scatter": lambda x: dist.scatter(x, parts, root, group=group),
            "sendrecv": lambda x: self._send_on(given, x),
        }
        return of[case.operation]

    def _send_on(self, given: torch.Tensor, result: torch.Tensor) -> None:
        """Send to the next rank and receive from the previous one."""
        if self.size == 1:
            result.copy_(given)
            return
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        send = dist.P2POp(dist.isend, given, after, self._group)
        for work in dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, result, before, self._group)]):
            work.wait()

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Return an uninitialized uint8 tensor."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def synchronize(self) -> None:
        """Wait for work enqueued on a GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Leave the group, after the last call."""
        if dist.is_initialized():
            dist.destroy_process_group()  # and all other groups


class CommunicatorLibrary(Library):
    """Collectives of a :class:`Communicator` over the default group; creates a Gloo group if there is none.

    Args:
        registered: whether :meth:`empty` returns memory of ``Communicator.empty``, which all ranks of the host reach.
    """

    in_place = ()

    def __init__(
        self, store: Store, rank: int, size: int, device: torch.device, timeout: timedelta, registered: bool
    ) -> None:
        self.rank, self.size, self.device, self._registered = rank, size, device, registered
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        self._communicator = Communicator(timeout=timeout)

    def collective(self, case: Case, given: torch.Tensor) -> Into:
        ours, op = self._communicator, _OWN_REDUCTIONS.get(case.redop, "")
        of: dict[str, Into] = {
            "all_reduce": lambda x: ours.all_reduce(x, op),
            "broadcast": lambda x: ours.broadcast(x, case.root),
            "all_gather": lambda x: ours.all_gather(x, given),
            "reduce_scatter": lambda x: ours.reduce_scatter(x, given, op),
            "all_to_all": lambda x: ours.all_to_all(x, given),
        }
        if case.operation not in of:
            raise UnsupportedError(f"pycomm.Communicator has no {case.operation}")
        if case.spec.reduces and not op:
            raise UnsupportedError(f"pycomm.Communicator has no reduction {case.redop!r}")
        return of[case.operation]

    def barrier(self) -> None:
        self._communicator.barrier()

    def empty(self, num_bytes: int) -> torch.Tensor:
        if self._registered:
            return self._communicator.empty(num_bytes, torch.uint8, self.device)
        return super().empty(num_bytes)

    def synchronize(self) -> None:
        super().synchronize()
        if self.device.type == "cuda":
            self._communicator.check()

    def close(self) -> None:
        self._communicator.close()
        super().close()
