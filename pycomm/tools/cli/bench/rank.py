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
from pycomm.tools.cli.bench.operations import COMMUNICATOR, Case
from pycomm.torch_internals import PrefixStore, Store, all_gather_single, reduce_scatter_single

Indices = npt.NDArray[np.uint32]

# Test data. Element i of rank r is (7919 i + 1000003 r) mod M. M is a power of two, so small that all sums over the
# ranks are exact in the dtype. Any M consecutive elements differ, and so do the same elements of any M ranks. For
# products, elements are 1 or 2 by the same rule.

_TIMEOUT = timedelta(seconds=120)  # of every wait for another rank
_CHUNK = 1 << 16
_SIGNIFICANT_BITS = {"half": 11, "bfloat16": 8, "float": 24, "double": 24, "int8": 7, "uint8": 8}
_BITS = 24  # for all others: more would test no more


def modulus(ranks: int, bits: int = _BITS) -> int:
    """Return M: the largest power of two whose sum over the ranks has at most ``bits`` bits, at least 2."""
    return 1 << max(1, bits - (ranks - 1).bit_length())


def pattern(rank: int | Indices, index: Indices, modulus: int) -> Indices:
    """Return elements ``index`` of ``rank`` as integers; ``rank`` may be an array with a rank for each element."""
    offset = np.atleast_1d(np.asarray(rank, np.uint32)) * np.uint32(1000003)
    # Overflow wraps around at 2^32, a multiple of the modulus.
    return (index * np.uint32(7919) + offset) & np.uint32(modulus - 1)


def chunks(num_elements: int, begin: int = 0) -> Iterator[tuple[slice, Indices]]:
    """Yield slices of all elements with their indices, counted from ``begin``. This bounds temporary memory."""
    for start in range(0, num_elements, _CHUNK):
        piece = slice(start, min(start + _CHUNK, num_elements))
        yield piece, np.arange(begin + piece.start, begin + piece.stop, dtype=np.uint32)


def fill(case: Case, rank: int, target: torch.Tensor) -> None:
    """Write the input of ``rank`` to ``target``."""
    for piece, index in chunks(target.numel()):
        target[piece] = _given(case, rank, index)


def _given(case: Case, rank: int | Indices, index: Indices) -> torch.Tensor:
    return torch.from_numpy(_integers(case, rank, index)).to(case.torch_dtype)


def count_wrong(case: Case, rank: int, got: torch.Tensor) -> int:
    """Return the number of wrong elements in the result ``got`` of ``rank``."""
    exact = case.redop != "avg" or case.ranks & (case.ranks - 1) == 0
    # In an average, each rank's term and the sum may be rounded once.
    tolerance, wrong = 0.0 if exact else 2 * torch.finfo(case.torch_dtype).eps, 0
    for piece, index in chunks(got.numel()):
        same = torch.isclose(got[piece].cpu(), _wanted(case, rank, index), rtol=tolerance, atol=0.0)
        wrong += int((~same).sum())
    return wrong


def _integers(case: Case, rank: int | Indices, index: Indices) -> npt.NDArray[np.int64]:
    if case.redop == "prod":
        return 1 + ((pattern(rank, index, 1 << _BITS) >> np.uint32(7)) & np.uint32(1)).astype(np.int64)
    return pattern(rank, index, modulus(case.ranks, _SIGNIFICANT_BITS.get(case.dtype, _BITS))).astype(np.int64)


def _wanted(case: Case, rank: int, index: Indices) -> torch.Tensor:
    """Return elements ``index`` of the right result of ``rank``."""
    source: int | Indices = (rank - 1) % case.ranks if case.operation == "sendrecv" else case.root
    if case.operation in ("all_gather", "gather", "all_to_all"):
        source, index = index // np.uint32(case.count), index % np.uint32(case.count)
    if case.operation in ("all_to_all", "scatter", "reduce_scatter"):
        index = index + np.uint32(rank * case.count)
    return _reduced(case, index) if case.spec.reduces else _given(case, source, index)


def _reduced(case: Case, index: Indices) -> torch.Tensor:
    """Return elements ``index`` of the reduction; integers wrap around as in the dtype."""
    by_rank = [_integers(case, rank, index) for rank in range(case.ranks)]
    reduce = {"sum": np.add, "avg": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}[case.redop]
    reduced = torch.from_numpy(functools.reduce(reduce, by_rank))
    return (reduced.double() / case.ranks if case.redop == "avg" else reduced).to(case.torch_dtype)


Call = Callable[[], object]
Into = Callable[[torch.Tensor], object]
"""A collective that writes its result to its argument."""

_REDUCTIONS: dict[str, Any] = {name: getattr(dist.ReduceOp, name.upper()) for name in ("sum", "max", "min", "avg")}
_REDUCTIONS["prod"] = dist.ReduceOp.PRODUCT
_OWN_REDUCTIONS = {"sum": "sum", "max": "max", "min": "min", "avg": "mean"}


class UnsupportedError(Exception):
    """The library does not have this collective, dtype or reduction; the message says which."""


def through_scratch(call: Into, result: torch.Tensor) -> Call:
    """Return ``call`` into a scratch tensor, then a copy to ``result``, for libraries that cannot work in place."""
    scratch = torch.empty_like(result)
    return lambda: (call(scratch), result.copy_(scratch))


class Library:
    """Collectives of torch.distributed by ``backend``, in the default group, or in a new one if that exists already.

    Attributes:
        rank, size: of this process.
        in_place: the collectives of two arrays whose input may lie inside the result.
    """

    in_place: tuple[str, ...] = ("all_gather", "barrier")

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
        send = dist.P2POp(dist.isend, given, after, self._group)
        for work in dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, result, before, self._group)]):
            work.wait()

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def synchronize(self) -> None:
        """Wait for work enqueued on a GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Leave the group, after the last call."""
        if dist.is_initialized():
            dist.destroy_process_group()  # and all other groups


class CommunicatorLibrary(Library):
    """Collectives of a :class:`Communicator` over the default group; creates a Gloo group if there is none."""

    in_place = ("barrier",)

    def __init__(self, *place: Any) -> None:
        self._store, self.rank, self.size, self.device, timeout = place
        if not dist.is_initialized():
            super().__init__("gloo", *place)
        self._communicator = Communicator(timeout=timeout)

    def collective(self, case: Case, given: torch.Tensor) -> Into:
        ours, op = self._communicator, _OWN_REDUCTIONS.get(case.redop, "")
        of: dict[str, Into] = {
            "all_reduce": lambda x: ours.all_reduce(x, op),
            "broadcast": lambda x: ours.broadcast(x, case.root),
            "all_gather": lambda x: ours.all_gather(x, given),
            "reduce_scatter": lambda x: ours.reduce_scatter(x, given, op),
            "all_to_all": lambda x: ours.all_to_all(x, given),
            "barrier": lambda x: self.barrier(),
        }
        if case.operation not in of:
            raise UnsupportedError(f"pycomm.Communicator has no {case.operation}")
        if case.spec.reduces and not op:
            raise UnsupportedError(f"pycomm.Communicator has no reduction {case.redop!r}")
        return of[case.operation]

    def barrier(self) -> None:
        self._communicator.barrier()

    def synchronize(self) -> None:
        super().synchronize()
        if self.device.type == "cuda":
            self._communicator.check()

    def close(self) -> None:
        self._communicator.close()
        super().close()


_NAN = 255  # each byte of a NaN in every floating-point dtype, and of -1 or the largest number in the others


class BenchRank:
    """Worker in one process of a group. All libraries of a group share its processes and arrays.

    Args:
        num_bytes: of the largest array.
        device: "cpu" or "cuda".
        store: where the ranks meet; only torch's libraries require it.
    """

    def __init__(self, num_bytes: int, device: str = "cpu", store: Store | None = None) -> None:
        torch.set_num_threads(1)  # ranks may outnumber cores
        self.rank, self._size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._device = torch.device(device)
        if device == "cuda":  # by the rank on this host
            self._device = torch.device(
                device, int(os.environ.get("LOCAL_RANK", self.rank)) % torch.cuda.device_count()
            )
        self._store = store
        self._libraries: dict[str, Library] = {}
        source, target = (torch.ones(max(1, num_bytes), dtype=torch.uint8, device=self._device) for _ in range(2))
        self._source, self._target = source, target
        self._filled: Case | None = None

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call ``method``; return its result, as one of a team of ranks does."""
        return [getattr(self, method)(*arguments)]

    def open(self, name: str) -> None:
        """Join the group of the library ``name``."""
        self._libraries[name] = self._make(name)

    def _make(self, name: str) -> Library:
        assert self._store is not None, "torch's libraries require a store"
        place = (PrefixStore(name, self._store), self.rank, self._size, self._device, _TIMEOUT)
        return CommunicatorLibrary(*place) if name == COMMUNICATOR else Library(name, *place)

    def describe(self) -> dict[str, Any]:
        """Return where this rank runs, under nccl-tests' keys."""
        index = self._device.index or 0
        gpu = torch.cuda.get_device_properties(index) if self._device.type == "cuda" else None
        return {
            "rank": self.rank,
            "group": 0,
            "pid": os.getpid(),
            "hostname": socket.gethostname(),
            "device": index,
            "device_hex": f"{getattr(gpu, 'pci_domain_id', 0):04x}:{getattr(gpu, 'pci_bus_id', 0):02x}:00",
            "device_info": cpu_model() if gpu is None else gpu.name,
        }

    def verify(self, name: str, case: Case, in_place: bool) -> int | str:
        """Call once; return the number of wrong elements, or why the library does not support this."""
        library = self._libraries[name]
        self._target.fill_(_NAN)  # over an earlier result
        given, result = self._arrays(library.rank, case, in_place)
        try:
            library.bind(case, given, result)()
            library.synchronize()
        except CommError:
            raise
        except (UnsupportedError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            return (str(error) or type(error).__name__).splitlines()[0]
        return count_wrong(case, library.rank, result) if case.gets(library.rank) else 0

    def turn(self, name: str, case: Case, in_place: bool, warmups: int, calls: int) -> float:
        """Return seconds per call, of ``calls`` calls back to back after ``warmups`` untimed ones and a barrier."""
        library = self._libraries[name]
        call = library.bind(case, *self._arrays(library.rank, case, in_place))
        return _timed(library, call, warmups, calls)

    def turn_copy(self, name: str, num_bytes: int, calls: int) -> float:
        """Return seconds for copying ``num_bytes`` while all ranks do so: the basis of the floor."""
        source, target = self._source[:num_bytes], self._target[:num_bytes]
        if self._device.type != "cpu":
            return _timed(self._libraries[name], lambda: target.copy_(source), 1, calls)
        to, what = target.numpy(), source.numpy()
        return _timed(self._libraries[name], lambda: np.copyto(to, what), 1, calls)

    def close(self) -> None:
        for library in reversed(self._libraries.values()):  # the first one has the default group
            library.close()

    def _arrays(self, rank: int, case: Case, in_place: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the input of ``rank`` and the array for its result."""
        source, target = (array[: case.size].view(case.torch_dtype) for array in (self._source, self._target))
        given = source[case.input_span(rank, in_place=False)]
        if self._filled != case and case.gives(rank):
            fill(case, rank, given)
        self._filled = case
        if in_place:
            given = target[case.input_span(rank, in_place=True)].copy_(given)
        return given, target[case.output_span(rank, in_place)]


def _timed(library: Library, call: Call, warmups: int, calls: int) -> float:
    for _ in range(warmups):
        call()
    library.synchronize()
    library.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    library.synchronize()
    return (time.perf_counter() - start) / calls
