"""Running the examples as their first lines say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.cli.processes import left_behind

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PATIENCE = 10.0


def torchrun_on(ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def run(command: list[str], **variables: str) -> str:
    """Return what ``command`` prints; check that it ends with 0 and leaves no process behind."""
    started = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYCOMM_FLIGHT_DIR": "", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, errors = started.communicate(timeout=200)
        assert started.returncode == 0, errors
    finally:
        left = left_behind(started.pid, PATIENCE if started.poll() is not None else 0.0)
        started.communicate()
    assert not left
    return out
