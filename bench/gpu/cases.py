"""Kernels that ``bench.gpu`` measures, at which sizes, and what their figures are compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench.gpu.targets import BUCKET_COPY, COLD_READS, COPY, FOUR_TIMES, TEN_TIMES, WARM_READS, Target
from bench.kernels import compression, dense, optimizers, sparse, steps
from bench.kernels.case import Arrays, Calls, Case
from bench.kernels.resnet50 import Shape

_RATIOS = (0.001, 0.01)
_DGC_RATIO = 0.001
_PIECES = 100  # gradients that the elements are cut into
_SECTOR = 32  # bytes that a GPU moves at least
_LARS_NOTE = (
    "torch multiplies gradients by factors that are on the GPU in one launch each, its only way that does not wait for "
    "the host; that is the larger part of its time with many small parameters"
)


@dataclass(frozen=True)
class Plan:
    """One line of the table.

    Attributes:
        shapes: shapes of the gradients.
        what: words for them, where they have to be told from others.
        note: what a reader of the figures has to know.
    """

    case: Case
    shapes: Sequence[Shape]
    target: Target | None = None
    what: str = ""
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.case.name} of {self.what}" if self.what else self.case.name

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    def make(self, device: torch.device, count: int) -> list[Calls]:
        """Return ``count`` calls of the case, each on memory that the ones before it do not use, as far as it needs."""
        generator = torch.Generator(device).manual_seed(0)
        several = min(count, self.case.num_arrays or count)
        arrays = [Arrays(self.shapes, device, generator) for _ in range(several)]
        return [self.case.make(arrays[i % several]) for i in range(count)]


def make_plans(small: Sequence[int], large: int, shapes: Sequence[Shape]) -> list[Plan]:
    """Return all plans in the order of the table: gradients of ``shapes``, then arrays of several sizes.

    The large one is first, with the targets that are held against a copy; ``small`` are ascending, the middle one with
    the targets of a bucket. The slowest comes last, so that it takes no time from the others.
    """
    plans = [*_resnet50(shapes), *_steps(shapes)]
    for n in (large, *reversed(small)):
        tenfold = TEN_TIMES if n == small[-1] else None
        held = COPY if n == large else BUCKET_COPY if n == small[len(small) // 2] else None
        plans += [*_dense(n, held), *_sparse(n, n == large, tenfold), *_compression(n)]
    indices = [Plan(case, [(sparse.NUM_INDICES,)]) for case in (sparse.indices_to_bits(), sparse.bits_to_indices())]
    return [*plans, *indices, *(_dgc(n, pieces=False, warm=False) for n in (*small, large))]


def _pieces(n: int) -> list[Shape]:
    """Cut ``n`` elements into gradients of equal lengths, but for the last."""
    length = -(-n // _PIECES)
    return [(min(length, n - begin),) for begin in range(0, n, length)]


def _resnet50(shapes: Sequence[Shape]) -> list[Plan]:
    n, what = sum(math.prod(shape) for shape in shapes), f"{len(shapes)} gradients of ResNet-50"
    return [Plan(dense.pack_by_cat(n), shapes, FOUR_TIMES, what), Plan(dense.pack_half(n), shapes, None, what)]


def _dense(n: int, target: Target | None) -> list[Plan]:
    shapes = _pieces(n)
    held = [dense.pack_half(n), dense.unpack(n), dense.unpack_half(n), dense.reduce(n)]
    measured = [dense.accumulate(n), dense.absmax(n, by_norms=True), dense.hashes(n)]
    return [
        Plan(dense.pack(n), shapes),
        *(Plan(case, shapes, target) for case in held),
        *(Plan(case, shapes) for case in measured),
    ]


def _sparse(n: int, large: bool, tenfold: Target | None) -> list[Plan]:
    plans, shapes = [], _pieces(n)
    for ratio in _RATIOS:
        cold, warm = (COLD_READS, WARM_READS) if large else (tenfold if ratio == _RATIOS[0] else None, None)
        plans.append(Plan(sparse.topk(n, ratio), shapes, cold))
        plans.append(Plan(sparse.topk(n, ratio, warm=True), shapes, warm))
    return [*plans, *(Plan(sparse.scatter_add(n, ratio, _SECTOR), shapes) for ratio in _RATIOS)]


def _compression(n: int) -> list[Plan]:
    whole = [(n,)]
    steps_of_dgc = [_dgc(n, pieces, warm) for pieces, warm in ((False, True), (True, False), (True, True))]
    cases = [
        compression.encode_with_remainder(n, compression.INT8),
        compression.decode(n, compression.INT8, ranks=4),
        compression.encode_with_remainder(n, compression.INT4),
        compression.decode(n, compression.INT4, ranks=4),
        compression.encode_with_remainder(n, compression.E4M3),
        compression.decode(n, compression.E4M3, ranks=4),
        compression.requantize(n, compression.E4M3),
        compression.sign_pack_with_remainder(n),
        compression.chunk_pack(n),
        compression.chunk_unpack(n, ranks=4),
    ]
    return [*steps_of_dgc, *(Plan(case, whole) for case in cases)]


def _dgc(n: int, pieces: bool, warm: bool) -> Plan:
    """Describe a step of DGC, of one gradient or of many pieces."""
    shapes = _pieces(n) if pieces else [(n,)]
    what = f"{len(shapes)} gradients" if pieces else "one gradient"
    return Plan(sparse.dgc_step(n, _DGC_RATIO, warm), shapes, what=what)


def _steps(shapes: Sequence[Shape]) -> list[Plan]:
    n, what = sum(math.prod(shape) for shape in shapes), f"{len(shapes)} parameters of ResNet-50"
    cases = [(steps.squared_norms, ""), (steps.momentum, ""), (steps.lars, _LARS_NOTE), (steps.adam, "")]
    kernels = [Plan(make(n), shapes, what=what, note=note) for make, note in cases]
    return [*kernels, *(Plan(case, shapes, what=what) for case in optimizers.make_cases(n))]
