"""``pycomm bench`` as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.cli.processes import left_behind

COMMAND = [sys.executable, "-m", "pycomm.tools.cli.main", "bench"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def bench(
    *arguments: str,
    cwd: Path,
    launcher: list[str] | None = None,
    variables: Mapping[str, str] | None = None,
    command: list[str] = COMMAND,
) -> tuple[int, str, str]:
    """Run it in ``cwd``; returns exit code, output and errors. Nothing may be left of it."""
    command = [*launcher, *command[1:]] if launcher else command
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
    process = subprocess.Popen(
        [*command, *arguments],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=100)
    finally:
        process.kill()
        assert not left_behind(process.pid, 20.0)
    return process.returncode, output, errors
