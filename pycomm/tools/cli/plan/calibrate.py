"""``pycomm plan calibrate``: measures a network."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pycomm.descriptions import size_text
from pycomm.schedule.network import Network
from pycomm.tools.cli.arguments import complain, load_package
from pycomm.tools.cli.plan.report import link_text, require_free, time_text
from pycomm.tools.cli.table import print_table
from pycomm.untrusted import naming, one_line

if TYPE_CHECKING:  # takes torch
    from pycomm.collectives.communicator import Communicator


def run(arguments: argparse.Namespace) -> int:
    """Measure between torchrun's ranks, or start local ranks and measure there; return the exit code."""
    if "WORLD_SIZE" in os.environ:
        return _measure(arguments)
    require_free(arguments.output, "--output", arguments)
    return _launch(arguments)


def _launch(arguments: argparse.Namespace) -> int:
    """Run this command on local ranks, with torch's launcher."""
    if arguments.ranks is None:
        arguments.parser.error("--ranks is missing: how many local ranks? (or start this under torchrun)")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}"]
    command += ["--module", "pycomm.tools.cli.main", "plan", "calibrate", f"--output={arguments.output}"]
    command += [f"--transport={arguments.transport}", *(["--force"] if arguments.force else [])]
    return subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode


def _measure(arguments: argparse.Namespace) -> int:
    load_package()
    import torch
    import torch.distributed as dist

    from pycomm.collectives.calibration import calibrate
    from pycomm.collectives.communicator import Communicator

    torch.set_num_threads(1)  # ranks may outnumber cores
    dist.init_process_group("gloo")
    try:
        with Communicator(transport=arguments.transport) as communicator:
            first = communicator.rank == 0
            _require_free_for_all(communicator, arguments)
            network = calibrate(
                communicator, tell=(lambda line: print(f"measuring {line}")) if first else lambda _: None
            )
            if first:
                _write(network, arguments.output)
    except ValueError as error:  # raised on all ranks
        if dist.get_rank() == 0:
            complain(f"pycomm plan: {error}")
        return 2
    finally:
        dist.destroy_process_group()
    return 0


def _require_free_for_all(communicator: Communicator, arguments: argparse.Namespace) -> None:
    """Raise ValueError on all ranks, before the long measurement, if rank 0 may not write the file."""
    problem = None
    if communicator.rank == 0:
        try:
            require_free(arguments.output, "--output", arguments)
        except ValueError as error:
            problem = error
    found = np.array([problem is not None], np.int64)
    communicator.broadcast(found, 0)
    if found[0]:
        raise problem or ValueError("rank 0 may not write the file")


def _write(network: Network, path: Path) -> None:
    with naming(path):
        path.write_text(network.to_json())
    print_calibration(network)
    print(f'\nnetwork written to {path}: --network {path}, or PYCOMM_NETWORK={path} for algorithm="auto"')


def print_calibration(network: Network) -> None:
    """Print the measured links and times."""
    print(f"\n{one_line(network.name)}")
    print(f"  every collective  {time_text(network.overhead)} besides its messages")
    for name, link in (("within a host", network.within_host), ("between hosts", network.between_hosts)):
        print(f"  {name:16}  {link_text(link.alpha, link.beta, link.gamma)}")
    sizes = [size for size, _ in next(iter(network.measured.values()))]
    print("\nmeasured")
    rows = [[name, *(time_text(seconds) for _, seconds in curve)] for name, curve in network.measured.items()]
    print_table(["algorithm", *(size_text(size) for size in sizes)], rows, indent="  ")
