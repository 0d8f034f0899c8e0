"""``pycomm plan``: its arguments, and what it does with them."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from pycomm import schedule
from pycomm.cli.arguments import integer
from pycomm.cli.plan.report import print_calibration, print_ranking
from pycomm.schedule.choose import SIZES, rank_algorithms
from pycomm.schedule.network import DEFAULT_NETWORK, NETWORKS, Network
from pycomm.transport.choice import TRANSPORTS

_DESCRIPTION = f"""\
Prices every all-reduce algorithm on a described network, by simulation: prints their ranking for one size and the
fastest for each range of sizes, and plots time against size. Nothing is sent.

With --compression it says whether compressing gradients pays: the cost of each method, measured here and simulated on
the network, and the bandwidth below which it is faster than none.

With --calibrate it measures instead: the cost of messages between the ranks of the running group, and the time that the
algorithms take. Under torchrun that group is the one torchrun started; otherwise --ranks processes of this host. The
file that it writes is a network for --network, for Communicator(network=...) and for the environment variable
PYCOMM_NETWORK.

Networks: {", ".join(NETWORKS)}; or a file.
"""
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="price all-reduce algorithms on a network, or calibrate one",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--ranks", type=integer(1), help="number of ranks")
    add("--per-host", type=integer(1), help="ranks on each host (default: as the network says)")
    add(
        "--bytes",
        type=_bytes,
        default=100e6,
        metavar="SIZE",
        help="of the array: 100MB, 64KiB ... (default 100MB)",
    )
    add("--network", help=f"a name or a file (default {DEFAULT_NETWORK})")
    add("--plot", type=Path, default=Path("pycomm_plan.png"), metavar="FILE", help="file for the plot, a PNG")
    add("--no-plot", action="store_true", help="draw nothing")
    add("--compression", action="store_true", help="price the compression of gradients of --bytes")
    add("--calibrate", action="store_true", help="measure the running group instead")
    add(
        "--output",
        type=Path,
        default=Path("network.json"),
        metavar="FILE",
        help="file that --calibrate writes",
    )
    add("--transport", choices=TRANSPORTS, default="auto", help="transport for --calibrate")
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.calibrate:
        return _calibrate(arguments)
    if arguments.ranks is None:
        arguments.parser.error("--ranks is missing: how many ranks will there be?")
    try:
        network = schedule.load(arguments.network).with_hosts_of(arguments.per_host)
        if network.per_host is not None and arguments.per_host and arguments.ranks % network.per_host:
            raise ValueError(f"--ranks {arguments.ranks} do not factor into hosts of {network.per_host}")
        if arguments.compression:
            return _price_compression(arguments, network)
        ranking = rank_algorithms(arguments.ranks, network, sorted({*SIZES, arguments.bytes}))
    except ValueError as error:
        print(f"pycomm plan: {error}", file=sys.stderr)
        return 2
    print_ranking(ranking, arguments.bytes)
    return 0 if arguments.no_plot else _draw(ranking, arguments)


def _price_compression(arguments: argparse.Namespace, network: Network) -> int:
    from pycomm.cli.plan.compression import print_compression  # imports torch

    print_compression(arguments.ranks, arguments.bytes, network)
    return 0


def _draw(ranking: schedule.Ranking, arguments: argparse.Namespace) -> int:
    try:
        from pycomm.cli.plan.plot import save_plot  # needs an extra
    except ModuleNotFoundError as error:
        print(f"pycomm plan: no plot, {error.name} is not installed: pip install 'pycomm-torch[demo]'", file=sys.stderr)
        return 1
    try:
        save_plot(ranking, arguments.bytes, arguments.plot)
    except OSError as error:
        print(f"pycomm plan: no plot: {error}", file=sys.stderr)
        return 1
    print(f"\nplot of time against size: {arguments.plot}")
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    if "WORLD_SIZE" not in os.environ:
        return _launch(arguments)
    import torch
    import torch.distributed as dist

    from pycomm.calibration import calibrate
    from pycomm.communicator import Communicator

    torch.set_num_threads(1)  # ranks may outnumber cores
    dist.init_process_group("gloo")
    try:
        with Communicator(transport=arguments.transport) as communicator:
            first = communicator.rank == 0
            network = calibrate(
                communicator, tell=(lambda line: print(f"measuring {line}")) if first else lambda _: None
            )
            if first:
                _write(network, arguments.output)
    except ValueError as error:  # all ranks have it
        if dist.get_rank() == 0:
            print(f"pycomm plan: {error}", file=sys.stderr)
        return 2
    finally:
        dist.destroy_process_group()
    return 0


def _write(network: Network, path: Path) -> None:
    path.write_text(network.to_json())
    print_calibration(network)
    print(f'\nnetwork written to {path}: --network {path}, or PYCOMM_NETWORK={path} for algorithm="auto"')


def _launch(arguments: argparse.Namespace) -> int:
    """Run the same command on local ranks, by torch's launcher."""
    if arguments.ranks is None:
        arguments.parser.error("--ranks is missing: how many local ranks? (or start this under torchrun)")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}"]
    command += ["--module", "pycomm.cli.main", "plan", "--calibrate", f"--output={arguments.output}"]
    command += [f"--transport={arguments.transport}"]
    return subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode


def _bytes(text: str) -> float:
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([kmg]i?)?b?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}, wanted a size such as 100MB or 64KiB")
    return float(match[1]) * _UNITS[match[2] or ""]
