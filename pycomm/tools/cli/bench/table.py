"""nccl-tests' table, and its report as JSON. Further figures are comments, which its parsers skip, or further keys."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from pycomm.collectives.transport.nccl import build_info
from pycomm.descriptions import cpu_model
from pycomm.tools.cli.bench.operations import Case
from pycomm.tools.cli.bench.settings import BenchSettings, calls_of
from pycomm.tools.cli.table import table
from pycomm.tools.cli.timing import Samples, duration, times
from pycomm.untrusted import naming

ROUNDS = 5
"""Turns of each library, interleaved."""

PLACES = ("out_of_place", "in_place")
_VARIABLES = ("PYCOMM_", "NCCL_", "GLOO_", "OMP_", "MPI4PY_", "TORCH_", "CUDA_VISIBLE_DEVICES", "WORLD_SIZE")


@dataclass(frozen=True)
class TableLine:
    """A line of the table.

    Attributes:
        wrong, samples: name of a library that supports the case -> place -> wrong elements on all ranks together, and
            seconds per call of the slowest rank in each round. The first library is the one that is measured.
        floor: seconds to read and write every byte once, at the speed of copies.
    """

    case: Case
    wrong: dict[str, dict[str, int]]
    samples: dict[str, dict[str, Samples]]
    floor: float

    @property
    def ours(self) -> str:
        return next(iter(self.samples))

    def figures(self, name: str, place: str) -> dict[str, Any]:
        """Return the time in microseconds, the bandwidths in GB/s, and the wrong elements, under nccl-tests' keys."""
        seconds = self.samples[name][place].median
        algbw = self.case.size / seconds / 1e9
        busbw = algbw * self.case.spec.bus_factor(self.case.ranks)
        return {"time": seconds * 1e6, "alg_bw": algbw, "bus_bw": busbw, "nwrong": float(self.wrong[name][place])}


def preamble(settings: BenchSettings, devices: Sequence[Mapping[str, Any]]) -> str:
    """Return the text above the table: versions, settings and devices; and the table's head."""
    warmups, calls = calls_of(next(settings.cases).size)
    cores = len(os.sched_getaffinity(0))
    busy = [f"{settings.ranks} ranks on {cores} cores take turns: waits last longer."]
    lines = [
        headline(cpu_model()),
        f"Collective test starting: {settings.operation.name}, {settings.backend}",
        f"nThread 1 nGpus 1 minBytes {settings.sizes[0]} maxBytes {settings.sizes[-1]} step: {settings.factor}(factor) "
        f"warmup iters: {warmups} iters: {calls} agg iters: 1 validation: 1 graph: 0",
        *(busy if settings.ranks > cores and not settings.launched else []),
        "Using devices",
    ]
    for found in devices:
        lines.append(
            f" Rank {found['rank']:>2} Group {found['group']:>2} Pid {found['pid']:>6} on {found['hostname']:>10} "
            f"device {found['device']:>2} [{found['device_hex']}] {found['device_info']}"
        )
    what = "{:>10}  {:>12}  {:>8}  {:>6}  {:>6}"
    each = what + 2 * "  {:>7}  {:>6}  {:>6}  {:>6}"
    lines += ["", what.format(*5 * [""]) + f"  {'out-of-place':^31}  {'in-place':^31}"]
    lines += [each.format("size", "count", "type", "redop", "root", *2 * ("time", "algbw", "busbw", "#wrong"))]
    lines += [each.format("(B)", "(elements)", "", "", "", *2 * ("(us)", "(GB/s)", "(GB/s)", ""))]
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


def row(line: TableLine) -> str:
    """Return one line of the table."""
    case = line.case
    cells = [f"{case.size:>12}", f"{case.count:>12}", f"{case.dtype:>8}", f"{case.redop:>6}", f"{case.root:>6}"]
    for place in PLACES:
        found = line.figures(line.ours, place)
        cells += [_fitting(found["time"], 7), _fitting(found["alg_bw"], 6), _fitting(found["bus_bw"], 6)]
        cells.append(f"{found['nwrong']:>6g}")
    return "  ".join(cells)


def _fitting(value: float, width: int) -> str:
    """Write ``value`` in ``width`` characters, with two decimals if they fit."""
    texts = [f"{value:{width}.{digits}f}" for digits in (2, 1, 0)]
    return next((text for text in texts if len(text) <= width), f"{value:{width}.{1 if width >= 7 else 0}e}")


def below(settings: BenchSettings, lines: Sequence[TableLine], verdict: Mapping[str, Any]) -> str:
    """Return the text below the table, all in comments: floor and peers of every line, notes, and ``verdict``."""
    names = list(dict.fromkeys(name for line in lines for name in line.samples if name != line.ours))
    head = ["size", "", "time", "p10 - p90", "floor", "of floor"]
    head += [text for name in names for text in (f"{name}\ntime", "times\nlonger")]
    failed = verdict["out_of_bounds"]["count"]
    text = [
        "",
        f"medians of {ROUNDS} turns of the slowest rank; floor: each byte read and written once, as fast as copies",
        *table(head, [_compared(line, place, names) for line in lines for place in PLACES]).splitlines(),
        *verdict["missing"],
        *_wrong_peers(lines),
        "",
        f"{'Out of bounds values':<20} : {failed} {'FAILED' if failed else 'OK'}",
        f"{'Avg bus bandwidth':<20} : {verdict['average_bus_bandwidth']['bandwidth']:g}",
        "",
        f"Collective test concluded: {settings.operation.name}, {settings.backend}",
    ]
    return "\n".join(f"# {line}".rstrip() for line in text)


def _compared(line: TableLine, place: str, names: Sequence[str]) -> list[str]:
    ours = line.samples[line.ours][place]
    first = str(line.case.size) if place == PLACES[0] else ""
    cells = [first, place.replace("_", "-"), *ours.cells(), duration(line.floor), f"{line.floor / ours.median:.0%}"]
    for name in names:
        median = line.samples[name][place].median if name in line.samples else 0.0
        cells += [duration(median), times(median / ours.median)] if median else ["-", "-"]
    return cells


def _wrong_peers(lines: Sequence[TableLine]) -> Iterator[str]:
    for line in lines:
        for name, wrong in line.wrong.items():
            for place in PLACES if name != line.ours else ():
                if wrong[place]:
                    yield f"{name}: {wrong[place]} wrong elements of {line.case.size} bytes, {place.replace('_', '-')}"


def verdict_of(lines: Sequence[TableLine], missing: Sequence[str]) -> dict[str, Any]:
    """Return the keys that say whether the bench passed; ``missing`` are notes on what is not supported."""
    ours = [line.figures(line.ours, place) for line in lines for place in PLACES]
    failed = sum(each["nwrong"] > 0 for each in ours)
    average = sum(each["bus_bw"] for each in ours) / len(ours)
    return {
        "out_of_bounds": {"count": failed, "okay": "false" if failed else "true"},  # words, as nccl-tests writes
        "average_bus_bandwidth": {"bandwidth": average, "okay": "unchecked"},
        "missing": list(missing),
    }


def now() -> str:
    """Return the time as nccl-tests writes it."""
    return time.strftime("%Y-%m-%d %H:%M:%S")


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write the report, or leave no file."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with naming(path):
            partial.write_text(json.dumps(content, indent=1) + "\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def report(
    settings: BenchSettings,
    lines: Sequence[TableLine],
    devices: Sequence[Mapping[str, Any]],
    verdict: Mapping[str, Any],
    started: str,
) -> dict[str, Any]:
    """Return the report; ``verdict`` is the result of :func:`verdict_of`."""
    warmups, calls = calls_of(next(settings.cases).size)
    counts = {"nthreads": 1, "ngpus": 1, "minimum_bytes": settings.sizes[0], "maximum_bytes": settings.sizes[-1]}
    counts |= {"step_factor": settings.factor, "warmup_iters": warmups, "iterations": calls, "rounds": ROUNDS}
    counts |= {"aggregated_iterations": 1, "validation": 1, "graph": 0, "per_iter_skip": 0, "ranks": settings.ranks}
    words = dict.fromkeys(("blocking_collectives", "per_iter_timing", "parallel_init"), "false")
    libraries = {"operation": settings.operation.name, "backend": settings.backend, "peers": list(settings.peers)}
    version: Any = torch.cuda.nccl.version  # its stub has no types
    nccl = version() if torch.distributed.is_nccl_available() else None
    return {
        "version": 3,
        "start_time": started,
        "args": sys.argv,
        # Selected variables only, unlike nccl-tests: environments hold secrets.
        "env": [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)],
        "nccl_version": nccl and nccl[0] * 10000 + nccl[1] * 100 + nccl[2],
        "config": {**counts, **words, **libraries, "devices": list(devices)},
        "results": [_result(line) for line in lines],
        **verdict,
        "environment": environment(),
        "end_time": now(),
        "errors": [],
    }


def _result(line: TableLine) -> dict[str, Any]:
    case = line.case
    what = {"size": case.size, "count": case.count, "type": case.dtype, "redop": case.redop, "root": f"{case.root:>6}"}
    places: dict[str, Any] = {}
    for place in PLACES:
        ours = line.samples[line.ours][place].median
        floor = {"floor": line.floor * 1e6, "fraction_of_floor": line.floor / ours}
        peers = [name for name in line.samples if name != line.ours]
        longer = {name: {"times_longer": line.samples[name][place].median / ours} for name in peers}
        theirs = {name: {**_measured(line, name, place), **longer[name]} for name in peers}
        places[place] = {**_measured(line, line.ours, place), **floor, "peers": theirs}
    return {**what, **places, "actual_iterations": calls_of(case.size)[1], "experiment_name": ""}


def _measured(line: TableLine, name: str, place: str) -> dict[str, Any]:
    """Return the figures, with percentiles and samples in microseconds, like ``time``."""
    each = line.samples[name][place]
    spread = {"p10": each.low * 1e6, "p90": each.high * 1e6, "samples": [seconds * 1e6 for seconds in each.seconds]}
    return {**line.figures(name, place), **spread}
