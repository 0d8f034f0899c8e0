"""Runs ``pycomm bench COLLECTIVE``, on ranks of its own or those of a launcher: table, report, verdict."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from pycomm.cli.bench import report, table
from pycomm.cli.bench.busy import busy
from pycomm.cli.bench.kernels.arguments import WRONG
from pycomm.cli.bench.measure import PLACES, Contender, Line, lines
from pycomm.cli.bench.mpi import MPIS
from pycomm.cli.bench.rank import BenchRank
from pycomm.cli.bench.ranks import Ranks
from pycomm.cli.bench.settings import Settings
from pycomm.cli.bench.surrounding import Surrounding
from pycomm.launching import RankError, rendezvous

_WORKER = "pycomm.cli.bench.rank:BenchRank"


def run(settings: Settings) -> int:
    """Measure one collective; return the exit code: 7 for wrong results or too little bandwidth, as nccl-tests."""
    try:
        return _among_launched(settings) if settings.launched else _among_own(settings)
    except RankError as error:
        print(f"pycomm bench: {error}", file=sys.stderr)
        if "timed out" in str(error):
            hint = f"-T is {settings.timeout:g} s; raise it where ranks outnumber cores, or others use them"
            print(f"pycomm bench: a wait took longer than -T allows: {hint}", file=sys.stderr)
        return 1


def _among_own(settings: Settings) -> int:
    """Start ranks here: one group for all libraries of torch, and one for each MPI."""
    with contextlib.ExitStack() as stack:
        teams: dict[str, Ranks] = {}
        contenders = []
        for name in (settings.backend, *settings.peers):
            kind = name if name in MPIS else "torch"
            if kind not in teams:
                teams[kind] = stack.enter_context(_started(settings, kind))
            teams[kind].call("open", name)
            contenders.append(Contender(name, teams[kind]))
        return _conclude(settings, contenders)


@contextlib.contextmanager
def _started(settings: Settings, kind: str) -> Iterator[Ranks]:
    setup = _setup(settings)
    if kind in MPIS:
        label, find = MPIS[kind]
        mpi = find()
        with Ranks(label, _WORKER, settings.ranks, setup, mpi.launcher, mpi.environment) as ranks:
            yield ranks
    else:
        with rendezvous() as port, Ranks(kind, _WORKER, settings.ranks, {**setup, "port": port}) as ranks:
            yield ranks


def _setup(settings: Settings) -> dict[str, Any]:
    return {
        "num_bytes": settings.largest,
        "device": settings.device,
        "timeout": settings.timeout,
        "registered": settings.registered,
    }


def _among_launched(settings: Settings) -> int:
    """Be one of the ranks that a launcher has started; rank 0 drives."""
    surrounding = Surrounding()
    worker = BenchRank(**_setup(settings), store=surrounding.store)
    surrounding.use(worker)
    try:
        if surrounding.rank > 0:
            return surrounding.serve()
        code = 1
        try:
            contenders = [Contender(name, surrounding) for name in (settings.backend, *settings.peers)]
            for contender in contenders:
                surrounding.call("open", contender.name)
            code = _conclude(settings, contenders)
        finally:
            surrounding.end(code)
        return code
    finally:
        worker.close()


def _conclude(settings: Settings, contenders: Sequence[Contender]) -> int:
    """Measure, print and write; return the exit code."""
    started = report.now()
    ours, *peers = contenders
    devices = ours.team.call("describe")
    print(table.preamble(settings, devices))
    print(table.header(), flush=True)
    found: list[Line] = []
    with busy(settings.busy, settings.nice):
        for line in lines(settings, ours, peers):
            print(table.row(line), flush=True)
            found.append(line)
    missing = [note for who in contenders for note in who.missing]
    if not found:
        print(f"pycomm bench: {missing[0]}", file=sys.stderr)
        return 2
    failed = sum(bool(line.ours[place].wrong) for line in found for place in PLACES)
    verdict = report.verdict_of(failed, table.average_busbw(found), settings.min_busbw, missing)
    _print_rest(settings, found, missing, verdict)
    if settings.output is not None:
        report.write(settings.output, report.report(settings, found, devices, verdict, started))
        print(f"# JSON output written to {settings.output}")
    return WRONG if failed or verdict["average_bus_bandwidth"]["okay"] == "false" else 0


def _print_rest(settings: Settings, found: list[Line], missing: Sequence[str], verdict: dict[str, Any]) -> None:
    print(table.comparison(found, settings.rounds))
    for note in [*missing, *_wrong_peers(found)]:
        print(f"# {note}")
    scattered = table.scatter(settings, found)
    if scattered is not None:
        print(scattered)
    bandwidth = verdict["average_bus_bandwidth"]
    okay = {"unchecked": "", "true": "OK", "false": "FAILED"}[bandwidth["okay"]]
    print(f"#\n{table.footer(settings, bandwidth['bandwidth'], verdict['out_of_bounds']['count'], okay)}")


def _wrong_peers(found: list[Line]) -> Iterator[str]:
    for line in found:
        for place in PLACES:
            for name, peer in line.peers[place].items():
                if peer.wrong:
                    yield f"{name}: {peer.wrong} wrong elements of {line.case.size} bytes, {place.replace('_', '-')}"
