"""The kernels of compression that ``bench.gpu`` measures; see gpu_cases.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from bench.gpu_cases import Copy, Plan, Source
from pycomm import kernels

_RATIO = 0.001
_MOMENTUM = 0.5  # a power of two: results of both sides are then equal to the bit


def make_plans(n: int) -> list[Plan]:
    """All of them, for arrays of ``n`` elements, as one gradient and as many."""
    k = max(1, round(_RATIO * n))
    peer = "add + add + abs + topk + index"
    plans = []
    for name, pieces in (("one gradient", 1), ("100 gradients", 100)):
        for warmth, warm in (("cold", False), ("warm", True)):
            make = _copies(_sparsify, n, pieces, warm)
            plans.append(Plan(f"sparsify 0.1 % of {name}, momentum, {warmth}", n, 20 * n, peer, make))
    return [
        *plans,
        Plan("quantize int8, remainder", n, 9 * n, "abs + amax + div + round + to(int8)", _copies(_quantize, n)),
        Plan("dequantize int8 of 4 ranks", n, 8 * n, "(mul + add) x 4", _copies(_dequantize, n)),
        Plan("pack_signs, remainder", n, 8 * n + n // 8, "signbit + where + sub", _copies(_pack_signs, n)),
        Plan("indices to bits and back", k, 11 * k, "sort of int32", _copies(_indices, n, k)),
    ]


def _copies(one: Callable[..., Copy], *what: object) -> Callable[[Source, int], list[Copy]]:
    def make(source: Source, count: int) -> list[Copy]:
        return [one(source, *what) for _ in range(count)]

    return make


def _require(good: bool, what: str) -> None:
    if not good:
        raise AssertionError(f"{what}: wrong")


def _sparsify(source: Source, n: int, pieces: int, warm: bool) -> Copy:
    grads = list(torch.split(source.normal(n), -(-n // pieces)))
    old_velocity, residual = source.normal(n), source.normal(n)
    velocity, acc = source.empty(n), source.empty(n)
    counts = [max(1, round(_RATIO * len(grad))) for grad in grads]
    out = source.empty(sum(counts)), source.empty(sum(counts), torch.int32)
    thresholds, scratch = torch.zeros(len(grads), device=source.device), kernels.Scratch()
    momentum = kernels.Momentum(velocity, old_velocity, _MOMENTUM)

    def ours() -> None:
        if not warm:
            thresholds.zero_()
        kernels.sparsify(acc, residual, grads, counts, out, thresholds, momentum=momentum, scratch=scratch)

    def peer() -> list[torch.Tensor]:
        found, offset = [], 0
        for grad, k in zip(grads, counts, strict=True):
            part = slice(offset, offset + len(grad))
            torch.add(grad, old_velocity[part], alpha=_MOMENTUM, out=velocity[part])
            torch.add(residual[part], velocity[part], out=acc[part])
            found.append(acc[part].abs().topk(k).indices + offset)
            offset += len(grad)
        return found

    def verify() -> None:
        wanted = torch.cat(peer()).sort().values
        sums, velocities = acc.clone(), velocity.clone()
        for _ in range(2):  # the second time warm, where that is asked for
            acc.zero_()
            velocity.zero_()
            out[1].zero_()
            ours()
            _require(torch.equal(acc, sums) and torch.equal(velocity, velocities), "sparsify, sums")
            # Of equal magnitudes torch may take others.
            _require(torch.equal(sums[out[1].long()].abs().sort().values, sums[wanted].abs().sort().values), "sparsify")
            _require(torch.equal(out[0], sums[out[1].long()]), "sparsify, values")

    return Copy(ours, peer, verify)


_HOW = kernels.Quantization()


def _blocks(source: Source, n: int) -> torch.Tensor:
    return source.normal(-(-n // _HOW.block) * _HOW.block)


def _quantize(source: Source, n: int) -> Copy:
    x = _blocks(source, n)
    rest, back = torch.empty_like(x), torch.empty_like(x)
    units, codes = source.empty(len(x) // _HOW.block), source.empty(len(x), torch.uint8)

    def ours() -> None:
        kernels.quantize(x, _HOW, (units, codes), remainder=rest)

    def peer() -> torch.Tensor:
        blocks = x.view(-1, _HOW.block)
        scales = blocks.abs().amax(dim=1, keepdim=True) / 127
        return (blocks / scales).round_().to(torch.int8)

    def verify() -> None:
        units.zero_()
        codes.zero_()
        ours()
        kernels.dequantize([units], [codes], _HOW, back)
        off = (codes.view(torch.int8).int() - peer().view(-1).int()).abs()
        _require(int(off.max()) <= 1 and int(off.sum()) <= len(x) // 1000 + 1, "quantize")
        _require(torch.equal(rest, x - back), "quantize, remainder")

    return Copy(ours, peer, verify)


def _dequantize(source: Source, n: int) -> Copy:
    taken = [kernels.quantize(_blocks(source, n), _HOW) for _ in range(4)]
    units, codes = [u for u, _ in taken], [c for _, c in taken]
    out, scratch = torch.empty(len(codes[0]), device=source.device), kernels.Scratch()

    def ours() -> None:
        kernels.dequantize(units, codes, _HOW, out, scratch=scratch)

    def peer() -> torch.Tensor:
        total = torch.zeros(len(units[0]), _HOW.block, device=source.device)
        for unit, code in taken:
            total += code.view(torch.int8).view(-1, _HOW.block) * unit.view(-1, 1)
        return total.view(-1)

    def verify() -> None:
        out.zero_()
        ours()
        _require(torch.equal(out, peer()), "dequantize")

    return Copy(ours, peer, verify)


def _pack_signs(source: Source, n: int) -> Copy:
    x, magnitude = source.normal(n), torch.full((1,), 0.5, device=source.device)
    rest, back, words = torch.empty_like(x), torch.empty_like(x), source.empty(kernels.sign_words(n), torch.int32)

    def ours() -> None:
        kernels.pack_signs(x, magnitude, words, remainder=rest)

    def peer() -> torch.Tensor:
        return x - torch.where(torch.signbit(x), -magnitude, magnitude)

    def verify() -> None:
        words.zero_()
        rest.zero_()
        ours()
        kernels.unpack_signs([words], [magnitude], back)
        _require(torch.equal(rest, peer()) and torch.equal(back, x - peer()), "pack_signs")

    return Copy(ours, peer, verify)


def _indices(source: Source, n: int, k: int) -> Copy:
    places = torch.randperm(n, generator=source.generator, device=source.device)[:k].sort().values.to(torch.int32)
    words = source.empty(kernels.packed_words(n, k), torch.int32)
    back, scratch = torch.empty_like(places), kernels.Scratch()

    def ours() -> None:
        kernels.pack_indices(places, n, words)
        kernels.unpack_indices(words, n, k, back, scratch=scratch)

    def verify() -> None:
        words.zero_()
        back.zero_()
        ours()
        _require(torch.equal(back, places), "indices")

    return Copy(ours, partial(torch.sort, places), verify)
