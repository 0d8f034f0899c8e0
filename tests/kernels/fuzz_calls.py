"""What the fuzz of the kernels knows of a call, and valid calls of the kernels that go over arrays once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tests.kernels import test_hashes, test_norms, test_reduce
from tests.kernels.fuzz_arrays import Slot, slots_in, some_size, some_values, substituted
from tests.kernels.fuzz_memory import Rng
from tests.kernels.reference import ALL_DTYPES, FLOATS, assert_same_bits, cast
from tests.kernels.test_topk import exact_order

Read = Callable[[Slot], torch.Tensor]
"""What a slot held before the call."""


@dataclass(frozen=True)
class Refusal:
    """An error that a call may, or must, end in.

    Attributes:
        names: one of them is in the message. kinds: of exception. text: is in it besides.
        certain: the call must not succeed. spoils: what is written may be, before the error is found.
    """

    names: tuple[str, ...]
    kinds: tuple[type[Exception], ...] = (TypeError, ValueError)
    text: str = ""
    certain: bool = True
    spoils: bool = False


@dataclass
class Output:
    """What a slot must hold after the call; a function is asked then."""

    slot: Slot
    wanted: torch.Tensor | Callable[[], torch.Tensor]
    rtol: float = 0.0


@dataclass
class Wanted:
    """Of a call that succeeds. ``unknown``: written, with values that nobody promises."""

    outputs: list[Output] = field(default_factory=list)
    result: Callable[[Any], None] = lambda result: None
    unknown: list[Slot] = field(default_factory=list)


@dataclass
class Call:
    """One call.

    Attributes:
        arguments: by name, slots where arrays will be. wanted: what comes of it.
        faults: refusals that depend on what the arrays hold.
        shared: pairs of a written slot and another that may lie so many bytes behind it, and nowhere else in it.
        refusals: what is wrong with it. vague: results are not looked at. story: what has been done to it.
        paired: arguments that are sequences of a length that others give. sorts: of faults that it has.
    """

    function: str
    arguments: dict[str, Any]
    wanted: Callable[[Read], Wanted]
    faults: Callable[[Read], list[Refusal]] = lambda read: []
    shared: list[tuple[Slot, Slot, int]] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    vague: bool = False
    story: list[str] = field(default_factory=list)
    paired: tuple[str, ...] = ()
    sorts: set[str] = field(default_factory=set)
    threads: int | None = None
    simd: str | None = None

    @property
    def slots(self) -> list[Slot]:
        return list(slots_in(self.arguments))

    def put(self, old: Any, new: Any) -> None:
        self.arguments = substituted(self.arguments, old, new)


def as_tensor(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else torch.from_numpy(np.asarray(result))


def assert_close(actual: torch.Tensor, wanted: torch.Tensor, rtol: float) -> None:
    """Bit for bit where ``rtol`` is 0, but for NaNs."""
    if rtol == 0.0:
        assert_same_bits(actual, wanted)
    else:
        torch.testing.assert_close(actual, wanted, rtol=rtol, atol=0.0, equal_nan=True)


def expect(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def is_answer(result: Any, wanted: bool) -> None:
    expect(as_tensor(result).shape == () and bool(result) == wanted, f"returned {result}, wanted {wanted}")


def array(name: str, values: torch.Tensor, **more: Any) -> Slot:
    """A slot that is only read, of the dtype of its values and no other."""
    return Slot(name, values, **{"only": (values.dtype,), **more})


def output(rng: Rng, name: str, size: int, dtype: torch.dtype, **more: Any) -> Slot:
    return array(name, some_values(rng, size, dtype), written=True, **more)


def some_sizes(rng: Rng, most: int = 6) -> list[int]:
    return [some_size(rng) for _ in range(rng.randint(1, most))]


def several(rng: Rng, name: str, sizes: list[int], dtypes: list[torch.dtype], **more: Any) -> list[Slot]:
    return [
        array(f"{name}[{j}]", some_values(rng, size, dtype), **more)
        for j, (size, dtype) in enumerate(zip(sizes, dtypes, strict=True))
    ]


def some_floats(rng: Rng, count: int) -> list[torch.dtype]:
    """Of one type, or of several."""
    first = rng.choice(FLOATS)
    same = rng.chance(0.5)
    return [first if same else rng.choice(FLOATS) for _ in range(count)]


NUMBERS = (0.0, -0.0, 1.0, 0.3, -1.5, 3, 2**60, 1e-300, 1e300, -1e39, 1e-40, math.nan, math.inf, -math.inf)


def some_scale(rng: Rng, name: str = "scale") -> Any:
    """A number, or an array of one."""
    value = rng.choice(NUMBERS) if rng.chance(0.4) else rng.uniform(-2.0, 2.0)
    if rng.chance(0.6):
        return np.float64(value) if rng.chance(0.1) else value
    return array(name, torch.tensor([value], dtype=torch.float32), aligned=None)


def number_of(scale: Any, read: Read) -> float:
    return float(read(scale).item()) if isinstance(scale, Slot) else float(scale)


def pack(rng: Rng) -> Call:
    sizes = some_sizes(rng)
    dtypes = some_floats(rng, len(sizes))
    target = dtypes[0] if rng.chance(0.4) else rng.choice(FLOATS)
    tensors = several(rng, "tensors", sizes, dtypes, only=FLOATS)
    out = output(rng, "out", sum(sizes), target, only=FLOATS)
    limit = rng.choice([math.inf, 8.0, 1e30, 1e300, 0.0, -1.0, 7]) if rng.chance(0.5) else None
    unless = array("unless", torch.tensor([rng.chance(0.3)]), layout="nd", aligned=None) if rng.chance(0.4) else None
    arguments: dict[str, Any] = {"tensors": tensors, "out": out, "scale": some_scale(rng), "unless": unless}
    arguments |= {} if limit is None else {"limit": limit}

    def wanted(read: Read) -> Wanted:
        if unless is not None and bool(read(unless)):
            return Wanted(result=lambda result: is_answer(result, True))
        scale = number_of(arguments["scale"], read)
        parts = [cast(read(tensor), out.dtype, scale) for tensor in tensors]
        fits = True
        for tensor in tensors:
            wide = torch.float64 if torch.float64 in (tensor.dtype, out.dtype) else torch.float32
            most = torch.tensor(math.inf if limit is None else limit, dtype=wide)
            fits &= bool((cast(read(tensor), wide, scale).abs() < most).all())
        all_of_it = torch.cat(parts)
        finite = fits and bool(all_of_it.isfinite().all())
        return Wanted([Output(out, all_of_it)], lambda result: is_answer(result, finite))

    starts = [sum(sizes[:j]) * out.itemsize for j in range(len(sizes))]
    shared = [(out, tensor, at) for tensor, at in zip(tensors, starts, strict=True) if tensor.dtype == target]
    return Call("pack", arguments, wanted, shared=shared)


def pack_flagged(rng: Rng) -> Call:
    sizes = some_sizes(rng)
    dtypes = some_floats(rng, len(sizes))
    target = dtypes[0] if rng.chance(0.4) else rng.choice(FLOATS)
    tensors = several(rng, "tensors", sizes, dtypes, only=FLOATS)
    out = output(rng, "out", sum(sizes), target, only=FLOATS)
    has_data, num_bits = [rng.chance(0.7) for _ in sizes], rng.choice([0, 1, 3, 64])
    flags = output(rng, "flags", len(sizes) + 1 + 2 * num_bits, target, only=FLOATS)
    values = torch.tensor([rng.chance(0.5) for _ in range(num_bits)], dtype=torch.bool)
    bits = array("bits", values) if num_bits and rng.chance(0.7) else None
    limit = rng.choice([math.inf, 8.0, 1e30, 0.0])
    arguments: dict[str, Any] = {"tensors": tensors, "has_data": has_data, "out": out, "flags": flags, "bits": bits}
    arguments |= {"scale": some_scale(rng), "limit": limit}

    def wanted(read: Read) -> Wanted:
        scale, parts, fits = number_of(arguments["scale"], read), [], True
        for tensor, size, has in zip(tensors, sizes, has_data, strict=True):
            parts.append(cast(read(tensor), out.dtype, scale) if has else torch.zeros(size, dtype=out.dtype))
            wide = torch.float64 if torch.float64 in (tensor.dtype, out.dtype) else torch.float32
            fits &= not has or bool((cast(read(tensor), wide, scale).abs() < torch.tensor(limit, dtype=wide)).all())
        packed = torch.cat(parts)
        sent = [False] * 2 * num_bits if bits is None else [*read(bits).tolist(), *(~read(bits)).tolist()]
        is_too_large = not (fits and bool(packed.isfinite().all()))
        return Wanted(
            [Output(out, packed), Output(flags, torch.tensor([*has_data, is_too_large, *sent]).to(flags.dtype))]
        )

    starts = [sum(sizes[:j]) * out.itemsize for j in range(len(sizes))]
    shared = [(out, tensor, at) for tensor, at in zip(tensors, starts, strict=True) if tensor.dtype == target]
    return Call("pack_flagged", arguments, wanted, shared=shared)


def unpack(rng: Rng) -> Call:
    sizes = some_sizes(rng)
    dtypes = some_floats(rng, len(sizes))
    source = dtypes[0] if rng.chance(0.4) else rng.choice(FLOATS)
    flat = array("flat", some_values(rng, sum(sizes), source), only=FLOATS)
    tensors = several(rng, "tensors", sizes, dtypes, only=FLOATS, written=True)
    scale = some_scale(rng)

    def wanted(read: Read) -> Wanted:
        parts = torch.split(read(flat), sizes)
        number = number_of(scale, read)
        return Wanted([Output(t, cast(part, t.dtype, number)) for t, part in zip(tensors, parts, strict=True)])

    starts = [sum(sizes[:j]) * flat.itemsize for j in range(len(sizes))]
    shared = [(tensor, flat, -at) for tensor, at in zip(tensors, starts, strict=True) if tensor.dtype == source]
    return Call("unpack", {"flat": flat, "tensors": tensors, "scale": scale}, wanted, shared=shared)


def reduce(rng: Rng) -> Call:
    size, dtype, count = some_size(rng), rng.choice(ALL_DTYPES), rng.choice([1, 2, 2, 3, 5, 9])
    inputs = several(rng, "inputs", [size] * count, [dtype] * count)
    out = output(rng, "out", size, dtype)
    op = rng.choice([*test_reduce.OPS])
    arguments = {"out": out, "inputs": inputs, "op": op}
    if op == "sum" and rng.chance(0.3):
        del arguments["op"]

    def wanted(read: Read) -> Wanted:
        return Wanted([Output(out, test_reduce.expected([read(x) for x in inputs], op))])

    call = Call("reduce", arguments, wanted, shared=[(out, x, 0) for x in inputs])
    if not test_reduce.is_defined(op, dtype):
        call.refusals.append(Refusal(("op",), (TypeError,)))
    return call


def largest(part: torch.Tensor, k: int) -> torch.Tensor:
    """Where the ``k`` largest magnitudes are, the largest first."""
    return torch.sort(exact_order(part), descending=True, stable=True).indices[:k]


def topk(rng: Rng) -> Call:
    size, dtype = max(1, some_size(rng)), rng.choice(FLOATS)
    k = rng.choice([1, size, rng.randint(1, size), min(size, 3)])
    x = array("x", some_values(rng, size, dtype), only=FLOATS, sized=False)
    out = None
    if rng.chance(0.6):
        out = output(rng, "values", k, dtype), output(rng, "indices", k, torch.int32, aligned=None)
    earlier = None
    if rng.chance(0.5):
        value = rng.choice([0.0, 1.0, 1e30, math.nan, -1.0, math.inf])
        earlier = array("threshold", torch.tensor([value]), written=True, aligned=None)

    def wanted(read: Read) -> Wanted:
        values = read(x)
        chosen = largest(values, k)
        where = chosen.sort().values.int()
        top = values[where.long()]
        outputs = [] if out is None else [Output(out[0], top), Output(out[1], where)]
        outputs += [] if earlier is None else [Output(earlier, values[chosen[-1:]].abs().float())]

        def check(result: Any) -> None:
            assert_same_bits(as_tensor(result[0]), top)
            assert_same_bits(as_tensor(result[1]), where)

        return Wanted(outputs, (lambda result: None) if out is not None else check)

    return Call("topk", {"x": x, "k": k, "out": out, "threshold": earlier}, wanted)


def scatter_add(rng: Rng) -> Call:
    size, count = max(1, some_size(rng)), rng.choice([0, 1, 5, 16, 17, rng.randrange(40)])
    target, source = rng.choice(FLOATS), rng.choice(FLOATS)
    out = output(rng, "out", size, target, only=FLOATS, sized=False)
    values = array("values", some_values(rng, count, source), only=FLOATS)
    where = torch.randint(0, size, (count,), generator=torch.Generator().manual_seed(rng.torch_seed()))
    if count and rng.chance(0.2):
        where[rng.randrange(count)] = rng.choice([-1, size, 2**31 - 1, -(2**31)])
    indices = array("indices", (where.sort().values if rng.chance(0.5) else where).int(), aligned=None)
    scale = some_scale(rng)

    def wanted(read: Read) -> Wanted:
        wide = torch.float64 if torch.float64 in (target, source) else torch.float32
        sums = read(out)
        products = read(values).to(wide) * torch.tensor(number_of(scale, read), dtype=wide)
        for index, product in zip(read(indices).tolist(), products, strict=True):
            sums[index] = (sums[index].to(wide) + product).to(target)
        return Wanted([Output(out, sums)])

    def faults(read: Read) -> list[Refusal]:
        places = read(indices)
        bad = bool(((places < 0) | (places >= out.count)).any())
        return [Refusal(("indices",), (ValueError,))] if bad else []

    arguments = {"out": out, "indices": indices, "values": values, "scale": scale}
    return Call("scatter_add", arguments, wanted, faults)


def absmax(rng: Rng) -> Call:
    sizes = some_sizes(rng)
    tensors = several(rng, "tensors", sizes, some_floats(rng, len(sizes)), only=FLOATS, sized=False)

    def wanted(read: Read) -> Wanted:
        most = torch.cat([torch.zeros(1).double(), *(read(x).double().abs() for x in tensors)]).max().float()
        return Wanted(result=lambda result: assert_same_bits(as_tensor(result), most))

    return Call("absmax", {"tensors": tensors}, wanted)


def _one_for_each(rng: Rng, function: str, dtype: torch.dtype, of: Callable[[list[torch.Tensor]], Any]) -> Call:
    """hashes and squared_norms; ``of``: what they must be."""
    kinds, alignment, rtol = (ALL_DTYPES, False, 0.0) if function == "hashes" else (FLOATS, True, test_norms.CLOSE)
    sizes = some_sizes(rng)
    dtypes = [rng.choice(kinds) for _ in sizes]
    tensors = several(rng, "tensors", sizes, dtypes, only=kinds, sized=False, aligned=alignment)
    out = output(rng, "out", len(sizes), dtype, aligned=True) if rng.chance(0.5) else None

    def wanted(read: Read) -> Wanted:
        numbers = of([read(x) for x in tensors])
        if out is not None:
            return Wanted([Output(out, numbers, rtol)])
        return Wanted(result=lambda result: assert_close(as_tensor(result), numbers, rtol))

    return Call(function, {"tensors": tensors, "out": out}, wanted, paired=() if out is None else ("tensors",))


def hashes(rng: Rng) -> Call:
    return _one_for_each(rng, "hashes", torch.int64, lambda xs: torch.tensor([test_hashes.wanted(x) for x in xs]))


def squared_norms(rng: Rng) -> Call:
    return _one_for_each(rng, "squared_norms", torch.float64, test_norms.wanted)
