"""Program of ``pycomm bench COLLECTIVE`` on every rank, whether this command has started it or a launcher.

The ranks verify all libraries and time them in turns. Rank 0 prints a table and a verdict.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Protocol

from torch.distributed import rendezvous  # type: ignore[attr-defined]

from pycomm.agreement import Words, exchanged
from pycomm.errors import text_of
from pycomm.tools.cli.bench import table
from pycomm.tools.cli.bench.operations import Case
from pycomm.tools.cli.bench.rank import BenchRank
from pycomm.tools.cli.bench.settings import BenchSettings, calls_of
from pycomm.tools.cli.bench.table import PLACES, ROUNDS, TableLine
from pycomm.tools.cli.timing import Samples
from pycomm.tools.launching import RankError, RankPool
from pycomm.torch_internals import PrefixStore

_WRONG = 7  # nccl-tests' exit code
_WORDS = Words(failed="{problem}", error=RankError, shares_lost=True)
_PATIENCE = timedelta(minutes=20)  # for one turn: whoever started the ranks notices those that die


class Team(Protocol):
    """This rank's worker, or workers of other ranks that this one drives."""

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call the workers' ``method``; return their results."""


Opened = Callable[[BenchSettings], contextlib.AbstractContextManager[Team]]


def run(settings: BenchSettings, others: Mapping[str, Opened] | None = None) -> int:
    """Measure one collective; return the exit code.

    Args:
        others: libraries other than torch's: name -> function that opens them, called on every rank.
    """
    try:
        if settings.launched:
            return measure(settings, others or {})
        quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with RankPool(settings.ranks, backend=None, environment=quiet) as pool:
            return int(pool.run(measure, settings, others or {})[0])
    except RankError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"pycomm bench: {error}", file=sys.stderr)
        return 1


def setup_of(settings: BenchSettings) -> dict[str, Any]:
    """Return the arguments of :class:`BenchRank` besides the store."""
    return {"num_bytes": max(case.size for case in settings.cases), "device": settings.device}


def measure(settings: BenchSettings, others: Mapping[str, Opened]) -> int:
    """Run as one of the ranks, of which only rank 0 prints and writes; return the exit code. Collective."""
    with contextlib.ExitStack() as stack:
        ranks = Ranks()
        if ranks.rank > 0:
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        own = stack.enter_context(contextlib.closing(BenchRank(**setup_of(settings), store=ranks.store)))
        teams: dict[str, Team] = {}
        for name in (settings.backend, *settings.peers):
            teams[name] = stack.enter_context(others[name](settings)) if name in others else own
            ranks.ask(teams[name], "open", name)
        code = _conclude(settings, ranks, own, teams)
        ranks.part()
        return code


class Ranks:
    """All ranks that measure. Answers travel through their store, as JSON: others may reach it."""

    def __init__(self) -> None:
        found, self.rank, self.size = next(rendezvous("env://"))
        found.set_timeout(_PATIENCE)
        self.store = PrefixStore("pycomm bench", found)
        self._calls = 0

    def ask(self, team: Team, method: str, *arguments: Any) -> list[Any]:
        """Call ``method`` of this rank's ``team``; return the answers of all ranks' teams. Collective."""
        mine: Any
        try:
            mine = team.call(method, *arguments)
        except Exception as error:
            mine = RankError(f"rank {self.rank} failed: {text_of(error)}")
        everyones = exchanged(self._gather, mine, method, words=_WORDS)
        return [answer for answers in everyones for answer in answers]

    def part(self) -> None:
        """Wait for the others; rank 0 is the last to go, since it may host the store. Collective."""
        self._gather(b"")
        if self.rank > 0:
            self.store.set(f"gone {self.rank}", "")
        else:
            self.store.wait([f"gone {rank}" for rank in range(1, self.size)])

    def _gather(self, mine: bytes) -> list[bytes]:
        number, self._calls = self._calls, self._calls + 1
        self.store.set(f"{number} {self.rank}", mine.decode())
        everyones = [self.store.get(f"{number} {rank}") for rank in range(self.size)]
        self.store.delete_key(f"{number - 1} {self.rank}")  # which all have read
        return everyones


def _conclude(settings: BenchSettings, ranks: Ranks, own: Team, teams: Mapping[str, Team]) -> int:
    """Measure, print and write; return the exit code."""
    started, devices = table.now(), ranks.ask(own, "describe")
    print(table.preamble(settings, devices))
    found: list[TableLine] = []
    missing: dict[str, None] = {}  # notes on what is not supported, each once
    for case in settings.cases:
        wrong: dict[str, dict[str, int]] = {}
        for name, team in teams.items():
            counts = {place: _verify(case, ranks, team, name, place == "in_place") for place in PLACES}
            missing |= {count: None for count in counts.values() if isinstance(count, str)}
            whole = {place: count for place, count in counts.items() if isinstance(count, int)}
            wrong |= {name: whole} if len(whole) == len(counts) else {}
        if settings.backend in wrong:
            found.append(_line(case, ranks, {name: teams[name] for name in wrong}, wrong))
            print(table.row(found[-1]), flush=True)
    if not found:
        if ranks.rank == 0:
            print(f"pycomm bench: {next(iter(missing))}", file=sys.stderr)
        return 2
    verdict = table.verdict_of(found, list(missing))
    print(table.below(settings, found, verdict))
    if settings.output is not None and ranks.rank == 0:
        table.write(settings.output, table.report(settings, found, devices, verdict, started))
        print(f"# JSON output written to {settings.output}")
    return _WRONG if verdict["out_of_bounds"]["count"] else 0


def _verify(case: Case, ranks: Ranks, team: Team, name: str, in_place: bool) -> int | str:
    """Return the number of wrong elements, or a note if the library does not support the case."""
    answers = ranks.ask(team, "verify", name, case, in_place)
    reasons = sorted({answer for answer in answers if isinstance(answer, str)})
    if not reasons:
        return int(sum(answers))
    if not all(isinstance(answer, str) for answer in answers):
        raise RankError(f"{name}: some ranks failed, others did not: {'; '.join(reasons)}")
    what = " ".join(word for word in (case.operation, case.dtype, case.redop) if word != "none")
    return f"{name}, {what}: {reasons[0]}"


def _line(case: Case, ranks: Ranks, teams: Mapping[str, Team], wrong: dict[str, dict[str, int]]) -> TableLine:
    warmups, calls = calls_of(case.size)
    ours, *_ = teams
    taken: dict[str, dict[str, list[float]]] = {name: {place: [] for place in PLACES} for name in teams}
    copies: list[float] = []
    for number in range(ROUNDS):
        for place in PLACES:
            # Alternate the order, so that no library always follows the same other one.
            for name in teams if number % 2 == 0 else reversed(list(teams)):
                seconds = ranks.ask(teams[name], "turn", name, case, place == "in_place", warmups, calls)
                taken[name][place].append(max(seconds))
        copies.append(max(ranks.ask(teams[ours], "turn_copy", ours, case.size, calls)))
    samples = {name: {place: Samples.of(each) for place, each in places.items()} for name, places in taken.items()}
    return TableLine(case, wrong, samples, Samples.of(copies).median * case.least_traffic())
