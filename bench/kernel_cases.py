"""What ``bench.kernels`` measures: each kernel, the best torch has for the same, and how many bytes must move.

The arrays are gradients of ResNet-50's shapes, normally distributed; each is several times a
last-level cache, and all are written before anything is timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from bench.resnet50 import parameter_shapes
from pycomm import kernels

_SCALE = 0.5  # a power of two: results of both sides are then equal to the bit
_CACHE_LINE = 64


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
        floor_bytes: the bytes that have to move, whoever does it, each once; ``floor`` says at which
            speed: that of a copy (bytes read + bytes written) or of reading alone.
        verify: raises ``AssertionError`` if ours, or what torch is timed with, is wrong.
        prepare: runs before each timed call of the peer, outside the time.
    """

    name: str
    ours: Callable[[], object]
    peer_name: str
    peer: Callable[[], object]
    floor_bytes: int
    verify: Callable[[], None]
    floor: Literal["copy", "read"] = "copy"
    prepare: Callable[[], object] = field(default=lambda: None)


class Arrays:
    """The memory that all cases share, so that a small machine can hold it."""

    def __init__(self, num_shapes: int | None = None) -> None:
        """Of the first ``num_shapes`` parameters, or all."""
        generator = torch.Generator().manual_seed(0)
        shapes = parameter_shapes()[:num_shapes]
        self.grads = [torch.randn(shape, generator=generator) for shape in shapes]
        self.count = sum(math.prod(shape) for shape in shapes)
        self.flat = torch.cat([grad.view(-1) for grad in self.grads])
        self.half = self.flat.half()
        self.out = torch.randn(self.count, generator=generator)
        self.others = [torch.randn(self.count, generator=generator) for _ in range(3)]
        self.outs = self.views(self.out)
        self.found_inf = torch.zeros(1)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """``flat`` cut up like the gradients."""
        parts = torch.split(flat, [grad.numel() for grad in self.grads])
        return [part.view(grad.shape) for part, grad in zip(parts, self.grads, strict=True)]


def make_cases(arrays: Arrays) -> list[Case]:
    """All of them, in the order of the table."""
    return [
        _pack(arrays),
        _pack_half(arrays),
        _unpack(arrays),
        _unpack_half(arrays),
        _reduce(arrays),
        _accumulate(arrays),
        _absmax(arrays),
        _hashes(arrays),
        _topk(arrays, 0.001),
        _topk(arrays, 0.01),
        _scatter_add(arrays, 0.01),
    ]


def _require_equal(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    if not torch.equal(got, wanted):
        differ = int((got != wanted).sum()) if got.shape == wanted.shape else got.numel()
        raise AssertionError(f"{what}: {differ} of {wanted.numel()} elements are wrong")


def _require_finite_check(arrays: Arrays, out: torch.Tensor, scale: float) -> None:
    """One infinity in the last tensor but one must be seen, and none where there is none."""
    place = arrays.grads[-2].view(-1)[123:124]
    kept = place.clone()
    place.fill_(math.inf)
    seen = not bool(kernels.pack(arrays.grads, out, scale))
    place.copy_(kept)
    if not seen or not bool(kernels.pack(arrays.grads, out, scale)):
        raise AssertionError("pack: the finite check is wrong")


def _pack(arrays: Arrays) -> Case:
    def ours() -> object:
        return kernels.pack(arrays.grads, arrays.out)

    def peer() -> None:
        torch._foreach_copy_(arrays.outs, arrays.grads)

    def verify() -> None:
        for call in (ours, peer):
            arrays.out.zero_()
            call()
            _require_equal(arrays.out, arrays.flat, "pack fp32")
        _require_finite_check(arrays, arrays.out, 1.0)

    return Case("pack fp32 -> fp32", ours, "_foreach_copy_", peer, 8 * arrays.count, verify)


def _pack_half(arrays: Arrays) -> Case:
    """Torch's unscale works in place, so it gets gradients of its own, halved and doubled in turns."""
    own = [grad.clone() for grad in arrays.grads]
    out = torch.empty_like(arrays.half)
    outs = arrays.views(out)
    inverse_scale = torch.tensor([1.0 / _SCALE])

    def ours() -> object:
        return kernels.pack(arrays.grads, out, _SCALE)

    def peer() -> None:
        torch._amp_foreach_non_finite_check_and_unscale_(own, arrays.found_inf, inverse_scale)
        torch._foreach_copy_(outs, own)

    def verify() -> None:
        wanted = (arrays.flat * _SCALE).half()
        inverse_scale.reciprocal_()
        for call in (ours, peer):
            out.zero_()
            call()
            _require_equal(out, wanted, "pack fp16")
        _require_finite_check(arrays, out, _SCALE)

    name = "pack fp32 -> fp16, scale, finite"
    peer_name = "_amp_foreach_non_finite_check_and_unscale_ + _foreach_copy_"
    return Case(name, ours, peer_name, peer, 6 * arrays.count, verify, prepare=inverse_scale.reciprocal_)


def _unpack(arrays: Arrays) -> Case:
    def ours() -> None:
        kernels.unpack(arrays.flat, arrays.outs)

    parts = arrays.views(arrays.flat)

    def peer() -> None:
        torch._foreach_copy_(arrays.outs, parts)

    def verify() -> None:
        for call in (ours, peer):
            arrays.out.zero_()
            call()
            _require_equal(arrays.out, arrays.flat, "unpack fp32")

    return Case("unpack fp32 -> fp32", ours, "_foreach_copy_", peer, 8 * arrays.count, verify)


def _unpack_half(arrays: Arrays) -> Case:
    parts = arrays.views(arrays.half)

    def ours() -> None:
        kernels.unpack(arrays.half, arrays.outs, _SCALE)

    def peer() -> None:
        torch._foreach_copy_(arrays.outs, parts)
        torch._foreach_mul_(arrays.outs, _SCALE)

    def verify() -> None:
        for call in (ours, peer):
            arrays.out.zero_()
            call()
            _require_equal(arrays.out, arrays.half.float() * _SCALE, "unpack fp16")

    name = "_foreach_copy_ + _foreach_mul_"
    return Case("unpack fp16 -> fp32, scale", ours, name, peer, 6 * arrays.count, verify)


def _reduce(arrays: Arrays) -> Case:
    inputs = [arrays.flat, *arrays.others]

    def ours() -> None:
        kernels.reduce(arrays.out, inputs)

    def peer() -> None:
        torch.add(inputs[0], inputs[1], out=arrays.out).add_(inputs[2]).add_(inputs[3])

    def verify() -> None:
        wanted = inputs[0] + inputs[1] + inputs[2] + inputs[3]
        for call in (ours, peer):
            arrays.out.zero_()
            call()
            _require_equal(arrays.out, wanted, "reduce")

    return Case("reduce, 4 arrays", ours, "add(out) + add_ + add_", peer, 5 * 4 * arrays.count, verify)


def _accumulate(arrays: Arrays) -> Case:
    residual, grad = arrays.others[0], arrays.flat
    one = torch.ones(1)

    def ours() -> object:
        return kernels.accumulate(arrays.out, residual, grad, _SCALE)

    def peer() -> None:
        torch.add(residual, grad, alpha=_SCALE, out=arrays.out)
        torch._amp_foreach_non_finite_check_and_unscale_([arrays.out], arrays.found_inf, one)

    def verify() -> None:
        for call in (ours, peer):
            arrays.out.zero_()
            call()
            _require_equal(arrays.out, residual + grad * _SCALE, "accumulate")
        if not bool(ours()):
            raise AssertionError("accumulate: the finite check is wrong")

    name = "add(out) + _amp_foreach_non_finite_check_and_unscale_"
    return Case("accumulate, finite", ours, name, peer, 3 * 4 * arrays.count, verify)


def _absmax(arrays: Arrays) -> Case:
    def ours() -> torch.Tensor:
        return kernels.absmax(arrays.grads)

    def peer() -> torch.Tensor:
        extremes = [extreme for grad in arrays.grads for extreme in torch.aminmax(grad)]
        return torch.stack(extremes).abs().max()

    def verify() -> None:
        wanted = arrays.flat.abs().max()
        _require_equal(ours(), wanted, "absmax")
        _require_equal(peer(), wanted, "aminmax")

    return Case("absmax", ours, "aminmax of each", peer, 4 * arrays.count, verify, floor="read")


def _hashes(arrays: Arrays) -> Case:
    def ours() -> torch.Tensor:
        return kernels.hashes(arrays.grads)

    def peer() -> torch.Tensor:
        return torch.stack([grad.view(torch.int32).sum() for grad in arrays.grads])

    def verify() -> None:
        before, bits = ours(), arrays.grads[-2].view(-1).view(torch.int32)
        _require_equal(kernels.hashes([grad.clone() for grad in arrays.grads]), before, "hashes")
        bits[1] ^= 1
        seen = (ours() != before).nonzero().tolist()
        bits[1] ^= 1
        if seen != [[len(arrays.grads) - 2]]:
            raise AssertionError("hashes: a bit that changed is not seen, or elsewhere")

    return Case("hashes of replicas", ours, "view(int32).sum() of each", peer, 4 * arrays.count, verify, floor="read")


def _topk(arrays: Arrays, ratio: float) -> Case:
    x, k = arrays.flat, round(ratio * arrays.count)

    def ours() -> tuple[torch.Tensor, torch.Tensor]:
        return kernels.topk(x, k)

    def peer() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.topk(x.abs(), k)

    def verify() -> None:
        magnitudes = x.abs()
        threshold = peer()[0].min()
        above = (magnitudes > threshold).nonzero().view(-1)
        ties = (magnitudes == threshold).nonzero().view(-1)[: k - above.numel()]
        wanted = torch.cat([above, ties]).sort().values
        values, indices = ours()
        _require_equal(indices.long(), wanted, "topk indices")
        _require_equal(values, x[wanted], "topk values")

    return Case(f"topk, {100 * ratio:g} %", ours, "topk(x.abs(), k)", peer, 4 * arrays.count, verify, floor="read")


def _scatter_add(arrays: Arrays, ratio: float) -> Case:
    """Both sides add to the same places; torch wants its indices as int64.

    The least that must move: the indices and values once, and each cache line that holds one of the
    places there and back.
    """
    values, indices = kernels.topk(arrays.flat, round(ratio * arrays.count))
    wide = indices.long()
    lines = torch.unique(wide * 4 // _CACHE_LINE).numel()

    def ours() -> None:
        kernels.scatter_add(arrays.out, indices, values)

    def peer() -> None:
        arrays.out.scatter_add_(0, wide, values)

    def verify() -> None:
        wanted = arrays.others[0].clone()
        wanted[wide] += values
        for call in (ours, peer):
            arrays.out.copy_(arrays.others[0])
            call()
            _require_equal(arrays.out, wanted, "scatter_add")

    floor_bytes = 2 * _CACHE_LINE * lines + 8 * indices.numel()
    return Case(f"scatter_add, {100 * ratio:g} %", ours, "scatter_add_", peer, floor_bytes, verify)
