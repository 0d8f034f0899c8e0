"""Sections on what one host does: collectives between its processes, and kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmark_page.reports import Report, Reports, by_processor, grouped, heading, several
from benchmark_page.tables import MISSING, Part, beside, count, duration, merged, on_each, size, times

EMPTY, TENSOR = "pycomm, empty", "pycomm, tensor"
_OWN = "pycomm"
_MPI = ("MPICH", "Open MPI")


@dataclass(frozen=True)
class Rival:
    """The fastest of the other libraries, at one size.

    Attributes:
        memory: what it sums: "tensor" or "array".
        seconds: of one call, the median.
    """

    name: str
    memory: str
    seconds: float


def collectives(reports: Reports) -> str:
    """Show every library on one processor; on several, our times, and the strongest rival of each size."""
    found = by_processor(reports)
    groups = {label: {group["ranks"]: group for group in report["results"]} for label, report in found.items()}
    parts = [
        heading("All-reduce between processes of one host", reports, ("peers", "rounds"), "bench.collectives"),
        "Sum of float32, in place, one thread per rank, called from Python. `empty`: memory from `Communicator.empty`; "
        "`tensor`: an ordinary tensor. Rivals sum ordinary tensors; MPI sums NumPy arrays (`array`). The strongest "
        "rival of a size is the fastest there. In brackets: how many times as fast as it.\n",
        *_not_measured(groups),
        f"{_faster_rivals(groups)}\n",
    ]
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


def _not_measured(groups: Mapping[str, Mapping[int, Report]]) -> Iterator[str]:
    """Say which rivals are missing on each processor: those of other reports, and those that could not take part."""
    everywhere = merged(rivals(group) for by_ranks in groups.values() for group in by_ranks.values())
    for label, by_ranks in groups.items():
        reasons: dict[str, str] = {}
        for group in by_ranks.values():
            reasons |= {who: "" for who in everywhere if who not in rivals(group)} | group.get("not_measured", {})
        if reasons:
            where = f" on {label}" if len(groups) > 1 else ""
            named = (f"{who} ({reason})" if reason else who for who, reason in reasons.items())
            yield f"Not measured{where}: {', '.join(named)}.\n"


def _faster_rivals(groups: Mapping[str, Mapping[int, Report]]) -> str:
    """Say at which sizes a rival is faster than one of ours."""
    found = []
    for label, by_ranks in groups.items():
        where = f", {label}" if len(groups) > 1 else ""
        for ranks, group in by_ranks.items():
            for measured in group["all_reduce"]:
                rival, seconds = strongest_rival(group, measured), all_reduce_seconds(measured)
                lost = [ours for ours in (EMPTY, TENSOR) if rival is not None and rival.seconds < seconds[ours]]
                if rival is not None and lost:
                    memory = " and ".join(f"`{ours.removeprefix(_OWN + ', ')}`" for ours in lost)
                    found.append(f"{rival.name} than {memory} ({size(measured['bytes'])}, {ranks} ranks{where})")
    return f"**Faster: {'; '.join(found)}.**" if found else "**No rival is faster at any of these sizes.**"


def all_reduce_seconds(measured: Report) -> dict[str, float]:
    """Return the median of each library, of one size."""
    return {who: figures["median"] for who, figures in measured["seconds_per_call"].items()}


def rivals(group: Report) -> list[str]:
    """Return the names of the others that were measured with a number of ranks."""
    return [who for who in group["all_reduce"][0]["seconds_per_call"] if not who.startswith(_OWN)]


def strongest_rival(group: Report, measured: Report) -> Rival | None:
    """Return the fastest of the others at one size, if there is any."""
    seconds = all_reduce_seconds(measured)
    names = [who for who in rivals(group) if who in seconds]
    if not names:
        return None
    name = min(names, key=lambda who: seconds[who])
    memory = group.get("memory", {}).get(name, "array" if name in _MPI else "tensor")  # old reports do not say
    return Rival(name, memory, seconds[name])


def _every_library(group: Report) -> Part:
    libraries = list(group["all_reduce"][0]["seconds_per_call"])
    rows = {}
    for measured in group["all_reduce"]:
        seconds = all_reduce_seconds(measured)
        rival = strongest_rival(group, measured)
        cells = [duration(seconds[who]) if who in seconds else MISSING for who in libraries]
        ratios = [times(rival.seconds / seconds[ours]) if rival else MISSING for ours in (EMPTY, TENSOR)]
        rows[size(measured["bytes"])] = [*cells, f"{rival.name}, `{rival.memory}`" if rival else MISSING, *ratios]
    return Part([*libraries, "strongest rival", "`empty` against it", "`tensor` against it"], rows)


def _ratios(group: Report) -> Part:
    rows = {}
    for measured in group["all_reduce"]:
        seconds = all_reduce_seconds(measured)
        rival = strongest_rival(group, measured)
        cells = [duration(seconds[ours]) for ours in (EMPTY, TENSOR)]
        if rival is not None:
            cells = [
                f"{cell} ({times(rival.seconds / seconds[ours])})"
                for cell, ours in zip(cells, (EMPTY, TENSOR), strict=True)
            ]
        shown = f"{duration(rival.seconds)}, {rival.name}, `{rival.memory}`" if rival else MISSING
        rows[size(measured["bytes"])] = [*cells, shown]
    return Part(["`empty`", "`tensor`", "strongest rival"], rows)


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
