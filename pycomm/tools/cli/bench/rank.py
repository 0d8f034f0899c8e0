"""Worker of ``pycomm bench`` on one rank: the libraries, their arrays, and the timed turns."""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from pycomm.collectives.communicator import Communicator
from pycomm.descriptions import cpu_model
from pycomm.errors import CommError
from pycomm.tools.cli.bench.operations import COMMUNICATOR, REDUCING, ROOTED, Case
from pycomm.torch_internals import all_gather_single, reduce_scatter_single

Indices = npt.NDArray[np.uint32]

# Test data. Element i of rank r is (7919 i + 1000003 r) mod M. M is a power of two, so small that all sums over the
# ranks are exact in the dtype. Any M consecutive elements differ, and so do the same elements of any M ranks. For
# products, elements are 1 or 2 by the same rule.

_TIMEOUT = timedelta(seconds=120)  # of every wait for another rank
_CHUNK = 1 << 16
_SIGNIFICANT_BITS = {"half": 11, "bfloat16": 8, "float": 24, "double": 24, "int8": 7, "uint8": 8}
_BITS = 24  # for all others: more would test no more
_NAN = 255  # each byte of a NaN in every floating-point dtype, and of -1 or the largest number in the others


def pattern(rank: int | Indices, index: Indices, ranks: int, bits: int = _BITS) -> Indices:
    """Return elements ``index`` of ``rank`` as integers, whose sum over all ``ranks`` has at most ``bits`` bits.

    ``rank`` may be an array with a rank for each element.
    """
    modulus = 1 << max(1, bits - (ranks - 1).bit_length())
    offset = np.atleast_1d(np.asarray(rank, np.uint32)) * np.uint32(1000003)
    # Overflow wraps around at 2^32, a multiple of the modulus.
    return (index * np.uint32(7919) + offset) & np.uint32(modulus - 1)


def chunks(num_elements: int) -> Iterator[tuple[slice, Indices]]:
    """Yield slices of all elements with their indices. This bounds temporary memory."""
    for start in range(0, num_elements, _CHUNK):
        piece = slice(start, min(start + _CHUNK, num_elements))
        yield piece, np.arange(piece.start, piece.stop, dtype=np.uint32)


def fill(case: Case, rank: int, target: torch.Tensor) -> None:
    """Write the input of ``rank`` to ``target``."""
    for piece, index in chunks(target.numel()):
        target[piece] = torch.from_numpy(_given(case, rank, index))


def count_wrong(case: Case, rank: int, got: torch.Tensor) -> int:
    """Return the number of wrong elements in the result ``got`` of ``rank``; 0 if it has no result."""
    if case.operation in ("reduce", "gather", "barrier") and rank != case.root:
        return 0
    exact = case.redop != "avg" or case.ranks & (case.ranks - 1) == 0
    # In an average, each rank's term and the sum may be rounded once.
    tolerance, wrong = 0.0 if exact else 2 * torch.finfo(got.dtype).eps, 0
    for piece, index in chunks(got.numel()):
        wanted = torch.from_numpy(_wanted(case, rank, index)).to(got.dtype)  # integers wrap around as in the dtype
        wrong += int((~torch.isclose(got[piece].cpu(), wanted, rtol=tolerance, atol=0.0)).sum())
    return wrong


def _given(case: Case, rank: int | Indices, index: Indices) -> npt.NDArray[np.int64]:
    """Return elements ``index`` of the input of ``rank``, which may be an array."""
    if case.redop == "prod":
        return 1 + (pattern(rank, index, 1, bits=8) >> np.uint32(7)).astype(np.int64)
    return pattern(rank, index, case.ranks, _SIGNIFICANT_BITS.get(case.dtype, _BITS)).astype(np.int64)


def _wanted(case: Case, rank: int, index: Indices) -> npt.NDArray[Any]:
    """Return elements ``index`` of the right result of ``rank``."""
    source: int | Indices = (rank - 1) % case.ranks if case.operation == "sendrecv" else case.root
    if case.operation in ("all_gather", "gather", "all_to_all"):
        source, index = index // np.uint32(case.count), index % np.uint32(case.count)
    if case.operation in ("all_to_all", "scatter", "reduce_scatter"):
        index = index + np.uint32(rank * case.count)
    if case.operation not in REDUCING:
        return _given(case, source, index)
    reduce = {"sum": np.add, "avg": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}[case.redop]
    reduced: npt.NDArray[Any] = functools.reduce(reduce, (_given(case, each, index) for each in range(case.ranks)))
    return reduced / case.ranks if case.redop == "avg" else reduced


Call = Callable[[], object]
Into = Callable[[torch.Tensor], object]
"""A collective that writes its result to its argument."""


class Library:
    """Collectives of torch.distributed in ``group``.

    Attributes:
        rank, size: of this process.
        in_place: the collectives whose input may lie inside the result.
    """

    in_place: tuple[str, ...] = ("all_reduce", "reduce", "broadcast", "all_gather", "barrier")

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(), dist.get_world_size()

    def bind(self, case: Case, given: torch.Tensor, result: torch.Tensor) -> Call:
        """Return the call for ``case`` that reads ``given`` and leaves the result in ``result``.

        If the two share memory, the call works in place. If the library supports only the other way, the call
        includes a copy, as the user would need one, too. An array that only the root needs may serve as scratch on
        other ranks.
        """
        call, away = self.collective(case, given), case.operation in ROOTED and self.rank != case.root
        shared = given.untyped_storage().data_ptr() == result.untyped_storage().data_ptr()
        # Ranks other than the root of a reduction copy, too: it leaves partial sums in their array.
        if not shared and (case.operation in ("all_reduce", "reduce") or (case.operation == "broadcast" and not away)):
            return lambda: call(result.copy_(given))
        if not shared or away or case.operation in self.in_place:
            return lambda: call(result)
        scratch = torch.empty_like(result)
        return lambda: (call(scratch), result.copy_(scratch))

    def collective(self, case: Case, given: torch.Tensor) -> Into:
        """Return the library's own function. Collectives of one array take it as the result."""
        group, root, at_root = self.group, case.root, self.rank == case.root
        op: Any = getattr(dist.ReduceOp, {"prod": "PRODUCT"}.get(case.redop, case.redop.upper()), None)
        parts = list(given.chunk(self.size)) if case.operation == "scatter" and at_root else None
        of: dict[str, Into] = {
            "all_reduce": lambda x: dist.all_reduce(x, op, group=group),
            "reduce": lambda x: dist.reduce(x, root, op, group=group),
            "broadcast": lambda x: dist.broadcast(x, root, group=group),
            "all_gather": lambda x: all_gather_single(x, given, group=group),
            "reduce_scatter": lambda x: reduce_scatter_single(x, given, op, group=group),
            "all_to_all": lambda x: dist.all_to_all_single(x, given, group=group),
            "gather": lambda x: dist.gather(given, list(x.chunk(self.size)) if at_root else None, root, group=group),
            "scatter": lambda x: dist.scatter(x, parts, root, group=group),
            "sendrecv": lambda x: self._send_on(given, x),
            "barrier": lambda x: self.barrier(),
        }
        return of[case.operation]

    def _send_on(self, given: torch.Tensor, result: torch.Tensor) -> None:
        """Send to the next rank and receive from the previous one."""
        if self.size == 1:
            result.copy_(given)
            return
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        send = dist.P2POp(dist.isend, given, after, self.group)
        for work in dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, result, before, self.group)]):
            work.wait()

    def barrier(self) -> None:
        dist.barrier(group=self.group)

    def synchronize(self) -> None:
        """Wait for work enqueued on a GPU."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()


class CommunicatorLibrary(Library):
    """Collectives of a :class:`Communicator`, the ``group``."""

    in_place = ("all_reduce", "reduce", "broadcast", "barrier")

    def collective(self, case: Case, given: torch.Tensor) -> Into:
        ours, op = self.group, {"avg": "mean"}.get(case.redop, case.redop)
        of: dict[str, Into] = {
            "all_reduce": lambda x: ours.all_reduce(x, op),
            "reduce": lambda x: ours.reduce(x, case.root, op),
            "broadcast": lambda x: ours.broadcast(x, case.root),
            "all_gather": lambda x: ours.all_gather(x, given),
            "reduce_scatter": lambda x: ours.reduce_scatter(x, given, op),
            "all_to_all": lambda x: ours.all_to_all(x, given),
            "barrier": lambda x: self.barrier(),
        }
        if case.operation not in of:
            raise NotImplementedError(f"pycomm.Communicator has no {case.operation}")
        return of[case.operation]

    def barrier(self) -> None:
        self.group.barrier()

    def synchronize(self) -> None:
        super().synchronize()
        self.group.check()


class BenchRank:
    """Worker in one process of a group. All libraries of a group share its processes and arrays.

    Args:
        num_bytes: of the largest array.
        device: "cpu" or "cuda".
    """

    def __init__(self, num_bytes: int, device: str = "cpu") -> None:
        torch.set_num_threads(1)  # ranks may outnumber cores
        if device == "cuda":  # by the rank on this host
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", dist.get_rank())) % torch.cuda.device_count())
        self._source, self._target = (torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
        self._libraries: dict[str, Library] = {}

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call ``method``; return its result, as one of a team of ranks does."""
        return [getattr(self, method)(*arguments)]

    def open(self, name: str) -> None:
        """Join the group of the library ``name``."""
        if name == COMMUNICATOR:
            self._libraries[name] = CommunicatorLibrary(Communicator(timeout=_TIMEOUT))
        else:
            self._libraries[name] = Library(dist.new_group(backend=name, timeout=_TIMEOUT))

    def close(self) -> None:
        """Close the communicator; the groups are torch's."""
        if COMMUNICATOR in self._libraries:
            self._libraries[COMMUNICATOR].group.close()

    def describe(self) -> dict[str, Any]:
        """Return where this rank runs, under nccl-tests' keys."""
        device, info = 0, cpu_model()
        if self._source.is_cuda:
            device, info = torch.cuda.current_device(), torch.cuda.get_device_name()
        place = {"hostname": socket.gethostname(), "device": device, "device_info": info}
        return {"rank": dist.get_rank(), "pid": os.getpid(), **place}

    def verify(self, name: str, case: Case, place: str) -> int | str:
        """Call once; return the number of wrong elements, or why the library does not support this.

        ``place``: where the result lies, "in_place" or "out_of_place". The turns that follow use the same input.
        """
        library = self._libraries[name]
        fill(case, library.rank, self._arrays(library.rank, case, "out_of_place")[0])
        self._target.fill_(_NAN)  # over an earlier result
        given, result = self._arrays(library.rank, case, place)
        try:
            library.bind(case, given, result)()
            library.synchronize()
        except CommError:
            raise
        except (RuntimeError, TypeError, ValueError) as error:
            return (str(error) or type(error).__name__).splitlines()[0]
        return count_wrong(case, library.rank, result)

    def turn(self, name: str, case: Case, place: str) -> float:
        """Return seconds per call, of calls back to back after untimed ones and a barrier.

        ``place`` "copy": of copies of the larger array, while all ranks make them: the basis of the floor.
        """
        library, (warmups, calls) = self._libraries[name], case.calls()
        if place != "copy":
            call = library.bind(case, *self._arrays(library.rank, case, place))
        elif self._source.is_cuda:
            call = functools.partial(self._target[: case.size].copy_, self._source[: case.size])
        else:
            call = functools.partial(np.copyto, self._target.numpy()[: case.size], self._source.numpy()[: case.size])
        for _ in range(warmups):
            call()
        library.synchronize()
        library.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        library.synchronize()
        return (time.perf_counter() - start) / calls

    def _arrays(self, rank: int, case: Case, place: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the input of ``rank`` and the array for its result."""
        source, target = (x[: case.size].view(getattr(torch, case.dtype)) for x in (self._source, self._target))
        whole, part = slice(None), slice(case.count)
        given = source[part if case.operation in ("all_gather", "gather") else whole]
        if place == "in_place":
            part = slice(rank * case.count, (rank + 1) * case.count)
            given = target[part if case.operation in ("all_gather", "gather") else whole].copy_(given)
        return given, target[part if case.operation in ("reduce_scatter", "scatter") else whole]
