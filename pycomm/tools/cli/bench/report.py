"""The report that ``-J`` writes: nccl-tests' keys in its units, and further keys for what it does not measure."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pycomm.tools.cli.bench.settings import BenchSettings
from pycomm.tools.cli.bench.table import PLACES, TableLine, Timed, environment
from pycomm.tools.cli.bench.timing import Samples
from pycomm.untrusted import naming

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
