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

import pycomm
from pycomm.descriptions import cpu_model
from pycomm.tools.cli.bench.operations import Case
from pycomm.tools.cli.bench.settings import BenchSettings
from pycomm.tools.cli.bench.timing import Samples, duration, times
from pycomm.tools.cli.table import table
from pycomm.untrusted import naming

PLACES = ("out_of_place", "in_place")
_SCATTERED = 2.0
"""A median is reported as unreliable if the 90th percentile is more than this many times the 10th."""


@dataclass(frozen=True)
class Timed:
    """Timing of one library for one case, out of place or in place.

    Attributes:
        wrong: wrong elements on all ranks together; ``None`` if not verified.
        samples: seconds per call of the slowest rank, for each round.
    """

    wrong: int | None
    samples: Samples


@dataclass(frozen=True)
class TableLine:
    """A line of the table.

    Attributes:
        calls: of a turn.
        ours: place -> timing of the measured library. peers: place -> name -> timing of a peer that supports the case.
        floor: time to read and write every byte once, at the speed of copies.
    """

    case: Case
    calls: int
    ours: dict[str, Timed]
    peers: dict[str, dict[str, Timed]]
    floor: Samples

    def bandwidths(self, seconds: float) -> tuple[float, float]:
        """Return algbw and busbw in GB/s."""
        algbw = self.case.size / seconds / 1e9
        return algbw, algbw * self.case.spec.bus_factor(self.case.ranks)


def preamble(settings: BenchSettings, devices: Sequence[Mapping[str, Any]]) -> str:
    """Return the text above the table: versions, settings and devices."""
    smallest, largest = settings.sizes[0], settings.sizes[-1]
    lines = [
        f"# {headline(cpu_model())}",
        f"# Collective test starting: {settings.operation.name}, {settings.backend}",
        f"# nThread 1 nGpus 1 minBytes {smallest} maxBytes {largest} step: {settings.step} "
        f"warmup iters: {settings.warmups_of(next(settings.cases))} iters: {settings.calls_of(next(settings.cases))} "
        f"agg iters: 1 validation: {settings.checks} graph: 0",
        "#",
    ]
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


def environment() -> dict[str, Any]:
    """Return versions and the machine."""
    return {
        "pycomm": pycomm.build_info(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
    }


def headline(processor: str) -> str:
    """Return versions and the machine in one line."""
    found = environment()
    build, cores = found["pycomm"], found["cores"]
    ours = f"pycomm {build['version']} ({build['simd']})"
    return f"{ours}, torch {found['torch']}, Python {found['python']}, {processor}, {cores} cores"


def header() -> str:
    """Return the table's head of three lines."""
    what = "# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}"
    each = what + 2 * "  {:>7}  {:>6}  {:>6}  {:>6}"
    return "\n".join(
        [
            "#",
            what.format(*5 * [""]) + f"  {'out-of-place':^31}  {'in-place':^31}",
            each.format("size", "count", "type", "redop", "root", *2 * ("time", "algbw", "busbw", "#wrong")),
            each.format("(B)", "(elements)", "", "", "", *2 * ("(us)", "(GB/s)", "(GB/s)", "")),
        ]
    )


def row(line: TableLine) -> str:
    """Return one line of the table."""
    case = line.case
    cells = [f"{case.size:>12}", f"{case.count:>12}", f"{case.dtype:>8}", f"{case.redop:>6}", f"{case.root:>6}"]
    for timed in map(line.ours.__getitem__, PLACES):
        algbw, busbw = line.bandwidths(timed.samples.median)
        cells += [_fitting(timed.samples.median * 1e6, 7), _fitting(algbw, 6), _fitting(busbw, 6)]
        cells.append(f"{'N/A':>6}" if timed.wrong is None else f"{timed.wrong:>6g}")
    return "  ".join(cells)


def _fitting(value: float, width: int) -> str:
    """Write ``value`` in ``width`` characters, with two decimals if they fit."""
    for digits in (2, 1, 0):
        text = f"{value:{width}.{digits}f}"
        if len(text) <= width:
            return text
    return f"{value:{width}.{1 if width >= 7 else 0}e}"


def below(settings: BenchSettings, lines: Sequence[TableLine], verdict: Mapping[str, Any]) -> str:
    """Return the text below the table, all in comments: comparison, notes, and ``verdict``."""
    notes = [*verdict["missing"], *_wrong_peers(lines), *scatter(settings, lines)]
    failed, bandwidth = verdict["out_of_bounds"]["count"], verdict["average_bus_bandwidth"]
    okay = {"unchecked": "", "true": "OK", "false": "FAILED"}[bandwidth["okay"]]
    text = [
        *_comparison(lines, settings.rounds),
        *notes,
        "",
        f"{'Out of bounds values':<20} : {failed} {'FAILED' if failed else 'OK'}",
        f"{'Avg bus bandwidth':<20} : {bandwidth['bandwidth']:g} {okay}",
        "",
        f"Collective test concluded: {settings.operation.name}, {settings.backend}",
    ]
    return "\n".join(f"# {line}".rstrip() for line in text)


def average_busbw(lines: Sequence[TableLine]) -> float:
    """Return the mean of the table's busbw columns in GB/s."""
    found = [line.bandwidths(line.ours[place].samples.median)[1] for line in lines for place in PLACES]
    return sum(found) / len(found)


def _comparison(lines: Sequence[TableLine], rounds: int) -> list[str]:
    """Return spread, floor and peers of every line of the table, out of place and then in place."""
    names = list(dict.fromkeys(name for line in lines for place in PLACES for name in line.peers[place]))
    head = ["size", "", "time", "p10 - p90", "floor", "of floor"]
    head += [text for name in names for text in (f"{name}\ntime", "times\nlonger")]
    explained = (
        f"medians of {rounds} turns of the slowest rank; floor: each byte read and written once, as fast as copies"
    )
    rows = [_compared(line, place, names) for line in lines for place in PLACES]
    return ["", explained, *table(head, rows).splitlines()]


def _compared(line: TableLine, place: str, names: Sequence[str]) -> list[str]:
    ours, floor = line.ours[place].samples, line.floor.median
    first = line.case.size if place == PLACES[0] else ""
    cells = [str(first), place.replace("_", "-"), *ours.cells(), duration(floor), f"{floor / ours.median:.0%}"]
    for name in names:
        peer = line.peers[place].get(name)
        median = 0.0 if peer is None else peer.samples.median
        cells += ["-", "-"] if peer is None else [duration(median), times(median / ours.median)]
    return cells


def _wrong_peers(lines: Sequence[TableLine]) -> Iterator[str]:
    for line in lines:
        for place in PLACES:
            for name, peer in line.peers[place].items():
                if peer.wrong:
                    yield f"{name}: {peer.wrong} wrong elements of {line.case.size} bytes, {place.replace('_', '-')}"


def scatter(settings: BenchSettings, lines: Sequence[TableLine]) -> Iterator[str]:
    """Yield a note if times differ much from turn to turn."""
    samples = [(line.case.size, line.ours[place].samples) for line in lines for place in PLACES]
    sizes = dict.fromkeys(size for size, each in samples if each.high > _SCATTERED * each.low)
    if sizes:
        where = f"{', '.join(map(str, sizes))} bytes"
        busy = "the cores are busy with something else. Take more --rounds."
        yield f"times scatter (p90 over {_SCATTERED:g} times p10) at {where}: {busy} {_limit(settings)}"


def _limit(settings: BenchSettings) -> str:
    return f"If a wait times out, raise -T ({settings.timeout:g} s)"


_VERSION = 3  # of nccl-tests' format
_VARIABLES = ("PYCOMM_", "NCCL_", "GLOO_", "OMP_", "MPI4PY_", "TORCH_", "CUDA_VISIBLE_DEVICES", "WORLD_SIZE")


def now() -> str:
    """Return the time as nccl-tests writes it."""
    return time.strftime("%Y-%m-%d %H:%M:%S")


def report(
    settings: BenchSettings,
    lines: Sequence[TableLine],
    devices: Sequence[Mapping[str, Any]],
    verdict: Mapping[str, Any],
    started: str,
) -> dict[str, Any]:
    """Return the report; ``verdict`` is the result of :func:`verdict_of`."""
    return {
        "version": _VERSION,
        "start_time": started,
        "args": sys.argv,
        # Selected variables only, unlike nccl-tests: environments hold secrets.
        "env": [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)],
        "nccl_version": _nccl_version(),
        "config": _config(settings, devices),
        "results": [_line(line) for line in lines],
        **verdict,
        "environment": environment(),
        "end_time": now(),
        "errors": [],
    }


def verdict_of(failed: int, average: float, min_busbw: float | None, missing: Sequence[str]) -> dict[str, Any]:
    """Return the keys that say whether the bench passed.

    As in nccl-tests, a bandwidth up to 10 % below ``min_busbw`` passes.
    """
    okay = "unchecked" if min_busbw is None else _word(average >= 0.9 * min_busbw)
    return {
        "out_of_bounds": {"count": failed, "okay": _word(failed == 0)},
        "average_bus_bandwidth": {"bandwidth": average, "okay": okay},
        "missing": list(missing),
    }


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write the report, or leave no file."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with naming(path):
            partial.write_text(json.dumps(content, indent=1) + "\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _config(settings: BenchSettings, devices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    kind, step = ("step_factor" if "factor" in settings.step else "step_bytes"), settings.step.partition("(")[0]
    return {
        "nthreads": 1,
        "ngpus": 1,
        "minimum_bytes": settings.sizes[0],
        "maximum_bytes": settings.sizes[-1],
        kind: int(step),
        "warmup_iters": settings.warmups_of(next(settings.cases)),
        "iterations": settings.calls_of(next(settings.cases)),
        "aggregated_iterations": 1,
        "validation": settings.checks,
        "graph": 0,
        "blocking_collectives": _word(False),
        "per_iter_timing": _word(False),
        "per_iter_skip": 0,
        "parallel_init": _word(False),
        "devices": list(devices),
        "operation": settings.operation.name,
        "ranks": settings.ranks,
        "rounds": settings.rounds,
        "backend": settings.backend,
        "peers": list(settings.peers),
        "local_register": int(settings.registered),
    }


def _line(line: TableLine) -> dict[str, Any]:
    case = line.case
    return {
        "size": case.size,
        "count": case.count,
        "type": case.dtype,
        "redop": case.redop,
        "root": f"{case.root:>6}",
        **{place: _place(line, place) for place in PLACES},
        "actual_iterations": line.calls,
        "experiment_name": "",
    }


def _place(line: TableLine, place: str) -> dict[str, Any]:
    ours, floor = line.ours[place], line.floor.median
    median = ours.samples.median
    return {
        **_timed(line, ours),
        **_spread(ours.samples),
        "floor": floor * 1e6,
        "fraction_of_floor": floor / median,
        "peers": {
            name: {**_timed(line, peer), **_spread(peer.samples), "times_longer": peer.samples.median / median}
            for name, peer in line.peers[place].items()
        },
    }


def _timed(line: TableLine, timed: Timed) -> dict[str, Any]:
    seconds = timed.samples.median
    algbw, busbw = line.bandwidths(seconds)
    wrong = None if timed.wrong is None else float(timed.wrong)
    return {"time": seconds * 1e6, "alg_bw": algbw, "bus_bw": busbw, "nwrong": wrong}


def _spread(samples: Samples) -> dict[str, Any]:
    """Return percentiles and samples in microseconds, like ``time``."""
    return {
        "p10": samples.low * 1e6,
        "p90": samples.high * 1e6,
        "samples": [seconds * 1e6 for seconds in samples.seconds],
    }


def _word(value: bool) -> str:
    return "true" if value else "false"  # nccl-tests writes words, too


def _nccl_version() -> int | None:
    """Return NCCL's version as one number; ``None`` if this torch has no NCCL."""
    if not torch.distributed.is_nccl_available():
        return None
    version: Any = torch.cuda.nccl.version  # its stub has no types
    major, minor, patch = version()[:3]
    return int(major * 10000 + minor * 100 + patch)
