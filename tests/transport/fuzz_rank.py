"""One rank of the fuzz: does its part of a call, and says what came of it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pycomm import Communicator
from tests.transport import fuzz_flaws
from tests.transport.fuzz_arrays import Bytes, Held, Spec, dtype_of, hold
from tests.transport.fuzz_cases import WRITTEN, Case, Plan, draw
from tests.transport.fuzz_oracle import Report, difference, elements_of

_communicators: dict[str, Communicator] = {}
_sabotage: dict[str, str] = {}


def prepare(transport: str, timeout: float, sabotage: str = "") -> None:
    """Make this process a rank, with a new communicator of this transport. Collective."""
    leave(transport)
    _communicators[transport] = Communicator(timeout=timeout, transport=transport)
    _sabotage[transport] = sabotage


def leave(transport: str) -> None:
    """Give the communicator back; whoever waits for this rank stops."""
    if transport in _communicators:
        _communicators.pop(transport).close("the fuzz gave up")


def probe(transport: str) -> str:
    """Run a plain operation; return what is wrong with it, "" for nothing."""
    communicator = _communicators[transport]
    try:
        x = torch.full((3,), communicator.rank + 1.0)
        communicator.all_reduce(x)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    right = communicator.size * (communicator.size + 1) / 2
    return "" if bool((x == right).all()) else f"{x.tolist()} instead of {right}"


def perform(seed: int, number: int, transport: str) -> Report:
    """Do this rank's part of call ``number``."""
    return perform_case(draw(seed, number, _communicators[transport].size, transport))


def perform_case(case: Case) -> Report:
    """Do this rank's part of ``case``."""
    communicator = _communicators[case.transport]
    rank = communicator.rank
    plan = case.plans[rank]
    if plan.operation in ("empty", "job"):
        return _perform_alone(communicator, plan)
    held = {name: _hold(communicator, case, rank, name, spec) for name, spec in plan.arrays.items()}
    before = {name: array.memory.copy() for name, array in held.items()}
    call = _call_of(communicator, plan, {name: array.given for name, array in held.items()})
    if _sabotage[case.transport]:
        call = _sabotaged(_sabotage[case.transport], communicator, held, call)
    report, result = _timed(lambda: _around(communicator, case.around, call))
    _look_at_memory(case, rank, held, before, report)
    if plan.operation == "all_gather_bytes" and not report.error:
        right = [p.data_bytes for p in case.plans]
        if result != right:
            report.problems.append(f"all_gather_bytes returned {_lengths(result)} instead of {_lengths(right)}")
    return report


def _hold(communicator: Communicator, case: Case, rank: int, name: str, spec: Spec) -> Held:
    def allocate(num_bytes: int) -> Bytes:
        found: Bytes = communicator.empty(num_bytes, torch.uint8).numpy()
        return found

    if not spec.flaw:
        return hold(spec, elements_of(case, rank, name), allocate)
    count = spec.count if spec.count > 1 else fuzz_flaws.FEWEST
    sound = hold(Spec("complex128", count), torch.ones(count, dtype=torch.complex128), allocate)  # the widest
    return Held(fuzz_flaws.FLAWS[spec.flaw].make(sound, spec.dtype, count), sound.memory, sound.begin)


def _call_of(communicator: Communicator, plan: Plan, given: dict[str, Any]) -> Callable[[], Any]:
    """The call that ``plan`` describes; what it returns is waited for."""
    owner: Any = communicator.channel if plan.operation == "all_gather_bytes" else communicator
    method = getattr(owner, plan.operation)
    options: dict[str, Any] = dict(given)
    if plan.operation in ("all_reduce", "reduce_scatter"):
        options["op"] = plan.op
    if plan.operation == "all_reduce":
        options["algorithm"] = plan.algorithm
    if plan.operation == "broadcast":
        options["src"] = plan.src
    if plan.operation == "all_gather_bytes":
        options = {"mine": plan.data}
    if plan.mode == "submit":
        return lambda: communicator.channel.submit(lambda: method(**options))
    if plan.mode == "async":
        options["async_op"] = True
    return lambda: method(**options)


def _around(communicator: Communicator, around: str, call: Callable[[], Any]) -> Any:
    """``call``, beside another operation that must not mind it."""
    other = torch.full((5,), communicator.rank + 1.0)
    pending = communicator.all_reduce(other, async_op=True) if around == "before" else None
    result, error = _outcome_of(call, lambda: communicator.all_reduce(other) if around == "behind" else None)
    if pending is not None:
        pending.wait()
    right = communicator.size * (communicator.size + 1) / 2
    if around != "plain" and not bool((other == right).all()):
        raise AssertionError(f"the operation beside came to {other.tolist()} instead of {right}")
    if error is not None:
        raise error
    return result


def _outcome_of(call: Callable[[], Any], between: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Return what ``call`` returns or raises, at once or when it is waited for; call ``between`` in between."""
    try:
        work = call()
    except Exception as error:
        between()
        return None, error
    between()
    try:
        return (work.wait() if hasattr(work, "wait") else work), None
    except Exception as error:
        return None, error


def _timed(call: Callable[[], Any]) -> tuple[Report, Any]:
    start = time.monotonic()
    try:
        result = call()
    except Exception as error:
        names = tuple(kind.__name__ for kind in type(error).__mro__)
        text = str(error).encode("utf-8", "backslashreplace").decode()
        return Report(time.monotonic() - start, names, text), None
    return Report(time.monotonic() - start), result


def _look_at_memory(case: Case, rank: int, held: dict[str, Held], before: dict[str, Bytes], report: Report) -> None:
    """Notes in ``report`` where memory is not what it must be after the call."""
    plan = case.plans[rank]
    for name, array in held.items():
        spec, memory = plan.arrays[name], array.memory
        right = before[name]
        if not report.error and not spec.flaw and WRITTEN[plan.operation] == name:
            place = slice(array.begin, array.begin + spec.count * spec.itemsize)
            got = memory[place].copy()
            right[place] = got  # looked at by itself; what is around it must be as before
            report.digest = hashlib.sha256(got.tobytes()).hexdigest() if plan.operation == "all_reduce" else ""
            expects = all(p.guilt != "sure" for p in case.plans) and not case.disagree
            if expects and (wrong := difference(case, rank, got)):
                report.problems.append(f"{name}: {wrong}")
        if not np.array_equal(memory, right):
            where = int(np.flatnonzero(memory != right)[0]) - array.begin
            report.problems.append(f"{name}: memory changed that must not, first at byte {where} of the array")


def _perform_alone(communicator: Communicator, plan: Plan) -> Report:
    """Do what the others know nothing of."""
    if plan.operation == "job":
        report, result = _timed(lambda: communicator.channel.submit(lambda: _run_job(plan.data)).wait())
        right = type(plan.data).__name__ if isinstance(plan.data, Exception) else ""
        if (report.error[0] if report.error else "") != right or (not right and result != plan.data):
            report.problems.append(f"the job came to {report.error or result}")
        report.error = ()
        return report
    shape, dtype = plan.data
    dtype = dtype_of(dtype) if plan.guilt != "sure" else dtype
    report, tensor = _timed(lambda: communicator.empty(shape, dtype))
    if plan.guilt == "no" and not report.error:
        right_shape = (shape,) if isinstance(shape, int) else shape
        if tuple(tensor.shape) != right_shape or tensor.dtype != dtype:
            report.problems.append(f"empty returned {tensor.dtype} of shape {tuple(tensor.shape)}")
        tensor.zero_()
    return report


def _run_job(data: Any) -> Any:
    if isinstance(data, Exception):
        raise data
    return data


def _lengths(parts: Any) -> Any:
    return [len(part) for part in parts] if isinstance(parts, list) else parts


def _sabotaged(
    what: str, communicator: Communicator, held: dict[str, Held], call: Callable[[], Any]
) -> Callable[[], Any]:
    """``call`` with a fault of the kind that the fuzz is there to find, on the last rank."""

    def faulty() -> Any:
        if communicator.rank != communicator.size - 1:
            return call()
        if what == "silent":
            with_error: Any = _outcome_of(call, lambda: None)
            return with_error[0]
        try:
            result = call()
            if hasattr(result, "wait"):
                result = result.wait()
        except (TypeError, ValueError) as error:
            if what == "class":
                raise RuntimeError(str(error)) from error
            if what == "names nobody":
                raise ValueError("something was wrong") from error
            raise
        for array in held.values():
            if array.memory.flags.writeable and array.memory.size:
                array.memory[array.begin if what == "result" else 0] ^= 1
        return result

    return faulty
