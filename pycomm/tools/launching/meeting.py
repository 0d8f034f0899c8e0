"""Where the ranks of one host find each other: a store on the loopback device, and a process group by it."""

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
"""For every wait of a rank for another: a rank that dies is noticed at once, this is for one that hangs."""


@contextlib.contextmanager
def rendezvous() -> Iterator[int]:
    """Let ranks of this host find each other: yields the port for :func:`join`, which only this host can reach."""
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
    """Join the ranks that meet at ``port`` in a default process group, over the loopback device.

    Args:
        patience: for every wait of a rank for another.
        threads: that torch computes with; one per rank, so that two ranks on two cores do not fight over them.
    """
    torch.set_num_threads(threads)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(backend, store=connect(port, patience), rank=rank, world_size=size, timeout=patience)


def connect(port: int, patience: timedelta = PATIENCE) -> Store:
    """Return the store of the ranks that meet at ``port``."""
    return TCPStore(loopback(), port, is_master=False, timeout=patience)


def variables_of(port: int, rank: int, size: int) -> dict[str, str]:
    """Return the environment as torchrun makes it, by which a script's ``init_process_group()`` finds the others."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0}
    return {
        **{name: str(value) for name, value in place.items()},
        "MASTER_ADDR": loopback(),
        "MASTER_PORT": str(port),
        # The store is there already: rank 0 must not make one.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
