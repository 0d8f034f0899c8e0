"""Kernels that put elements into fewer bits."""

from __future__ import annotations

from functools import partial

import torch

from bench.kernels.case import Arrays, Calls, Case, require, require_equal
from pycomm import kernels

_INT8 = kernels.Quantization()
_CHUNKS = kernels.Chunks(64)
_ENCODER = "abs + amax + div + round + to(int8)"


def whole_blocks(n: int) -> int:
    """Return the most elements up to ``n`` that fill blocks, as torch's side needs."""
    return n // _INT8.block * _INT8.block


def int8_encode(n: int) -> Case:
    """Describe turning elements into scales and int8 codes."""
    return Case("int8 encode", _ENCODER, 5 * whole_blocks(n), _encode)


def int8_encode_in_place(n: int) -> Case:
    """Describe int8 encoding that leaves the remainder in the place of the elements; for one user at a time."""
    return Case("int8 encode, in place the remainder", _ENCODER, 9 * whole_blocks(n), _encode_in_place)


def int8_encode_with_remainder(n: int) -> Case:
    """Describe int8 encoding that writes the remainder to another array."""
    return Case("int8 encode, remainder", _ENCODER, 9 * whole_blocks(n), _encode_with_remainder)


def int8_decode(n: int, ranks: int = 1) -> Case:
    """Describe summing what ``ranks`` ranks encoded."""
    of, peer = ("", "mul(int8, scale)") if ranks == 1 else (f" of {ranks} ranks", f"mul(int8, scale), + {ranks - 1} x")
    return Case(f"int8 decode{of}", peer, (4 + ranks) * whole_blocks(n), partial(_decode, ranks=ranks))


def sign_pack(n: int) -> Case:
    """Describe turning elements into sign bits."""
    return Case("sign pack", "signbit * 2^i, sum", 4 * n + n // 8, _pack_signs, floor="read")


def sign_pack_with_remainder(n: int) -> Case:
    """Describe turning elements into sign bits and what those leave over."""
    return Case("sign pack, remainder", "signbit + where + sub", 8 * n + n // 8, _pack_signs_with_remainder)


def sign_unpack(n: int) -> Case:
    """Describe turning sign bits into elements."""
    return Case("sign unpack", "sign * magnitude", 4 * n + n // 8, _unpack_signs)


def chunk_pack(n: int) -> Case:
    """Describe turning the largest elements of every chunk into bits, and what those leave over."""
    num_bytes = 8 * n + 4 * _CHUNKS.num_words(n)
    return Case("top-k of chunks, 64 of 4096, remainder", "abs + topk + gather + mean + sub", num_bytes, _pack_chunks)


def chunk_unpack(n: int, ranks: int = 1) -> Case:
    """Describe summing what ``ranks`` ranks packed of their chunks."""
    of = "" if ranks == 1 else f" of {ranks} ranks"
    num_bytes = 4 * n + 4 * ranks * _CHUNKS.num_words(n)
    return Case(f"chunks unpack{of}", "zero + scatter_add", num_bytes, partial(_unpack_chunks, ranks=ranks))


class _Blocks:
    """Elements in whole blocks, and memory for their codes."""

    def __init__(self, arrays: Arrays, x: torch.Tensor) -> None:
        self.x, self.rows = x, x.view(-1, _INT8.block)
        self.scales = arrays.empty(len(self.rows))
        self.codes = arrays.empty(len(x), torch.uint8)

    def encode(self, remainder: torch.Tensor | None = None) -> None:
        kernels.quantize(self.x, _INT8, (self.scales, self.codes), remainder=remainder)

    def encode_with_torch(self) -> tuple[torch.Tensor, torch.Tensor]:
        scales = self.rows.abs().amax(dim=1, keepdim=True) / 127
        return scales, (self.rows / scales).round_().to(torch.int8)

    def verify(self, remainder: torch.Tensor | None = None) -> None:
        """Encode, decode, and compare with the elements and with torch's codes."""
        x = self.x.clone()
        theirs = self.encode_with_torch()[1].view(-1).int()
        self.scales.zero_()
        self.codes.zero_()
        self.encode(remainder)
        back = torch.empty_like(x)
        kernels.dequantize([self.scales], [self.codes], _INT8, back)
        error = (back - x).view_as(self.rows).abs().amax(dim=1)
        require(not bool((error > 0.5001 * self.scales).any()), "int8: more than half a unit off")
        off = (self.codes.view(torch.int8).int() - theirs).abs()
        require(int(off.max()) <= 1 and int(off.sum()) <= len(x) // 1000 + 1, "int8, against torch's codes")
        if remainder is not None:
            require_equal(remainder, x - back, "int8, remainder")


def _blocks(arrays: Arrays) -> _Blocks:
    return _Blocks(arrays, arrays.flat[: whole_blocks(arrays.count)])


def _encode(arrays: Arrays) -> Calls:
    blocks = _blocks(arrays)
    return Calls(blocks.encode, blocks.encode_with_torch, blocks.verify)


def _encode_in_place(arrays: Arrays) -> Calls:
    x = _blocks(arrays).x
    own = _Blocks(arrays, x.clone())

    def verify() -> None:
        own.x.copy_(x)
        own.verify(own.x)

    return Calls(lambda: own.encode(own.x), _blocks(arrays).encode_with_torch, verify, lambda: own.x.copy_(x))


def _encode_with_remainder(arrays: Arrays) -> Calls:
    blocks = _blocks(arrays)
    rest = torch.empty_like(blocks.x)
    return Calls(lambda: blocks.encode(rest), blocks.encode_with_torch, lambda: blocks.verify(rest))


def _decode(arrays: Arrays, ranks: int) -> Calls:
    count, scratch = whole_blocks(arrays.count), kernels.Scratch()
    taken = [kernels.quantize(flat[:count], _INT8) for flat in [arrays.flat, *arrays.others][:ranks]]
    scales, codes = [scale for scale, _ in taken], [code for _, code in taken]
    out = arrays.out[:count]
    rows = out.view(-1, _INT8.block)
    theirs = [(code.view(torch.int8).view_as(rows), scale.view(-1, 1)) for scale, code in taken]

    def ours() -> None:
        kernels.dequantize(scales, codes, _INT8, out, scratch=scratch)

    def peer() -> None:
        torch.mul(*theirs[0], out=rows)
        for code, scale in theirs[1:]:
            rows.add_(code * scale)

    def verify() -> None:
        out.zero_()
        ours()
        mine = out.clone()
        out.zero_()
        peer()
        require_equal(mine, out, "int8 decode")

    return Calls(ours, peer, verify)


class _Signs:
    """Elements, what stands for their magnitude, and memory for their signs."""

    def __init__(self, arrays: Arrays) -> None:
        self.x, self.out = arrays.flat, arrays.out
        self.magnitude = torch.full((1,), 0.5, device=arrays.device)
        self.words = arrays.empty(kernels.sign_words(arrays.count), torch.int32)
        self.scratch = kernels.Scratch()

    def pack(self, remainder: torch.Tensor | None = None) -> None:
        kernels.pack_signs(self.x, self.magnitude, self.words, remainder=remainder)

    def unpack(self) -> None:
        kernels.unpack_signs([self.words], [self.magnitude], self.out, scratch=self.scratch)

    def remainder_with_torch(self) -> torch.Tensor:
        return self.x - torch.where(torch.signbit(self.x), -self.magnitude, self.magnitude)

    def verify(self, remainder: torch.Tensor | None = None) -> None:
        """Pack, unpack, and compare with torch's signs."""
        wanted = self.remainder_with_torch()
        for array in (self.words, self.out, remainder):
            if array is not None:
                array.zero_()
        self.pack(remainder)
        self.unpack()
        require_equal(self.out, torch.where(torch.signbit(self.x), -self.magnitude, self.magnitude), "signs")
        if remainder is not None:
            require_equal(remainder, wanted, "signs, remainder")


def _pack_signs(arrays: Arrays) -> Calls:
    signs = _Signs(arrays)
    padded = torch.nn.functional.pad(signs.x, (0, -len(signs.x) % 8)).view(-1, 8)
    weights = 2 ** torch.arange(8, device=arrays.device)

    def peer() -> torch.Tensor:
        return (torch.signbit(padded) * weights).sum(dim=1, dtype=torch.uint8)

    def verify() -> None:
        signs.verify()
        require_equal(signs.words.view(torch.uint8)[: len(padded)], peer(), "signs, against torch's")

    return Calls(signs.pack, peer, verify)


def _pack_signs_with_remainder(arrays: Arrays) -> Calls:
    signs = _Signs(arrays)
    rest = torch.empty_like(signs.x)
    return Calls(lambda: signs.pack(rest), signs.remainder_with_torch, lambda: signs.verify(rest))


def _unpack_signs(arrays: Arrays) -> Calls:
    signs = _Signs(arrays)

    def peer() -> None:
        torch.mul(torch.sign(signs.x), signs.magnitude, out=signs.out)

    def verify() -> None:
        signs.verify()
        peer()
        require_equal(signs.out, torch.sign(signs.x) * signs.magnitude, "signs, torch's")

    signs.pack()
    return Calls(signs.unpack, peer, verify)


def _pack_chunks(arrays: Arrays) -> Calls:
    x, out = arrays.flat, arrays.out
    rest = torch.empty_like(x)
    words = arrays.empty(_CHUNKS.num_words(len(x)), torch.int32)
    rows = torch.nn.functional.pad(x, (0, -len(x) % _CHUNKS.chunk)).view(-1, _CHUNKS.chunk)
    scratch = kernels.Scratch()

    def ours() -> None:
        kernels.pack_chunks(x, _CHUNKS, words, remainder=rest)

    def peer() -> torch.Tensor:
        places = rows.abs().topk(_CHUNKS.k, dim=1, sorted=False).indices
        values = rows.gather(1, places)
        sizes = values.abs()
        sent = torch.where(sizes > sizes.mean(dim=1, keepdim=True), sizes, sizes.mean(dim=1, keepdim=True))
        return rows.scatter_add(1, places, -sent.copysign(values))

    def verify() -> None:
        words.zero_()
        rest.zero_()
        ours()
        require(bool(words.any()), "top-k of chunks, words")
        kernels.unpack_chunks([words], _CHUNKS, out, scratch=scratch)
        require_equal(rest, x - out, "top-k of chunks, remainder")
        chosen = torch.zeros_like(rows, dtype=torch.bool)
        chosen.scatter_(1, rows.abs().topk(_CHUNKS.k, dim=1).indices, True)
        require_equal(out != 0, chosen.view(-1)[: len(x)], "top-k of chunks, against torch's")

    return Calls(ours, peer, verify)


def _unpack_chunks(arrays: Arrays, ranks: int) -> Calls:
    words = [kernels.pack_chunks(flat, _CHUNKS) for flat in [arrays.flat, *arrays.others][:ranks]]
    out, each, scratch = arrays.out, torch.empty_like(arrays.flat), kernels.Scratch()
    sparse = []
    for one in words:
        kernels.unpack_chunks([one], _CHUNKS, each)
        places = each.nonzero().flatten()
        sparse.append((places, each[places]))

    def ours() -> None:
        kernels.unpack_chunks(words, _CHUNKS, out, scratch=scratch)

    def peer() -> None:
        out.zero_()
        for places, values in sparse:
            out.index_add_(0, places, values)

    def verify() -> None:
        out.zero_()
        ours()
        mine = out.clone()
        peer()
        require_equal(mine, out, "chunks unpack")

    return Calls(ours, peer, verify)
