"""Calls drawn from a seed: what every rank does, right or wrong, so that each knows what must come out."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from pycomm import schedule
from tests.transport import fuzz_flaws
from tests.transport.fuzz_arrays import BUFFERS, FLOATS, MOVED, REDUCED, Spec, draw_count, draw_holding

REDUCTIONS = ("all_reduce", "reduce_scatter")
WRITTEN = {"all_reduce": "x", "broadcast": "x", "reduce_scatter": "out", "all_gather": "out", "all_to_all": "out"}
_OPERATIONS = {
    "all_reduce": 8,
    "reduce_scatter": 3,
    "all_gather": 4,
    "all_to_all": 3,
    "broadcast": 4,
    "barrier": 1,
    "all_gather_bytes": 2,
}
_KINDS = {"right": 60, "one wrong": 22, "some wrong": 5, "disagree": 9, "local": 4}
_AS_WIDE = {"bool": "float8_e5m2", "float8_e5m2": "bool", "uint64": "complex64", "complex64": "uint64"}
_OF_FLOATS = ("sum", "sum", "mean", "min", "max", "product")
_OF_INTEGERS = ("sum", "sum", "min", "max", "product", "band", "bor", "bxor")
_STRANGE_TYPES = ("bool", "complex64", "uint32", "int16", "float8_e5m2")


@dataclass(frozen=True)
class Plan:
    """One rank's part of a call.

    Attributes:
        arrays: the array arguments by name. data: the argument of all_gather_bytes.
        root: the rank that ``src`` means. mode: "sync", "async" or "submit".
        guilt: "no"; "sure" if the call must be refused because of this rank, "maybe" if it may be.
        wrong: what is wrong or strange, for grouping failures.
    """

    operation: str
    arrays: dict[str, Spec] = field(default_factory=dict)
    op: Any = "sum"
    algorithm: Any = "auto"
    src: Any = 0
    root: int = 0
    data: Any = b""
    data_bytes: bytes = b""
    mode: str = "sync"
    guilt: str = "no"
    wrong: str = ""

    def __str__(self) -> str:
        words = [f"{name}={spec}" for name, spec in self.arrays.items()]
        if self.operation in REDUCTIONS:
            words.append(f"op={short(self.op)}")
        if self.operation == "all_reduce":
            words.append(f"algorithm={short(self.algorithm)}")
        if self.operation == "broadcast":
            words.append(f"src={short(self.src)}")
        if self.operation in ("all_gather_bytes", "empty"):
            words.append(short(self.data))
        mode = "" if self.mode == "sync" else f" [{self.mode}]"
        return f"{self.operation}({', '.join(words)}){mode}{f' <- {self.wrong}' if self.wrong else ''}"


@dataclass(frozen=True)
class Case:
    """One call of all ranks.

    Attributes:
        seeds: of the values of the arrays. around: "plain"; "before": an operation is under way already when it is
            called; "behind": another one is called before it is waited for.
        disagree: whether the ranks do things that do not fit together.
    """

    seeds: tuple[int, int]
    transport: str
    plans: list[Plan]
    around: str = "plain"
    disagree: bool = False

    def __str__(self) -> str:
        around = "" if self.around == "plain" else f", {self.around} another"
        lines = [f"  rank {rank}: {plan}" for rank, plan in enumerate(self.plans)]
        return "\n".join([f"{self.transport}, {len(self.plans)} ranks{around}:", *lines])


def short(value: Any) -> str:
    """``value`` for a line of text."""
    text = ascii(value)
    if " at 0x" in text:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)"


def draw(seed: int, number: int, size: int, transport: str) -> Case:
    """Call ``number`` of the sequence that ``seed`` stands for; the same on every rank."""
    rng = random.Random(f"{seed}/{number}/{size}/{transport}")
    kind = rng.choices(list(_KINDS), list(_KINDS.values()))[0]
    seeds = seed, number
    if kind == "local":
        return Case(seeds, transport, [_draw_local(rng) for _ in range(size)])
    base = _draw_operation(rng, size, transport)
    plans = [base] * size
    if kind == "disagree":
        odd = rng.randrange(size)
        plans[odd] = _draw_disagreement(rng, base, size, transport)
    plans = [_draw_holdings(rng, plan, transport) for plan in plans]
    if kind == "one wrong":
        odd = rng.randrange(size)
        plans[odd] = _draw_wrong(rng, plans[odd], size)
    if kind == "some wrong":
        plans = [_draw_wrong(rng, plan, size) if rng.random() < 0.8 else plan for plan in plans]
    plans = [replace(plan, mode=rng.choice(_modes(plan))) for plan in plans]
    around = rng.choices(("plain", "before", "behind"), (80, 10, 10))[0]
    return Case(seeds, transport, plans, around, kind == "disagree")


def _modes(plan: Plan) -> list[str]:
    asynchronous = [] if plan.operation in ("barrier", "all_gather_bytes") else ["async", "async"]
    return ["sync"] * 5 + ["submit", *asynchronous]


def _draw_operation(rng: random.Random, size: int, transport: str, operation: str = "") -> Plan:
    """An operation that all ranks can do, with arrays of which nothing but types and lengths is decided."""
    operation = operation or rng.choices(list(_OPERATIONS), list(_OPERATIONS.values()))[0]
    if operation in ("barrier", "all_gather_bytes"):
        return Plan(operation)
    dtype = rng.choice(REDUCED if operation in REDUCTIONS or rng.random() < 0.4 else MOVED)
    op = rng.choice(_OF_FLOATS if dtype in FLOATS else _OF_INTEGERS)
    x = Spec(dtype, draw_count(rng, Spec(dtype, 0).itemsize))
    if operation == "broadcast":
        root = rng.randrange(size)
        return Plan(operation, {"x": replace(x, style="bits")}, src=root, root=root)
    if operation == "all_reduce":
        algorithm = rng.choice(["auto", "auto", "native", *([] if transport == "torch" else _algorithms(size))])
        style = _draw_style(rng, dtype, transport, algorithm, op)
        return Plan(operation, {"x": replace(x, style=style)}, op=op, algorithm=algorithm)
    share = (x.count + size - 1) // size if x.count > 5000 else x.count
    whole, part = replace(x, count=share * size), replace(x, count=share)
    if operation == "reduce_scatter":
        whole = replace(whole, style=_draw_style(rng, dtype, transport, "native", op))
        return Plan(operation, {"out": part, "x": whole}, op=op)
    if operation == "all_gather":
        return Plan(operation, {"out": whole, "x": replace(part, style="bits")})
    return Plan(operation, {"out": whole, "x": replace(whole, style="bits")})


@cache
def _algorithms(size: int) -> list[Any]:
    return [*fuzz_flaws.algorithms(size), schedule.ring(size)]


def _draw_style(rng: random.Random, dtype: str, transport: str, algorithm: Any, op: str) -> str:
    if dtype not in FLOATS:
        return rng.choice(("small", "bits"))
    # Infinities and NaNs where the result is known to the bit.
    if op == "product":
        return "small"  # others overflow on the way, or do not, depending on the order
    known = transport == "shared_memory" and algorithm in ("auto", "native")
    return rng.choice(("small", "normal", *(["special"] if known else [])))


def _draw_holdings(rng: random.Random, plan: Plan, transport: str) -> Plan:
    """``plan`` with this rank's own arrays: each rank decides for itself where they lie."""
    if plan.operation == "all_gather_bytes":
        data = rng.randbytes(rng.choice((0, 0, 1, 5, 100, 7001, 70_000)))
        return replace(plan, data=data, data_bytes=data)
    written = WRITTEN.get(plan.operation)
    arrays = {name: draw_holding(rng, spec, name == written) for name, spec in plan.arrays.items()}
    strange = [spec.holder for spec in arrays.values() if _may_be_refused(spec, transport)]
    plan = replace(plan, arrays=arrays)
    return replace(plan, guilt="maybe", wrong=strange[0]) if strange else plan


def _may_be_refused(spec: Spec, transport: str) -> bool:
    if spec.holder == "watched":
        return True
    only_buffers = spec.holder.endswith(("memoryview", "bytes")) or spec.holder in BUFFERS
    return transport == "torch" and only_buffers


def _draw_wrong(rng: random.Random, plan: Plan, size: int) -> Plan:
    """``plan`` with one argument that is wrong, or strange."""
    makers: list[Callable[[random.Random, Plan, int], Plan]] = []
    if plan.arrays:
        makers += [_with_flaw] * 6
    if plan.operation in REDUCTIONS:
        makers += [_with_wrong_op, _with_wrong_type]
    if plan.operation == "all_reduce":
        makers += [_with_wrong_algorithm]
    if plan.operation == "broadcast":
        makers += [_with_wrong_src] * 2
    if "out" in plan.arrays:
        makers += [_with_wrong_length, _with_other_type]
    if plan.operation == "all_gather_bytes":
        makers += [_with_wrong_bytes]
    return rng.choice(makers)(rng, plan, size) if makers else plan


def _with(plan: Plan, name: str, spec: Spec, wrong: str) -> Plan:
    return replace(plan, arrays={**plan.arrays, name: spec}, guilt="sure", wrong=wrong)


def _with_flaw(rng: random.Random, plan: Plan, size: int) -> Plan:
    name = rng.choice(list(plan.arrays))
    writes = WRITTEN[plan.operation] == name
    found = [flaw for flaw, how in fuzz_flaws.FLAWS.items() if (how.write if writes else how.read)]
    flaw = rng.choice(found)
    return _with(plan, name, replace(plan.arrays[name], flaw=flaw), f"{name} {'written' if writes else 'read'}: {flaw}")


def _with_wrong_type(rng: random.Random, plan: Plan, size: int) -> Plan:
    name = rng.choice(list(plan.arrays))
    spec = Spec(rng.choice(_STRANGE_TYPES), plan.arrays[name].count, style="bits")
    return _with(plan, name, spec, f"{name} of {spec.dtype}")


def _with_other_type(rng: random.Random, plan: Plan, size: int) -> Plan:
    name = rng.choice(list(plan.arrays))
    other, wrong = _other_type(rng, plan.arrays["x"].dtype)
    return _with(plan, name, Spec(other, plan.arrays[name].count, style="bits"), f"{name} of {wrong}")


def _other_type(rng: random.Random, dtype: str) -> tuple[str, str]:
    if dtype in _AS_WIDE and rng.random() < 0.7:
        return _AS_WIDE[dtype], "another type as wide"
    return rng.choice([other for other in REDUCED if other != dtype]), "another type"


def _with_wrong_length(rng: random.Random, plan: Plan, size: int) -> Plan:
    name = rng.choice(list(plan.arrays))
    spec = plan.arrays[name]
    spec = Spec(spec.dtype, max(0, spec.count + rng.choice((-1, 1, 1, size, 2 * spec.count))), style=spec.style)
    if spec.count == plan.arrays[name].count:
        spec = replace(spec, count=spec.count + 1)
    return _with(plan, name, spec, f"{name} of a wrong length")


def _with_wrong_op(rng: random.Random, plan: Plan, size: int) -> Plan:
    op = rng.choice(fuzz_flaws.wrong_ops())
    return replace(plan, op=op, guilt="sure", wrong=f"op {short(op)}")


def _with_wrong_algorithm(rng: random.Random, plan: Plan, size: int) -> Plan:
    algorithm = rng.choice(fuzz_flaws.wrong_algorithms(size))
    wrong = short(algorithm) if isinstance(algorithm, str) else type(algorithm).__name__
    return replace(plan, algorithm=algorithm, guilt="sure", wrong=f"algorithm {wrong}")


def _with_wrong_src(rng: random.Random, plan: Plan, size: int) -> Plan:
    if rng.random() < 0.3:
        src = rng.choice(fuzz_flaws.other_srcs(plan.root))
        guilt = "sure" if plan.guilt == "sure" else "maybe"
        return replace(plan, src=src, guilt=guilt, wrong=f"src of {type(src).__name__}")
    src = rng.choice(fuzz_flaws.wrong_srcs(size))
    return replace(plan, src=src, guilt="sure", wrong=f"src {short(src)}")


def _with_wrong_bytes(rng: random.Random, plan: Plan, size: int) -> Plan:
    if rng.random() < 0.3:
        data = rng.choice(fuzz_flaws.other_bytes(plan.data_bytes))
        return replace(plan, data=data, guilt="maybe", wrong=f"bytes in a {type(data).__name__}")
    data = rng.choice(fuzz_flaws.wrong_bytes())
    return replace(plan, data=data, guilt="sure", wrong=f"bytes {short(data)}")


def _draw_disagreement(rng: random.Random, plan: Plan, size: int, transport: str) -> Plan:
    """A plan that is right by itself and does not fit to ``plan``."""
    kinds = ["operation"]
    if plan.arrays:
        kinds += ["length", "length", "type"]
    if plan.operation in REDUCTIONS:
        kinds.append("op")
    if plan.operation == "all_reduce" and transport != "torch":
        kinds.append("algorithm")
    if plan.operation == "broadcast":
        kinds.append("src")
    kind = rng.choice(kinds)
    plan = replace(plan, wrong=f"another {kind}")
    if kind == "length":
        return replace(plan, arrays=_lengthened(plan, size))
    if kind == "type":
        other, wrong = _other_type(rng, plan.arrays["x"].dtype)
        op = plan.op if plan.op in (_OF_FLOATS if other in FLOATS else _OF_INTEGERS) else "sum"
        arrays = {name: replace(spec, dtype=other, style="bits") for name, spec in plan.arrays.items()}
        return replace(plan, op=op, arrays=arrays, wrong=wrong)
    if kind == "op":
        return replace(plan, op=rng.choice([op for op in ("sum", "min", "max") if op != plan.op]))
    if kind == "src":
        root = (plan.root + rng.randrange(1, size)) % size
        return replace(plan, src=root, root=root)
    if kind == "algorithm":
        scheduled = plan.algorithm not in ("auto", "native")
        return replace(plan, algorithm="native" if scheduled else "ring")
    others = [name for name in _OPERATIONS if name not in (plan.operation, "all_gather_bytes", "all_gather")]
    return replace(_draw_operation(rng, size, transport, rng.choice(others)), wrong="another operation")


def _lengthened(plan: Plan, size: int) -> dict[str, Spec]:
    """``plan``'s arrays with one element more per rank."""
    one_more = {"reduce_scatter": ("out",), "all_gather": ("x",), "all_to_all": ()}.get(plan.operation, ("x",))
    add = {name: 1 if name in one_more else size for name in plan.arrays}
    return {name: replace(spec, count=spec.count + add[name]) for name, spec in plan.arrays.items()}


def _draw_local(rng: random.Random) -> Plan:
    """Draw something that a rank does by itself: memory from ``empty``, a job of its own."""
    if rng.random() < 0.3:
        return Plan("job", data=rng.choice((7, None, ValueError("a job's own"))))
    if rng.random() < 0.5:
        shape = rng.choice((0, 1, 3, (), (2, 3), (0, 5), 70_001, (4,), True))
        return Plan("empty", data=(shape, rng.choice(MOVED)), guilt="maybe" if shape is True else "no", wrong="")
    shape, dtype = rng.choice(fuzz_flaws.wrong_shapes())
    return Plan("empty", data=(shape, dtype), guilt="sure", wrong=f"empty({short(shape)}, {short(dtype)})")
