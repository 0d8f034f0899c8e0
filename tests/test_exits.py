"""Processes that end while threads of pycomm wait: soon, with their own exit code, and without aborting.

A daemon thread that comes out of C++ when the interpreter has been torn down aborts the process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from pycomm import threads
from pycomm.tools.launching.processes import rendezvous
from tests.exits import ENDS, IN_VAIN, KINDS, Ended, Request
from tests.ranks import SLOWER

ROOT = Path(__file__).parent.parent
ABORTED = ("terminate called", "Fatal Python error")
MANY = 67
"""Runs of each kind with each of the three ends: 200 of each kind."""
TEARDOWN = 6.0
"""Seconds that the end of an interpreter takes at most, on a busy machine."""


class Script:
    """Process that forks ranks; see :mod:`tests.exits`."""

    def __init__(self, port: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.exits", str(port)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._asked = 0  # runs

    def run(self, request: Request) -> Iterator[Ended]:
        """Yield how the ranks have ended, one after the other, run by run."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(asdict(request)), file=self._process.stdin, flush=True)
        before, self._asked = self._asked, self._asked + request.runs
        missing = request.runs * len((KINDS | IN_VAIN)[request.kind].hosts)
        for line in self._process.stdout:
            ended = Ended(**json.loads(line))
            if ended.run > before:  # else left over from a failed test
                missing -= 1
                yield ended
            if missing == 0:
                return
        raise AssertionError("the process that forks ranks has ended")

    def close(self) -> None:
        """End it, and with it the ranks."""
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    with rendezvous() as port:
        started = Script(port)
        yield started
        started.close()


def ends_well(script: Script, request: Request) -> float:
    """Check all ranks of all runs; return the longest time from a script's end to its process's end."""
    longest = 0.0
    for ended in script.run(request):
        where = f"rank {ended.rank} of run {ended.run} (exit code {ended.code})"
        assert not any(word in ended.errors for word in ABORTED), f"{where} aborted:\n{ended.errors}"
        assert ended.code == ENDS[request.end], f"{where} ended otherwise:\n{ended.errors}"
        longest = max(longest, ended.seconds)
    return longest


@pytest.mark.parametrize("runs", [1, pytest.param(MANY, marks=(pytest.mark.slow, pytest.mark.timeout(900)))])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_end_while_a_thread_waits(script: Script, kind: str, runs: int) -> None:
    for end in ENDS:
        ends_well(script, Request(kind, end, runs))


@pytest.mark.parametrize("kind", IN_VAIN)
def test_a_wait_in_vain_does_not_keep_a_rank(script: Script, kind: str) -> None:
    assert ends_well(script, Request(kind, "return", runs=1)) < (threads.EXIT_PATIENCE + TEARDOWN) * SLOWER
