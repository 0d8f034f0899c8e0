"""Running the examples as their first lines say."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

from pycomm.tools import launching
from tests.cli.processes import left_behind
from tests.ranks import PRELOAD

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PATIENCE = 10.0
_LIMIT = 340.0


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
        out, errors = started.communicate(timeout=_LIMIT)
        assert started.returncode == 0, errors
    finally:
        left = left_behind(started.pid, PATIENCE if started.poll() is not None else 0.0)
        started.communicate()
    assert not left
    return out


def run_on(ranks: int, example: str, *options: str) -> str:
    """Return what ``example`` prints on so many ranks, rank by rank.

    They find what torchrun would tell them, but are forked from a process that has imported torch: a fifth of the time.
    """
    patience = timedelta(seconds=_LIMIT)
    variables = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYCOMM_FLIGHT_DIR": ""}
    with tempfile.TemporaryDirectory() as folder:
        with launching.RankPool(
            ranks, backend=None, patience=patience, environment=variables, limit=_LIMIT, preload=PRELOAD
        ) as pool:
            pool.run(_run_script, str(EXAMPLES / example), options, folder, leaves=True)
            pool.finish()
        return "".join((Path(folder) / str(rank)).read_text(encoding="utf-8") for rank in range(ranks))


def _run_script(script: str, options: tuple[str, ...], folder: str) -> None:
    """Run ``script`` in this rank, which writes to a file in ``folder``."""
    written = os.open(Path(folder) / os.environ["RANK"], os.O_WRONLY | os.O_CREAT)
    os.dup2(written, sys.stdout.fileno())
    os.close(written)
    os.chdir(ROOT)
    sys.argv = [script, *options]
    sys.path.insert(0, str(EXAMPLES))
    runpy.run_path(script, run_name="__main__")
    sys.stdout.flush()
