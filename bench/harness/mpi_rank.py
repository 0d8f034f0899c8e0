"""MPI in the table of ``pycomm bench``, through mpi4py and numpy arrays; the environment says which MPI."""

from __future__ import annotations

from typing import Any

import torch

from pycomm.tools.cli.bench.operations import Case
from pycomm.tools.cli.bench.rank import BenchRank, Call, Into, Library


class MpiRank(BenchRank):
    """Rank that MPI has started, and that has nothing but MPI."""

    def open(self, name: str) -> None:
        """Join the world of MPI."""
        self._libraries[name] = MpiLibrary()


class MpiLibrary(Library):
    """Collectives of ``MPI.COMM_WORLD``, in place where MPI has that. mpi4py finalizes when the process ends."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi: Any = MPI
        self._world: Any = MPI.COMM_WORLD
        self.rank: int = self._world.rank
        self.size: int = self._world.size

    def bind(self, case: Case, given: torch.Tensor, result: torch.Tensor) -> Call:
        if case.dtype in ("half", "bfloat16"):
            raise NotImplementedError(f"MPI has no type for {case.dtype}")
        if case.redop == "avg":
            raise NotImplementedError("MPI has no reduction 'avg'")
        if case.operation == "reduce_scatter":
            return super().bind(case, given, result)
        made: Call = getattr(self, f"_{case.operation}")(case, given, result)
        return made

    def _op(self, case: Case) -> Any:
        return getattr(self._mpi, case.redop.upper())

    def _source(self, given: torch.Tensor, result: torch.Tensor) -> Any:
        """Return what to send: MPI's mark for "in place", where it is."""
        return self._mpi.IN_PLACE if in_place(given, result) else given.numpy()

    def _all_reduce(self, case: Case, given: torch.Tensor, result: torch.Tensor) -> Call:
        source, to, op = self._source(given, result), result.numpy(), self._op(case)
        return lambda: self._world.Allreduce(source, to, op)

    def _reduce(self, case: Case, given: torch.Tensor, result: torch.Tensor) -> Call:
        source, to, op = given.numpy(), result.numpy(), self._op(case)
        if self.rank != case.root:
            return lambda: self._world.Reduce(source, None, op, case.root)
        source = self._source(given, result)
        return lambda: self._world.Reduce(source, to, op, case.root)

    def _broadcast(self, case: Case, given: torch.Tensor, result: torch.Tensor) -> Call:
        to = result.numpy()
        if self.rank != case.root or same(given, result):
            return lambda: self._world.Bcast(to, case.root)
        source = given.numpy()

        def call() -> None:  # every rank's result lies in its own array, the root's too
            self._world.Bcast(source, case.root)
            result.copy_(given)

        return call

    def _all_gather(self, case: Case, given: torch.Tensor, result: torch.Tensor) -> Call:
        source, to = self._source(given, result), result.numpy()
        return lambda: self._world.Allgather(source, to)

    def collective(self, case: Case, given: torch.Tensor) -> Into:
        """Return reduce-scatter. MPI's own "in place" leaves the result elsewhere: in the first part of the array."""
        source, op = given.numpy(), self._op(case)
        return lambda to: self._world.Reduce_scatter_block(source, to.numpy(), op)

    def _all_to_all(self, case: Case, given: torch.Tensor, result: torch.Tensor) -> Call:
        source, to = self._source(given, result), result.numpy()
        return lambda: self._world.Alltoall(source, to)

    def _gather(self, case: Case, given: torch.Tensor, result: torch.Tensor) -> Call:
        source, to = given.numpy(), result.numpy()
        if self.rank != case.root:
            return lambda: self._world.Gather(source, None, case.root)
        source = self._source(given, result)
        return lambda: self._world.Gather(source, to, case.root)

    def _scatter(self, case: Case, given: torch.Tensor, result: torch.Tensor) -> Call:
        source, to = given.numpy(), result.numpy()
        if self.rank != case.root:
            return lambda: self._world.Scatter(None, to, case.root)
        target = self._mpi.IN_PLACE if in_place(given, result) else to
        return lambda: self._world.Scatter(source, target, case.root)

    def _sendrecv(self, case: Case, given: torch.Tensor, result: torch.Tensor) -> Call:
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        source, to = given.numpy(), result.numpy()
        if same(given, result):
            return lambda: self._world.Sendrecv_replace(to, dest=after, source=before)
        return lambda: self._world.Sendrecv(source, dest=after, recvbuf=to, source=before)

    def _barrier(self, case: Case, given: torch.Tensor, result: torch.Tensor) -> Call:
        return self.barrier

    def barrier(self) -> None:
        self._world.Barrier()

    def synchronize(self) -> None:
        pass  # every call blocks


def in_place(given: torch.Tensor, result: torch.Tensor) -> bool:
    """Return whether both lie in the same array."""
    return given.untyped_storage().data_ptr() == result.untyped_storage().data_ptr()


def same(given: torch.Tensor, result: torch.Tensor) -> bool:
    """Return whether both are the same memory."""
    return given.data_ptr() == result.data_ptr()
