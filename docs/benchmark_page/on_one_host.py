"""Sections on what one host does: collectives between its processes, and kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmark_page.reports import Report, Reports, by_processor, grouped, heading, several
from benchmark_page.tables import MISSING, Part, beside, count, duration, on_each, size, times

EMPTY, TENSOR, GLOO = "pycomm, empty", "pycomm, tensor", "Gloo"
_MPI = ("MPICH", "Open MPI")


def collectives(reports: Reports) -> str:
    """Show every library on one processor; on several, our times and how many times faster than the others they are."""
    found = by_processor(reports)
    compared = (
        "The last columns compare the first with Gloo, and with the faster of the two MPI libraries."
        if len(found) == 1
        else "In brackets: how many times faster than Gloo, and than the faster of the two MPI libraries."
    )
    parts = [
        heading("All-reduce between processes of one host", reports, module="bench.collectives"),
        "Sum of float32, in place, one thread per rank, called from Python. `empty`: memory from `Communicator.empty`; "
        f"`tensor`: an ordinary tensor. {compared}\n",
    ]
    groups = {label: {group["ranks"]: group for group in report["results"]} for label, report in found.items()}
    show = _every_library if len(found) == 1 else _ratios
    for ranks in sorted({ranks for measured in groups.values() for ranks in measured}):
        here = {label: measured[ranks] for label, measured in groups.items() if ranks in measured}
        parts.append(beside(f"{ranks} ranks", here, show, len(found) > 1))
        floors = on_each(here, lambda group: duration(group["memcpy"]["seconds"]["median"]), labelled=len(found) > 1)
        copied = size(next(iter(here.values()))["memcpy"]["bytes"])
        parts.append(
            f"All {ranks} ranks copying {copied} at once take {floors}: a lower bound for that size with memcpy.\n"
        )
    return "\n".join(parts)


def all_reduce_seconds(measured: Report) -> dict[str, float]:
    """Return the median of each library, of one size."""
    return {who: figures["median"] for who, figures in measured["seconds_per_call"].items()}


def _every_library(group: Report) -> Part:
    libraries = list(group["all_reduce"][0]["seconds_per_call"])
    rows = {}
    for measured in group["all_reduce"]:
        seconds = all_reduce_seconds(measured)
        cells = [duration(seconds[who]) for who in libraries]
        rows[size(measured["bytes"])] = [*cells, _faster(seconds, EMPTY, [GLOO]), _faster(seconds, EMPTY, _MPI)]
    return Part([*libraries, "faster than Gloo", "than MPI"], rows)


def _ratios(group: Report) -> Part:
    rows = {}
    for measured in group["all_reduce"]:
        seconds = all_reduce_seconds(measured)
        rows[size(measured["bytes"])] = [
            f"{duration(seconds[ours])} ({_faster(seconds, ours, [GLOO])}, {_faster(seconds, ours, _MPI)})"
            for ours in (EMPTY, TENSOR)
        ]
    return Part(["`empty`", "`tensor`"], rows)


def _faster(seconds: Mapping[str, float], ours: str, others: Sequence[str]) -> str:
    """Return how many times faster we are than the fastest of ``others`` that took part."""
    theirs = [seconds[who] for who in others if who in seconds]
    return times(min(theirs) / seconds[ours]) if theirs else MISSING


def kernels(reports: Reports) -> str:
    """Show times, torch's beside them, and the floor; a table for each number of elements and of threads."""
    parts = [heading("Kernels on a CPU", reports, module="bench.kernels")]
    alike = grouped(reports, lambda report: (report["settings"]["elements"], report["settings"]["threads"]))
    for (elements, threads), group in alike.items():
        found = by_processor(group)
        labelled = several(reports)
        speeds = {label: report["bytes_per_second"] for label, report in found.items()}
        copies = on_each(speeds, lambda speed: f"{speed['copy'] / 1e9:.1f} GB/s", labelled)
        reads = on_each(speeds, lambda speed: f"{speed['read'] / 1e9:.1f} GB/s", labelled)
        parts.append(
            f"On {elements / 1e6:.1f} M elements, the gradients of ResNet-50; {count(threads, 'thread')}. The floor is "
            "the time to move the necessary bytes at the speed of a copy "
            f"({copies}{';' if labelled else ' here,'} read and written) or of reading alone ({reads}), "
            "measured in the same run. Some times are below the floor: a copy also reads the cache lines that it "
            "writes, and our kernels do not.\n"
        )
        show, corner = (_kernels_of_several, "kernel, and torch's way") if labelled else (_kernels_of_one, "kernel")
        parts.append(beside(corner, found, show, labelled))
    return "\n".join(parts)


def _kernels_of_one(report: Report) -> Part:
    rows = {
        row["kernel"]: [
            *(duration(row[who]["median"]) for who in ("pycomm", "torch")),
            f"`{row['peer']}`",
            times(row["times_faster"]),
            _over_floor(row),
        ]
        for row in report["rows"]
    }
    return Part(["pycomm", "torch", "by", "faster", "time / floor"], rows)


def _kernels_of_several(report: Report) -> Part:
    rows = {
        f"{row['kernel']}: `{row['peer']}`": [
            *(duration(row["pycomm"]["median"]), times(row["times_faster"])),
            _over_floor(row),
        ]
        for row in report["rows"]
    }
    return Part(["pycomm", "faster", "time / floor"], rows)


def _over_floor(row: Report) -> str:
    return f"{row['time_over_floor']:.2f} of a {row['floor']['kind']}"
