"""The kernels of compression, for ``bench.kernels``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.kernel_cases import Arrays, Case
from pycomm import kernels

_RATIO = 0.001
_MOMENTUM = 0.9


def make_cases(arrays: Arrays) -> list[Case]:
    """All of them, in the order of the table."""
    return [
        _dgc(arrays, warm=True),
        _dgc(arrays, warm=False),
        *_int8(arrays),
        *_signs(arrays),
        *_indices(arrays),
    ]


@dataclass
class _Step:
    """One step of DGC from fixed states, so that every turn does the same work."""

    arrays: Arrays
    warm: bool

    def __post_init__(self) -> None:
        arrays = self.arrays
        self.old_velocity, self.residual = arrays.others[0], arrays.others[1]
        self.velocity = torch.zeros(arrays.count)
        self.counts = [max(1, round(_RATIO * grad.numel())) for grad in arrays.grads]
        total = sum(self.counts)
        self.out = torch.empty(total), torch.empty(total, dtype=torch.int32)
        self.thresholds = torch.zeros(len(self.counts))
        self.ours()  # finds the thresholds

    def ours(self) -> None:
        if not self.warm:
            self.thresholds.zero_()
        momentum = kernels.Momentum(self.velocity, self.old_velocity, _MOMENTUM)
        kernels.sparsify(
            self.arrays.out, self.residual, self.arrays.grads, self.counts, self.out, self.thresholds, momentum=momentum
        )
        indices = self.out[1].long()
        self.velocity.index_fill_(0, indices, 0.0)
        self.arrays.out.index_fill_(0, indices, 0.0)

    def peer(self) -> None:
        """The same with torch's operations, parameter by parameter."""
        arrays = self.arrays
        parts = zip(
            arrays.grads,
            arrays.views(self.old_velocity),
            arrays.views(self.residual),
            arrays.views(self.velocity),
            arrays.outs,
            self.counts,
            strict=True,
        )
        places = []
        for grad, old_velocity, residual, velocity, out, k in parts:
            torch.add(grad, old_velocity, alpha=_MOMENTUM, out=velocity)
            torch.add(residual, velocity, out=out)
            chosen = out.view(-1).abs().topk(k, sorted=False).indices
            places.append(out.view(-1)[chosen])
            velocity.view(-1)[chosen] = 0.0
            out.view(-1)[chosen] = 0.0
        self.sent = torch.cat(places)

    def verify(self) -> None:
        self.peer()
        wanted = self.arrays.out.clone(), self.velocity.clone()
        self.arrays.out.zero_()
        self.velocity.zero_()
        self.ours()
        # torch's fused multiply-add may round otherwise.
        for got, right in zip((self.arrays.out, self.velocity), wanted, strict=True):
            wrong = ((got - right).abs() > 1e-5).sum()
            if wrong > len(self.out[0]) // 1000:
                raise AssertionError(f"DGC's step: {wrong} elements are wrong")


def _dgc(arrays: Arrays, warm: bool) -> Case:
    step = _Step(arrays, warm)
    name = f"DGC step 0.1 %, {'warm' if warm else 'cold'}"
    peer_name = "add + add + abs + topk + index + index_put_ x 2, by parameter"
    return Case(name, step.ours, peer_name, step.peer, 20 * arrays.count, step.verify)


def _int8(arrays: Arrays) -> list[Case]:
    how = kernels.Quantization()
    count = arrays.count // how.block * how.block
    x, out = arrays.flat[:count], arrays.out[:count]
    units, codes = kernels.quantize(x, how)
    blocks = x.view(-1, how.block)

    def encode_with_torch() -> tuple[torch.Tensor, torch.Tensor]:
        scales = blocks.abs().amax(dim=1, keepdim=True) / 127
        return scales, (blocks / scales).round_().to(torch.int8)

    theirs = encode_with_torch()

    def decode_with_torch() -> None:
        torch.mul(theirs[1], theirs[0], out=out.view(-1, how.block))

    def verify() -> None:
        kernels.dequantize([units], [codes], how, out)
        error = (out - x).view(-1, how.block).abs().amax(dim=1)
        if (error > 0.5001 * units).any():
            raise AssertionError("int8: more than half a unit off")
        rest = torch.empty_like(x)
        kernels.quantize(x, how, (units, codes), remainder=rest)
        if not torch.equal(x - out, rest):
            raise AssertionError("int8: the remainder is wrong")

    own = x.clone()

    def encode_and_leave() -> None:
        kernels.quantize(own, how, (units, codes), remainder=own)

    encode_name, decode_name = "abs + amax + div + round + to(int8)", "mul(int8, scale)"
    return [
        Case("int8 encode", lambda: kernels.quantize(x, how, (units, codes)), encode_name, encode_with_torch,
             5 * count, verify),
        Case("int8 encode, in place the remainder", encode_and_leave, encode_name, encode_with_torch,
             9 * count, lambda: None, prepare=lambda: own.copy_(x)),
        Case("int8 decode", lambda: kernels.dequantize([units], [codes], how, out), decode_name, decode_with_torch,
             5 * count, lambda: None),
    ]  # fmt: skip


def _signs(arrays: Arrays) -> list[Case]:
    x, out, magnitude = arrays.flat, arrays.out, torch.tensor([0.5])
    words = kernels.pack_signs(x, magnitude)
    padded = torch.nn.functional.pad(x, (0, -len(x) % 8)).view(-1, 8)
    weights = 2 ** torch.arange(8)

    def pack_with_torch() -> torch.Tensor:
        return (torch.signbit(padded) * weights).sum(dim=1, dtype=torch.uint8)

    def sign_with_torch() -> None:
        torch.mul(torch.sign(x), magnitude, out=out)

    def verify() -> None:
        kernels.unpack_signs([words], [magnitude], out)
        if not torch.equal(out, torch.where(torch.signbit(x), -magnitude, magnitude)):
            raise AssertionError("signs: wrong")
        packed = words.view(torch.uint8)[: len(padded)]
        if not torch.equal(packed, pack_with_torch()):
            raise AssertionError("signs: torch packs otherwise")

    floor = arrays.count * 4 + arrays.count // 8
    return [
        Case("sign pack", lambda: kernels.pack_signs(x, magnitude, words), "signbit * 2^i, sum", pack_with_torch,
             floor, verify, floor="read"),
        Case("sign unpack", lambda: kernels.unpack_signs([words], [magnitude], out), "sign * magnitude",
             sign_with_torch, floor, lambda: None),
    ]  # fmt: skip


def _indices(arrays: Arrays) -> list[Case]:
    """A hundred thousand of a hundred million: their bits, against the 4 bytes each that torch would send."""
    limit = 100_000_000
    generator = torch.Generator().manual_seed(1)
    indices = torch.randperm(limit // 1000, generator=generator).mul_(1000).sort().values.to(torch.int32)
    words = kernels.pack_indices(indices, limit)
    back = torch.empty_like(indices)

    def verify() -> None:
        if not torch.equal(kernels.unpack_indices(words, limit, len(indices)), indices):
            raise AssertionError("indices: wrong")

    num_bytes = indices.nbytes + words.nbytes
    return [
        Case("indices to bits, 0.1 %", lambda: kernels.pack_indices(indices, limit, words), "copy_ of int32",
             lambda: back.copy_(indices), num_bytes, verify),
        Case("bits to indices, 0.1 %", lambda: kernels.unpack_indices(words, limit, len(indices), back),
             "copy_ of int32", lambda: back.copy_(indices), num_bytes, lambda: None),
    ]  # fmt: skip
