"""``pycomm bench`` with more to compare with: MPI, and processes that compute meanwhile.

    python -m bench.collectives.nccl_tests all_reduce -b 1K -e 1M -f 4 --peers gloo,mpich,openmpi --busy 1

Options, output and exit codes are as in ``pycomm bench``. ``--backend`` and ``--peers`` also take "mpich" and
"openmpi" (extra ``[bench]``), whose ranks MPI starts. ``--busy N`` has N processes compute beside it, as DataLoader
workers or another job would, at the niceness ``--nice``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from functools import partial

from bench.harness.arguments import plain_parser
from bench.harness.busy import add_arguments, busy
from bench.harness.installed import UnavailableError
from bench.harness.mpi import MPIS
from bench.harness.ranks import WorkerGroup, by_launcher
from pycomm.tools.cli.bench import command
from pycomm.tools.cli.bench.command import add_collective, launched, settings_of
from pycomm.tools.cli.bench.measure import Team, run
from pycomm.tools.cli.bench.operations import OPERATIONS, BenchSettings

_WORKER = "bench.harness.mpi_rank:MpiRank"


def main() -> int:
    arguments = make_parser().parse_args()
    settings = checked(arguments)
    drives = not settings.launched or os.environ["RANK"] == "0"
    if drives and arguments.busy:
        print(f"# busy processes beside it: {arguments.busy}, niceness {arguments.nice}")
    with busy(arguments.busy if drives else 0, arguments.nice):
        return run(settings, {name: partial(_mpi_ranks, name) for name in MPIS})


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all collectives."""
    parser = plain_parser("bench.collectives.nccl_tests", __doc__)
    benches = parser.add_subparsers(required=True, metavar="WHAT")
    for operation in OPERATIONS:
        add_arguments(add_collective(benches, operation))
    return parser


def checked(arguments: argparse.Namespace) -> BenchSettings:
    """Return what the arguments ask for, where the libraries may be MPI's, too, or end with the parser's error."""
    settings = settings_of(arguments, _why_not)
    if settings.device == "cuda" and {settings.backend, *settings.peers} & set(MPIS):
        arguments.parser.error("--peers: nccl requires arrays on GPUs, and MPI is called with arrays in CPU memory")
    return settings


def _why_not(name: str) -> str | None:
    if name not in MPIS:
        return command.why_not(name)
    if launched():
        return f"{name} starts its ranks itself, which it cannot under another launcher"
    try:
        MPIS[name][1]()
    except UnavailableError as error:
        return f"{name} is {error}, or 'pycomm-torch[bench]'"
    return None


@contextlib.contextmanager
def _mpi_ranks(name: str, settings: BenchSettings) -> Iterator[Team]:
    """Have rank 0 drive ranks that MPI starts; the others have none."""
    if os.environ["RANK"] != "0":
        yield lambda *_: []
        return
    label, find = MPIS[name]
    mpi = find()
    start, setup = by_launcher(label, mpi.launcher), {"num_bytes": settings.num_bytes}
    with WorkerGroup(label, _WORKER, settings.ranks, setup, mpi.environment, start) as ranks:
        yield ranks.call


if __name__ == "__main__":
    sys.exit(main())
