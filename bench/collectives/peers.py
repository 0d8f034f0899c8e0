"""The ranks of ``bench.collectives``: one class per library, all with the same turns.

Only what a rank's own library needs is loaded by it, but for torch, which comes with the package.

The numbers are the same as in ``pycomm.tools.cli.bench.rank``: ranks differ in every element, and all sums over the
P ranks are exact in float32. Summing in place again and again multiplies by P each time, which stays
exact where P is a power of two; each block of calls starts afresh, before it could overflow.
"""

from __future__ import annotations

import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pycomm.tools.cli.bench.rank import Indices, chunks, pattern

Floats = npt.NDArray[np.float32]

_SAMPLE_STRIDE = 1009
_LARGEST_EXPONENT = 126  # of two, in float32


def starting_values(rank: int, size: int, index: Indices) -> Floats:
    """Return the elements ``index`` of ``rank``'s input; see ``pycomm.tools.cli.bench.rank``."""
    return pattern(rank, index, size).astype(np.float32)


def sums(size: int, index: Indices) -> Floats:
    """Return the elements ``index`` of the sum over all ranks, exactly."""
    total = np.zeros(len(index), np.float32)
    for rank in range(size):
        total += starting_values(rank, size, index)
    return total


class AllReducePeer(ABC):
    """One library's rank: input, expected sums, turns. Subclasses say where memory comes from and how it is summed.

    Args:
        rank, size: of this process.
        num_elements: of the largest array; smaller ones are its beginning.
        variants: kinds of memory to measure.
    """

    def __init__(self, rank: int, size: int, num_elements: int, variants: list[str]) -> None:
        self.rank, self.size = rank, size
        self._source = np.empty(num_elements, np.float32)
        for piece, index in chunks(num_elements):
            self._source[piece] = starting_values(rank, size, index)
        self._sampled_sums = sums(size, np.arange(0, num_elements, _SAMPLE_STRIDE, dtype=np.uint32))
        self._copy: Floats | None = None
        self._memory = {variant: self._allocate(variant, num_elements) for variant in variants}

    @abstractmethod
    def _allocate(self, variant: str, num_elements: int) -> Any:
        """Return an array of the library's kind."""

    @abstractmethod
    def _all_reduce(self, array: Any) -> None:
        """Sum in place over the ranks."""

    def _operation(self, variant: str) -> Callable[[Any], object]:
        """Return the function that sums arrays of ``variant``."""
        return self._all_reduce

    @abstractmethod
    def _barrier(self) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Leave the group, after the last turn."""

    def verify(self, variant: str, num_elements: int) -> None:
        """Compare every element of one sum.

        Raises:
            AssertionError: an element is wrong.
        """
        array, view = self._fresh(variant, num_elements)
        self._operation(variant)(array)
        for piece, index in chunks(num_elements):
            if not np.array_equal(view[piece], sums(self.size, index)):
                raise AssertionError(f"{variant}: wrong sums among elements {piece.start} to {piece.stop}")

    def turn(self, variant: str, num_elements: int, calls: int, blocks: int) -> list[float]:
        """Sum ``blocks`` times ``calls`` times back to back; returns seconds per call in each block, on this rank.

        A block more goes ahead and does not count: ranks that have just been woken up run wherever the
        kernel put them, with the caches that the others left.
        """
        calls = self._fitting(calls)
        return [self._block(variant, num_elements, calls) for _ in range(1 + blocks)][1:]

    def turn_memcpy(self) -> float:
        """Return the seconds for copying the largest array while all ranks do: the floor of an all-reduce of that size.

        It has to read each rank's input once and write each rank's output once; that is what these copies do.
        """
        if self._copy is None:
            self._copy = self._source.copy()
        self._barrier()
        start = time.perf_counter()
        np.copyto(self._copy, self._source)
        return time.perf_counter() - start

    def _block(self, variant: str, num_elements: int, calls: int) -> float:
        array, view = self._fresh(variant, num_elements)
        all_reduce = self._operation(variant)
        self._barrier()
        start = time.perf_counter()
        for _ in range(calls):
            all_reduce(array)
        seconds = time.perf_counter() - start
        self._check_sample(view, calls)
        return seconds / calls

    def _fresh(self, variant: str, num_elements: int) -> tuple[Any, Floats]:
        array = self._memory[variant][:num_elements]
        view = self._view(array)
        np.copyto(view, self._source[:num_elements])
        return array, view

    def _view(self, array: Any) -> Floats:
        return array if isinstance(array, np.ndarray) else array.numpy()

    def _fitting(self, calls: int) -> int:
        """Return at most as many calls as keep 2^24 P^(calls - 1) a float32."""
        growth = math.log2(max(2, self.size))
        return min(calls, 1 + int((_LARGEST_EXPONENT - 24) / growth))

    def _check_sample(self, view: Floats, calls: int) -> None:
        got = view[::_SAMPLE_STRIDE]
        wanted = self._sampled_sums[: len(got)] * np.float32(self.size) ** (calls - 1)
        exact = self.size & (self.size - 1) == 0
        if not np.allclose(got, wanted, rtol=0 if exact else 1e-5, atol=0):
            raise AssertionError(f"wrong sums after {calls} calls with {len(view)} elements")


class PycommPeer(AllReducePeer):
    """pycomm's rank.

    Variants: "empty", memory from ``Communicator.empty``; "tensor", any tensor; "empty ring", by that algorithm.
    """

    def __init__(self, port: int, **rest: Any) -> None:
        import pycomm

        rank, size = _join(port)
        self._communicator = pycomm.Communicator()
        self._by_kind: dict[str, Any] = {}
        super().__init__(rank, size, **rest)

    def _allocate(self, variant: str, num_elements: int) -> Any:
        import torch

        kind = variant.partition(" ")[0]
        if kind not in self._by_kind:
            self._by_kind[kind] = (
                self._communicator.empty(num_elements) if kind == "empty" else torch.empty(num_elements)
            )
        return self._by_kind[kind]

    def _all_reduce(self, array: Any) -> None:
        self._communicator.all_reduce(array)

    def _operation(self, variant: str) -> Callable[[Any], object]:
        algorithm = variant.partition(" ")[2] or "auto"
        return lambda array: self._communicator.all_reduce(array, algorithm=algorithm)

    def _barrier(self) -> None:
        self._communicator.barrier()

    def close(self) -> None:
        self._communicator.close()
        _leave()


class TorchPeer(AllReducePeer):
    """Rank of a torch.distributed group that sums ordinary tensors."""

    def __init__(self, rank: int, size: int, **rest: Any) -> None:
        import torch.distributed as dist

        self._dist = dist
        super().__init__(rank, size, **rest)

    def _allocate(self, variant: str, num_elements: int) -> Any:
        import torch

        return torch.empty(num_elements)

    def close(self) -> None:
        _leave()


class GlooPeer(TorchPeer):
    """Rank that calls ``torch.distributed.all_reduce`` over Gloo; by sockets, or through shared memory."""

    def __init__(self, port: int, shared_memory: bool, **rest: Any) -> None:
        # Where Gloo can sum through shared memory, it does so if torchrun's variable says that all ranks are here.
        os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"] if shared_memory else "0"
        super().__init__(*_join(port), **rest)

    def _all_reduce(self, array: Any) -> None:
        self._dist.all_reduce(array)

    def _barrier(self) -> None:
        self._dist.barrier()


class DeepSpeedPeer(TorchPeer):
    """Rank that calls DeepSpeed's all-reduce through shared memory; its driver has built that."""

    def __init__(self, port: int, **rest: Any) -> None:
        import torch

        rank, size = _join(port)
        # It takes from the environment whether all ranks are on this host, and what tells its files from others'.
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        os.environ.update(place, LOCAL_SIZE=str(size), DS_ACCELERATOR="cpu")
        from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

        ShareMemCommBuilder().load(verbose=False).initialize(size, rank)
        self._sum = torch.ops.deepspeed.inference_all_reduce_.default
        self._nothing = torch.zeros(8)
        super().__init__(rank, size, **rest)
        self._dist.barrier()  # all have opened all files, which DeepSpeed leaves behind: 66 MiB for each rank
        name = f"deepspeed_allreduce_buffer_{os.getuid()}_{'_'.join(place.values())}_{rank}"
        Path("/dev/shm", name).unlink(missing_ok=True)

    def _all_reduce(self, array: Any) -> None:
        self._sum(array)

    def _barrier(self) -> None:
        self._sum(self._nothing)  # returns once all ranks have called it


class MpiPeer(AllReducePeer):
    """Rank that calls ``MPI_Allreduce`` through mpi4py with a numpy array; its environment says which MPI."""

    def __init__(self, **rest: Any) -> None:
        from mpi4py import MPI

        self._in_place, self._sum = MPI.IN_PLACE, MPI.SUM
        self._world = MPI.COMM_WORLD
        super().__init__(self._world.rank, self._world.size, **rest)

    def _allocate(self, variant: str, num_elements: int) -> Floats:
        return np.empty(num_elements, np.float32)

    def _all_reduce(self, array: Any) -> None:
        self._world.Allreduce(self._in_place, array, self._sum)

    def _barrier(self) -> None:
        self._world.Barrier()

    def close(self) -> None:
        pass  # mpi4py finalizes when the process ends


def _join(port: int) -> tuple[int, int]:
    from bench.harness.ranks import join_group

    return join_group(port)


def _leave() -> None:
    import torch.distributed as dist

    dist.destroy_process_group()
