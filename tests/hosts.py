"""Simulated hosts: ranks of one machine that claim to be on several, without root."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

from pycomm.collectives.transport import rendezvous


@contextmanager
def on_hosts(hosts: str) -> Iterator[None]:
    """Let this process's rank meet others as if on another host; ``hosts`` has a letter for each rank's host."""
    with pytest.MonkeyPatch.context() as patch:
        real = rendezvous.host_identity()
        patch.setattr(rendezvous, "host_identity", lambda: f"{hosts[dist.get_rank()]}{real}")
        patch.setenv("PYCOMM_SECRET", "what ranks of different hosts know")
        yield


def link_local_address() -> str:
    """Return a link-local address of this host, with its interface. Skips the test if there is none."""
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        lines = []
    for digits, *_, interface in map(str.split, lines):
        if digits.startswith("fe80"):
            return f"{ipaddress.IPv6Address(bytes.fromhex(digits))}%{interface}"
    pytest.skip("no interface of this host has a link-local address")
