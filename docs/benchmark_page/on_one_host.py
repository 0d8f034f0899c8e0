"""Sections on what one host does: collectives between its processes, and kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmark_page.reports import Report, Reports, by_processor, fullest, grouped, heading
from benchmark_page.tables import KIB, MIB, MISSING, Row, count, duration, size, table, times

EMPTY, TENSOR = "pycomm, empty", "pycomm, tensor"
_OWN = "pycomm"
_MPI = ("MPICH", "Open MPI")
_SIZES = (KIB, 64 * KIB, MIB, 100 * MIB)
_KERNELS = (
    "pack fp32 -> fp32",
    "reduce, 4 arrays",
    "topk, 0.1 %",
    "DGC step 0.1 %, warm",
    "int8 encode",
    "int8 decode",
    "e4m3 encode",
    "LARS.step",
    "LAMB.step",
    "Adam.step, unscale",
)
"""What the page shows of sizes and of kernels."""


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
    """Show our times and the strongest rival of some sizes, on the processor with most rivals; ratios on all."""
    shown = fullest(reports, lambda report: sum(len(rivals(group)) for group in report["results"]))
    groups: list[Report] = reports[shown]["results"]
    options = ("peers", "rounds")
    missing = {who: reason for group in groups for who, reason in group.get("not_measured", {}).items()}
    copies = ", ".join(
        f"{duration(group['memcpy']['seconds']['median'])} ({count(group['ranks'], 'rank')})" for group in groups
    )
    rows: list[Row] = [["", "`empty`", "`tensor`", "strongest rival"]]
    parts = [
        heading(
            "All-reduce between processes of one host",
            {shown: reports[shown]},
            options,
            "bench.collectives",
            (*_MPI, "DeepSpeed"),
        ),
        "Sum of float32 in place, called from Python, one thread per rank. `empty` is memory from "
        "`Communicator.empty`, `tensor` an ordinary tensor. Rivals sum ordinary tensors, MPI sums NumPy arrays. In "
        "brackets: how many times as fast as the strongest rival. Large arrays gain most from `empty`, which saves "
        "copies. With more ranks than cores, times depend on the scheduler.\n",
        *([f"Not measured: {', '.join(f'{who} ({reason})' for who, reason in missing.items())}.\n"] if missing else []),
        table([*rows, *(row for group in groups for row in _against_rivals(group))]),
        f"Copying {size(groups[0]['memcpy']['bytes'])} on all ranks at once takes {copies}.\n",
        f"{_faster_rivals(reports)} Over all sizes, as fast as the strongest rival: {'; '.join(_ranges(reports))}.\n",
    ]
    return "\n".join(parts)


def _against_rivals(group: Report) -> Iterator[Row]:
    for measured in group["all_reduce"]:
        if measured["bytes"] in _SIZES:
            seconds = all_reduce_seconds(measured)
            rival = strongest_rival(group, measured)
            cells = [
                duration(seconds[ours]) + ("" if rival is None else f" ({times(rival.seconds / seconds[ours])})")
                for ours in (EMPTY, TENSOR)
            ]
            shown = f"{duration(rival.seconds)}, {rival.name}" if rival else MISSING
            yield [f"{group['ranks']} ranks, {size(measured['bytes'])}", *cells, shown]


def _ranges(reports: Reports) -> Iterator[str]:
    """Say of each processor how far the ratios go, and which rivals of the others it lacks."""
    everywhere = {who: None for report in reports.values() for group in report["results"] for who in rivals(group)}
    for (label, report), name in zip(by_processor(reports).items(), reports, strict=True):
        ratios = [
            rival.seconds / seconds
            for group in report["results"]
            for measured in group["all_reduce"]
            if (rival := strongest_rival(group, measured)) is not None
            for who, seconds in all_reduce_seconds(measured).items()
            if who in (EMPTY, TENSOR)
        ]
        lacks = [who for who in everywhere if any(who not in rivals(group) for group in report["results"])]
        without = f", without {' and '.join(lacks)}" if lacks else ""
        found = f"{times(min(ratios))} to {times(max(ratios))}" if ratios else "not measured"
        yield f"{found} on {label} (`{name}`{without})"


def _faster_rivals(reports: Reports) -> str:
    """Say at which sizes a rival is faster than one of ours."""
    found = []
    for label, report in by_processor(reports).items():
        where = f", {label}" if len(reports) > 1 else ""
        for group in report["results"]:
            for measured in group["all_reduce"]:
                rival, seconds = strongest_rival(group, measured), all_reduce_seconds(measured)
                lost = [ours for ours in (EMPTY, TENSOR) if rival is not None and rival.seconds < seconds[ours]]
                if rival is not None and lost:
                    memory = " and ".join(f"`{ours.removeprefix(_OWN + ', ')}`" for ours in lost)
                    what = f"{size(measured['bytes'])}, {group['ranks']} ranks{where}"
                    found.append(f"{rival.name} than {memory} ({what})")
    return f"**Faster: {'; '.join(found)}.**" if found else "**No rival is faster at any of the sizes measured.**"


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


def kernels(reports: Reports) -> str:
    """Show times of some kernels, torch's beside them, and the floor; a table for each number of elements, threads."""
    alike = grouped(reports, lambda report: (report["settings"]["elements"], report["settings"]["threads"]))
    shown = [fullest(group, lambda report: len(report["rows"])) for group in alike.values()]
    parts = [heading("Kernels on a CPU", {name: reports[name] for name in shown}, module="bench.kernels")]
    for ((elements, threads), group), name in zip(alike.items(), shown, strict=True):
        speed = reports[name]["bytes_per_second"]
        parts.append(
            f"{elements / 1e6:.1f} M elements, the gradients of ResNet-50; {count(threads, 'thread')}. The floor is "
            f"the time to move the necessary bytes at the speed of a copy ({speed['copy'] / 1e9:.1f} GB/s, read and "
            f"written) or of reading alone ({speed['read'] / 1e9:.1f} GB/s), measured in the same run. A time may be "
            "below the floor: a copy also reads the cache lines that it writes, and these kernels do not. Plain "
            "optimizer steps are bound by memory: pycomm gains where it saves a pass over the gradients.\n"
        )
        parts.append(table([["kernel", "pycomm", "torch", "faster", "time / floor"], *_kernel_rows(reports[name])]))
        parts.append(f"{_slower_kernels(reports[name])}{''.join(_other_kernels(group, name))}\n")
    return "\n".join(parts)


def _kernel_rows(report: Report) -> Iterator[Row]:
    for row in report["rows"]:
        if row["kernel"] in _KERNELS:
            cells = (duration(row[who]["median"]) for who in ("pycomm", "torch"))
            floor = f"{row['time_over_floor']:.2f} of a {row['floor']['kind']}"
            yield [row["kernel"], *cells, times(row["times_faster"]), floor]


def _slower_kernels(report: Report) -> str:
    """Say which of all kernels are slower than torch's."""
    rows = report["rows"]
    slower = [f"{row['kernel']} ({times(row['times_faster'])})" for row in rows if row["times_faster"] < 1]
    text = f"slower than torch are {'; '.join(slower)}" if slower else "none is slower than torch"
    return f"Of all {len(rows)} kernels in the report, {text}."


def _other_kernels(group: Reports, shown: str) -> Iterator[str]:
    for (label, report), name in zip(by_processor(group).items(), group, strict=True):
        if name != shown:
            ratios = [row["times_faster"] for row in report["rows"]]
            where = f"{label} (`{name}`, {count(len(ratios), 'kernel')})"
            yield f" On {where}: {times(min(ratios))} to {times(max(ratios))} as fast as torch's."
