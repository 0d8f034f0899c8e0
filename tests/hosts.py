"""Simulated hosts: ranks of one machine that claim to be on several, without root."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
