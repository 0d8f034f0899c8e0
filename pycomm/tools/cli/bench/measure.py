"""Driver of ``pycomm bench COLLECTIVE``, on ranks that it starts or on those of a launcher.

It verifies all libraries, times them in turns, and prints a table and a verdict.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Protocol

from torch.distributed import rendezvous as launchers_rendezvous  # type: ignore[attr-defined]

from pycomm.agreement import Words, exchanged
from pycomm.tools.cli.bench import table
from pycomm.tools.cli.bench.operations import Case
from pycomm.tools.cli.bench.rank import BenchRank
from pycomm.tools.cli.bench.settings import BenchSettings, calls_of
from pycomm.tools.cli.bench.table import PLACES, ROUNDS, TableLine
from pycomm.tools.cli.timing import Samples
from pycomm.tools.launching import RankError, WorkerGroup, rendezvous
from pycomm.torch_internals import PrefixStore

_WRONG = 7  # nccl-tests' exit code


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
    try:
        if not settings.launched:
            return _among_own(settings, others or {})
        if os.environ["RANK"] == "0":
            return _among_launched(settings)
        with open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            return _among_launched(replace(settings, output=None))
    except RankError as error:
        print(f"pycomm bench: {error}", file=sys.stderr)
        return 1


def setup_of(settings: BenchSettings) -> dict[str, Any]:
    """Return the arguments of :class:`BenchRank` besides ``port`` or ``store``."""
    return {"num_bytes": max(case.size for case in settings.cases), "device": settings.device}


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
    worker = f"{BenchRank.__module__}:{BenchRank.__name__}"
    with (
        rendezvous() as port,
        WorkerGroup("torch", worker, settings.ranks, setup_of(settings) | {"port": port}) as ranks,
    ):
        yield ranks


_WORDS = Words(failed="rank {rank} failed: {problem}", error=RankError, shares_lost=True)
_PATIENCE = timedelta(minutes=20)  # for one turn: the launcher notices ranks that die


class LaunchedWorkers:
    """All launched ranks, used like a :class:`WorkerGroup` by each of them. Answers travel through their store."""

    def __init__(self) -> None:
        found, self.rank, self.size = next(launchers_rendezvous("env://"))
        found.set_timeout(_PATIENCE)
        self.store = PrefixStore("pycomm bench", found)
        self.worker: Any = None  # every rank sets its own
        self._calls = 0

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call ``method`` of this rank's worker; return all ranks' results in rank order. Collective."""
        answer: Any
        try:
            answer = getattr(self.worker, method)(*arguments)
        except Exception:
            answer = RankError(f"rank {self.rank} failed:\n{traceback.format_exc()}")
        return exchanged(self._gather, answer, method, words=_WORDS)

    def close(self) -> None:
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


def _among_launched(settings: BenchSettings) -> int:
    """Run as one of a launcher's ranks. All do the same; only rank 0 prints and writes."""
    workers = LaunchedWorkers()
    worker = workers.worker = BenchRank(**setup_of(settings), store=workers.store)
    with contextlib.closing(worker):
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


def _conclude(settings: BenchSettings, contenders: Sequence[Contender]) -> int:
    """Measure, print and write; return the exit code."""
    started = table.now()
    devices = contenders[0].team.call("describe")
    print(table.preamble(settings, devices))
    found: list[TableLine] = []
    for case in settings.cases:
        wrong = {who.name: counts for who in contenders if (counts := _verify(case, who)) is not None}
        if contenders[0].name in wrong:
            found.append(_line(case, [who for who in contenders if who.name in wrong], wrong))
            print(table.row(found[-1]), flush=True)
    missing = [note for who in contenders for note in who.missing]
    if not found:
        print(f"pycomm bench: {missing[0]}", file=sys.stderr)
        return 2
    verdict = table.verdict_of(found, missing)
    print(table.below(settings, found, verdict))
    if settings.output is not None:
        table.write(settings.output, table.report(settings, found, devices, verdict, started))
        print(f"# JSON output written to {settings.output}")
    return _WRONG if verdict["out_of_bounds"]["count"] else 0


def _verify(case: Case, who: Contender) -> dict[str, int] | None:
    """Return the number of wrong elements by place; ``None``, with a note, if ``who`` does not support the case."""
    found: dict[str, int] = {}
    for place in PLACES:
        answers = who.team.call("verify", who.name, case, place == "in_place")
        reasons = sorted({answer for answer in answers if isinstance(answer, str)})
        if reasons and all(isinstance(answer, str) for answer in answers):
            what = " ".join(word for word in (case.operation, case.dtype, case.redop) if word != "none")
            note = f"{who.name}, {what}: {reasons[0]}"
            who.missing += [note] if note not in who.missing else []
            return None
        if reasons:
            raise RankError(f"{who.name}: some ranks failed, others did not: {'; '.join(reasons)}")
        found[place] = sum(answers)
    return found


def _line(case: Case, present: list[Contender], wrong: dict[str, dict[str, int]]) -> TableLine:
    warmups, calls = calls_of(case.size)
    taken: dict[str, dict[str, list[float]]] = {place: {who.name: [] for who in present} for place in PLACES}
    copies: list[float] = []
    for number in range(ROUNDS):
        for place in PLACES:
            # Alternate the order, so that no library always follows the same other one.
            for who in present if number % 2 == 0 else reversed(present):
                seconds = who.team.call("turn", who.name, case, place == "in_place", warmups, calls)
                taken[place][who.name].append(max(seconds))
        copies.append(max(present[0].team.call("turn_copy", present[0].name, case.size, calls)))
    samples = {who.name: {place: Samples.of(taken[place][who.name]) for place in PLACES} for who in present}
    floor = Samples.of(copies).median * case.least_traffic()
    return TableLine(case, {who.name: wrong[who.name] for who in present}, samples, floor)
