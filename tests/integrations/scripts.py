"""The scripts under examples/trainers, run with pycomm's lines and without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.cli.processes import left_behind
from tests.docs.scripts import load

PAGE = load("docs/trainers.py")
TRAINERS: Path = PAGE.SCRIPTS


def run(command: list[str], timeout: float = 100.0) -> str:
    """Return what a command prints; nothing of it is left."""
    own = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    started = subprocess.Popen(
        command,
        cwd=TRAINERS,  # not the root: Ray adds it to the path of its workers, where pycomm is not compiled
        env={**os.environ, **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = started.communicate(timeout=timeout)
        assert started.returncode == 0, out
    finally:
        left = left_behind(started.pid, 10.0 if started.poll() is not None else 0.0)
        started.communicate()
    assert not left
    return out


def on_one(script: Path, *options: str) -> str:
    """Run a script in one process."""
    return run([sys.executable, str(script), *options])


def on_two(script: Path, *options: str) -> str:
    """Run a script on two ranks."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return run([*torchrun, str(script), *options])
