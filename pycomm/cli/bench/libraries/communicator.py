"""pycomm's own collectives, :class:`pycomm.Communicator`."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from pycomm.cli.bench.libraries.base import Call, UnsupportedError, copy_first, in_place, then_copy
from pycomm.cli.bench.operations import Case
from pycomm.communicator import Communicator

_REDUCTIONS = {"sum": "sum", "max": "max", "min": "min", "avg": "mean"}


class CommunicatorLibrary:
    """Collectives of a :class:`Communicator` over the default group, which is Gloo's if there is none yet.

    Args:
        registered: whether :meth:`empty` is ``Communicator.empty``, memory that all ranks of the host reach.
    """

    def __init__(
        self, store: Store, rank: int, size: int, device: torch.device, timeout: timedelta, registered: bool
    ) -> None:
        self.rank, self.size, self._device, self._registered = rank, size, device, registered
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        self._communicator = Communicator(timeout=timeout)

    def bind(self, case: Case, given: torch.Tensor, result: torch.Tensor) -> Call:
        make = getattr(self, f"_{case.operation}", None)
        if make is None:
            raise UnsupportedError(f"pycomm.Communicator has no {case.operation}")
        if case.spec.reduces and case.redop not in _REDUCTIONS:
            raise UnsupportedError(f"pycomm.Communicator has no reduction {case.redop!r}")
        made: Call = make(case, given, result)
        return made

    def _all_reduce(self, case: Case, given: torch.Tensor, result: torch.Tensor) -> Call:
        op = _REDUCTIONS[case.redop]
        return copy_first(given, result, lambda: self._communicator.all_reduce(result, op))

    def _broadcast(self, case: Case, given: torch.Tensor, result: torch.Tensor) -> Call:
        call: Call = lambda: self._communicator.broadcast(result, case.root)  # noqa: E731
        return copy_first(given, result, call) if self.rank == case.root else call

    def _all_gather(self, case: Case, given: torch.Tensor, result: torch.Tensor) -> Call:
        if in_place(given, result):
            return then_copy(lambda to: self._communicator.all_gather(to, given), result)
        return lambda: self._communicator.all_gather(result, given)

    def _reduce_scatter(self, case: Case, given: torch.Tensor, result: torch.Tensor) -> Call:
        op = _REDUCTIONS[case.redop]
        if in_place(given, result):
            return then_copy(lambda to: self._communicator.reduce_scatter(to, given, op), result)
        return lambda: self._communicator.reduce_scatter(result, given, op)

    def _all_to_all(self, case: Case, given: torch.Tensor, result: torch.Tensor) -> Call:
        if in_place(given, result):
            return then_copy(lambda to: self._communicator.all_to_all(to, given), result)
        return lambda: self._communicator.all_to_all(result, given)

    def _barrier(self, case: Case, given: torch.Tensor, result: torch.Tensor) -> Call:
        return self.barrier

    def barrier(self) -> None:
        self._communicator.barrier()

    def empty(self, num_bytes: int) -> torch.Tensor:
        if self._registered:
            return self._communicator.empty(num_bytes, torch.uint8, self._device)
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self._communicator.check()

    def close(self) -> None:
        self._communicator.close()
        if dist.is_initialized():
            dist.destroy_process_group()
