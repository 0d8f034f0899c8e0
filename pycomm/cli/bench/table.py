"""nccl-tests' table, in its very columns, and what it does not print in comments behind it, which its parsers skip."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from pycomm.cli.bench.measure import PLACES, Line, Timed
from pycomm.cli.bench.results import headline
from pycomm.cli.bench.settings import Settings
from pycomm.cli.bench.timing import duration, times
from pycomm.cli.table import table

Device = dict[str, object]

_NAMES = ("time", "algbw", "busbw", "#wrong")
_UNITS = ("(us)", "(GB/s)", "(GB/s)", "")
_SCATTERED = 2.0
"""Ratio of the 90th percentile to the 10th above which a median says little."""


def preamble(settings: Settings, devices: Sequence[Device]) -> str:
    """Return what stands above the table: who measures what, and where."""
    smallest, largest = settings.sizes[0], settings.sizes[-1]
    lines = [
        f"# {headline()}",
        f"# Collective test starting: {settings.operation.name}, {settings.backend}",
        f"# nThread 1 nGpus 1 minBytes {smallest} maxBytes {largest} step: {settings.step} "
        f"warmup iters: {settings.warmups_of(next(settings.cases))} iters: {settings.calls_of(next(settings.cases))} "
        f"agg iters: 1 validation: {settings.checks} graph: 0",
        "#",
    ]
    if settings.busy:
        lines += [f"# busy processes beside it: {settings.busy}, niceness {settings.nice}", "#"]
    cores = len(os.sched_getaffinity(0))
    if not settings.launched and settings.ranks > cores:
        lines += [f"# {settings.ranks} ranks on {cores} cores take turns: waits last longer. {_limit(settings)}", "#"]
    lines.append("# Using devices")
    for found in devices:
        lines.append(
            f"#  Rank {found['rank']:>2} Group {found['group']:>2} Pid {found['pid']:>6} on {found['hostname']:>10} "
            f"device {found['device']:>2} [{found['device_hex']}] {found['device_info']}"
        )
    return "\n".join(lines)


def header() -> str:
    """Return the table's head of three lines."""
    return "\n".join(
        [
            "#",
            f"# {'':>10}  {'':>12}  {'':>8}  {'':>6}  {'':>6}  {'out-of-place':^31}  {'in-place':^31}",
            _head(("size", "count", "type", "redop", "root"), _NAMES),
            _head(("(B)", "(elements)", "", "", ""), _UNITS),
        ]
    )


def _head(first: Sequence[str], rest: Sequence[str]) -> str:
    what = f"# {first[0]:>10}  {first[1]:>12}  {first[2]:>8}  {first[3]:>6}  {first[4]:>6}"
    place = f"{rest[0]:>7}  {rest[1]:>6}  {rest[2]:>6}  {rest[3]:>6}"
    return f"{what}  {place}  {place}"


def row(line: Line) -> str:
    """Return one line of the table."""
    case = line.case
    cells = [f"{case.size:>12}", f"{case.count:>12}", f"{case.dtype:>8}", f"{case.redop:>6}", f"{case.root:>6}"]
    for place in PLACES:
        cells += _cells(line, line.ours[place])
    return "  ".join(cells)


def _cells(line: Line, timed: Timed) -> Iterator[str]:
    seconds = timed.samples.median
    algbw, busbw = line.bandwidths(seconds)
    yield _fitting(seconds * 1e6, 7)
    yield _fitting(algbw, 6)
    yield _fitting(busbw, 6)
    yield f"{'N/A':>6}" if timed.wrong is None else f"{timed.wrong:>6g}"


def _fitting(value: float, width: int) -> str:
    """Write ``value`` with as many digits behind the point, two at most, as ``width`` leaves room for."""
    for digits in (2, 1, 0):
        text = f"{value:{width}.{digits}f}"
        if len(text) <= width:
            return text
    return f"{value:{width}.{1 if width >= 7 else 0}e}"


def scatter(settings: Settings, lines: Sequence[Line]) -> str | None:
    """Return a comment on times that differ much from turn to turn, if there are such."""
    samples = [(line.case.size, line.ours[place].samples) for line in lines for place in PLACES]
    sizes = {size: None for size, each in samples if each.high > _SCATTERED * each.low}
    if not sizes:
        return None
    where = f"{', '.join(map(str, sizes))} bytes"
    busy = "the cores are busy with something else. Take more --rounds."
    return f"# times scatter (p90 over {_SCATTERED:g} times p10) at {where}: {busy} {_limit(settings)}"


def _limit(settings: Settings) -> str:
    return f"If a wait times out, raise -T ({settings.timeout:g} s)"


def comparison(lines: Sequence[Line], rounds: int) -> str:
    """Return, in comments, spread, floor and peers of every line: out of place above, in place below."""
    names = list(dict.fromkeys(name for line in lines for place in PLACES for name in line.peers[place]))
    head = ["size", "", "time", "p10 - p90", "floor", "of floor"]
    head += [text for name in names for text in (f"{name}\ntime", "times\nlonger")]
    rows = [_compared(line, place, names) for line in lines for place in PLACES]
    text = table(head, rows)
    explained = (
        f"medians of {rounds} turns of the slowest rank; floor: each byte read and written once, as fast as copies"
    )
    return "\n".join(f"# {text}".rstrip() for text in ("", explained, *text.splitlines()))


def _compared(line: Line, place: str, names: Sequence[str]) -> list[str]:
    ours, floor = line.ours[place].samples, line.floor.median
    first = line.case.size if place == PLACES[0] else ""
    cells = [str(first), place.replace("_", "-"), *ours.cells(), duration(floor), f"{floor / ours.median:.0%}"]
    for name in names:
        peer = line.peers[place].get(name)
        cells += ["-", "-"] if peer is None else [duration(peer.samples.median), times(_ratio(line, place, name))]
    return cells


def _ratio(line: Line, place: str, name: str) -> float:
    return line.peers[place][name].samples.median / line.ours[place].samples.median


def average_busbw(lines: Sequence[Line]) -> float:
    """Return the mean of the table's busbw columns in GB/s."""
    found = [line.bandwidths(line.ours[place].samples.median)[1] for line in lines for place in PLACES]
    return sum(found) / len(found)


def footer(settings: Settings, average: float, failed: int, okay: str) -> str:
    """Return what stands below: ``failed`` is the number of wrong results, ``okay`` the verdict on the bandwidth."""
    return "\n".join(
        [
            f"# {'Out of bounds values':<20} : {failed} {'FAILED' if failed else 'OK'}",
            f"# {'Avg bus bandwidth':<20} : {average:g} {okay}".rstrip(),
            "#",
            f"# Collective test concluded: {settings.operation.name}, {settings.backend}",
        ]
    )
