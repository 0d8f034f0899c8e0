"""A dozen faults of the harness; ``python -m tests.chaos`` is the long run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.faults import KINDS, TRANSPORTS, WORKLOADS, fault_of, short_faults
from tests.cli.processes import left_behind

ROOT = Path(__file__).parent.parent.parent


def test_the_table_is_covered() -> None:
    rows = {(fault.kind, fault.workload, fault.transport) for fault in (fault_of(7, number) for number in range(28))}
    assert len(rows) == 28
    short = short_faults(0)
    assert {fault.kind for fault in short} == set(KINDS)
    pairs = {(fault.workload, fault.transport) for fault in short}
    assert pairs == {(workload, transport) for workload in WORKLOADS for transport in TRANSPORTS}
    assert short == short_faults(0)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_survivors_of_a_dozen_faults() -> None:
    """Run in a process of its own, so that everything it started ends with it."""
    command = [sys.executable, "-m", "tests.chaos", "--short", "--seed", "0"]
    judge = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        told, _ = judge.communicate(timeout=200)
    finally:
        if judge.poll() is None:
            os.killpg(judge.pid, signal.SIGKILL)
            judge.wait()
        left = left_behind(judge.pid, patience=10.0)
    assert judge.returncode == 0, told
    assert not left
