"""The README's table: five figures, each over all processors that have a report of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from benchmark_page.on_one_host import EMPTY, all_reduce_seconds, rivals, strongest_rival
from benchmark_page.reports import Report, Reports, by_bench, label_of
from benchmark_page.tables import KIB, MIB, Row, duration, link, size, span, table, times
from benchmark_page.training import step_times

_ELEMENTS = 25_557_032
"""Gradients of ResNet-50."""


class Pair(NamedTuple):
    """Our seconds, the peer's, and who that is; of how many peers it is the fastest."""

    ours: float
    theirs: float
    whose: str
    peers: int = 1


@dataclass(frozen=True)
class _Figure:
    """One row: what is compared, and where a report has its figures; ``None`` if it has not.

    Attributes:
        memory: where ours are taken, if that matters.
    """

    what: str
    bench: str
    pair: Callable[[Report], Pair | None]
    memory: str = ""


@dataclass(frozen=True)
class Compared:
    """A row with its figures.

    Attributes:
        pairs: one for each processor.
    """

    what: str
    bench: str
    memory: str
    pairs: Sequence[Pair]

    @property
    def whose(self) -> str:
        """Return the peer's name; where processors differ, all names."""
        return " or ".join(dict.fromkeys(pair.whose for pair in self.pairs))

    def speedups(self) -> list[float]:
        """Return how many times as fast we are, on each processor."""
        return [pair.theirs / pair.ours for pair in self.pairs]


def compared(reports: Reports) -> Iterator[Compared]:
    """Yield the rows.

    Raises:
        ValueError: no report has a figure.
    """
    benches = by_bench(reports)
    for figure in _figures():
        pairs = [pair for report in benches.get(figure.bench, {}).values() if (pair := figure.pair(report)) is not None]
        if not pairs:
            raise ValueError(f"no report of bench {figure.bench!r} has {figure.what}")
        # The fastest of a few is not the fastest of all: reports from before there were more of them do not count.
        most = max(pair.peers for pair in pairs)
        yield Compared(figure.what, figure.bench, figure.memory, [pair for pair in pairs if pair.peers == most])


def headline(reports: Reports) -> str:
    """Return the table; where processors differ, a cell goes from the least to the largest.

    Raises:
        ValueError: no report has a figure.
    """
    rows: list[Row] = [
        [f"Benchmark ({_machines(by_bench(reports))})", "pycomm", "compared with", "speedup", "`python -m`"]
    ]
    for row in compared(reports):
        rows.append(
            [
                row.what,
                span((pair.ours for pair in row.pairs), duration) + row.memory,
                f"{span((pair.theirs for pair in row.pairs), duration)}, {row.whose}",
                span(row.speedups(), times),
                f"`bench.{row.bench}`",
            ]
        )
    return table(rows)


def sentence(reports: Reports) -> str:
    """Return the largest speedup and the smallest one, in words.

    Raises:
        ValueError: no report has a figure.
    """
    rows = sorted(compared(reports), key=lambda row: min(row.speedups()))
    said = [f"{span(row.speedups(), times)} as fast as {row.whose} ({row.what})" for row in (rows[-1], rows[0])]
    return f"**Best of these five: {said[0]}. Worst: {said[1]}.**\n"


def _figures() -> Iterator[_Figure]:
    """Yield the five; the last is one where nothing is gained."""
    for ranks, num_bytes in ((2, 100 * MIB), (4, 64 * KIB)):
        what = f"all-reduce of {size(num_bytes)}, {ranks} ranks of a host"
        yield _Figure(what, "collectives", partial(_all_reduce, ranks=ranks, num_bytes=num_bytes), " (empty)")
    what = f"the largest 0.1 % of {_ELEMENTS / 1e6:.1f} M elements, exact"
    yield _Figure(what, "kernels", _topk)
    for method, gbit, words in ((*("dgc", 0.1), "DGC(0.001)"), (*("dense", 1.0), "no compression")):
        what = f"training step, 4 hosts, {link(gbit)}, {words}"
        yield _Figure(what, "slow_network", partial(_step, method=method, gbit=gbit))


def _all_reduce(report: Report, ranks: int, num_bytes: int) -> Pair | None:
    for group in report["results"]:
        for measured in group["all_reduce"]:
            rival = strongest_rival(group, measured)
            if (group["ranks"], measured["bytes"]) == (ranks, num_bytes) and rival is not None:
                ours, whose = all_reduce_seconds(measured)[EMPTY], f"{rival.name} ({rival.memory})"
                return Pair(ours, rival.seconds, whose, len(rivals(group)))
    return None


def _topk(report: Report) -> Pair | None:
    if (report["settings"]["elements"], report["settings"]["threads"]) != (_ELEMENTS, 1):
        return None
    found = [row for row in report["rows"] if row["kernel"] == "topk, 0.1 %"]
    return Pair(found[0]["pycomm"]["median"], found[0]["torch"]["median"], "torch") if found else None


def _step(report: Report, method: str, gbit: float) -> Pair | None:
    steps = step_times(report)
    ours, theirs = (steps.get(("4 hosts", gbit, each)) for each in (method, "ddp"))
    return None if ours is None or theirs is None else Pair(ours, theirs, "DDP")


def _machines(benches: Mapping[str, Reports]) -> str:
    """Say on how many cores, and on how many kinds of processor if there are several."""
    reports = {name: report for figure in _figures() for name, report in benches.get(figure.bench, {}).items()}
    numbers = {report["environment"]["cores"] for report in reports.values()}
    cores = f"{span(numbers, str)} cores"
    kinds = len({label_of(report) for report in reports.values()})
    return cores if kinds == 1 else f"{cores}, {kinds} machines"
