"""Rendezvous of one host's ranks: a store on the loopback device, and a process group made through it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from pycomm.collectives.transport.addresses import loopback, store_on_loopback

PATIENCE = timedelta(seconds=120)
"""Default limit of a rank's wait for another that hangs; one that dies is noticed at once."""


@contextlib.contextmanager
def rendezvous() -> Iterator[int]:
    """Keep a store for ranks of this host; yield its port for :func:`join`. Other hosts cannot reach it."""
    store = store_on_loopback(PATIENCE)
    yield store.port
    del store


def join(
    port: int,
    rank: int,
    size: int,
    patience: timedelta = PATIENCE,
    backend: str = "gloo",
    threads: int = 1,
) -> None:
    """Join the default process group of the ranks that meet at ``port``, over the loopback device.

    Args:
        patience: limit of every wait of a rank for another.
        threads: torch's threads in this rank; ranks with more would compete for cores.
    """
    torch.set_num_threads(threads)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(backend, store=connect(port, patience), rank=rank, world_size=size, timeout=patience)


def connect(port: int, patience: timedelta = PATIENCE) -> Store:
    """Connect to the store at ``port``."""
    return TCPStore(loopback(), port, is_master=False, timeout=patience)


def variables_of(port: int, rank: int, size: int) -> dict[str, str]:
    """Return torchrun's environment variables, through which a script's ``init_process_group()`` finds the others."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0}
    return {
        **{name: str(value) for name, value in place.items()},
        "MASTER_ADDR": loopback(),
        "MASTER_PORT": str(port),
        # The store exists: rank 0 must not make one.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
