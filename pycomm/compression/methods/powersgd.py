"""Low rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch

from pycomm import checks, kernels
from pycomm.collectives.bucket import Bucket
from pycomm.collectives.communicator import Communicator
from pycomm.compression.base import Flag, State
from pycomm.compression.codec import Accumulated, BaseCodec, Summands, seed_of, wide_dtype
from pycomm.compression.feedback import CodecMethod
from pycomm.compression.messages import SummedMessage
from pycomm.compression.report import Report, Told


class LowRankCodec(BaseCodec):
    """Codec of every parameter as a matrix M, first dimension by the rest: M ~ P Q^T with ``rank`` columns each.

    P = M Q is summed over the ranks and orthogonalized; then Q = M^T P is summed, and the next step begins
    with it. This rank's contribution is P Q^T with its own Q; the contributions of all ranks add up to what
    every rank receives. On a CPU our kernels compute the products, in the passes that read and write M anyway; on a
    GPU cuBLAS does.
    """

    def __init__(self, bucket: Bucket, communicator: Communicator, rank: int, seed: int) -> None:
        super().__init__()
        self._bucket = bucket
        self._config = config = kernels.LowRank([_matrix_of(p) for p in bucket.params()], rank)
        self._ps = SummedMessage(bucket, communicator, config.num_p)
        self._qs = SummedMessage(bucket, communicator, config.num_q, reports=False)
        generator = torch.Generator().manual_seed(seed_of(seed, 0, bucket))
        first = torch.randn(config.num_q, generator=generator, dtype=wide_dtype(bucket))
        self._q = first.to(bucket.device)
        self._next = torch.empty_like(self._q)
        self._scratch = kernels.Scratch()
        self._finite = torch.tensor(True)

    def accumulate(self, summands: Summands) -> torch.Tensor:
        ps = self._ps.values
        if not self._bucket.on_gpu:
            options = {name: value for name, value in summands.options.items() if name != "scratch"}
            finite: torch.Tensor = kernels.accumulate_low_rank(*summands.arrays, self._config, self._q, ps, **options)
            return finite
        finite = super().accumulate(summands)
        for matrix, q, p in zip(self._matrices(summands.acc), self._cut_q(self._q), self._cut_p(ps), strict=True):
            torch.mm(matrix, q, out=p)
        return finite

    def send(self, accumulated: Accumulated, told: Told) -> Report:
        flat, ps, qs = accumulated.flat, self._ps.values, self._qs.values
        report = self._ps.all_reduce(told)
        self._finite = report.finite()
        kernels.orthogonalize(ps, self._config, scratch=self._scratch)
        if not self._bucket.on_gpu:
            kernels.split_low_rank(flat, self._config, ps, qs)
        else:
            for matrix, p, q in zip(self._matrices(flat), self._cut_p(ps), self._cut_q(qs), strict=True):
                torch.mm(matrix.t(), p, out=q)
                matrix.addmm_(p, q.t(), alpha=-1.0)
        self._qs.all_reduce_values()
        # A Q of zeros, where nothing was received, would stay zero: the old one is kept then.
        for q, new, kept in zip(*map(self._cut_q, (self._q, qs, self._next)), strict=True):
            torch.where(new.any(), new, q, out=kept)
        self.bytes_sent += self._ps.num_bytes + self._qs.num_bytes
        return report

    def largest(self) -> torch.Tensor:
        # Columns of P have length 1, so an element of P Q^T is at most a row of Q long.
        rows = [torch.linalg.vector_norm(q, dim=1) for q in self._cut_q(self._qs.values)]
        return (torch.cat(rows) if len(rows) > 1 else rows[0]).max().double()

    def finite(self, report: Report, accumulated: Accumulated) -> torch.Tensor:
        return self._finite & accumulated.fits(self.largest())

    def write(self, out: torch.Tensor, factor: float | torch.Tensor) -> None:
        ps, qs = self._ps.values, self._qs.values
        if not self._bucket.on_gpu:
            kernels.expand_low_rank(out, self._config, ps, qs, factor)
            return
        for matrix, p, q in zip(self._matrices(out), self._cut_p(ps), self._cut_q(qs), strict=True):
            torch.mm(p * factor, q.t(), out=matrix)

    def commit(self, finite: Flag) -> None:
        if isinstance(finite, torch.Tensor):
            torch.where(finite, self._next, self._q, out=self._q)
        elif finite:
            self._q.copy_(self._next)

    def state(self) -> State:
        return {name: {"q": q} for name, q in zip(self._bucket.names, self._cut_q(self._q), strict=True)}

    def _matrices(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return _cut(flat, self._config.shapes)

    def _cut_p(self, ps: torch.Tensor) -> list[torch.Tensor]:
        return _cut(ps, self._config.p_shapes)

    def _cut_q(self, qs: torch.Tensor) -> list[torch.Tensor]:
        return _cut(qs, self._config.q_shapes)


def _matrix_of(param: torch.Tensor) -> tuple[int, int]:
    return param.shape[0], param.numel() // param.shape[0]


def _cut(flat: torch.Tensor, shapes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    parts = torch.split(flat, [math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


@dataclass(frozen=True)
class PowerSGD(CodecMethod):
    """Gradients as products of two matrices of ``rank`` columns, by one step of power iteration.

    Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", 2019,
    algorithms 1 and 2, warm-started. A parameter of n by m elements (first dimension by the rest) takes
    4 * rank * (n + m) bytes in two all-reduces; it is sent dense if that is more than half of its size. For a
    DTensor, each rank's part is such a matrix, with ``rank`` columns of its own: together they approximate the whole
    parameter at least as well.

    Args:
        rank: number of columns, at least 1.
        error_feedback: keep what was not sent and add it to the next gradient.
        seed: seed of the first Q, equal on all ranks.

    Raises:
        TypeError, ValueError: ``rank`` or ``seed`` is out of range.
    """

    rank: int = 4
    _: KW_ONLY
    error_feedback: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        checks.integer("rank", self.rank, 1)
        checks.flag("error_feedback", self.error_feedback)
        checks.integer("seed", self.seed, 0)

    def applies_to(self, param: torch.Tensor) -> bool:
        if not super().applies_to(param):
            return False
        n, m = _matrix_of(param)
        return 2 * self.rank * (n + m) <= n * m

    def codec(self, bucket: Bucket, communicator: Communicator) -> LowRankCodec:
        return LowRankCodec(bucket, communicator, self.rank, self.seed)
