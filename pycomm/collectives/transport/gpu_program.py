"""Execution of a program, or of an all-to-all, between GPUs: NCCL's sends and receives, and our kernels to reduce.

Each round is a group. Nothing blocks the host. Everything is enqueued on one stream, so a round's kernels run after its
messages and before the next round's.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from pycomm import kernels
from pycomm.collectives.transport.host_tensors import require_op
from pycomm.collectives.transport.nccl import NcclTransport
from pycomm.kernels.arrays import DTYPES, Part, dtype_of, empty
from pycomm.schedule.program import Program, sums_of


class GpuProgram:
    """All-reduce of ``x`` by ``program``, ready to be enqueued.

    For means the sums are divided at the end; half types are summed in float32.

    Args:
        program: this rank's program.
        x: array, reduced in place.
        op: reduction of :func:`pycomm.kernels.reduce`.
        scratch: scratch memory of the stream.
    """

    def __init__(self, program: Program, x: Any, op: str, scratch: kernels.Scratch) -> None:
        dtype, self._count = dtype_of(x), _require_contiguous(x)
        if dtype not in DTYPES:
            raise TypeError(f"x has dtype {dtype}, wanted one of {', '.join(DTYPES)}")
        require_op(op, dtype, "x")
        self._program = program
        self._op = op
        self._x = x
        self._widens = op == "mean" and dtype in ("float16", "bfloat16")
        self._scratch = scratch
        self._rounds = list(program.rounds())
        self._working = self._incoming = x

    @property
    def needs_memory(self) -> bool:
        """Whether :meth:`run` allocates."""
        return self._widens or any(row[3] for _, receives in self._rounds for row in receives)

    def run(self, transport: NcclTransport, stream: int, timeout: float) -> None:
        """Enqueue the all-reduce on ``stream``, which must be torch's current stream, as memory is allocated on it.

        Other libraries allocate without regard to the stream: for their arrays this object, which holds the memory,
        must live until the stream has finished the program.
        """
        if self._widens:
            self._working = empty(self._x, (self._count,), "float32")
        room = max((sum(self._length(row) for row in receives if row[3]) for _, receives in self._rounds), default=0)
        self._incoming = empty(self._x, (room,), dtype_of(self._working))
        whole, working = (Part(array, 0, self._count, stream) for array in (self._x, self._working))
        if self._working is not self._x and self._count:
            self._scale(whole, working, 1.0)
        for sends, receives in self._rounds:
            self._do_round(sends, receives, transport, stream, timeout)
        if self._op == "mean" and self._count:
            self._scale(working, whole, 1.0 / self._program.num_ranks)

    def _do_round(
        self, sends: list[list[int]], receives: list[list[int]], transport: NcclTransport, stream: int, timeout: float
    ) -> None:
        owns, incoming, used = [], [], 0
        with transport.grouped(timeout):
            for row in receives:
                own = target = self._part(row, stream)
                if row[3]:
                    target = Part(self._incoming, used, len(own), stream)
                    used += len(own)
                owns.append(own)
                incoming.append(target)
                if len(own):
                    transport.recv(target, row[0], stream, timeout)
            for row in sends:
                part = self._part(row, stream)
                if len(part):
                    transport.send(part, row[0], stream, timeout)
        for own, *operands in sums_of(self._program.rank, receives, owns, incoming):
            if len(own):
                kernels.reduce(own, operands, "sum" if self._op == "mean" else self._op, scratch=self._scratch)

    def _part(self, row: list[int], stream: int) -> Part:
        return Part(self._working, self._program.border(row[1], self._count), self._length(row), stream)

    def _length(self, row: list[int]) -> int:
        chunk, count = row[1:3]
        return self._program.border(chunk + count, self._count) - self._program.border(chunk, self._count)

    def _scale(self, src: Part, out: Part, scale: float) -> None:
        kernels.unpack(src, [out], scale, scratch=self._scratch)


def all_to_all(transport: NcclTransport, out: Any, x: Any, stream: int, timeout: float) -> None:
    """Enqueue on ``stream``: part p of ``x`` goes to rank p, where it becomes part ``rank`` of ``out``."""
    size, count = transport.size, _require_contiguous(x)
    dtypes = dtype_of(x), dtype_of(out)
    if dtypes[0] not in DTYPES or dtypes[0] != dtypes[1]:
        raise TypeError(f"x has dtype {dtypes[0]} and out {dtypes[1]}, wanted both one of {', '.join(DTYPES)}")
    if count % size or _require_contiguous(out) != count:
        lengths = f"x has {count} elements and out {_require_contiguous(out)}"
        raise ValueError(f"{lengths}, wanted both the same multiple of {size}, the number of ranks")
    with transport.grouped(timeout):
        for p in range(size if count else 0):
            first, length = p * (count // size), count // size
            transport.send(Part(x, first, length, stream), p, stream, timeout)
            transport.recv(Part(out, first, length, stream), p, stream, timeout)


def _require_contiguous(x: Any) -> int:
    """Return the number of elements of ``x``; raise ValueError unless it is contiguous and writable."""
    if isinstance(x, torch.Tensor):
        contiguous, shape = x.is_contiguous(), tuple(x.shape)
    else:
        interface = x.__cuda_array_interface__
        shape, strides = tuple(interface["shape"]), interface.get("strides")
        if interface["data"][1]:
            raise ValueError("x is read-only, wanted an array to write to")
        width = int(interface["typestr"][2:])
        dense = [width * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        contiguous = strides is None or list(strides) == dense or 0 in shape
    if not contiguous:
        raise ValueError("x is not contiguous, wanted a contiguous array to write to")
    return math.prod(shape)
