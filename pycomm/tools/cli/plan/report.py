"""Shared by the commands of ``pycomm plan``: the network, and text."""

from __future__ import annotations

import argparse

from pycomm import schedule
from pycomm.schedule.network import Network


def network_of(arguments: argparse.Namespace) -> Network:
    """Return the network of ``--network`` and ``--per-host`` for ``--ranks``."""
    network = schedule.load(arguments.network).with_hosts_of(arguments.per_host)
    if network.per_host is not None and arguments.per_host and arguments.ranks % network.per_host:
        raise ValueError(f"--ranks {arguments.ranks} do not factor into hosts of {network.per_host}")
    return network


def time_text(seconds: float) -> str:
    """Write a time with three digits."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def link_text(alpha: float, beta: float, gamma: float) -> str:
    """Describe a class of links."""
    rates = [f"{1 / cost / 1e9:.3g} GB/s" if cost > 0 else "no time" for cost in (beta, gamma)]
    return f"{time_text(alpha)} per message, {rates[0]} sent, {rates[1]} added"
