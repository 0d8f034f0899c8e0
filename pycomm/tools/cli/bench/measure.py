"""Program of ``pycomm bench COLLECTIVE`` on every rank, whether this command has started it or a launcher.

The ranks verify all libraries and time them in turns. Rank 0 prints a table and a verdict.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

from pycomm.agreement import Words, exchanged
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.transport.nccl import build_info
from pycomm.descriptions import cpu_model
from pycomm.errors import CommError, text_of
from pycomm.tools.cli.bench.operations import BenchSettings, Case
from pycomm.tools.cli.bench.rank import BenchRank
from pycomm.tools.cli.table import table
from pycomm.tools.cli.timing import Samples, busy_note, duration, times
from pycomm.tools.launching import RankError, RankPool
from pycomm.untrusted import naming

_WRONG = 7  # nccl-tests' exit code
_WORDS = Words(failed="{problem}", error=RankError, shares_lost=True)
_PATIENCE = timedelta(minutes=20)  # for one turn: whoever started the ranks notices those that die
_ROUNDS = 5  # turns of each library, interleaved
_PLACES = ("out_of_place", "in_place")
_COLUMNS = {"size": 12, "count": 12, "type": 8, "redop": 6, "root": 6}  # and their widths
_TIME = "%Y-%m-%d %H:%M:%S"  # as nccl-tests writes it

Rows = Sequence[Mapping[str, Any]]
Team = Callable[..., list[Any]]
"""Calls a method of this rank's worker, or of workers of other ranks that this one drives; returns their results."""
Opened = Callable[[BenchSettings], contextlib.AbstractContextManager[Team]]


def run(settings: BenchSettings, others: Mapping[str, Opened]) -> int:
    """Measure one collective; return the exit code.

    Args:
        others: libraries other than torch's: name -> function that opens them, called on every rank.
    """
    try:
        if settings.launched:
            return measure(settings, others)
        quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with RankPool(settings.ranks, backend=None, environment=quiet) as pool:
            return int(pool.run(measure, settings, others)[0])
    except (RankError, CommError) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"pycomm bench: {error}", file=sys.stderr)
        return 1


def measure(settings: BenchSettings, others: Mapping[str, Opened]) -> int:
    """Run as one of the ranks, of which only rank 0 prints and writes; return the exit code. Collective."""
    dist.init_process_group("gloo", timeout=_PATIENCE)
    link = Communicator(transport="torch")  # left open by an error, so that other ranks do not report its end instead
    with contextlib.ExitStack() as stack:
        if link.rank > 0:
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        own = stack.enter_context(contextlib.closing(BenchRank(settings.num_bytes, settings.device)))
        teams: dict[str, Team] = {}
        for name in (settings.backend, *settings.peers):
            team = stack.enter_context(others[name](settings)) if name in others else own.call
            teams[name] = functools.partial(_ask, link, team, name)
            teams[name]("open")
        devices = exchanged(link.channel.all_gather_bytes, own.describe(), "describe")
        code = _conclude(settings, devices, teams)
    link.barrier()  # rank 0 may host the store that the others use
    link.close()
    dist.destroy_process_group()
    return code


def _ask(link: Communicator, team: Team, name: str, method: str, *arguments: Any) -> list[Any]:
    """Call ``method`` for the library ``name``; return the answers of all ranks' teams. Collective."""
    try:
        mine: Any = team(method, name, *arguments)
    except Exception as error:
        mine = RankError(f"rank {link.rank} failed: {text_of(error)}")
    everyones = exchanged(link.channel.all_gather_bytes, mine, method, words=_WORDS)
    return [answer for answers in everyones for answer in answers]


def _conclude(settings: BenchSettings, devices: list[dict[str, Any]], teams: Mapping[str, Team]) -> int:
    """Measure, print and write; return the exit code."""
    started = time.strftime(_TIME)
    print(preamble(settings, devices))
    results: list[dict[str, Any]] = []
    missing: dict[str, None] = {}  # notes on what is not supported, each once
    for case in settings.cases:
        wrong = {name: _verify(case, name, team, missing) for name, team in teams.items()}
        if wrong[settings.backend]:
            results.append(_timed(case, {name: team for name, team in teams.items() if wrong[name]}, wrong))
            print(row(results[-1]), flush=True)
    if not results:
        if os.environ["RANK"] == "0":
            print(f"pycomm bench: {next(iter(missing))}", file=sys.stderr)
        return 2
    (warmups, calls), ours = settings.cases[0].calls(), [result[place] for result in results for place in _PLACES]
    what = {"operation": settings.cases[0].operation, "backend": settings.backend, "peers": settings.peers}
    sizes = {"minimum_bytes": settings.sizes[0], "maximum_bytes": settings.sizes[-1], "step_factor": settings.factor}
    counts = {"warmup_iters": warmups, "iterations": calls, "rounds": _ROUNDS, "ranks": settings.ranks}
    failed = sum(each["nwrong"] > 0 for each in ours)
    report = {
        "version": 3,
        "start_time": started,
        "args": sys.argv,
        "config": {**what, **sizes, **counts, "devices": devices},
        "results": results,
        "out_of_bounds": {"count": failed, "okay": "false" if failed else "true"},  # words, as nccl-tests writes
        "average_bus_bandwidth": {"bandwidth": sum(each["bus_bw"] for each in ours) / len(ours), "okay": "unchecked"},
        "missing": list(missing),
        "environment": environment(),
        "end_time": time.strftime(_TIME),
    }
    print(below(report))
    if settings.output is not None and os.environ["RANK"] == "0":
        write(settings.output, report)
        print(f"# JSON output written to {settings.output}")
    return _WRONG if failed else 0


def _verify(case: Case, name: str, team: Team, missing: dict[str, None]) -> dict[str, int]:
    """Return the wrong elements by place; nothing, and a note in ``missing``, if the library lacks the case."""
    answers = {place: team("verify", case, place) for place in _PLACES}
    reasons = sorted({answer for each in answers.values() for answer in each if isinstance(answer, str)})
    if not reasons:
        return {place: sum(counts) for place, counts in answers.items()}
    if any(len({isinstance(answer, str) for answer in each}) > 1 for each in answers.values()):
        raise RankError(f"{name}: some ranks failed, others did not: {'; '.join(reasons)}")
    what = " ".join(word for word in (case.operation, case.dtype, case.redop) if word != "none")
    missing[f"{name}, {what}: {reasons[0]}"] = None
    return {}


def _timed(case: Case, teams: Mapping[str, Team], wrong: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """Return the line of the report, durations in microseconds. ``wrong``: by the names of ``teams`` and by place."""
    ours, *peers = teams
    taken: dict[str, dict[str, list[float]]] = {place: {name: [] for name in teams} for place in _PLACES}
    taken["copy"] = {ours: []}
    for number in range(_ROUNDS):
        for place, seconds in taken.items():
            # Alternate the order, so that no library always follows the same other one.
            for name in seconds if number % 2 == 0 else reversed(seconds):
                seconds[name].append(max(teams[name]("turn", case, place)))
    floor = 1e6 * Samples.of(taken["copy"][ours]).median * case.least_traffic()
    what = {"size": case.size, "count": case.count, "type": case.dtype, "redop": case.redop, "root": f"{case.root:>6}"}
    places: dict[str, Any] = {}
    for place in _PLACES:
        own, *theirs = (_figures(case, wrong[name][place], taken[place][name]) for name in teams)
        longer = [{**each, "times_longer": each["time"] / own["time"]} for each in theirs]
        floors = {"floor": floor, "fraction_of_floor": floor / own["time"]}
        places[place] = {**own, **floors, "peers": dict(zip(peers, longer, strict=True))}
    return {**what, **places}


def _figures(case: Case, wrong: int, seconds: Iterable[float]) -> dict[str, Any]:
    """Return the time, the bandwidths in GB/s and the wrong elements, under nccl-tests' keys, and the spread."""
    taken = Samples.of(each * 1e6 for each in seconds)
    algbw = case.size / taken.median / 1e3
    ours = {"time": taken.median, "alg_bw": algbw, "bus_bw": algbw * case.bus_factor()}
    return {**ours, "nwrong": float(wrong), "p10": taken.low, "p90": taken.high, "samples": list(taken.seconds)}


def preamble(settings: BenchSettings, devices: Rows) -> str:
    """Return the text above the table: versions, settings and devices; and the table's head."""
    (warmups, calls), cores = settings.cases[0].calls(), len(os.sched_getaffinity(0))
    busy = [f"{settings.ranks} ranks on {cores} cores take turns: waits last longer."]
    device = " Rank {rank:>2} Pid {pid:>6} on {hostname:>10} device {device:>2} {device_info}"
    each = "{:>10}  {:>12}  {:>8}  {:>6}  {:>6}" + 2 * "  {:>7}  {:>6}  {:>6}  {:>6}"
    lines = [
        headline(cpu_model()),
        f"Collective test starting: {settings.cases[0].operation}, {settings.backend}",
        f"minBytes {settings.sizes[0]} maxBytes {settings.sizes[-1]} step: {settings.factor}(factor) "
        f"warmup iters: {warmups} iters: {calls}",
        *(busy if settings.ranks > cores and not settings.launched else [each for each in [busy_note(1)] if each]),
        "Using devices",
        *(device.format(**found) for found in devices),
        "",
        50 * " " + f"  {'out-of-place':^31}  {'in-place':^31}",
        each.format(*_COLUMNS, *2 * ("time", "algbw", "busbw", "#wrong")),
        each.format("(B)", "(elements)", "", "", "", *2 * ("(us)", "(GB/s)", "(GB/s)", "")),
    ]
    return "\n".join(f"# {line}".rstrip() for line in lines)


def environment() -> dict[str, Any]:
    """Return versions and the machine."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__}
    return {"pycomm": build_info(), **versions, "cpu": cpu_model(), "cores": len(os.sched_getaffinity(0))}


def headline(processor: str) -> str:
    """Return versions and the machine in one line."""
    found = environment()
    ours = f"pycomm {found['pycomm']['version']} ({found['pycomm']['simd']})"
    return f"{ours}, torch {found['torch']}, Python {found['python']}, {processor}, {found['cores']} cores"


def row(result: Mapping[str, Any]) -> str:
    """Return one line of the table."""
    cells = [f"{result[name]:>{width}}" for name, width in _COLUMNS.items()]
    for found in (result[place] for place in _PLACES):
        for key, width in (("time", 7), ("alg_bw", 6), ("bus_bw", 6)):
            cells.append(f"{found[key]:>{width}.{2 if found[key] < 10 ** (width - 3) else 0}f}")
        cells.append(f"{found['nwrong']:>6g}")
    return "  ".join(cells)


def below(report: Mapping[str, Any]) -> str:
    """Return the text below the table, all in comments: floor and peers of every line, notes, and the verdict."""
    config, failed, results = report["config"], report["out_of_bounds"]["count"], report["results"]
    head = ["size", "", "time", "p10 - p90", "floor", "of floor"]
    head += [text for name in config["peers"] for text in (f"{name}\ntime", "times\nlonger")]
    rows = [_compared(result, place, config["peers"]) for result in results for place in _PLACES]
    text = [
        "",
        f"medians of {_ROUNDS} turns of the slowest rank; floor: each byte read and written once, as fast as copies",
        *table(head, rows).splitlines(),
        *report["missing"],
        "",
        f"{'Out of bounds values':<20} : {failed} {'FAILED' if failed else 'OK'}",
        f"{'Avg bus bandwidth':<20} : {report['average_bus_bandwidth']['bandwidth']:g}",
        "",
        f"Collective test concluded: {config['operation']}, {config['backend']}",
    ]
    return "\n".join(f"# {line}".rstrip() for line in text)


def _compared(result: Mapping[str, Any], place: str, peers: Sequence[str]) -> list[str]:
    found = result[place]
    time, low, high, floor = (duration(found[key] / 1e6) for key in ("time", "p10", "p90", "floor"))
    first = str(result["size"]) if place == _PLACES[0] else ""
    cells = [first, place.replace("_", "-"), time, f"{low} - {high}", floor, f"{found['fraction_of_floor']:.0%}"]
    for peer in map(found["peers"].get, peers):
        wrong = f" ({peer['nwrong']:g} wrong)" if peer and peer["nwrong"] else ""
        cells += [duration(peer["time"] / 1e6) + wrong, times(peer["times_longer"])] if peer else ["-", "-"]
    return cells


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write the report. An earlier file stays until it is complete."""
    partial = path.with_name(f".{path.name}.partial")
    with naming(path), contextlib.ExitStack() as stack:
        stack.callback(partial.unlink, missing_ok=True)
        partial.write_text(json.dumps(content, indent=1) + "\n")
        partial.replace(path)
