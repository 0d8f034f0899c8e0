"""Arguments of ``pycomm bench kernels``, which is ``python -m bench.kernels``, too."""

from __future__ import annotations

import argparse
from pathlib import Path

from pycomm.cli.arguments import integer, later

DESCRIPTION = """\
The CPU kernels against torch and against the memory's speed, on ResNet-50's gradients and parameters.

Every line: the median time of a kernel over the rounds with its 10th and 90th percentile; torch's
for the same, and how many times faster pycomm is; and the floor, the time that the bytes which have
to move take at the speed measured in the same run, with our time over it. That speed is a copy's
(bytes read plus bytes written; the faster of numpy's and torch's, plain stores: a kernel that writes
past the caches can go below 1) or, where next to nothing is written, that of reading alone (the
faster of torch's sum and pycomm's absmax).
"""

WRONG = 7
"""Exit code for wrong results, of kernels and of collectives: that of nccl-tests."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Have ``parser`` know what ``pycomm.cli.bench.kernels.command`` takes."""
    add = parser.add_argument
    add("-J", "--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    add("--rounds", type=integer(1), default=15, help="turns that everything measured gets (default 15)")
    add("--only", default="", metavar="TEXT", help="only kernels with this in their name")
    add("--shapes", type=integer(1), help="only the first so many of the 161 parameters")
    add("--threads", type=integer(1), default=1, help="threads for pycomm and torch (default 1)")
    parser.set_defaults(run=later("pycomm.cli.bench.kernels.command", whole=True), parser=parser)
