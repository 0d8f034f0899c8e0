"""Hosts that ranks only say they are on: several on one machine, without root."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from pycomm.collectives.transport import rendezvous


@contextmanager
def on_hosts(hosts: str) -> Iterator[None]:
    """Let the rank of this process meet others as if it were on the host whose letter stands at its place."""
    with pytest.MonkeyPatch.context() as patch:
        real = rendezvous.host_identity()
        patch.setattr(rendezvous, "host_identity", lambda: f"{hosts[dist.get_rank()]}{real}")
        patch.setenv("PYCOMM_SECRET", "what ranks of different hosts know")
        yield
