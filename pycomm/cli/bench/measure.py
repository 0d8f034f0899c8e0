"""The driver of ``pycomm bench``: verifies what is measured and what it is compared with, then lets them take turns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from pycomm.cli.bench.operations import Case
from pycomm.cli.bench.settings import Settings
from pycomm.cli.bench.timing import Samples
from pycomm.launching import RankError

PLACES = ("out_of_place", "in_place")


class Team(Protocol):
    """Ranks that do what they are told, all at once."""

    def call(self, method: str, *arguments: Any) -> list[Any]: ...


@dataclass
class Contender:
    """One library, and the ranks that have it.

    Attributes:
        missing: why there are no figures of it, for each case that it does not have.
    """

    name: str
    team: Team
    missing: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Timed:
    """What one library took for one case, out of place or in place.

    Attributes:
        wrong: wrong elements on all ranks together, ``None`` if nobody looked.
        samples: seconds per call of the slowest rank, for each round.
    """

    wrong: int | None
    samples: Samples


@dataclass(frozen=True)
class Line:
    """A line of the table.

    Attributes:
        calls: of a turn.
        ours: by place, of what is measured. peers: place -> name -> the same of a peer that has it.
        floor: the least time in which all bytes can be read and written, at the speed of copies.
    """

    case: Case
    calls: int
    ours: dict[str, Timed]
    peers: dict[str, dict[str, Timed]]
    floor: Samples

    def bandwidths(self, seconds: float) -> tuple[float, float]:
        """Return algbw and busbw in GB/s."""
        algbw = self.case.size / seconds / 1e9
        return algbw, algbw * self.case.spec.bus_factor(self.case.ranks)


def lines(settings: Settings, ours: Contender, peers: list[Contender]) -> Iterator[Line]:
    """Yield a line of every case that ``ours`` has."""
    for case in settings.cases:
        wrong = {name: _verify(settings, case, who) for name, who in _named(ours, peers)}
        if wrong[ours.name] is not None:
            present = [who for who in (ours, *peers) if wrong[who.name] is not None]
            yield _line(settings, case, present, wrong)


def _named(ours: Contender, peers: list[Contender]) -> list[tuple[str, Contender]]:
    return [(who.name, who) for who in (ours, *peers)]


def _verify(settings: Settings, case: Case, who: Contender) -> dict[str, int | None] | None:
    """Return the wrong elements by place, or ``None`` and leave a note if ``who`` does not have this.

    Called at least once: whether it has this shows when it is called.
    """
    found: dict[str, int | None] = {}
    for place in PLACES:
        total = 0
        for _ in range(max(1, settings.checks)):
            answers = who.team.call("verify", who.name, case.as_json(), place == "in_place")
            reasons = {answer["none"] for answer in answers if "none" in answer}
            if reasons and all("none" in answer for answer in answers):
                _note(who, case, sorted(reasons)[0])
                return None
            if reasons:
                raise RankError(f"{who.name}: some ranks failed, others did not: {'; '.join(sorted(reasons))}")
            total += sum(answer["wrong"] for answer in answers)
        found[place] = total if settings.checks else None
    return found


def _note(who: Contender, case: Case, reason: str) -> None:
    what = " ".join(word for word in (case.operation, case.dtype, case.redop) if word != "none")
    note = f"{who.name}, {what}: {reason}"
    if note not in who.missing:
        who.missing.append(note)


def _line(
    settings: Settings, case: Case, present: list[Contender], wrong: dict[str, dict[str, int | None] | None]
) -> Line:
    calls, warmups = settings.calls_of(case), settings.warmups_of(case)
    taken: dict[str, dict[str, list[float]]] = {place: {who.name: [] for who in present} for place in PLACES}
    copies: list[float] = []
    for number in range(settings.rounds):
        for place in PLACES:
            # Forwards and backwards in turns, so that nobody always follows the same other one.
            for who in present if number % 2 == 0 else reversed(present):
                arguments = (who.name, case.as_json(), place == "in_place", warmups, calls)
                taken[place][who.name].append(max(who.team.call("turn", *arguments)))
        copies.append(max(present[0].team.call("turn_copy", present[0].name, case.size, calls)))

    def timed(place: str, name: str) -> Timed:
        return Timed((wrong[name] or {})[place], Samples.of(taken[place][name]))

    ours, *peers = (who.name for who in present)
    return Line(
        case,
        calls,
        {place: timed(place, ours) for place in PLACES},
        {place: {name: timed(place, name) for name in peers} for place in PLACES},
        Samples.of(seconds * case.least_traffic() for seconds in copies),
    )
