"""Calls in which one rank differs: what has to become of them, and of the next ones."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pycomm import torch_internals
from tests.backend.worlds import world
from tests.ranks import SLOWER

LIMIT = 5.0
"""Seconds within which every rank must have its error; the groups' own timeout is much longer."""

Make = Callable[[], Any]


@contextmanager
def pycomm_world() -> Iterator[None]:
    """Have a default group on the backend "pycomm"."""
    with world("pycomm"):
        yield


@dataclass(frozen=True)
class Call:
    """Collective call of which every argument can be wrong.

    Attributes:
        run: makes the call, with the arguments by keyword.
        arguments: makes the right ones, anew for each call and on every rank; may itself be collective.
        wrong: for each argument, functions that make wrong values of it.
        place: context in which the ranks are while they call.
    """

    run: Callable[..., Any]
    arguments: Callable[[], Mapping[str, Any]]
    wrong: Mapping[str, Sequence[Make]]
    place: Callable[[], AbstractContextManager[Any]] = pycomm_world


_KEPT: dict[str, Any] = {}


def kept(name: str, make: Make) -> Any:
    """Return what every rank has made at the first of these calls in the present test."""
    if name not in _KEPT:
        _KEPT[name] = make()
    return _KEPT[name]


@dataclass
class Told:
    """Outcomes of one call on this rank, told to all ranks through a store of their own."""

    rank: int
    size: int
    store: Any
    problems: list[str] = field(default_factory=list)
    number: int = 0

    def everyones(self, outcome: list[Any]) -> list[list[Any]]:
        """Return the outcomes of all ranks."""
        keys = [f"told/{self.number}/{rank}" for rank in range(self.size)]
        self.number += 1
        self.store.set(keys[self.rank], json.dumps(outcome))
        self.store.wait(keys, timedelta(seconds=60 * SLOWER))
        return [json.loads(self.store.get(key)) for key in keys]


def check_call(call: Call, name: str, wrong: Mapping[str, Sequence[Make]], *, are_wrong: bool = True) -> None:
    """Make ``call`` with wrong arguments, one at a time, by one rank after the other; and rightly after each.

    Raises AssertionError, on every rank, unless all ranks get an error soon, which names the rank that differed, and
    the right call works.

    Args:
        wrong: functions that make values, for each argument.
        are_wrong: whether the values must be refused: otherwise they may be taken, by all ranks.
    """
    default = dist.group.WORLD
    assert default is not None
    place = torch_internals.PrefixStore(f"one_rank/{name}", torch_internals.store_of(default))
    told = Told(default.rank(), default.size(), place)
    _KEPT.clear()
    with call.place():
        call.run(**call.arguments())
        for argument, makers in wrong.items():
            for i, make in enumerate(makers):
                problem = _one(call, argument, make, told, are_wrong)
                assert not problem, f"{name}: the {i}-th wrong {argument}, on rank {told.number % told.size}: {problem}"
        _KEPT.clear()  # before the group that it uses


def _one(call: Call, argument: str, make: Make, told: Told, is_wrong: bool) -> str:
    """Make one wrong call, and a right one; return what is wrong with their outcomes, the same text on every rank."""
    culprit = told.number // 2 % told.size
    arguments = dict(call.arguments())
    if told.rank == culprit:
        arguments[argument] = make()
    first = told.everyones(_outcome(call, arguments))
    shown = "; ".join(f"rank {rank}: {text or 'no error'} ({s:.1f} s)" for rank, (text, s) in enumerate(first))
    if is_wrong or any(text for text, _ in first):
        if not all(text for text, _ in first):
            return f"not all ranks have an error: {shown}"
        if max(s for _, s in first) > LIMIT * SLOWER:
            return f"it took too long: {shown}"
        if not all(
            f"rank {culprit}" in text or "ranks disagree" in text for r, (text, _) in enumerate(first) if r != culprit
        ):
            return f"rank {culprit} is not named: {shown}"
    then = told.everyones(_outcome(call, dict(call.arguments())))
    return f"after {shown}, the right call fails: {then}" if any(text for text, _ in then) else ""


def _outcome(call: Call, arguments: Mapping[str, Any]) -> list[Any]:
    """Return the error of the call, "" if it has none, and how long it took."""
    start = time.monotonic()
    try:
        call.run(**arguments)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"[:500], time.monotonic() - start]
    return ["", time.monotonic() - start]
