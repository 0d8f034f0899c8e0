"""Other work on the cores while something is measured, as DataLoader workers or another job would be."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from pycomm.tools.cli.arguments import integer

_WORK = """
import os, sys
os.nice(int(sys.argv[2]))
print(flush=True)
parent = int(sys.argv[1])
while os.getppid() == parent:
    sum(range(10_000))
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Have ``parser`` know ``--busy`` and ``--nice``."""
    parser.add_argument(
        "--busy", type=integer(0), default=0, metavar="N", help="measure beside so many processes that compute"
    )
    parser.add_argument(
        "--nice", type=integer(0, largest=19), default=0, metavar="N", help="their niceness (default 0: as usual)"
    )


@contextlib.contextmanager
def busy(count: int, nice: int) -> Iterator[list[int]]:
    """Have ``count`` processes compute, each with one thread, at that niceness; they are the yielded ids.

    They end with the block, or with this process, however that ends.
    """
    found = []
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            command = [sys.executable, "-S", "-c", _WORK, str(os.getpid()), str(nice)]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(process.kill)  # before Popen's own end, which waits
            assert process.stdout is not None
            process.stdout.readline()  # it computes from now on
            found.append(process.pid)
        yield found
