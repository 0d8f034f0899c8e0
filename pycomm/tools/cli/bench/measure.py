"""Driver of ``pycomm bench COLLECTIVE``, on ranks that it starts or on those of a launcher.

It verifies all libraries, times them in turns, and prints a table and a verdict.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pycomm.tools.cli.bench import table
from pycomm.tools.cli.bench.operations import Case
from pycomm.tools.cli.bench.rank import BenchRank
from pycomm.tools.cli.bench.settings import BenchSettings
from pycomm.tools.cli.bench.table import PLACES, TableLine, Timed
from pycomm.tools.cli.bench.timing import Samples
from pycomm.tools.cli.bench.workers import LaunchedWorkers, WorkerGroup
from pycomm.tools.launching import RankError, rendezvous

_WRONG = 7  # nccl-tests' exit code for wrong results or too little bandwidth


class Team(Protocol):
    """Ranks whose workers are all called at once."""

    def call(self, method: str, *arguments: Any) -> list[Any]: ...


@dataclass
class Contender:
    """One library, and the ranks that use it.

    Attributes:
        missing: for each kind of case that it does not support, a note that says why.
    """

    name: str
    team: Team
    missing: list[str] = field(default_factory=list)


Started = Callable[[BenchSettings], contextlib.AbstractContextManager[Team]]


def run(settings: BenchSettings, others: Mapping[str, Started] | None = None) -> int:
    """Measure one collective; return the exit code.

    Args:
        others: libraries other than torch's: name -> function that starts their ranks.
    """
    if settings.launched and os.environ["RANK"] != "0":  # only rank 0 prints
        with open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            return _run(replace(settings, output=None), {})
    return _run(settings, others or {})


def _run(settings: BenchSettings, others: Mapping[str, Started]) -> int:
    try:
        return _among_launched(settings) if settings.launched else _among_own(settings, others)
    except RankError as error:
        print(f"pycomm bench: {error}", file=sys.stderr)
        if "timed out" in str(error):
            hint = f"-T is {settings.timeout:g} s; raise it where ranks outnumber cores, or other programs use them"
            print(f"pycomm bench: a wait took longer than -T allows: {hint}", file=sys.stderr)
        return 1


def setup_of(settings: BenchSettings) -> dict[str, Any]:
    """Return the arguments of :class:`BenchRank` besides ``port`` or ``store``."""
    return {
        "num_bytes": settings.largest,
        "device": settings.device,
        "timeout": settings.timeout,
        "registered": settings.registered,
    }


def _among_own(settings: BenchSettings, others: Mapping[str, Started]) -> int:
    """Start ranks here: one group for all of torch's libraries, and one for each other library."""
    with contextlib.ExitStack() as stack:
        teams: dict[str, Team] = {}
        contenders = []
        for name in (settings.backend, *settings.peers):
            kind = name if name in others else "torch"
            if kind not in teams:
                teams[kind] = stack.enter_context(others.get(kind, _torchs_ranks)(settings))
            teams[kind].call("open", name)
            contenders.append(Contender(name, teams[kind]))
        return _conclude(settings, contenders)


@contextlib.contextmanager
def _torchs_ranks(settings: BenchSettings) -> Iterator[Team]:
    setup, worker = setup_of(settings), f"{BenchRank.__module__}:{BenchRank.__name__}"
    with rendezvous() as port, WorkerGroup("torch", worker, settings.ranks, {**setup, "port": port}) as workers:
        yield workers


def _among_launched(settings: BenchSettings) -> int:
    """Run as one of a launcher's ranks. All do the same; only rank 0 prints and writes."""
    workers = LaunchedWorkers()
    worker = workers.worker = BenchRank(**setup_of(settings), store=workers.store)
    try:
        try:
            contenders = [Contender(name, workers) for name in (settings.backend, *settings.peers)]
            for contender in contenders:
                workers.call("open", contender.name)
            code = _conclude(settings, contenders)
        except RankError:  # raised on all ranks; after any other error, the launcher ends the other ranks
            workers.close()
            raise
        workers.close()
        return code
    finally:
        worker.close()


def _conclude(settings: BenchSettings, contenders: Sequence[Contender]) -> int:
    """Measure, print and write; return the exit code."""
    started = table.now()
    ours, *peers = contenders
    devices = ours.team.call("describe")
    print(table.preamble(settings, devices))
    print(table.header(), flush=True)
    found: list[TableLine] = []
    for line in lines(settings, ours, peers):
        print(table.row(line), flush=True)
        found.append(line)
    missing = [note for who in contenders for note in who.missing]
    if not found:
        print(f"pycomm bench: {missing[0]}", file=sys.stderr)
        return 2
    failed = sum(bool(line.ours[place].wrong) for line in found for place in PLACES)
    verdict = table.verdict_of(failed, table.average_busbw(found), settings.min_busbw, missing)
    print(table.below(settings, found, verdict))
    if settings.output is not None:
        table.write(settings.output, table.report(settings, found, devices, verdict, started))
        print(f"# JSON output written to {settings.output}")
    return _WRONG if failed or verdict["average_bus_bandwidth"]["okay"] == "false" else 0


def lines(settings: BenchSettings, ours: Contender, peers: list[Contender]) -> Iterator[TableLine]:
    """Yield a line for every case that ``ours`` supports."""
    for case in settings.cases:
        wrong = {who.name: _verify(settings, case, who) for who in (ours, *peers)}
        if wrong[ours.name] is not None:
            present = [who for who in (ours, *peers) if wrong[who.name] is not None]
            yield _line(settings, case, present, wrong)


def _verify(settings: BenchSettings, case: Case, who: Contender) -> dict[str, int | None] | None:
    """Return the number of wrong elements by place; ``None``, with a note, if ``who`` does not support the case.

    This calls the collective at least once, since only a call shows whether it is supported.
    """
    found: dict[str, int | None] = {}
    for place in PLACES:
        total = 0
        for _ in range(max(1, settings.checks)):
            answers = who.team.call("verify", who.name, case.as_json(), place == "in_place")
            reasons = sorted({answer["none"] for answer in answers if "none" in answer})
            if reasons and all("none" in answer for answer in answers):
                what = " ".join(word for word in (case.operation, case.dtype, case.redop) if word != "none")
                note = f"{who.name}, {what}: {reasons[0]}"
                who.missing += [note] if note not in who.missing else []
                return None
            if reasons:
                raise RankError(f"{who.name}: some ranks failed, others did not: {'; '.join(reasons)}")
            total += sum(answer["wrong"] for answer in answers)
        found[place] = total if settings.checks else None
    return found


def _line(
    settings: BenchSettings, case: Case, present: list[Contender], wrong: dict[str, dict[str, int | None] | None]
) -> TableLine:
    calls, warmups = settings.calls_of(case), settings.warmups_of(case)
    taken: dict[str, dict[str, list[float]]] = {place: {who.name: [] for who in present} for place in PLACES}
    copies: list[float] = []
    for number in range(settings.rounds):
        for place in PLACES:
            # Alternate the order, so that no library always follows the same other one.
            for who in present if number % 2 == 0 else reversed(present):
                arguments = (who.name, case.as_json(), place == "in_place", warmups, calls)
                taken[place][who.name].append(max(who.team.call("turn", *arguments)))
        copies.append(max(present[0].team.call("turn_copy", present[0].name, case.size, calls)))
    timed = {
        place: {name: Timed((wrong[name] or {})[place], Samples.of(seconds)) for name, seconds in taken[place].items()}
        for place in PLACES
    }
    floor = Samples.of(seconds * case.least_traffic() for seconds in copies)
    return TableLine(case, calls, {place: timed[place].pop(present[0].name) for place in PLACES}, timed, floor)
