"""``pycomm bench`` with more to compare with: MPI, and processes that compute meanwhile.

    python -m bench.collectives.nccl_tests all_reduce -b 1K -e 1M -f 4 --peers gloo,mpich,openmpi --busy 1

Options, output and exit codes are those of ``pycomm bench``. ``--backend`` and ``--peers`` also take "mpich" and
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
from bench.harness.mpi import MPIS, NotInstalledError
from bench.harness.ranks import WorkerGroup, by_launcher
from pycomm.tools.cli.bench import settings as options
from pycomm.tools.cli.bench.measure import Team, run, setup_of
from pycomm.tools.cli.bench.settings import BenchSettings, UsageError, launched_ranks, settings_of

_WORKER = "bench.harness.mpi_rank:MpiRank"


def main() -> int:
    arguments = make_parser().parse_args()
    try:
        launched = launched_ranks()
        settings = checked(arguments, launched)
    except UsageError as error:
        arguments.parser.error(str(error))
    drives = launched is None or os.environ["RANK"] == "0"
    if drives and arguments.busy:
        print(f"# busy processes beside it: {arguments.busy}, niceness {arguments.nice}")
    with busy(arguments.busy if drives else 0, arguments.nice):
        return run(settings, {name: partial(_mpi_ranks, name) for name in MPIS})


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all collectives."""
    parser = plain_parser("bench.collectives.nccl_tests", __doc__)
    for one in options.add_collectives(parser.add_subparsers(required=True, metavar="WHAT")):
        add_arguments(one)
    return parser


def checked(arguments: argparse.Namespace, launched: int | None) -> BenchSettings:
    """Return what the arguments ask for, where the libraries may be MPI's, too.

    Raises:
        UsageError: something is wrong, or cannot be had here.
    """
    settings = settings_of(arguments, launched, partial(_why_not, launched is not None))
    if settings.device == "cuda" and {settings.backend, *settings.peers} & set(MPIS):
        raise UsageError("--peers: nccl requires arrays on GPUs, and MPI is called with arrays in CPU memory")
    return settings


def _why_not(launched: bool, name: str) -> str | None:
    if name not in MPIS:
        return options.why_not(name)
    if launched:
        return f"{name} starts its ranks itself, which it cannot under another launcher"
    try:
        MPIS[name][1]()
    except NotInstalledError as error:
        return f"{name} is {error}, or 'pycomm-torch[bench]'"
    return None


@contextlib.contextmanager
def _mpi_ranks(name: str, settings: BenchSettings) -> Iterator[Team]:
    """Have rank 0 drive ranks that MPI starts; the others have none."""
    if os.environ["RANK"] != "0":
        yield _NoRanks()
        return
    label, find = MPIS[name]
    mpi = find()
    start = by_launcher(label, mpi.launcher)
    with WorkerGroup(label, _WORKER, settings.ranks, setup_of(settings), mpi.environment, start) as ranks:
        yield ranks


class _NoRanks:
    """Team of nobody."""

    def call(self, method: str, *arguments: object) -> list[object]:
        return []


if __name__ == "__main__":
    sys.exit(main())
