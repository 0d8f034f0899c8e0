"""Kernels that compress gradients in the pass that accumulates them, and PowerSGD's products, on float32."""

from __future__ import annotations

from functools import partial

import torch

from bench.kernels.case import SCALE, Arrays, Call, Calls, Case, require, require_equal
from bench.kernels.compression import Format
from pycomm import kernels

_CHUNKS = kernels.Chunks(64)
_ROWS, _RANK = 2048, 4


def make_cases(n: int, formats: list[Format]) -> list[Case]:
    """Return the cases for gradients of ``n`` elements."""
    whole = n // _ROWS * _ROWS
    return [
        *(
            Case(
                f"accumulate and {of.name} encode, remainder",
                "the two kernels",
                12 * n + of.config.code_bytes(n),
                partial(_quantized, of=of),
            )
            for of in formats
        ),
        Case("accumulate and chunk pack, remainder", "the two kernels", 12 * n, _chunks),
        Case(f"accumulate and M Q, rank {_RANK}", "add + mm", 12 * whole, _low_rank),
        Case(f"M' P and M - P Q', rank {_RANK}", "mm + addmm", 8 * whole, _split),
        Case(f"P Q', rank {_RANK}", "mm", 4 * whole, _expand),
    ]


def _quantized(arrays: Arrays, of: Format) -> Calls:
    residual, grads, config, n = arrays.others[0], arrays.grads, of.config, arrays.count
    sums, codes = [arrays.empty(n) for _ in range(2)], arrays.empty(config.code_bytes(n), torch.uint8)
    out = arrays.empty(config.num_blocks(n)), codes

    def ours() -> object:
        return kernels.accumulate_quantized(sums[0], residual, grads, SCALE, config, [(0, n, None, *out)])

    def peer() -> None:
        kernels.accumulate(sums[1], residual, grads, SCALE)
        kernels.quantize(sums[1], config, out, remainder=sums[1])

    return Calls(ours, peer, lambda: _verify(ours, peer, sums))


def _chunks(arrays: Arrays) -> Calls:
    residual, grads = arrays.others[0], arrays.grads
    sums = [arrays.empty(arrays.count) for _ in range(2)]
    words = arrays.empty(_CHUNKS.num_words(arrays.count), torch.int32)

    def ours() -> object:
        return kernels.accumulate_chunks(sums[0], residual, grads, SCALE, _CHUNKS, words)

    def peer() -> None:
        kernels.accumulate(sums[1], residual, grads, SCALE)
        kernels.pack_chunks(sums[1], _CHUNKS, words, remainder=sums[1])

    return Calls(ours, peer, lambda: _verify(ours, peer, sums))


def _verify(ours: Call, peer: Call, sums: list[torch.Tensor]) -> None:
    ours()
    peer()
    require_equal(sums[0], sums[1], "what is left")


class _Matrix:
    """One matrix of all gradients, with its P and Q."""

    def __init__(self, arrays: Arrays) -> None:
        columns = arrays.count // _ROWS
        self.config = kernels.LowRank([(_ROWS, columns)], _RANK)
        self.flat, self.residual = (x[: _ROWS * columns] for x in (arrays.flat, arrays.others[0]))
        self.sums = arrays.empty(_ROWS * columns)
        self.m, self.out = self.flat.view(_ROWS, columns), self.sums.view(_ROWS, columns)
        self.p, self.q = arrays.normal((_ROWS, _RANK)), arrays.normal((columns, _RANK))
        kernels.orthogonalize(self.p.view(-1), self.config)


def _low_rank(arrays: Arrays) -> Calls:
    of, found = _Matrix(arrays), arrays.empty(_ROWS * _RANK)

    def ours() -> object:
        flat = of.q.view(-1)
        return kernels.accumulate_low_rank(of.sums, of.residual, [of.m], SCALE, of.config, flat, found)

    def peer() -> torch.Tensor:
        torch.add(of.residual, of.flat, alpha=SCALE, out=of.sums)
        return torch.mm(of.out, of.q)

    def verify() -> None:
        ours()
        require(torch.allclose(found.view(_ROWS, _RANK), peer(), rtol=1e-3, atol=0.05), "M Q")

    return Calls(ours, peer, verify)


def _split(arrays: Arrays) -> Calls:
    of, q = _Matrix(arrays), arrays.empty(arrays.count // _ROWS * _RANK)

    def ours() -> None:
        kernels.split_low_rank(of.sums, of.config, of.p.view(-1), q)

    def peer() -> None:
        found = torch.mm(of.out.t(), of.p)
        of.out.addmm_(of.p, found.t(), alpha=-1.0)

    def verify() -> None:
        of.sums.copy_(of.flat)
        ours()
        require(torch.allclose(q.view(-1, _RANK), torch.mm(of.m.t(), of.p), rtol=1e-3, atol=1e-3), "M' P")

    return Calls(ours, peer, verify)


def _expand(arrays: Arrays) -> Calls:
    of = _Matrix(arrays)

    def ours() -> None:
        kernels.expand_low_rank(of.sums, of.config, of.p.view(-1), of.q.view(-1))

    def peer() -> torch.Tensor:
        return torch.mm(of.p, of.q.t(), out=of.out)

    def verify() -> None:
        ours()
        found = of.sums.clone()
        require(torch.allclose(found, peer().view(-1), rtol=1e-3, atol=1e-3), "P Q'")

    return Calls(ours, peer, verify)
