"""Kernels that put elements into fewer bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from bench.kernels.case import Arrays, Calls, Case, require, require_equal
from pycomm import kernels

_CHUNKS = kernels.Chunks(64)


@dataclass(frozen=True)
class Format:
    """Format of codes, and the same by torch.

    Attributes:
        encoder: torch's operations that encode. decoder: those that decode.
        encode: turns elements, in units of their scales, into codes. decode: turns codes into such elements.
    """

    name: str
    config: kernels.Quantization
    encoder: str
    decoder: str
    encode: Callable[[torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor], torch.Tensor]

    def whole_blocks(self, n: int) -> int:
        """Return the most elements up to ``n`` that fill blocks, as torch's side needs."""
        return n // self.config.block * self.config.block

    def num_bytes(self, n: int, floats: int, codes: int = 1) -> int:
        """Return the bytes of so many arrays of float32 and of codes, for the whole blocks of ``n`` elements."""
        count = self.whole_blocks(n)
        return 4 * floats * count + codes * self.config.code_bytes(count)

    def scales(self, rows: torch.Tensor) -> torch.Tensor:
        """Return torch's scales of blocks, which are rows here."""
        largest = rows.abs().amax(dim=1, keepdim=True)
        if self.config.element == "int":
            return largest / self.config.levels
        mantissa, exponent = torch.frexp(largest)
        return torch.ldexp(torch.ones_like(largest), exponent - 9 + (mantissa > 0.875).int())


def _as_nibbles(levels: torch.Tensor) -> torch.Tensor:
    pairs = levels.round_().to(torch.int8).view(-1, 2)
    return (pairs[:, 0] & 15) | (pairs[:, 1] << 4)


def _from_nibbles(codes: torch.Tensor) -> torch.Tensor:
    return torch.stack((codes << 4 >> 4, codes >> 4), dim=-1)


INT8 = Format(
    *("int8", kernels.Quantization(), "abs + amax + div + round + to(int8)", "mul(int8, scale)"),
    lambda levels: levels.round_().to(torch.int8),
    lambda codes: codes.view(torch.int8),
)
INT4 = Format(
    *("int4", kernels.Quantization(128, 7, 4), "as int8, & + << + or", "<< + >> + stack + mul(int8, scale)"),
    _as_nibbles,
    lambda codes: _from_nibbles(codes.view(torch.int8)),
)
E4M3 = Format(
    *("e4m3", kernels.Quantization(128, element="e4m3"), "abs + amax + frexp + ldexp + div + to(float8)"),
    "to(float32) + mul(scale)",
    lambda levels: levels.to(torch.float8_e4m3fn),
    lambda codes: codes.view(torch.float8_e4m3fn).float(),
)


def encode(n: int, of: Format) -> Case:
    """Describe turning elements into scales and codes."""
    return Case(f"{of.name} encode", of.encoder, of.num_bytes(n, 1), partial(_encode, of=of))


def encode_in_place(n: int, of: Format) -> Case:
    """Describe encoding that leaves the remainder in the place of the elements; for one user at a time."""
    name = f"{of.name} encode, in place the remainder"
    return Case(name, of.encoder, of.num_bytes(n, 2), partial(_encode_in_place, of=of))


def encode_with_remainder(n: int, of: Format) -> Case:
    """Describe encoding that writes the remainder to another array."""
    name = f"{of.name} encode, remainder"
    return Case(name, of.encoder, of.num_bytes(n, 2), partial(_encode_with_remainder, of=of))


def decode(n: int, of: Format, ranks: int = 1) -> Case:
    """Describe summing what ``ranks`` ranks encoded."""
    name, peer = f"{of.name} decode", of.decoder
    if ranks > 1:
        name, peer = f"{name} of {ranks} ranks", f"{peer}, + {ranks - 1} x"
    return Case(name, peer, of.num_bytes(n, 1, ranks), partial(_decode, of=of, ranks=ranks))


def requantize(n: int, of: Format) -> Case:
    """Describe summing what four ranks encoded, and encoding the sum."""
    make, peer = partial(_requantize, of=of), f"{of.decoder}, + 3 x, {of.encoder}"
    return Case(f"{of.name} requantize of 4 ranks", peer, of.num_bytes(n, 0, 5), make)


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

    def __init__(self, arrays: Arrays, x: torch.Tensor, of: Format) -> None:
        self.of, self.x, self.rows = of, x, x.view(-1, of.config.block)
        self.scales = arrays.empty(len(self.rows))
        self.codes = arrays.empty(of.config.code_bytes(len(x)), torch.uint8)

    def encode(self, remainder: torch.Tensor | None = None) -> None:
        kernels.quantize(self.x, self.of.config, (self.scales, self.codes), remainder=remainder)

    def encode_with_torch(self) -> tuple[torch.Tensor, torch.Tensor]:
        scales = self.of.scales(self.rows)
        return scales, self.of.encode(self.rows / scales)

    def verify(self, remainder: torch.Tensor | None = None) -> None:
        """Encode, decode, and compare with torch's."""
        x, wanted = self.x.clone(), self.of.decode(self.encode_with_torch()[1]).view_as(self.rows)
        self.scales.zero_()
        self.codes.zero_()
        self.encode(remainder)
        self.compare(self.of.decode(self.codes).view_as(self.rows), wanted)
        back = torch.empty_like(x)
        kernels.dequantize([self.scales], [self.codes], self.of.config, back)
        if remainder is not None:
            require_equal(remainder, x - back, f"{self.of.name}, remainder")

    def compare(self, levels: torch.Tensor, wanted: torch.Tensor) -> None:
        """Raise ``AssertionError`` if more than a few elements are another level, or one is further off than that."""
        off = levels.float() - wanted.float()
        least = 0.0 if self.of.config.element != "int" else 1.0
        good = float(off.abs().max()) <= least and int((off != 0).sum()) <= off.numel() // 1000 + 1
        require(good, f"{self.of.name}, against torch's codes")


def _blocks(arrays: Arrays, of: Format) -> _Blocks:
    return _Blocks(arrays, arrays.flat[: of.whole_blocks(arrays.count)], of)


def _encode(arrays: Arrays, of: Format) -> Calls:
    blocks = _blocks(arrays, of)
    return Calls(blocks.encode, blocks.encode_with_torch, blocks.verify)


def _encode_in_place(arrays: Arrays, of: Format) -> Calls:
    x = _blocks(arrays, of).x
    own = _Blocks(arrays, x.clone(), of)

    def verify() -> None:
        own.x.copy_(x)
        own.verify(own.x)

    return Calls(lambda: own.encode(own.x), _blocks(arrays, of).encode_with_torch, verify, lambda: own.x.copy_(x))


def _encode_with_remainder(arrays: Arrays, of: Format) -> Calls:
    blocks = _blocks(arrays, of)
    rest = torch.empty_like(blocks.x)
    return Calls(lambda: blocks.encode(rest), blocks.encode_with_torch, lambda: blocks.verify(rest))


class _Sum:
    """What several ranks encoded, and memory for its sum."""

    def __init__(self, arrays: Arrays, of: Format, ranks: int) -> None:
        count = of.whole_blocks(arrays.count)
        taken = [kernels.quantize(flat[:count], of.config) for flat in [arrays.flat, *arrays.others][:ranks]]
        self.of, self.scales, self.codes = of, [scale for scale, _ in taken], [code for _, code in taken]
        self.out, self.scratch = arrays.out[:count], kernels.Scratch()
        self.rows = self.out.view(-1, of.config.block)

    def add_up(self) -> None:
        kernels.dequantize(self.scales, self.codes, self.of.config, self.out, scratch=self.scratch)

    def add_up_with_torch(self) -> None:
        parts = zip(self.scales, self.codes, strict=True)
        each = ((self.of.decode(code).view_as(self.rows), scale.view(-1, 1)) for scale, code in parts)
        torch.mul(*next(each), out=self.rows)
        for code, scale in each:
            self.rows.add_(code * scale)


def _decode(arrays: Arrays, of: Format, ranks: int) -> Calls:
    found = _Sum(arrays, of, ranks)

    def verify() -> None:
        found.out.zero_()
        found.add_up()
        mine = found.out.clone()
        found.out.zero_()
        found.add_up_with_torch()
        require_equal(mine, found.out, f"{of.name} decode")

    return Calls(found.add_up, found.add_up_with_torch, verify)


def _requantize(arrays: Arrays, of: Format) -> Calls:
    """The result is written where the sum's own codes are, which are verified."""
    found = _Sum(arrays, of, 4)
    blocks = _Blocks(arrays, found.out, of)

    def ours() -> None:
        out = blocks.scales, blocks.codes
        kernels.requantize(found.scales, found.codes, of.config, out, count=len(found.out), scratch=found.scratch)

    def peer() -> object:
        found.add_up_with_torch()
        return blocks.encode_with_torch()

    def verify() -> None:
        peer()
        blocks.verify()
        wanted = blocks.scales.clone(), blocks.codes.clone()
        blocks.scales.zero_()
        blocks.codes.zero_()
        ours()
        require_equal(blocks.scales, wanted[0], f"{of.name} requantize, scales")
        require_equal(blocks.codes, wanted[1], f"{of.name} requantize, codes")

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
