"""``pycomm plan calibrate``: measures a network."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from pycomm.descriptions import size_text
from pycomm.schedule.network import Network
from pycomm.tools.cli.arguments import complain, load_package
from pycomm.tools.cli.plan.report import link_text, time_text
from pycomm.tools.cli.table import print_table
from pycomm.untrusted import naming, one_line


def run(arguments: argparse.Namespace) -> int:
    """Measure between torchrun's ranks, or start local ranks and measure there; return the exit code."""
    if "WORLD_SIZE" in os.environ:
        return _measure(arguments)
    _require_free(arguments)
    if arguments.ranks is None:
        arguments.parser.error("--ranks is missing: how many local ranks? (or start this under torchrun)")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}"]
    command += ["--module", "pycomm.tools.cli.main", "plan", "calibrate", f"--output={arguments.output}"]
    command += [f"--transport={arguments.transport}", *(["--force"] if arguments.force else [])]
    return subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode


def _require_free(arguments: argparse.Namespace) -> None:
    """Raise ValueError if the file cannot be written, or exists and ``--force`` is not given."""
    path: Path = arguments.output
    if not path.parent.is_dir():
        raise ValueError(f"{path} cannot be written: {path.parent} is not a folder")
    if path.exists() and not arguments.force:
        raise ValueError(f"{path} already exists: pass another name with --output, or --force to replace it")


def _measure(arguments: argparse.Namespace) -> int:
    load_package()
    import torch
    import torch.distributed as dist

    from pycomm.agreement import agreed
    from pycomm.collectives.communicator import Communicator
    from pycomm.errors import attempt
    from pycomm.training.cost.calibration import calibrate

    torch.set_num_threads(1)  # ranks may outnumber cores
    dist.init_process_group("gloo")
    try:
        with Communicator(transport=arguments.transport) as communicator:
            first = communicator.rank == 0
            free = attempt(lambda: _require_free(arguments)) if first else None  # before the long measurement
            agreed(communicator.channel.all_gather_bytes, free, "write the file")
            network = calibrate(communicator, tell=lambda line: print(f"measuring {line}") if first else None)
            if first:
                _write(network, arguments.output)
    except ValueError as error:  # raised on all ranks
        if dist.get_rank() == 0:
            complain(f"pycomm plan: {error}")
        return 2
    finally:
        dist.destroy_process_group()
    return 0


def _write(network: Network, path: Path) -> None:
    """Write the measured network; print its links and times."""
    with naming(path):
        path.write_text(network.to_json())
    print(f"\n{one_line(network.name)}")
    print(f"  every collective  {time_text(network.overhead)} in addition to its messages")
    for name, link in (("within a host", network.within_host), ("between hosts", network.between_hosts)):
        print(f"  {name:16}  {link_text(link.alpha, link.beta, link.gamma)}")
    sizes = [size for size, _ in next(iter(network.measured.values()))]
    print("\nmeasured")
    rows = [[name, *(time_text(seconds) for _, seconds in curve)] for name, curve in network.measured.items()]
    print_table(["algorithm", *(size_text(size) for size in sizes)], rows, indent="  ")
    print(f'\nnetwork written to {path}: --network {path}, or PYCOMM_NETWORK={path} for algorithm="auto"')
