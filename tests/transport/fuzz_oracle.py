"""Oracle of the fuzz: which values must come out of a call, and whether the ranks' reports agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
import torch

from tests.transport.fuzz_arrays import Bytes, bytes_of, dtype_of, values
from tests.transport.fuzz_cases import WRITTEN, Case

SLOWEST = 15.0  # seconds; whoever takes longer has waited for the timeout
_ALLOWED = ("TypeError", "ValueError", "MemoryError")
_RAW = ("incompatible function arguments", "pybind11", "Unable to cast", "unknown error", "std::", "(): ", "codec")
_OF_TWO: dict[str, Callable[..., torch.Tensor]] = {
    "product": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_HALVES = (torch.float16, torch.bfloat16)


@dataclass
class Report:
    """Outcome of a call on one rank.

    Attributes:
        error: its class and those above it, by name; empty when nothing was raised.
        problems: what this rank found wrong by itself.
        digest: of what was written, where all ranks must have the same.
    """

    seconds: float = 0.0
    error: tuple[str, ...] = ()
    text: str = ""
    digest: str = ""
    problems: list[str] = field(default_factory=list)


def elements_of(case: Case, rank: int, name: str) -> torch.Tensor:
    """Return the elements of the array ``name`` of ``rank`` before the call."""
    return values((*case.seeds, rank, int(name == "out")), case.plans[rank].arrays[name])


def wanted(case: Case, rank: int) -> torch.Tensor:
    """Return what the array that ``rank`` writes to must hold in the end, as exactly as it is known."""
    operation, size = case.plans[rank].operation, len(case.plans)
    if operation == "broadcast":
        return elements_of(case, case.plans[rank].root, "x")
    inputs = [elements_of(case, p, "x") for p in range(size)]
    if operation == "all_reduce":
        return _reduced(inputs, str(case.plans[rank].op))
    if operation == "reduce_scatter":
        return _reduced([_part(x, rank, size) for x in inputs], str(case.plans[rank].op))
    if operation == "all_gather":
        return torch.cat(inputs)
    return torch.cat([_part(x, rank, size) for x in inputs])


def difference(case: Case, rank: int, got: Bytes) -> str:
    """Describe what is wrong about ``got``, the bytes that ``rank``'s operation wrote; "" for nothing."""
    right = wanted(case, rank)
    plan = case.plans[rank]
    spec = plan.arrays[WRITTEN[plan.operation]]
    if got.size == 0 or np.array_equal(got, bytes_of(right)):
        return ""
    if not right.is_floating_point() or spec.dtype.startswith("float8"):
        return _first(got != bytes_of(right), bytes_of(right), got)
    found = torch.from_numpy(got).view(dtype_of(spec.dtype))
    if plan.operation in ("all_reduce", "reduce_scatter"):
        wrong = ~_close(case, rank, found, right)
    else:
        wrong = (torch.from_numpy(got) != torch.from_numpy(bytes_of(right))).view(-1, right.itemsize).any(1)
    return _first(wrong.numpy(), right, found) if bool(wrong.any()) else ""


def judge(case: Case, reports: Sequence[Report]) -> list[str]:
    """List what is wrong about a call by what all ranks report of it."""
    problems = [f"rank {rank}: {problem}" for rank, report in enumerate(reports) for problem in report.problems]
    raised = [rank for rank, report in enumerate(reports) if report.error]
    if "CommError" not in {name for report in reports for name in report.error}:
        for rank, report in enumerate(reports):
            if report.seconds > SLOWEST:
                problems.append(f"rank {rank}: took {report.seconds:.1f} s")
    if case.plans[0].operation in ("empty", "job"):
        return problems + _judge_alone(case, reports)
    sure = [rank for rank, plan in enumerate(case.plans) if plan.guilt == "sure"]
    if raised and len(raised) < len(reports):
        problems.append(f"raised on rank {_listed(raised)} alone of {len(reports)}: {_outcome(reports[raised[0]])}")
    if not raised and (sure or case.disagree):
        problems.append("was accepted")
    if raised and not sure and not case.disagree and all(plan.guilt == "no" for plan in case.plans):
        problems.append(f"was refused: {_outcome(reports[raised[0]])}")
    for rank in raised:
        problems += _judge_error(case, rank, reports[rank])
    if len({report.digest for report in reports}) > 1 and not raised:
        problems.append("the ranks hold different bits")
    return problems


def _judge_alone(case: Case, reports: Sequence[Report]) -> list[str]:
    problems = []
    for rank, (plan, report) in enumerate(zip(case.plans, reports, strict=True)):
        if plan.guilt == "sure" and not report.error:
            problems.append(f"rank {rank}: was accepted")
        if plan.guilt == "no" and report.error:
            problems.append(f"rank {rank}: was refused: {_outcome(report)}")
        if report.error:
            problems += [f"rank {rank}: {what}" for what in _bad_class(report)]
    return problems


def _judge_error(case: Case, rank: int, report: Report) -> list[str]:
    problems = [f"rank {rank}: {what}" for what in _bad_class(report)]
    suspects = [p for p, plan in enumerate(case.plans) if plan.guilt != "no"]
    if rank in suspects or problems:
        return problems
    if report.error[0] != "ValueError":
        problems.append(f"rank {rank}: innocent, got {_outcome(report)}")
    named = any(f"rank {p} could not take part" in report.text for p in suspects)
    if not named and not (case.disagree and "the ranks disagree" in report.text):
        problems.append(f"rank {rank}: innocent, its error names nobody who is to blame: {_outcome(report)}")
    return problems


def _bad_class(report: Report) -> list[str]:
    problems = []
    if not set(_ALLOWED) & set(report.error) or {"UnicodeError", "CommError"} & set(report.error):
        problems.append(f"raised {_outcome(report)}")
    elif any(words in report.text for words in _RAW) or not report.text.strip():
        problems.append(f"raised an error not meant for users: {_outcome(report)}")
    return problems


def _outcome(report: Report) -> str:
    text = " ".join(report.text.split())
    return f"{report.error[0]}: {text if len(text) < 240 else text[:240] + '...'}"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _part(x: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    share = len(x) // size
    return x[rank * share : (rank + 1) * share]


def _reduced(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    """Reduce in the order of the ranks; halves in float32, rounded once."""
    dtype = inputs[0].dtype
    if op in ("min", "max"):
        return reduce(torch.minimum if op == "min" else torch.maximum, inputs)
    combine = _OF_TWO.get(op, torch.add)
    wide = reduce(combine, [x.float() if dtype in _HALVES else x for x in inputs])
    if op == "mean":
        wide = wide * torch.tensor(1.0 / len(inputs), dtype=wide.dtype)
    return wide.to(dtype)


def _close(case: Case, rank: int, found: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return which elements of a reduction are as right as they have to be."""
    plan = case.plans[rank]
    same = (found == right) | (found.isnan() & right.isnan())
    small = all(p.arrays["x"].style == "small" for p in case.plans)
    if plan.op in ("min", "max", "band", "bor", "bxor") or small:
        return same
    scheduled = plan.operation == "all_reduce" and plan.algorithm not in ("auto", "native")
    if case.transport == "shared_memory" and not scheduled:
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[right.itemsize]
        return (found.view(bits) == right.view(bits)) | (found.isnan() & right.isnan())
    # Terms are added in another order there, and halves rounded after each addition where it is a sum.
    size = len(case.plans)
    inputs = [elements_of(case, p, "x") for p in range(size)]
    if plan.operation == "reduce_scatter":
        inputs = [_part(x, rank, size) for x in inputs]
    scale = reduce(torch.add, [x.double().abs() for x in inputs]) / (size if plan.op == "mean" else 1)
    exact_mean = plan.op == "mean" and right.dtype in _HALVES
    slack = scale * size * torch.finfo(torch.float32 if exact_mean else right.dtype).eps
    if exact_mean:  # the one rounding may fall to the other side
        slack = slack + right.double().abs() * torch.finfo(right.dtype).eps
    return (found.double() - right.double()).abs() <= slack


def _first(wrong: Any, right: Any, found: Any) -> str:
    places = np.flatnonzero(wrong)
    i = int(places[0])
    count = len(places)
    return f"{count} wrong, first at {i}: {found[i]} instead of {right[i]}"


def label(case: Case) -> str:
    """Name the kind of call, for grouping failures."""
    strange = [
        (plan.operation, plan.wrong) for plan in case.plans if plan.guilt == "sure" or (case.disagree and plan.wrong)
    ]
    strange = strange or [(plan.operation, plan.wrong) for plan in case.plans if plan.wrong]
    if strange:
        return "; ".join(sorted({f"{operation}, {wrong}" for operation, wrong in strange}))
    return f"{case.plans[0].operation}, right"
