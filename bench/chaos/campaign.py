"""Faults one after the other, in groups of ranks of all sorts, and what is checked after each."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bench.chaos.faults import KINDS, Fault
from bench.chaos.group import Group, HangError, Member, store_at
from bench.chaos.ranks import METHODS, Setup

_PATIENCE = 45.0  # seconds until ranks have gone on, more than any wait of pycomm
_STEPS = 3  # after a fault, that everybody left must make
_TRIES = 4  # of newcomers
_SLACK = {"descriptors": 6, "mappings": 6, "threads": 4, "bytes": 24 << 20}


@dataclass(frozen=True)
class Case:
    """Kind of group."""

    method: str
    ranks: int
    hosts: str  # letters, in turns; empty for one host

    def __str__(self) -> str:
        return f"{self.method}, {self.ranks} ranks, {len(set(self.hosts)) or 1} host{'s' if self.hosts else ''}"


@dataclass
class Result:
    """Result of one fault.

    Attributes:
        went_on: seconds until the slowest of the ranks that are left had ended the next step.
        detected: seconds until the last of them had noticed; ``None`` if nobody needed to.
        recovered: seconds of that which pycomm calls a recovery; likewise.
        lost: number of ranks lost.
        tries: newcomers that were started for them.
        problems: what was wrong.
    """

    number: int
    case: Case
    kind: str
    place: str
    went_on: float | None = None
    detected: float | None = None
    recovered: float | None = None
    lost: int = 0
    tries: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def line(self) -> str:
        went_on = "never went on" if self.went_on is None else f"went on after {self.went_on:6.3f} s"
        detected = "" if self.detected is None else f" (noticed after {self.detected:.3f} s)"
        words = "; ".join(self.problems) if self.problems else "equal"
        notes = f" [{'; '.join(self.notes)}]" if self.notes else ""
        what = f"{self.number:4d}  {self.kind:9} in {self.place:8}  {self.case!s:26}"
        return f"{what}  lost {self.lost}, {went_on}{detected}: {words}{notes}"

    def as_json(self) -> dict[str, Any]:
        return {**self.__dict__, "case": str(self.case)}


@dataclass
class Totals:
    """Totals over all groups: steps, and how much more their longest-lived ranks hold than at the start."""

    committed: int = 0
    attempted: int = 0
    growth: list[dict[str, int]] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)


def plan(count: int, seed: int) -> list[tuple[str, str]]:
    """Return ``count`` kinds and places: all in turns, in random order."""
    every = [(kind, place) for kind, about in KINDS.items() for place in about.places]
    order: list[tuple[str, str]] = []
    chooser = random.Random(seed)
    while len(order) < count:
        chooser.shuffle(every)
        order += every
    return order[:count]


def run_all(
    cases: Sequence[Case], faults: Sequence[tuple[str, str]], seed: int, report: Callable[[Result], None]
) -> Totals:
    """Inject ``faults``, an equal share into each of ``cases``; ``report`` each."""
    totals, queue = Totals(), list(enumerate(faults))
    share = -(-len(faults) // len(cases))
    before = _shared_files()
    for i, case in enumerate(cases):
        part, left = queue[i * share : (i + 1) * share], True
        while part and left:
            part = _run_case(case, part, random.Random(f"{seed}/{i}/{len(part)}"), i % 2 == 1, report, totals)
    totals.leaks += [f"/dev/shm/{name}" for name in sorted(_shared_files() - before)]
    return totals


def _shared_files() -> set[str]:
    return set(os.listdir("/dev/shm"))


def _run_case(
    case: Case,
    faults: list[tuple[int, tuple[str, str]]],
    chooser: random.Random,
    has_witness: bool,
    report: Callable[[Result], None],
    totals: Totals,
) -> list[tuple[int, tuple[str, str]]]:
    """Let ``faults`` happen to a group; return those that are left when a check failed."""
    with store_at() as address, Group(Setup(0, case.ranks, address, case.method), case.ranks, case.hosts) as group:
        try:
            settle(group, case.ranks, "the beginning")
        except HangError as error:
            totals.leaks.append(f"{case}: {error}")
            return []
        witness = group.members[-1] if has_witness else None
        while faults:
            number, (kind, place) = faults.pop(0)
            result = Result(number + 1, case, kind, place)
            _strike(group, result, chooser, witness)
            report(result)
            if result.problems:
                break
        else:
            try:
                group.end()
            except HangError as error:
                totals.leaks.append(f"{case}: {error}")
            totals.leaks += [f"{case}: {problem}" for problem in group.problems]
        if witness is not None and witness.base:
            totals.growth.append({key: witness.vitals[key] - witness.base[key] for key in witness.base})
        totals.committed += len(group.digests)
        totals.attempted += sum(step <= max(group.digests) for step in group.begun)
    return faults


def _strike(group: Group, result: Result, chooser: random.Random, witness: Member | None) -> None:
    """Let one fault happen, check those that are left, and replace those that are not."""
    kind, place = result.kind, result.place
    size = len(group.members)
    targets = chooser.sample([member for member in group.members if member is not witness], 2)
    fault = Fault(kind, place, chooser.randrange(1 << 30), chooser.randrange(1, 20))
    victims = [targets[0]]
    before = list(group.members)
    try:
        if place in ("recovery", "join"):
            victims.append(targets[1])
            group.strike(targets[0], fault)
            other = Fault("kill", chooser.choice(("forward", "hook", "exchange", "commit", "step")), fault.seed, 20)
            group.strike(targets[1], other)
        else:
            group.strike(targets[0], fault)
        first = victims[-1]
        group.until("the fault", lambda: first.happened is not None or first.end is not None, _PATIENCE)
        if place == "join":
            replace_lost(group, [first], result)
        group.until("the fault", lambda: targets[0].happened is not None or targets[0].end is not None, _PATIENCE)
        struck = targets[0] if place == "join" else first
        assert struck.happened is not None
        go_on(group, before, struck.happened, result)
        lost = [member for member in before if member.end is not None]
        result.lost = len(lost)
        _judge(lost, victims, result)
        if len(lost) == size:
            result.problems += [f"rank {m.number}: {m.end}" for m in lost]
            return
        replace_lost(group, [m for m in lost if m is not first or place != "join"], result)
        settle(group, size, "newcomers")
        check(group, result)
    except HangError as error:
        result.problems.append(f"hang: {error}")
    result.problems += group.problems
    group.problems = []


def go_on(group: Group, before: list[Member], fault: tuple[float, int], result: Result) -> None:
    """Wait until the surviving members of ``before`` continue after a fault; note how long that took.

    Args:
        fault: when it happened, and in which step.
    """
    when, step = fault

    def moved() -> bool:
        return all(m.end is not None or m.step >= step + _STEPS for m in before)

    group.until("three more steps", moved, _PATIENCE)
    left = [m for m in before if m.end is None]
    if not left:
        return
    result.went_on = max(m.done[step + 1] for m in left if step + 1 in m.done) - when
    noticed = [next(t for t in m.noticed if t >= when) for m in left if m.noticed and m.noticed[-1] >= when]
    if noticed:
        result.detected = max(noticed) - when
        result.recovered = max(m.recoveries[-1] for m in left if m.recoveries)


def _judge(lost: list[Member], victims: list[Member], result: Result) -> None:
    """Say which ranks were lost that should not be, and the other way round."""
    for member in lost:
        if member not in victims:
            result.problems.append(f"rank {member.number} was lost too: {member.end}")
        elif member is victims[0] and not str(member.end).startswith("died (-9"):
            result.notes.append(str(member.end))
    must_be_lost = KINDS[result.kind].loses and not (result.kind == "long stop" and result.case.hosts)
    if must_be_lost and victims[0] not in lost:
        result.problems.append(f"rank {victims[0].number} was not lost")
    if result.kind == "long stop" and victims[0] in lost and "left behind" not in str(victims[0].end):
        result.problems.append(f"rank {victims[0].number} was not told that it was left behind: {victims[0].end}")


def replace_lost(group: Group, lost: list[Member], result: Result) -> None:
    """Have newcomers take the places of ``lost``, one after the other."""
    for member in lost:
        for _ in range(_TRIES):
            newcomer = group.replace(member)
            result.tries += 1
            group.until("a newcomer", partial(_has_arrived, newcomer), _PATIENCE)
            if newcomer.end is None:
                break
            result.notes.append(f"newcomer: {newcomer.end}")
        else:
            result.problems.append("no newcomer was let in")


def _has_arrived(newcomer: Member) -> bool:
    return newcomer.end is not None or newcomer.step >= 0


def settle(group: Group, size: int, what: str) -> None:
    """Wait until all ranks agree on a world of ``size`` ranks, and have taken some steps in it."""

    def are_few() -> bool:
        return len(group.members) < size

    def are_together() -> bool:
        return are_few() or all(m.step >= 0 and len(m.world) == size for m in group.members)

    there = list(group.members)
    group.until(what, are_together, _PATIENCE)
    step = max(m.step for m in group.members) + _STEPS
    group.until(f"steps after {what}", lambda: are_few() or all(m.step >= step for m in group.members), _PATIENCE)
    if are_few():
        group.problems += [f"rank {m.number} was lost afterwards: {m.end}" for m in there if m.end is not None]
        return
    if len({m.world for m in group.members}) != 1:
        group.problems.append(f"worlds differ: {sorted(m.world for m in group.members)}")
    for member in group.members:
        member.vitals = {}
        member.order("vitals")
    group.until("vitals", lambda: all(m.vitals for m in group.members), _PATIENCE)
    for member in group.members:
        member.base = member.base or member.vitals


def check(group: Group, result: Result) -> None:
    """Note which ranks hold more than at the start."""
    for member in group.members:
        for what, slack in _SLACK.items():
            more = member.vitals[what] - member.base[what]
            if more > slack:
                result.problems.append(f"rank {member.number} holds {more} more {what} than at first")


def cases_of(methods: Sequence[str], ranks: Sequence[int], hosts: str) -> list[Case]:
    """Return all kinds of groups: for each method, the sizes in turns."""
    assert set(methods) <= set(METHODS)
    return [Case(method, count, "ab" if hosts == "two" else "") for method in methods for count in ranks]
