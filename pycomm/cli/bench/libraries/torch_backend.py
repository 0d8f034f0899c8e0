"""Any backend of torch.distributed, by its name: "pycomm", "gloo", "nccl", or another one that is registered."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from pycomm.cli.bench.libraries.base import Call, copy_first, in_place, then_copy
from pycomm.cli.bench.operations import Case

_REDUCTIONS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "avg": dist.ReduceOp.AVG,
}

# Newer releases of torch renamed them, and warn about the old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TorchBackend:
    """torch.distributed's collectives by ``backend``: in the default group, or in one beside it if there is one."""

    def __init__(
        self, backend: str, store: Store, rank: int, size: int, device: torch.device, timeout: timedelta
    ) -> None:
        self.rank, self.size, self._device = rank, size, device
        if dist.is_initialized():
            self._group: Any = dist.new_group(backend=backend, timeout=timeout)
        else:
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
            self._group = dist.group.WORLD

    def bind(self, case: Case, given: torch.Tensor, result: torch.Tensor) -> Call:
        made: Call = getattr(self, f"_{case.operation}")(case, given, result)
        return made

    def _all_reduce(self, case: Case, given: torch.Tensor, result: torch.Tensor) -> Call:
        op = _REDUCTIONS[case.redop]
        return copy_first(given, result, lambda: dist.all_reduce(result, op, group=self._group))

    def _reduce(self, case: Case, given: torch.Tensor, result: torch.Tensor) -> Call:
        # Out of place on every rank: those that are not the root find partial sums in their arrays.
        op, root = _REDUCTIONS[case.redop], case.root
        return copy_first(given, result, lambda: dist.reduce(result, root, op, group=self._group))

    def _broadcast(self, case: Case, given: torch.Tensor, result: torch.Tensor) -> Call:
        call: Call = lambda: dist.broadcast(result, case.root, group=self._group)  # noqa: E731
        return copy_first(given, result, call) if self.rank == case.root else call

    def _all_gather(self, case: Case, given: torch.Tensor, result: torch.Tensor) -> Call:
        return lambda: _all_gather(result, given, group=self._group)

    def _reduce_scatter(self, case: Case, given: torch.Tensor, result: torch.Tensor) -> Call:
        op = _REDUCTIONS[case.redop]
        return self._apart(given, result, lambda to: _reduce_scatter(to, given, op, group=self._group))

    def _all_to_all(self, case: Case, given: torch.Tensor, result: torch.Tensor) -> Call:
        return self._apart(given, result, lambda to: dist.all_to_all_single(to, given, group=self._group))

    def _gather(self, case: Case, given: torch.Tensor, result: torch.Tensor) -> Call:
        if self.rank != case.root:
            return lambda: dist.gather(given, None, case.root, group=self._group)

        def call(to: torch.Tensor) -> None:
            dist.gather(given, list(to.chunk(self.size)), case.root, group=self._group)

        return self._apart(given, result, call)

    def _scatter(self, case: Case, given: torch.Tensor, result: torch.Tensor) -> Call:
        if self.rank != case.root:
            return lambda: dist.scatter(result, None, case.root, group=self._group)
        parts = list(given.chunk(self.size))
        return self._apart(given, result, lambda to: dist.scatter(to, parts, case.root, group=self._group))

    def _sendrecv(self, case: Case, given: torch.Tensor, result: torch.Tensor) -> Call:
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        if self.size == 1:
            return lambda: result.copy_(given)

        def call(to: torch.Tensor) -> None:
            both = [
                dist.P2POp(dist.isend, given, after, self._group),
                dist.P2POp(dist.irecv, to, before, self._group),
            ]
            for work in dist.batch_isend_irecv(both):
                work.wait()

        return self._apart(given, result, call)

    def _barrier(self, case: Case, given: torch.Tensor, result: torch.Tensor) -> Call:
        return self.barrier

    def _apart(self, given: torch.Tensor, result: torch.Tensor, call: Any) -> Call:
        return then_copy(call, result) if in_place(given, result) else lambda: call(result)

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def empty(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()  # with all groups beside it
