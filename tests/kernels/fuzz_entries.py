"""Valid calls, and some of data that is not, of the kernels of entries; what comes of them is computed in torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from pycomm.kernels import EntryLayout, Gathered, Taken
from tests.kernels import test_indices
from tests.kernels.fuzz_arrays import Slot, some_size, some_values
from tests.kernels.fuzz_calls import (
    Call,
    Output,
    Read,
    Refusal,
    Wanted,
    array,
    number_of,
    output,
    some_scale,
)
from tests.kernels.fuzz_codes import decoded_words
from tests.kernels.fuzz_memory import Rng
from tests.kernels.reference import FLOATS, cast

_FLAGS = (torch.bool, torch.int8, torch.uint8)
_UNUSED, _USED, _NOT_FINITE = 0, 1, 2
_BORDER = 8


def _up(count: int) -> int:
    return -(-count // _BORDER) * _BORDER


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


class _Messages:
    """Messages of some ranks: their settings, and the definition in csrc/kernels/entries.h."""

    def __init__(self, rng: Rng) -> None:
        self.rng = rng
        self.dtype = rng.choice([torch.float32, torch.float32, torch.float64])
        self.half = self.dtype == torch.float32 and rng.chance(0.5)
        self.sent = torch.float16 if self.half else self.dtype
        self.limit = rng.randint(4090, 9000) if rng.chance(0.1) else max(1, some_size(rng))
        self.count = rng.choice([1, min(self.limit, 3), self.limit, rng.randint(1, self.limit)])
        self.count = self.count if rng.chance(0.1) else min(self.count, 300)
        self.params, self.bits = rng.choice([0, 1, 2, 5, 33]), rng.choice([0, 1, 5, 32])
        self.ranks = rng.choice([1, 1, 2, 3, 9])
        name = str(self.dtype).removeprefix("torch.")
        self.layout = EntryLayout(self.params, self.bits, self.count, self.limit, name, self.half)
        codes = self.params + self.bits
        self.values_at = _up(codes) + (_BORDER if self.half else 0)
        self.words_at = self.values_at + _up(self.count * self.sent.itemsize)
        self.num_words = len(self.words(torch.zeros(self.count)))
        self.num_bytes = self.words_at + _up(4 * self.num_words)
        self.used_at = 16 + 8 * self.ranks
        self.differing_at = self.used_at + self.params

    def words(self, indices: torch.Tensor) -> torch.Tensor:
        coded = test_indices.words_of(indices.int().tolist(), self.limit)
        return torch.from_numpy(np.array(coded, np.uint32).view(np.int32))

    def indices(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.rng.torch_seed())
        return torch.randperm(self.limit, generator=generator)[: self.count].sort().values.int()

    def flags(self, name: str, count: int, chance: float = 1.0) -> Slot | None:
        """Bools, also as bytes that are neither 0 nor 1."""
        if not self.rng.chance(chance):
            return None
        values = some_values(self.rng, count, self.rng.choice([torch.bool, torch.uint8]))
        return array(name, values, only=_FLAGS)

    def sums(self, name: str, **more: Any) -> Slot:
        return array(name, some_values(self.rng, self.limit, self.dtype), aligned=True, **more)

    def memory(self, name: str, size: int) -> Slot:
        return output(self.rng, name, size, torch.uint8, aligned=True, border=_BORDER)

    def verdict(self) -> Slot:
        tiles = -(-self.limit // 4096)  # whose borders GPUs keep there
        return self.memory("verdict", _up(_up(self.differing_at + self.bits) + 4 * self.ranks * tiles))

    def message(
        self, codes: torch.Tensor, scale: torch.Tensor, values: torch.Tensor, indices: torch.Tensor
    ) -> torch.Tensor:
        made = torch.zeros(self.num_bytes, dtype=torch.uint8)
        made[: len(codes)] = codes
        if self.half:
            made[self.values_at - _BORDER :][:4] = _bytes(scale.float().reshape(1))
        for at, part in ((self.values_at, values), (self.words_at, self.words(indices))):
            made[at:][: part.nbytes] = _bytes(part)
        return made

    def received(self, message: torch.Tensor) -> torch.Tensor:
        values = message[self.values_at :][: self.count * self.sent.itemsize].clone().view(self.sent)
        if not self.half:
            return values
        return values.float() / message[self.values_at - _BORDER :][:4].clone().view(torch.float32)

    def of_all_ranks(self) -> Slot:
        """Right messages, or such with some bytes changed."""
        rng = self.rng
        made = []
        for _ in range(self.ranks):
            codes = torch.tensor([rng.choice([_UNUSED, _USED, _USED, _USED]) for _ in range(self.params + self.bits)])
            if self.params and rng.chance(0.2):
                codes[rng.randrange(self.params)] = rng.choice([_NOT_FINITE, 255])
            scale = torch.tensor(rng.choice([1.0, 2.0**20, 2.0**-126, 2.0**126, 0.0, -3.0, math.nan, rng.random()]))
            values = some_values(rng, self.count, self.sent)
            made.append(self.message(codes.byte(), scale, values, self.indices()))
        together = torch.cat(made)
        if rng.chance(0.3):
            at = rng.randrange(self.ranks) * self.num_bytes + self.words_at
            for _ in range(rng.choice([1, 1, 3])):
                together[at + rng.randrange(4 * self.num_words)] = rng.randrange(256)
        if rng.chance(0.05):
            together = some_values(rng, len(together), torch.uint8)
        return array("messages", together, aligned=True, border=_BORDER)

    def split(self, messages: torch.Tensor) -> list[torch.Tensor]:
        return list(messages.split(self.num_bytes))

    def decoded(self, message: torch.Tensor) -> list[int] | None:
        """The indices in a message; ``None`` if there are none, or one of them twice."""
        words = message[self.words_at :][: 4 * self.num_words].clone().view(torch.int32)
        found = decoded_words(words, self.limit, self.count)
        return None if found is None or len(set(found)) < self.count else found


def _scale_for(largest: float) -> float:
    if not largest > 0.0 or math.isinf(largest):
        return 1.0
    return math.ldexp(1.0, max(-126, min(126, 15 - math.frexp(largest)[1])))


def _some_largest(rng: Rng, values: Slot) -> Slot:
    """The largest of the values, or any other number."""
    most = rng.choice([0.0, -0.0, 1e-45, 1e-40, 3.4e38, math.inf, math.nan, -1.0, rng.random()])
    most = float(values.values.float().abs().max()) if rng.chance(0.6) else most
    return array("largest", torch.tensor([most]), aligned=True)


def pack_entries(rng: Rng) -> Call:
    given = _Messages(rng)
    places = given.indices()
    if rng.chance(0.2):
        places[rng.randrange(given.count)] = rng.choice([-1, given.limit, -(2**31), 2**31 - 1, 0])
    values = array("values", some_values(rng, given.count, given.dtype), aligned=True)
    indices = array("indices", places, aligned=True)
    largest = _some_largest(rng, values) if given.half or rng.chance(0.5) else None
    flat = given.sums("flat", written=True)
    velocity = given.sums("velocity", written=True) if rng.chance(0.6) else None
    keeps, finite = given.flags("keeps", given.count, 0.5), given.flags("finite", given.params)
    fingerprint = given.flags("fingerprint", given.bits, 0.7)
    message, verdict = given.memory("message", given.num_bytes), given.verdict()
    assert finite is not None

    def wanted(read: Read) -> Wanted:
        flags = torch.where(read(finite) != 0, _USED, _NOT_FINITE)
        bits = torch.zeros(given.bits) if fingerprint is None else read(fingerprint) != 0
        held, where = read(values), read(indices).long()
        scale = torch.tensor(_scale_for(1.0 if largest is None else float(read(largest))))
        sent = (held * scale).half() if given.half else held
        left = held - sent.float() / scale if given.half else torch.zeros_like(held)
        made = given.message(torch.cat([flags, bits]).byte(), scale, sent, where)
        sums = read(flat)
        sums[where] = left
        outputs = [Output(message, made), Output(flat, sums), Output(verdict, read(verdict))]
        if velocity is not None:
            masked = torch.ones(given.count, dtype=torch.bool) if keeps is None else read(keeps) == 0
            after = read(velocity)
            after[where[masked]] = 0.0
            outputs.append(Output(velocity, after))
        return Wanted(outputs)

    def faults(read: Read) -> list[Refusal]:
        held = read(indices).long()
        bad = (held < 0) | (held >= given.limit)
        bad[1:] |= held.diff() <= 0
        return [Refusal(("indices",), (ValueError,), spoils=True)] if bool(bad.any()) else []

    taken = Taken(values, indices, flat, finite, largest, velocity, keeps, fingerprint)
    gathered = Gathered(given.layout, given.ranks, None, None, verdict)
    return Call("pack_entries", {"message": message, "taken": taken, "gathered": gathered}, wanted, faults)


def unpack_entries(rng: Rng) -> Call:
    given = _Messages(rng)
    messages, verdict = given.of_all_ranks(), given.verdict()
    indices = output(rng, "indices", given.ranks * given.count, torch.int32, aligned=True)
    factor = some_scale(rng, "factor")
    most = rng.choice([3.4e38, 65504.0, 1e308, 1.0, 0.0, -1.0, math.inf, math.nan, 3])

    def wanted(read: Read) -> Wanted:
        each = given.split(read(messages))
        found = [given.decoded(message) for message in each]
        answer, total, sources = read(verdict), 0.0, []
        for message in each:
            total += float(given.received(message).double().abs().max())
            bad = (message[: given.params] == _NOT_FINITE).nonzero()
            sources.append(int(bad[0]) + 1 if len(bad) else 0)
        answer[8] = not any(sources) and abs(total * number_of(factor, read)) <= most
        answer[16 : given.used_at] = _bytes(torch.tensor(sources))
        codes = torch.stack([message[: given.params + given.bits] for message in each])
        answer[given.used_at : given.differing_at] = (codes[:, : given.params] != _UNUSED).any(0)
        answer[given.differing_at :][: given.bits] = (codes != codes[0]).any(0)[given.params :]
        return Wanted([Output(indices, torch.tensor(found, dtype=torch.int32)), Output(verdict, answer)])

    def faults(read: Read) -> list[Refusal]:
        right = all(given.decoded(message) is not None for message in given.split(read(messages)))
        return [] if right else [Refusal(("messages",), (ValueError,), "rank", spoils=True)]

    gathered = Gathered(given.layout, given.ranks, messages, indices, verdict)
    return Call("unpack_entries", {"gathered": gathered, "factor": factor, "most": most}, wanted, faults)


class _Addition(_Messages):
    """The arguments of add_entries besides."""

    def __init__(self, rng: Rng) -> None:
        super().__init__(rng)
        self.messages, self.given_verdict = self.of_all_ranks(), self.verdict()
        self.given_verdict.written, self.given_verdict.solid = False, True
        places = torch.cat([self.indices() for _ in range(self.ranks)])
        if rng.chance(0.15):
            places[rng.randrange(len(places))] = rng.choice([-1, self.limit, -(2**31), 2**31 - 1, 0])
        self.places = array("indices", places, aligned=True)
        self.factor = some_scale(rng, "factor")
        self.out = output(rng, "out", self.limit, rng.choice(FLOATS), only=FLOATS)
        self.states = [
            (self.sums(f"states[{s}] now", written=True), self.sums(f"states[{s}] before", solid=True))
            for s in range(rng.choice([0, 1, 1, 2]))
        ]
        self.finite, self.used = self.flags("finite", 1, 0.5), self.flags("used", self.params, 0.5)
        ends = sorted(rng.randint(0, self.limit) for _ in range(self.params))
        ends[-1:] = [self.limit] if ends else []
        self.ends = None
        if self.used is not None or rng.chance(0.3):
            self.ends = array("ends", torch.tensor(ends, dtype=torch.int64), aligned=True)
        self.last_sources = output(rng, "last_sources", self.ranks, torch.int64, aligned=True)

    def added(self, read: Read, factor: float) -> torch.Tensor:
        sums = torch.zeros(self.limit, dtype=self.dtype)
        for message, places in zip(self.split(read(self.messages)), read(self.places).split(self.count), strict=True):
            sums[places.long()] += self.received(message) * torch.tensor(factor, dtype=self.dtype)
        return cast(sums, self.out.dtype)

    def undone(self, read: Read, finite: bool) -> torch.Tensor:
        """Where the state of before is put back."""
        where = torch.full((self.limit,), not finite)
        if self.used is not None and self.ends is not None:
            sizes = torch.diff(read(self.ends), prepend=torch.zeros(1, dtype=torch.int64))
            unused = (read(self.used) == 0).repeat_interleave(sizes)
            where[: len(unused)] |= unused
        return where

    def wanted(self, read: Read) -> Wanted:
        finite = self.finite is None or bool(read(self.finite) != 0)
        outputs = [Output(self.out, self.added(read, number_of(self.factor, read) if finite else math.nan))]
        for now, before in self.states:
            outputs.append(Output(now, torch.where(self.undone(read, finite), read(before), read(now))))
        sources = read(self.given_verdict)[16 : self.used_at].clone().view(torch.int64)
        return Wanted([*outputs, Output(self.last_sources, read(self.last_sources) if finite else sources)])

    def faults(self, read: Read) -> list[Refusal]:
        held = read(self.places).long().view(self.ranks, self.count)
        right = bool(((held >= 0) & (held < self.limit)).all() and (held.diff() > 0).all())
        return [] if right else [Refusal(("indices",), (ValueError,), "unpack_entries")]


def add_entries(rng: Rng) -> Call:
    given = _Addition(rng)
    arguments = {
        "gathered": Gathered(given.layout, given.ranks, given.messages, given.places, given.given_verdict),
        "factor": given.factor,
        "out": given.out,
        "states": given.states,
        "finite": given.finite,
        "used": given.used,
        "ends": given.ends,
        "last_sources": given.last_sources,
    }
    shared = [(given.out, before, 0) for _, before in given.states if before.dtype == given.out.dtype]
    return Call("add_entries", arguments, given.wanted, given.faults, shared=shared)
