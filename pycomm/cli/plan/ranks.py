"""``pycomm plan ranks``: all-reduce algorithms on a network, the fastest first."""

from __future__ import annotations

import argparse

from pycomm import schedule
from pycomm.cli.plan.files import draw
from pycomm.cli.plan.report import print_ranking
from pycomm.schedule.choose import SIZES, rank_algorithms
from pycomm.schedule.network import Network


def run(arguments: argparse.Namespace) -> int:
    """Print the ranking, and draw it if that is wanted; return the exit code."""
    network = network_of(arguments)
    ranking = rank_algorithms(arguments.ranks, network, sorted({*SIZES, arguments.bytes}))
    print_ranking(ranking, arguments.bytes)
    return draw("save_plot", "time against size", arguments, ranking, arguments.bytes)


def network_of(arguments: argparse.Namespace) -> Network:
    """Return the network of ``--network`` and ``--per-host`` for ``--ranks``."""
    network = schedule.load(arguments.network).with_hosts_of(arguments.per_host)
    if network.per_host is not None and arguments.per_host and arguments.ranks % network.per_host:
        raise ValueError(f"--ranks {arguments.ranks} do not factor into hosts of {network.per_host}")
    return network
